/* Decides which siblings collectives use, and destroys siblings.
 *
 * A limit has a place, which is the same for all communicators. The place in force is a single number. A thread holds
 * it from the start of a group to its end, so that nothing changes inside a group and nothing in use is freed. */
#define _GNU_SOURCE
#include "cuda_shim.h"
#include "nccl.h"

#include <stdio.h>
#include <time.h>

enum { POLL_NS = 200000, DRAIN_MS = 2000 };

static _Atomic int in_force;
static _Atomic int limits[NCCL_LIMITS]; /* CTAs of each place; 0: free */
static _Atomic int holders[NCCL_LIMITS];

void weft_route_set_limit(int place, int ctas) { atomic_store(&limits[place], ctas); }
int weft_route_limit(int place) { return atomic_load(&limits[place]); }
int weft_route_now(void) { return atomic_load(&in_force); }

int weft_route_take(void) {
    int place = atomic_load_explicit(&in_force, memory_order_relaxed);
    while (UNLIKELY(place > 0)) {
        atomic_fetch_add(&holders[place], 1);
        int again = atomic_load(&in_force);
        if (again == place)
            return place;
        atomic_fetch_sub(&holders[place], 1);
        place = again;
    }
    return place;
}

void weft_route_hold(int place) { atomic_fetch_add(&holders[place], 1); }

void weft_route_give(int place) {
    if (UNLIKELY(place > 0))
        atomic_fetch_sub(&holders[place], 1);
}

int weft_refuse(char *why, size_t size, const char *reason) {
    snprintf(why, size, "%s", reason);
    return -1;
}

void weft_nap(void) { nanosleep(&(struct timespec){0, POLL_NS}, NULL); }

const char *weft_route_not_now(void) {
    if (weft_nccl_in_group())
        return "this thread is inside an NCCL group";
    if (weft_capture_open())
        return "a CUDA graph is being captured";
    return NULL;
}

EXPORT int weft_nccl_route(int ctas, char *why, size_t size) {
    int place = 0;
    for (int i = 1; ctas > 0 && i < NCCL_LIMITS; i++)
        if (atomic_load(&limits[i]) == ctas)
            place = i;
    bool by_call = ctas > 0 && !place && weft_limit_possible(ctas);
    if (ctas > 0 && !place && !by_call) {
        snprintf(why, size, "no communicator with %d CTAs is prepared", ctas);
        return -1;
    }
    if (weft_limit_calls(by_call ? ctas : 0, why, size) != 0)
        return -1;
    atomic_store(&in_force, place);
    return 0;
}

static bool drained(int place) {
    for (int waited_us = 0; atomic_load(&holders[place]) > 0; waited_us += POLL_NS / 1000) {
        if (waited_us > DRAIN_MS * 1000)
            return false;
        weft_nap();
    }
    return true;
}

/* The sibling is removed first, so no further thread can find it; threads that hold its place release it soon. */
static bool destroy(weft_comm *c, int place) {
    ncclComm_t sibling = atomic_exchange(&c->sibling[place], NULL);
    if (!sibling)
        return true;
    if (!drained(place))
        return false; /* leaked, because a thread still uses it */
    weft_nccl_private(true);
    c->library->ncclCommDestroy(sibling);
    weft_nccl_private(false);
    return true;
}

static bool destroy_all(int place) {
    bool well = true;
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c))
        well &= destroy(c, place);
    atomic_store(&limits[place], 0);
    return well;
}

EXPORT int weft_nccl_release(char *why, size_t size) {
    const char *no = weft_route_not_now();
    if (no)
        return weft_refuse(why, size, no);
    for (int place = 1; place < NCCL_LIMITS; place++) {
        if (!atomic_load(&limits[place]) || place == atomic_load(&in_force))
            continue;
        if (!drained(place) || !destroy_all(place))
            return weft_refuse(why, size, "another thread is inside an NCCL group that uses them");
    }
    return 0;
}

void weft_forget_route(void) {
    atomic_store(&in_force, 0);
    for (int i = 0; i < NCCL_LIMITS; i++) {
        atomic_store(&limits[i], 0);
        atomic_store(&holders[i], 0);
    }
}
