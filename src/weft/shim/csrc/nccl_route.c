/* Siblings: communicators of the same ranks with another limit of CTAs, and which of them collectives use.
 *
 * A limit has a place, the same for all communicators. The place in force is one number; a thread holds it from the
 * start of a group to its end, so that nothing changes inside a group and nothing is freed that is in use. */
#define _GNU_SOURCE
#include "cuda_shim.h"
#include "nccl.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_AT_ONCE = 1024, POLL_NS = 200000, DRAIN_MS = 2000 };

static _Atomic int in_force;
static _Atomic int limits[NCCL_LIMITS]; /* CTAs of each place; 0: free */
static _Atomic int holders[NCCL_LIMITS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool busy; /* communicators are being split, perhaps beyond the deadline; guarded by the lock */

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

static int refuse(char *why, size_t size, const char *reason) {
    snprintf(why, size, "%s", reason);
    return -1;
}

/* --- making siblings -------------------------------------------------------------------------------------------------- */

typedef struct {
    int ctas, place;
    uint64_t deadline_ns;
    CUcontext context;
    int count;
    weft_comm *comms[MOST_AT_ONCE];
    ncclComm_t made[MOST_AT_ONCE];
    char why[NCCL_WHY];
    bool failed, over, abandoned; /* guarded by the lock */
    pthread_cond_t changed;
} job;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void nap(void) { nanosleep(&(struct timespec){0, POLL_NS}, NULL); }

static void configure(const weft_comm *c, int ctas, nccl_config *config) {
    *config = c->config;
    ncclConfig_t *own = &config->config;
    own->blocking = c->blocking;
    own->maxCTAs = ctas;
    if (own->minCTAs > ctas)
        own->minCTAs = ctas;
    own->splitShare = 0;
}

static bool failed(job *j, weft_comm *c, ncclResult_t result) {
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS)
        return false;
    weft_nccl *l = c->library;
    const char *words = l->ncclGetErrorString ? l->ncclGetErrorString(result) : NULL;
    const char *detail = l->ncclGetLastError ? l->ncclGetLastError(c->handle) : NULL;
    snprintf(j->why, sizeof j->why, "ncclCommSplit failed: %s%s%.120s", words ? words : "error", detail && *detail ? ": " : "",
             detail ? detail : "");
    return true;
}

/* A communicator that works in the background is ready when it says so. */
static bool await(job *j, weft_comm *c, ncclComm_t handle) {
    ncclResult_t state = NCCL_IN_PROGRESS;
    while (now_ns() < j->deadline_ns) {
        ncclResult_t result = c->library->ncclCommGetAsyncError(handle, &state);
        if (failed(j, c, result) || failed(j, c, state))
            return false;
        if (state == NCCL_SUCCESS)
            return true;
        nap();
    }
    snprintf(j->why, sizeof j->why, "ncclCommSplit was not over by the deadline");
    return false;
}

static bool await_all(job *j, int from, int until) {
    for (int i = from; i < until; i++)
        if (!j->comms[i]->blocking && (!await(j, j->comms[i], j->comms[i]->handle) ||
                                       (j->made[i] && !await(j, j->comms[i], j->made[i]))))
            return false;
    return true;
}

/* Ranks of one communicator that live in this process are split as one group: each waits for the others. */
static bool split(job *j, int from, int until) {
    weft_nccl *l = j->comms[from]->library;
    nccl_config configs[until - from];
    if (failed(j, j->comms[from], l->ncclGroupStart()))
        return false;
    bool well = true;
    for (int i = from; i < until && well; i++) {
        configure(j->comms[i], j->ctas, &configs[i - from]);
        well = !failed(j, j->comms[i],
                       l->ncclCommSplit(j->comms[i]->handle, 0, j->comms[i]->rank, &j->made[i], &configs[i - from].config));
    }
    ncclResult_t ended = l->ncclGroupEnd();
    well = well && !failed(j, j->comms[from], ended) && await_all(j, from, until);
    for (int i = from; i < until && well; i++)
        if (!j->made[i]) {
            snprintf(j->why, sizeof j->why, "ncclCommSplit made no communicator");
            well = false;
        }
    return well;
}

static void undo(job *j) {
    for (int i = 0; i < j->count; i++)
        if (j->made[i])
            j->comms[i]->library->ncclCommAbort(j->made[i]);
}

static bool make_all(job *j) {
    for (int from = 0, until; from < j->count; from = until) {
        for (until = from + 1; until < j->count && j->comms[until]->key == j->comms[from]->key &&
                               j->comms[until]->library == j->comms[from]->library;)
            until++;
        if (!split(j, from, until)) { /* what it left may be freed already: never to be touched */
            memset(&j->made[from], 0, (size_t)(until - from) * sizeof *j->made);
            return false;
        }
    }
    return true;
}

static void *work(void *argument) {
    job *j = argument;
    if (j->context && weft_cuda()->cuCtxSetCurrent) /* else NCCL would leave this thread on another device */
        weft_cuda()->cuCtxSetCurrent(j->context);
    weft_nccl_private(true);
    bool well = make_all(j);
    pthread_mutex_lock(&lock);
    bool abandoned = j->abandoned;
    j->failed = !well;
    j->over = true;
    if (abandoned)
        busy = false;
    pthread_cond_signal(&j->changed);
    pthread_mutex_unlock(&lock);
    if (abandoned) {
        undo(j);
        free(j);
    }
    weft_nccl_private(false);
    return NULL;
}

