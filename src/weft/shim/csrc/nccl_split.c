/* Making siblings: communicators of the same ranks with another limit of CTAs, by ncclCommSplit.
 *
 * A split concerns all ranks and may wait for them: a thread of its own makes it, and gives up at a deadline. What NCCL
 * may still write then is kept. */
#define _GNU_SOURCE
#include "cuda_shim.h"
#include "nccl.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SETTLE_MS = 60000, GRACE_MS = 50 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool busy; /* communicators are being split, perhaps beyond the deadline; guarded by the lock */

/* One communicator and the sibling that NCCL makes of it. NCCL reads the configuration and writes the sibling when the
 * split is over, which may be long after the deadline: a part is freed only once NCCL has said that it is. */
typedef struct {
    weft_comm *c;
    ncclComm_t handle; /* of `c`, which may be another communicator by the time a late split ends */
    _Atomic(ncclComm_t) made;
    nccl_config config;
    bool started, settled;
} part;

typedef struct job {
    struct job *next; /* of those that NCCL may still write to */
    int ctas, place;
    uint64_t deadline_ns;
    CUcontext context;
    int count, room;
    part *parts;
    char why[NCCL_WHY];
    bool failed, over, abandoned; /* guarded by the lock */
    pthread_cond_t changed;
} job;

static job *lingering; /* guarded by the lock */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

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
    snprintf(j->why, sizeof j->why, "ncclCommSplit failed: %s%s%.120s", words ? words : "error",
             detail && *detail ? ": " : "", detail ? detail : "");
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
        weft_nap();
    }
    snprintf(j->why, sizeof j->why, "ncclCommSplit was not over by the deadline");
    return false;
}

static bool await_all(job *j, int from, int until) {
    for (int i = from; i < until; i++) {
        part *p = &j->parts[i];
        if (!p->c->blocking && (!await(j, p->c, p->handle) || (p->made && !await(j, p->c, p->made))))
            return false;
        p->settled = true;
    }
    return true;
}

/* Ranks of one communicator that live in this process are split as one group: each waits for the others. */
static bool split(job *j, int from, int until) {
    weft_comm *c = j->parts[from].c;
    weft_nccl *l = c->library;
    if (failed(j, c, l->ncclGroupStart()))
        return false;
    bool well = true;
    for (int i = from; i < until && well; i++) {
        part *p = &j->parts[i];
        configure(p->c, j->ctas, &p->config);
        p->started = true;
        well = !failed(j, p->c, l->ncclCommSplit(p->handle, 0, p->c->rank, (ncclComm_t *)&p->made, &p->config.config));
    }
    ncclResult_t ended = l->ncclGroupEnd();
    well = well && !failed(j, c, ended) && await_all(j, from, until);
    for (int i = from; i < until && well; i++)
        if (!j->parts[i].made) {
            snprintf(j->why, sizeof j->why, "ncclCommSplit made no communicator");
            well = false;
        }
    return well;
}

/* Of a split that failed, what it left may be freed already or come later: only whole siblings are taken back. */
static void undo(job *j) {
    for (int i = 0; i < j->count; i++) {
        part *p = &j->parts[i];
        ncclComm_t made = p->settled ? atomic_exchange(&p->made, NULL) : NULL;
        if (made)
            p->c->library->ncclCommAbort(made);
    }
}

static bool make_all(job *j) {
    for (int from = 0, until; from < j->count; from = until) {
        for (until = from + 1; until < j->count && j->parts[until].c->key == j->parts[from].c->key &&
                               j->parts[until].c->library == j->parts[from].c->library;)
            until++;
        if (!split(j, from, until)) {
            for (int i = from; i < until; i++) {
                j->parts[i].settled = false;
                j->parts[i].started &= !j->parts[i].c->blocking; /* NCCL has returned and is done with it */
            }
            return false;
        }
    }
    return true;
}

/* --- splits that end late ------------------------------------------------------------------------------------------- */

