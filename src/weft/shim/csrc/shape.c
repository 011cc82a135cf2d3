/* Residency: which kernels are shaped, and how much shared memory that takes.
 *
 * A plan is worked out once per variant and policy and kept in one word, so the hot path is a load:
 *   policy id (24 bits) | reason (8) | blocks (8) | dynamic shared bytes (24) */
#include "weft.h"

#include <pthread.h>

enum { GIVE_UP_AFTER = 3 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t plan_pack(uint32_t id, uint32_t reason, uint32_t blocks, uint32_t bytes) {
    return (uint64_t)(id & 0xffffff) << 40 | (uint64_t)reason << 32 | (uint64_t)(blocks & 0xff) << 24 |
           (bytes & 0xffffff);
}
static uint32_t plan_id(uint64_t plan) { return (uint32_t)(plan >> 40); }
static uint32_t plan_reason(uint64_t plan) { return (uint32_t)(plan >> 32) & 0xff; }
static uint32_t plan_blocks(uint64_t plan) { return (uint32_t)(plan >> 24) & 0xff; }
static uint32_t plan_bytes(uint64_t plan) { return (uint32_t)plan & 0xffffff; }

/* Residency that the policy wants for a kernel; `named` tells a rule of its own from the default. */
static uint32_t wanted(const weft_policy *policy, const char *name, bool *named) {
    *named = true;
    for (uint32_t i = 0; i < policy->rule_count; i++)
        if (weft_glob(policy->rules[i].pattern, name))
            return policy->rules[i].residency;
    *named = false;
    return policy->residency;
}

/* The top bit of `blocks` tells a rule that names the kernel from the default. */
enum { NAMED = 0x80 };

/* By bisection over the occupancy call: cuOccupancyAvailableDynamicSMemPerBlock, which seems to answer this at
 * once, leaves the driver's own shared memory out of the sum (580.159 on an H200), and HIP has no such call. */
bool weft_pin_size(int (*fit)(void *, unsigned, size_t), void *handle, unsigned threads, size_t low, size_t high,
                   unsigned blocks, uint32_t *bytes) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (fit(handle, threads, middle) > (int)blocks)
            low = middle + 1;
        else
            high = middle;
    }
    *bytes = (uint32_t)low;
    return fit(handle, threads, low) == (int)blocks;
}

static uint64_t make_plan(const weft_backend *api, const weft_rules *rules, weft_variant *v) {
    bool named;
    uint32_t blocks = wanted(&rules->data, weft_self->rows[v->row].name, &named);
    unsigned threads = (unsigned)(v->shape >> 32), shared = (unsigned)v->shape;
    uint32_t bytes = shared, reason = WEFT_SHAPED;
    if (blocks == 0)
        reason = WEFT_NOT_ASKED;
    else if (atomic_load(&v->refusals) >= GIVE_UP_AFTER)
        reason = WEFT_REFUSED;
    else if (v->natural_blocks > 0 && (uint32_t)v->natural_blocks <= blocks)
        reason = WEFT_ALREADY_FEWER;
    else if (v->natural_blocks == 0 || !api->pin(v->handle, threads, shared, blocks, &bytes))
        reason = WEFT_INFEASIBLE;
    if (reason == WEFT_INFEASIBLE)
        weft_count(WEFT_COUNT_SHAPE_FAILURES);
    if (reason == WEFT_SHAPED) { /* so that a graph node with this size is known for what it is */
        weft_variant *form = weft_lookup(api, v->handle, threads, bytes);
        if (form && form != v)
            atomic_store(&form->shaped_from, v);
    }
    return plan_pack(rules->id, reason, blocks | (named ? NAMED : 0), bytes);
}

static uint64_t plan_for(const weft_backend *api, const weft_rules *rules, weft_variant *v) {
    _Atomic uint64_t *place = &v->plans[rules->id % WEFT_PLANS];
    uint64_t plan = atomic_load_explicit(place, memory_order_acquire);
    if (LIKELY(plan_id(plan) == rules->id))
        return plan;
    pthread_mutex_lock(&lock);
    plan = make_plan(api, rules, v);
    atomic_store_explicit(place, plan, memory_order_release);
    pthread_mutex_unlock(&lock);
    return plan;
}

uint32_t weft_shape(const weft_backend *api, const weft_rules *rules, weft_variant *v, unsigned shared,
                    uint64_t grid_blocks, bool in_flight) {
    weft_row *row = &weft_self->rows[v->row];
    uint64_t plan = plan_for(api, rules, v);
    uint32_t reason = plan_reason(plan), blocks = plan_blocks(plan) & ~(uint32_t)NAMED;
    if (reason == WEFT_SHAPED) {
        uint64_t natural = (uint64_t)v->natural_blocks * v->sms;
        if ((rules->data.flags & WEFT_WHEN_OVERLAP) && !in_flight)
            reason = WEFT_NOT_IN_FLIGHT;
        /* Blocks that wait for each other must all be resident. A grid that fits whole as it is and would
         * not when shaped may be such a kernel; only a rule that names it takes that risk. */
        else if (!(plan_blocks(plan) & NAMED) && grid_blocks <= natural &&
                 grid_blocks > (uint64_t)blocks * v->sms)
            reason = WEFT_ONE_WAVE;
    }
    if (UNLIKELY(atomic_load_explicit(&row->reason, memory_order_relaxed) != reason)) /* spare the cache line */
        atomic_store_explicit(&row->reason, reason, memory_order_relaxed);
    if (reason != WEFT_SHAPED)
        return shared;
    if (UNLIKELY(atomic_load_explicit(&row->shaped_blocks, memory_order_relaxed) != blocks)) {
        atomic_store_explicit(&row->shaped_blocks, blocks, memory_order_relaxed);
        atomic_store_explicit(&row->shaped_bytes, plan_bytes(plan), memory_order_relaxed);
    }
    return plan_bytes(plan);
}

void weft_shape_refused(weft_variant *v, const weft_rules *rules) {
    weft_count(WEFT_COUNT_SHAPE_FAILURES);
    weft_self->rows[v->row].reason = WEFT_REFUSED;
    if (atomic_fetch_add(&v->refusals, 1) + 1 >= GIVE_UP_AFTER)
        atomic_store(&v->plans[rules->id % WEFT_PLANS], 0); /* the next plan leaves it alone */
}