static bool run(job *j) {
    pthread_t thread;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&j->changed, &clock);
    pthread_condattr_destroy(&clock);
    if (pthread_create(&thread, NULL, work, j) != 0) {
        snprintf(j->why, sizeof j->why, "no thread could be started");
        j->failed = true;
        return true;
    }
    struct timespec until = {(time_t)(j->deadline_ns / 1000000000u), (long)(j->deadline_ns % 1000000000u)};
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

/* In order of creation, but the ranks of one communicator together: as they were made, so that ranks which share
 * several communicators do not wait for each other in a circle. */
static void sort(job *j) {
    weft_comm *sorted[MOST_AT_ONCE];
    int count = 0;
    for (int i = 0; i < j->count; i++)
        for (int k = i; j->comms[i] && k < j->count; k++)
            if (k > i && j->comms[k] && j->comms[k]->key == j->comms[i]->key) {
                sorted[count++] = j->comms[k];
                j->comms[k] = NULL;
            } else if (k == i) {
                sorted[count++] = j->comms[i];
            }
    memcpy(j->comms, sorted, (size_t)count * sizeof *sorted);
}

static void gather(job *j, const char **why_not) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c)) {
        if (atomic_load(&c->dead) || atomic_load(&c->collectives) == 0 || j->count == MOST_AT_ONCE)
            continue;
        weft_comm_complete(c);
        const char *why = weft_comm_why_not(c);
        if (why)
            *why_not = why;
        else if (!atomic_load(&c->sibling[j->place]))
            j->comms[j->count++] = c;
    }
}

static int place_for(int ctas) {
    int unused = 0;
    for (int i = NCCL_LIMITS - 1; i > 0; i--) {
        if (atomic_load(&limits[i]) == ctas)
            return i;
        if (atomic_load(&limits[i]) == 0)
            unused = i;
    }
    return unused;
}

static int finish(job *j, char *why, size_t size) {
    if (j->failed) {
        weft_count(WEFT_COUNT_SPLIT_FAILURES);
        weft_nccl_private(true);
        undo(j);
        weft_nccl_private(false);
        refuse(why, size, j->why[0] ? j->why : "ncclCommSplit failed");
    } else {
        atomic_store(&limits[j->place], j->ctas);
        for (int i = 0; i < j->count; i++)
            atomic_store_explicit(&j->comms[i]->sibling[j->place], j->made[i], memory_order_release);
    }
    int result = j->failed ? -1 : 0;
    pthread_cond_destroy(&j->changed);
    free(j);
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

static const char *not_now(void) {
    if (weft_nccl_in_group())
        return "this thread is inside an NCCL group";
    if (weft_capture_open())
        return "a CUDA graph is being captured";
    return NULL;
}

static job *new_job(int ctas, int place, double timeout_s) {
    job *j = calloc(1, sizeof *j);
    if (!j)
        return NULL;
    j->ctas = ctas;
    j->place = place;
    j->deadline_ns = now_ns() + (uint64_t)(timeout_s > 0 ? timeout_s * 1e9 : 0);
    if (weft_cuda()->cuCtxGetCurrent && weft_cuda()->cuCtxGetCurrent(&j->context) != CUDA_SUCCESS)
        j->context = NULL;
    return j;
}

EXPORT int weft_nccl_prepare(int ctas, double timeout_s, char *why, size_t size) {
    const char *no = not_now(), *excluded = NULL;
    if (no)
        return refuse(why, size, no);
    if (!weft_comm_first())
        return refuse(why, size, "the program has made no NCCL communicator yet");
    if (!begin())
        return refuse(why, size, "an earlier split of a communicator is not over");
    int place = place_for(ctas);
    job *j = place ? new_job(ctas, place, timeout_s) : NULL;
    if (!j)
        return end(refuse(why, size, place ? "no memory" : "too many limits are prepared: release some first"));
    gather(j, &excluded);
    if (j->count == 0) {
        free(j);
        if (any(place))
            return end(0); /* all are there */
        return end(refuse(why, size, excluded ? excluded : "no communicator has carried a collective yet"));
    }
    sort(j);
    if (!run(j)) { /* the thread that waits will say when it is over */
        weft_count(WEFT_COUNT_SPLIT_FAILURES);
        return refuse(why, size, "ncclCommSplit was not over by the deadline: did every rank ask for it?");
    }
    return end(finish(j, why, size));
}

/* --- choosing, and getting rid of them -------------------------------------------------------------------------------- */

EXPORT int weft_nccl_route(int ctas, char *why, size_t size) {
    int place = 0;
    for (int i = 1; ctas > 0 && i < NCCL_LIMITS; i++)
        if (atomic_load(&limits[i]) == ctas)
            place = i;
    if (ctas > 0 && !place) {
        snprintf(why, size, "no communicator with %d CTAs is prepared", ctas);
        return -1;
    }
    atomic_store(&in_force, place);
    return 0;
}

static bool drained(int place) {
    for (int waited_us = 0; atomic_load(&holders[place]) > 0; waited_us += POLL_NS / 1000) {
        if (waited_us > DRAIN_MS * 1000)
            return false;
        nap();
    }
    return true;
}

/* Taken away first: then nobody can find it, and whoever has found it gives it back soon. */
static bool destroy(weft_comm *c, int place) {
    ncclComm_t sibling = atomic_exchange(&c->sibling[place], NULL);
    if (!sibling)
        return true;
    if (!drained(place))
        return false; /* kept for ever rather than pulled from under somebody */
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
    const char *no = not_now();
    if (no)
        return refuse(why, size, no);
    for (int place = 1; place < NCCL_LIMITS; place++) {
        if (!atomic_load(&limits[place]) || place == atomic_load(&in_force))
            continue;
        if (!drained(place) || !destroy_all(place))
            return refuse(why, size, "another thread is inside an NCCL group that uses them");
    }
    return 0;
}