static bool in_progress(const part *p) {
    ncclResult_t state = NCCL_SUCCESS;
    return p->c->library->ncclCommGetAsyncError(p->handle, &state) == NCCL_SUCCESS && state == NCCL_IN_PROGRESS;
}

static bool is_gone(const part *p) { return atomic_load(&p->c->dead) || atomic_load(&p->c->handle) != p->handle; }

static void mark_splitting(job *j) {
    for (int i = 0; i < j->count; i++)
        if (j->parts[i].started && !j->parts[i].settled && !j->parts[i].c->blocking && in_progress(&j->parts[i]))
            atomic_store(&j->parts[i].c->splitting, true);
}

/* Whether NCCL is done with this part; a sibling that came too late is taken back. Where the program has ended the
 * communicator meanwhile, nothing is known of the split, and its memory is never freed. */
static bool has_settled(part *p) {
    if (!p->started || p->settled)
        return true;
    if (is_gone(p) || p->c->blocking || in_progress(p))
        return false;
    atomic_store(&p->c->splitting, false);
    p->settled = true;
    ncclComm_t made = atomic_exchange(&p->made, NULL);
    if (made)
        p->c->library->ncclCommAbort(made);
    return true;
}

static bool all_settled(job *j) {
    bool settled = true;
    for (int i = 0; i < j->count; i++)
        settled &= has_settled(&j->parts[i]);
    return settled;
}

static void discard(job *j) {
    pthread_cond_destroy(&j->changed);
    free(j->parts);
    free(j);
}

/* Nothing that NCCL may still write to is freed. */
static void let_go(job *j) {
    bool settled = true;
    for (int i = 0; i < j->count; i++)
        settled &= !j->parts[i].started || j->parts[i].settled;
    if (settled) {
        discard(j);
        return;
    }
    pthread_mutex_lock(&lock);
    j->next = lingering;
    lingering = j;
    pthread_mutex_unlock(&lock);
}

/* Called by `prepare` only: one thread at a time. */
static void collect_late_splits(void) {
    pthread_mutex_lock(&lock);
    job *late = lingering, *kept = NULL;
    lingering = NULL;
    pthread_mutex_unlock(&lock);
    while (late) {
        job *j = late;
        late = j->next;
        if (all_settled(j)) {
            discard(j);
        } else {
            j->next = kept;
            kept = j;
        }
    }
    pthread_mutex_lock(&lock);
    while (kept) {
        job *j = kept;
        kept = j->next;
        j->next = lingering;
        lingering = j;
    }
    pthread_mutex_unlock(&lock);
}

/* NCCL refuses calls on a communicator that works in the background. Its peers may only be late. */
void weft_route_settle(weft_comm *c) {
    ncclResult_t state = NCCL_IN_PROGRESS;
    uint64_t deadline = now_ns() + SETTLE_MS * 1000000ull;
    while (state == NCCL_IN_PROGRESS && now_ns() < deadline) {
        if (c->library->ncclCommGetAsyncError(c->handle, &state) != NCCL_SUCCESS)
            break;
        if (state == NCCL_IN_PROGRESS)
            weft_nap();
    }
    atomic_store(&c->splitting, false);
}

static void *work(void *argument) {
    job *j = argument;
    if (j->context && weft_cuda()->cuCtxSetCurrent) /* else NCCL would leave this thread on another device */
        weft_cuda()->cuCtxSetCurrent(j->context);
    weft_nccl_private(true);
    bool well = make_all(j);
    if (!well)
        mark_splitting(j);
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
        let_go(j);
    }
    weft_nccl_private(false);
    return NULL;
}

static bool run(job *j) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, j) != 0) {
        snprintf(j->why, sizeof j->why, "no thread could be started");
        j->failed = true;
        return true;
    }
    uint64_t patience = j->deadline_ns + GRACE_MS * 1000000ull; /* the thread is to give up first, where it can */
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

/* In order of creation, but the ranks of one communicator together: as they were made, so that ranks which share
 * several communicators do not wait for each other in a circle. */
