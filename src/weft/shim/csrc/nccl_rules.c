/* Decides which rule of the policy applies to a collective call.
 *
 * All ranks must follow the same rules at the same call. A change in the control block therefore has no effect by
 * itself. It takes effect when this process's Python asks for it, between the same two collectives on every rank
 * (shim/apply.py), and a group keeps the rules that it began with. */
#define _GNU_SOURCE
#include "cuda_shim.h"
#include "nccl.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char NO_PATH[] = "this NCCL has no configuration of single calls (2.31 and newer have) and does not ask "
                              "weft's tuner plugin (2.24 and newer do where `weft run` sets NCCL_TUNER_PLUGIN)";
static const char TOO_MANY[] = "too many different rules were in force in this process";

enum { MOST_PUBLISHED = 4096, SETTLE_MS = 2000, TUNER_WITH_CHUNK = 6 };

_Atomic(const weft_call_rules *) weft_call_rules_in_force;
_Atomic bool weft_call_rules_used;
static _Atomic(const weft_call_rules *) at_start;
static weft_call_rules *published; /* guarded by the lock */
static int published_count;
static _Atomic bool begun;
static weft_call_rules of_job; /* what the policy asks for; guarded by the lock */
static uint32_t routed_limit;  /* the limit set by weft_nccl_route; outranks the policy's; guarded by the lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool equal(const weft_call_rules *a, const weft_call_rules *b) {
    return a->count == b->count && a->limit == b->limit && a->copies == b->copies &&
           memcmp(a->rules, b->rules, a->count * sizeof *a->rules) == 0;
}

/* Equal rules are published only once. False if there is no room left; the rules in force then stay. */
static bool publish(const weft_call_rules *rules, const weft_call_rules **found) {
    *found = NULL;
    if (!rules->count && !rules->limit && !rules->copies)
        return true;
    weft_call_rules *at = published;
    while (at && !equal(at, rules))
        at = at->next;
    if (!at && published_count < MOST_PUBLISHED && (at = malloc(sizeof *at))) {
        *at = *rules;
        at->next = published;
        published = at;
        published_count++;
    }
    *found = at;
    return at != NULL;
}

static void of_policy(const weft_policy *policy, weft_call_rules *into) {
    memset(into, 0, sizeof *into);
    into->count = policy->comm_rule_count;
    into->limit = policy->comm_ctas;
    into->copies = (policy->flags & WEFT_ENGINE_DMA) != 0;
    memcpy(into->rules, policy->comm_rules, sizeof into->rules);
}

/* Callers hold the lock. False if there is no room for more rules; the rules in force then stay. */
static bool put_in_force(const weft_call_rules *asked, uint32_t limit) {
    const weft_call_rules *found;
    weft_call_rules both = *asked;
    both.limit = limit ? limit : asked->limit;
    if (!publish(&both, &found))
        return false;
    of_job = *asked;
    routed_limit = limit;
    atomic_store_explicit(&weft_call_rules_in_force, found, memory_order_release);
    if (found)
        atomic_store(&weft_call_rules_used, true);
    return true;
}

void weft_call_rules_begin(void) {
    if (LIKELY(atomic_load_explicit(&begun, memory_order_acquire)) || !weft_hot.self)
        return;
    weft_call_rules asked;
    of_policy(&weft_policy_now()->data, &asked);
    pthread_mutex_lock(&lock);
    if (!atomic_load(&begun) && put_in_force(&asked, 0))
        atomic_store(&at_start, weft_call_rules_now());
    atomic_store(&begun, true);
    pthread_mutex_unlock(&lock);
}

const weft_call_rules *weft_call_rules_at_start(void) { return atomic_load_explicit(&at_start, memory_order_acquire); }

uint64_t weft_call_bytes(int operation, uint64_t bytes, int ranks) {
    bool times_ranks = operation == OP_ALL_GATHER || operation == OP_REDUCE_SCATTER;
    return times_ranks && ranks > 0 ? bytes * (uint64_t)ranks : bytes;
}

const weft_comm_rule *weft_rule_of(const weft_call_rules *rules, int operation, uint64_t bytes) {
    for (uint32_t i = 0; rules && i < rules->count; i++) {
        const weft_comm_rule *rule = &rules->rules[i];
        if (rule->operations >> operation & 1 && bytes >= rule->min_bytes && bytes <= rule->max_bytes)
            return rule;
    }
    return NULL;
}

/* --- how rules reach NCCL --------------------------------------------------------------------------------------- */

int weft_nccl_path(weft_nccl *l) {
    if (l->version >= NCCL_WITH_CALL_CONFIG && l->ncclAllReduceConfig)
        return !atomic_load_explicit(&l->config_refused, memory_order_relaxed) ? WEFT_PATH_CONFIG
               : atomic_load_explicit(&l->tuner, memory_order_relaxed)         ? WEFT_PATH_TUNER
                                                                               : WEFT_PATH_REFUSED;
    return atomic_load_explicit(&l->tuner, memory_order_relaxed) ? WEFT_PATH_TUNER : WEFT_PATH_NONE;
}

