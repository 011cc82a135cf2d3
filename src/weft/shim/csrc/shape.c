/* Residency: decides which kernels are shaped and how much shared memory that takes.
 *
 * A plan is computed once per variant and policy and stored in one word, so that the hot path is a single load:
 *   policy id (24 bits) | reason (8) | blocks (8) | dynamic shared bytes (24) */
#include "weft.h"

enum { GIVE_UP_AFTER = 3 };

static _Atomic bool partitioned; /* see weft_sms_partitioned */

static uint64_t plan_pack(uint32_t id, uint32_t reason, uint32_t blocks, uint32_t bytes) {
    return (uint64_t)(id & 0xffffff) << 40 | (uint64_t)reason << 32 | (uint64_t)(blocks & 0xff) << 24 |
           (bytes & 0xffffff);
}
static uint32_t plan_id(uint64_t plan) { return (uint32_t)(plan >> 40); }
static uint32_t plan_reason(uint64_t plan) { return (uint32_t)(plan >> 32) & 0xff; }
static uint32_t plan_blocks(uint64_t plan) { return (uint32_t)(plan >> 24) & 0xff; }
static uint32_t plan_bytes(uint64_t plan) { return (uint32_t)plan & 0xffffff; }

/* The residency that the policy sets for a kernel. `named`: a rule matches the kernel; false: the default applies. */
static uint32_t wanted(const weft_policy *policy, const char *name, bool *named) {
    *named = true;
    for (uint32_t i = 0; i < policy->rule_count; i++)
        if (weft_glob(policy->rules[i].pattern, name))
            return policy->rules[i].residency;
    *named = false;
    return policy->residency;
}

/* The top bit of `blocks`: a rule names the kernel, so this is not the default. */
enum { NAMED = 0x80 };

/* Bisects over the occupancy call. cuOccupancyAvailableDynamicSMemPerBlock seems to answer this directly, but it
 * ignores the driver's own shared memory (580.159 on an H200), and HIP has no such call. */
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

static uint64_t make_plan(const weft_backend *api, const weft_rules *rules, const weft_kernel *k, uint32_t id) {
    bool named;
    uint32_t blocks = wanted(&rules->data, weft_row_at(k->row)->name, &named);
    uint32_t bytes = k->shared, reason = WEFT_SHAPED;
    if (blocks == 0)
        reason = WEFT_NOT_ASKED;
    else if (atomic_load(&k->v->refusals) >= GIVE_UP_AFTER)
        reason = WEFT_REFUSED;
    else if (k->natural_blocks > 0 && k->natural_blocks <= blocks)
        reason = WEFT_ALREADY_FEWER;
    else if (k->natural_blocks == 0 || !api->pin(k->handle, k->threads, k->shared, blocks, &bytes))
        reason = WEFT_INFEASIBLE;
    if (reason == WEFT_INFEASIBLE)
        weft_count(WEFT_COUNT_SHAPE_FAILURES);
    if (reason == WEFT_SHAPED && bytes != k->shared) /* so that a graph node with this size is recognized as shaped */
        weft_add_shaped_form(k, bytes);
    return plan_pack(id, reason, blocks | (named ? NAMED : 0), bytes);
}

/* No lock is held while the driver is called, so two threads may compute the same plan. */
static uint64_t plan_for(const weft_backend *api, const weft_rules *rules, const weft_kernel *k) {
    uint32_t id = atomic_load_explicit(&rules->id, memory_order_acquire);
    _Atomic uint64_t *place = &k->v->plans[id % WEFT_PLANS];
    uint64_t plan = atomic_load_explicit(place, memory_order_acquire);
    if (LIKELY(plan_id(plan) == id))
        return plan;
    plan = make_plan(api, rules, k, id);
    if (id == 0 || atomic_load_explicit(&rules->id, memory_order_acquire) != id) /* replaced by another policy */
        return plan_pack(id, WEFT_NOT_ASKED, 0, k->shared);
    atomic_store_explicit(place, plan, memory_order_release);
    return plan;
}

/* Blocks that wait for each other must all be resident at once. A kernel whose whole grid fits unshaped but not shaped
 * may depend on that; only a rule that names the kernel takes the risk. */
static bool may_wait_for_itself(const weft_kernel *k, uint64_t plan, uint32_t blocks, uint64_t grid_blocks) {
    if (plan_blocks(plan) & NAMED || grid_blocks > (uint64_t)k->natural_blocks * k->sms)
        return false;
    return atomic_load_explicit(&partitioned, memory_order_relaxed) || grid_blocks > (uint64_t)blocks * k->sms;
}

/* Called only if something changed, since launches otherwise do not touch the row's memory. */
static void note(const weft_kernel *k, uint32_t reason, uint32_t blocks, uint32_t bytes) {
    weft_row *row = weft_row_at(k->row);
    atomic_store_explicit(&row->reason, reason, memory_order_relaxed);
    if (reason == WEFT_SHAPED) {
        atomic_store_explicit(&row->shaped_blocks, blocks, memory_order_relaxed);
        atomic_store_explicit(&row->shaped_bytes, bytes, memory_order_relaxed);
    }
    atomic_store_explicit(&k->v->noted, reason << 8 | blocks, memory_order_relaxed);
}

uint32_t weft_shape(const weft_backend *api, const weft_rules *rules, const weft_kernel *k, uint64_t grid_blocks,
                    bool in_flight) {
    if (UNLIKELY(k->row < WEFT_FIRST_ROW || !k->v)) /* the kernel has no name or no row of its own */
        return k->shared;
    uint64_t plan = plan_for(api, rules, k);
    uint32_t reason = plan_reason(plan), blocks = plan_blocks(plan) & ~(uint32_t)NAMED, bytes = plan_bytes(plan);
    if (reason == WEFT_SHAPED) {
        if ((rules->data.flags & WEFT_WHEN_OVERLAP) && !in_flight)
            reason = WEFT_NOT_IN_FLIGHT;
        else if (may_wait_for_itself(k, plan, blocks, grid_blocks))
            reason = WEFT_ONE_WAVE;
    }
    if (UNLIKELY(atomic_load_explicit(&k->v->noted, memory_order_relaxed) != (reason << 8 | blocks)))
        note(k, reason, blocks, bytes);
    return reason == WEFT_SHAPED && bytes >= k->shared ? bytes : k->shared;
}

void weft_shape_refused(const weft_kernel *k, const weft_rules *rules) {
    weft_count(WEFT_COUNT_SHAPE_FAILURES);
    weft_row_at(k->row)->reason = WEFT_REFUSED;
    atomic_store(&k->v->noted, UINT32_MAX);
    if (atomic_fetch_add(&k->v->refusals, 1) + 1 >= GIVE_UP_AFTER)
        atomic_store(&k->v->plans[rules->id % WEFT_PLANS], 0); /* the next plan leaves it unchanged */
}

void weft_sms_partitioned(void) { atomic_store(&partitioned, true); }
void weft_forget_shape(void) { atomic_store(&partitioned, false); }
