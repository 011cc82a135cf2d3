/* Prepares siblings of the program's communicators for a CTA limit.
 *
 * A split may wait for all ranks, so a separate thread makes it and gives up at a deadline. Memory that NCCL may still
 * write to is then kept. */
#define _GNU_SOURCE
#include "nccl_split.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GRACE_MS = 50 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool busy; /* a split is running, perhaps beyond its deadline; guarded by the lock */

static void *work(void *argument) {
    weft_split *j = argument;
    if (j->context && weft_cuda()->cuCtxSetCurrent) /* otherwise NCCL would leave this thread on another device */
        weft_cuda()->cuCtxSetCurrent(j->context);
    weft_nccl_private(true);
    bool well = weft_split_make(j);
    if (!well)
        weft_split_mark_late(j);
    pthread_mutex_lock(&lock);
    bool abandoned = j->abandoned;
    j->failed = !well;
    j->over = true;
    if (abandoned)
        busy = false;
    pthread_cond_signal(&j->changed);
    pthread_mutex_unlock(&lock);
    if (abandoned) {
        weft_split_undo(j);
        weft_split_let_go(j);
    }
    weft_nccl_private(false);
    return NULL;
}

static bool run(weft_split *j) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, j) != 0) {
        snprintf(j->why, sizeof j->why, "cannot start a thread");
        j->failed = true;
        return true;
    }
    uint64_t patience = j->deadline_ns + GRACE_MS * 1000000ull; /* the thread should give up first, if it can */
    struct timespec until = {(time_t)(patience / 1000000000u), (long)(patience % 1000000000u)};
    pthread_mutex_lock(&lock);
    while (!j->over && pthread_cond_timedwait(&j->changed, &lock, &until) != ETIMEDOUT)
        ;
    bool over = j->over;
    j->abandoned = !over;
    pthread_mutex_unlock(&lock);
    if (over)
        pthread_join(thread, NULL);
    else
        pthread_detach(thread);
    return over;
}

/* Sorts by creation order, but keeps the ranks of one communicator together. All processes use the order of creation,
 * so that ranks that share several communicators do not wait for each other in a cycle. */
static void sort(weft_split *j, weft_split_part *sorted) {
    int count = 0;
    for (int i = 0; i < j->count; i++)
        for (int k = i; j->parts[i].c && k < j->count; k++)
            if (k > i && j->parts[k].c && j->parts[k].c->key == j->parts[i].c->key) {
                sorted[count++] = j->parts[k];
                j->parts[k].c = NULL;
            } else if (k == i) {
                sorted[count++] = j->parts[i];
            }
    free(j->parts);
    j->parts = sorted;
}

static bool is_among(uint64_t key, const uint64_t *keys, int count) {
    for (int i = 0; i < count; i++)
        if (keys[i] == key)
            return true;
    return count < 0;
}

static bool add_part(weft_split *j, weft_comm *c) {
    if (j->count == j->room) {
        int room = j->room ? 2 * j->room : 16;
        weft_split_part *grown = realloc(j->parts, (size_t)room * sizeof *grown);
        if (!grown)
            return false;
        j->parts = grown;
        j->room = room;
    }
    weft_split_part *p = memset(&j->parts[j->count++], 0, sizeof *p);
    p->c = c;
    p->handle = c->handle;
    return true;
}

/* Collects the communicators to split: those in `keys`, which all ranks agreed on; with any key if `count` is
 * negative. */
static bool gather(weft_split *j, const uint64_t *keys, int count, const char **why_not) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c)) {
        if (atomic_load(&c->dead) || atomic_load(&c->collectives) == 0 || !is_among(c->key, keys, count))
            continue;
        weft_comm_complete(c);
        const char *why = weft_comm_why_not(c);
        if (why)
            *why_not = why;
        else if (!atomic_load(&c->sibling[j->place]) && !add_part(j, c))
            return false;
    }
    return true;
}

static int place_for(int ctas) {
    int unused = 0;
    for (int i = NCCL_LIMITS - 1; i > 0; i--) {
        if (weft_route_limit(i) == ctas)
            return i;
        if (weft_route_limit(i) == 0)
            unused = i;
    }
    return unused;
}