const char *weft_rule_why_not(weft_nccl *l, const weft_comm_rule *rule) {
    int path = weft_nccl_path(l), tuner = atomic_load_explicit(&l->tuner, memory_order_relaxed);
    if (path != WEFT_PATH_CONFIG && path != WEFT_PATH_TUNER)
        return NO_PATH;
    if (rule->protocol && !tuner)
        return "a protocol needs weft's tuner plugin, and this NCCL does not ask it: set NCCL_TUNER_PLUGIN to "
               "STATIC_PLUGIN when the job is started (`weft run` does where the policy has rules)";
    if (rule->chunk && tuner < TUNER_WITH_CHUNK)
        return "a chunk needs version 6 of the tuner plugin interface (NCCL 2.30 and newer)";
    if ((rule->cluster || rule->cta_policy) && path != WEFT_PATH_CONFIG)
        return "cluster and cta_policy need the configuration of a call (NCCL 2.31 and newer)";
    return NULL;
}

void weft_path_note(weft_nccl *l) {
    weft_call_rules_begin();
    if (!weft_hot.self)
        return;
    atomic_store(&weft_hot.self->nccl_version, (uint32_t)l->version);
    atomic_store(&weft_hot.self->nccl_path, (uint32_t)weft_nccl_path(l));
    atomic_store(&weft_hot.self->nccl_tuner, (uint32_t)atomic_load(&l->tuner));
}

/* NCCL plans the calls of a non-blocking communicator on its own thread, by the rules in force at that time. It must
 * therefore have finished all earlier calls before the rules change. */
static bool settled(void) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c)) {
        ncclResult_t state = NCCL_SUCCESS;
        if (atomic_load(&c->dead) || c->blocking || !c->library->ncclCommGetAsyncError)
            continue;
        for (int waited_us = 0; waited_us < SETTLE_MS * 1000; waited_us += 200) {
            if (c->library->ncclCommGetAsyncError(c->handle, &state) != NCCL_SUCCESS || state != NCCL_IN_PROGRESS)
                break;
            weft_nap();
        }
        if (state == NCCL_IN_PROGRESS)
            return false;
    }
    return true;
}

static const char *not_now(void) {
    if (weft_nccl_in_group())
        return "this thread is inside an NCCL group";
    weft_nccl_private(true);
    bool ready = settled();
    weft_nccl_private(false);
    return ready ? NULL : "a communicator is still busy in the background";
}

static const char *never_applied(const weft_call_rules *asked) {
    const char *why = NULL;
    for (weft_comm *c = weft_comm_first(); c && !why; c = weft_comm_next(c))
        for (uint32_t i = 0; i < asked->count && !why && !atomic_load(&c->dead); i++)
            why = weft_rule_why_not(c->library, &asked->rules[i]);
    return why;
}

/* For Python: applies the rules of this process's policy from the next call on. */
EXPORT int weft_nccl_follow_policy(char *why, size_t size) {
    weft_call_rules asked;
    if (!weft_attach(WEFT_API_CUDA))
        return weft_refuse(why, size, "this process was not started by weft");
    weft_call_rules_begin();
    of_policy(&weft_policy_now()->data, &asked);
    pthread_mutex_lock(&lock);
    bool same = equal(&of_job, &asked);
    pthread_mutex_unlock(&lock);
    if (same)
        return 0;
    const char *no = never_applied(&asked);
    if (!no)
        no = not_now();
    if (no)
        return weft_refuse(why, size, no);
    pthread_mutex_lock(&lock);
    bool kept = put_in_force(&asked, routed_limit);
    pthread_mutex_unlock(&lock);
    return kept ? 0 : weft_refuse(why, size, TOO_MANY);
}

/* --- a limit for all collectives that no rule names ------------------------------------------------------------- */

/* A sibling is needed for more CTAs than the communicator has, and for operations that the tuner plugin does not
 * see. */
bool weft_limits_comm(weft_comm *c, int ctas) {
    int path = weft_nccl_path(c->library);
    if (c->max_ctas > 0 && ctas > c->max_ctas)
        return false;
    bool unseen = false;
    for (int i = OP_ALL_TO_ALL; i < OP_SEND; i++)
        unseen |= atomic_load(&c->bytes[i]) > 0;
    return path == WEFT_PATH_CONFIG || (path == WEFT_PATH_TUNER && !unseen);
}

bool weft_limit_possible(int ctas) {
    bool any = false;
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c)) {
        if (atomic_load(&c->dead))
            continue;
        if (!weft_limits_comm(c, ctas))
            return false;
        any = true;
    }
    return any;
}

int weft_limit_calls(int ctas, char *why, size_t size) {
    pthread_mutex_lock(&lock);
    bool same = routed_limit == (uint32_t)ctas;
    pthread_mutex_unlock(&lock);
    if (same)
        return 0;
    const char *no = not_now();
    if (no)
        return weft_refuse(why, size, no);
    pthread_mutex_lock(&lock);
    bool kept = put_in_force(&of_job, (uint32_t)ctas);
    pthread_mutex_unlock(&lock);
    return kept ? 0 : weft_refuse(why, size, TOO_MANY);
}

void weft_forget_call_rules(void) {
    pthread_mutex_init(&lock, NULL);
    atomic_store(&weft_call_rules_in_force, NULL);
    atomic_store(&weft_call_rules_used, false);
    atomic_store(&at_start, NULL);
    atomic_store(&begun, false);
    memset(&of_job, 0, sizeof of_job);
    routed_limit = 0;
}