static void sort(job *j, part *sorted) {
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

static bool add_part(job *j, weft_comm *c) {
    if (j->count == j->room) {
        int room = j->room ? 2 * j->room : 16;
        part *grown = realloc(j->parts, (size_t)room * sizeof *grown);
        if (!grown)
            return false;
        j->parts = grown;
        j->room = room;
    }
    part *p = memset(&j->parts[j->count++], 0, sizeof *p);
    p->c = c;
    p->handle = c->handle;
    return true;
}

/* The communicators to split: those of `keys`, which all ranks agreed on; of any key where `count` is negative. */
static bool gather(job *j, const uint64_t *keys, int count, const char **why_not) {
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

static int finish(job *j, char *why, size_t size) {
    int result = j->failed ? -1 : 0;
    if (j->failed) {
        weft_count(WEFT_COUNT_SPLIT_FAILURES);
        weft_nccl_private(true);
        undo(j);
        weft_nccl_private(false);
        weft_refuse(why, size, j->why[0] ? j->why : "ncclCommSplit failed");
    } else {
        weft_route_set_limit(j->place, j->ctas);
        for (int i = 0; i < j->count; i++)
            atomic_store_explicit(&j->parts[i].c->sibling[j->place], j->parts[i].made, memory_order_release);
    }
    let_go(j);
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

static job *new_job(int ctas, int place, double timeout_s) {
    job *j = calloc(1, sizeof *j);
    if (!j)
        return NULL;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&j->changed, &clock);
    pthread_condattr_destroy(&clock);
    j->ctas = ctas;
    j->place = place;
    j->deadline_ns = now_ns() + (uint64_t)(timeout_s > 0 ? timeout_s * 1e9 : 0);
    if (weft_cuda()->cuCtxGetCurrent && weft_cuda()->cuCtxGetCurrent(&j->context) != CUDA_SUCCESS)
        j->context = NULL;
    return j;
}

/* `keys`: the communicators that every rank can split, where the ranks have agreed on them; NULL: all that this rank
 * can. A communicator that one rank splits and another does not waits for the deadline. */
EXPORT int weft_nccl_prepare_keys(int ctas, double timeout_s, const uint64_t *keys, int key_count, char *why,
                                  size_t size) {
    const char *no = weft_route_not_now(), *excluded = NULL;
    if (no)
        return weft_refuse(why, size, no);
    if (!weft_comm_first())
        return weft_refuse(why, size, "the program has made no NCCL communicator yet");
    if (weft_limit_possible(ctas))
        return 0; /* each call can carry the limit: no sibling, and none of its memory */
    if (!begin())
        return weft_refuse(why, size, "an earlier split of a communicator is not over");
    weft_nccl_private(true);
    collect_late_splits();
    weft_nccl_private(false);
    int place = place_for(ctas);
    job *j = place ? new_job(ctas, place, timeout_s) : NULL;
    if (!j)
        return end(weft_refuse(why, size, place ? "no memory" : "too many limits are prepared: release some first"));
    bool gathered = gather(j, keys, keys ? key_count : -1, &excluded);
    part *sorted = gathered && j->count ? calloc((size_t)j->count, sizeof *sorted) : NULL;
    if (!sorted) {
        bool empty = gathered && j->count == 0;
        discard(j);
        if (empty && any(place))
            return end(0); /* all are there */
        return end(weft_refuse(why, size,
                               !empty     ? "no memory"
                               : excluded ? excluded
                                          : "no communicator has carried a collective yet"));
    }
    sort(j, sorted);
    if (!run(j)) { /* the thread that waits will say when it is over */
        weft_count(WEFT_COUNT_SPLIT_FAILURES);
        return weft_refuse(why, size, "ncclCommSplit was not over by the deadline: did every rank ask for it?");
    }
    return end(finish(j, why, size));
}

EXPORT int weft_nccl_prepare(int ctas, double timeout_s, char *why, size_t size) {
    return weft_nccl_prepare_keys(ctas, timeout_s, NULL, 0, why, size);
}

void weft_forget_split(void) {
    pthread_mutex_init(&lock, NULL);
    lingering = NULL;
    busy = false;
}