static int finish(weft_split *j, char *why, size_t size) {
    int result = j->failed ? -1 : 0;
    if (j->failed) {
        weft_count(WEFT_COUNT_SPLIT_FAILURES);
        weft_nccl_private(true);
        weft_split_undo(j);
        weft_nccl_private(false);
        weft_refuse(why, size, j->why[0] ? j->why : "ncclCommSplit failed");
    } else {
        weft_route_set_limit(j->place, j->ctas);
        for (int i = 0; i < j->count; i++)
            atomic_store_explicit(&j->parts[i].c->sibling[j->place], j->parts[i].made, memory_order_release);
    }
    weft_split_let_go(j);
    return result;
}

static bool begin(void) {
    pthread_mutex_lock(&lock);
    bool mine = !busy;
    busy = true;
    pthread_mutex_unlock(&lock);
    return mine;
}

static int end(int result) {
    pthread_mutex_lock(&lock);
    busy = false;
    pthread_mutex_unlock(&lock);
    return result;
}

static bool any(int place) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c))
        if (!atomic_load(&c->dead) && atomic_load(&c->sibling[place]))
            return true;
    return false;
}

static weft_split *new_split(int ctas, int place, double timeout_s) {
    weft_split *j = calloc(1, sizeof *j);
    if (!j)
        return NULL;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&j->changed, &clock);
    pthread_condattr_destroy(&clock);
    j->ctas = ctas;
    j->place = place;
    j->deadline_ns = weft_split_now_ns() + (uint64_t)(timeout_s > 0 ? timeout_s * 1e9 : 0);
    if (weft_cuda()->cuCtxGetCurrent && weft_cuda()->cuCtxGetCurrent(&j->context) != CUDA_SUCCESS)
        j->context = NULL;
    return j;
}

/* `keys`: the communicators that every rank can split, if the ranks have agreed on them; NULL: all that this rank can
 * split. If one rank splits a communicator and another does not, the split waits until the deadline. */
EXPORT int weft_nccl_prepare_keys(int ctas, double timeout_s, const uint64_t *keys, int key_count, char *why,
                                  size_t size) {
    const char *no = weft_route_not_now(), *excluded = NULL;
    if (no)
        return weft_refuse(why, size, no);
    if (weft_limit_possible(ctas))
        return 0; /* each call can carry the limit, which saves the siblings and their memory */
    if (!begin())
        return weft_refuse(why, size, "an earlier split of a communicator has not finished");
    weft_nccl_private(true);
    weft_split_collect_late();
    weft_nccl_private(false);
    int place = place_for(ctas);
    weft_split *j = place ? new_split(ctas, place, timeout_s) : NULL;
    if (!j)
        return end(weft_refuse(why, size, place ? "no memory" : "too many limits are prepared: release some first"));
    bool gathered = gather(j, keys, keys ? key_count : -1, &excluded);
    weft_split_part *sorted = gathered && j->count ? calloc((size_t)j->count, sizeof *sorted) : NULL;
    if (!sorted) {
        bool empty = gathered && j->count == 0;
        weft_split_discard(j);
        if (empty && any(place))
            return end(0); /* all siblings exist already */
        return end(weft_refuse(why, size,
                               !empty     ? "no memory"
                               : excluded ? excluded
                                          : "no communicator has carried a collective yet"));
    }
    sort(j, sorted);
    if (!run(j)) { /* its thread clears `busy` when the split ends */
        weft_count(WEFT_COUNT_SPLIT_FAILURES);
        return weft_refuse(why, size, "ncclCommSplit did not finish by the deadline: did every rank request it?");
    }
    return end(finish(j, why, size));
}

EXPORT int weft_nccl_prepare(int ctas, double timeout_s, char *why, size_t size) {
    return weft_nccl_prepare_keys(ctas, timeout_s, NULL, 0, why, size);
}

void weft_forget_split(void) {
    pthread_mutex_init(&lock, NULL);
    weft_forget_late_splits();
    busy = false;
}
