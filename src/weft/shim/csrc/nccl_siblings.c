/* Makes siblings, which are communicators of the same ranks with another CTA limit, with ncclCommSplit. */
#define _GNU_SOURCE
#include "nccl_split.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

uint64_t weft_split_now_ns(void) {
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

static bool failed(weft_split *j, weft_comm *c, ncclResult_t result) {
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS)
        return false;
    weft_nccl *l = c->library;
    const char *words = l->ncclGetErrorString ? l->ncclGetErrorString(result) : NULL;
    const char *detail = l->ncclGetLastError ? l->ncclGetLastError(c->handle) : NULL;
    snprintf(j->why, sizeof j->why, "ncclCommSplit failed: %s%s%.120s", words ? words : "error",
             detail && *detail ? ": " : "", detail ? detail : "");
    return true;
}

/* Polls a non-blocking communicator until it reports that it is ready. */
static bool await(weft_split *j, weft_comm *c, ncclComm_t handle) {
    ncclResult_t state = NCCL_IN_PROGRESS;
    while (weft_split_now_ns() < j->deadline_ns) {
        ncclResult_t result = c->library->ncclCommGetAsyncError(handle, &state);
        if (failed(j, c, result) || failed(j, c, state))
            return false;
        if (state == NCCL_SUCCESS)
            return true;
        weft_nap();
    }
    snprintf(j->why, sizeof j->why, "ncclCommSplit did not finish by the deadline");
    return false;
}

static bool await_all(weft_split *j, int from, int until) {
    for (int i = from; i < until; i++) {
        weft_split_part *p = &j->parts[i];
        if (!p->c->blocking && (!await(j, p->c, p->handle) || (p->made && !await(j, p->c, p->made))))
            return false;
        p->settled = true;
    }
    return true;
}

/* The ranks of one communicator in this process are split in one group, since each waits for the others. */
static bool split(weft_split *j, int from, int until) {
    weft_comm *c = j->parts[from].c;
    weft_nccl *l = c->library;
    if (failed(j, c, l->ncclGroupStart()))
        return false;
    bool well = true;
    for (int i = from; i < until && well; i++) {
        weft_split_part *p = &j->parts[i];
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

/* Aborts only completed siblings: what a failed split left behind may already be freed or may still be written. */
void weft_split_undo(weft_split *j) {
    for (int i = 0; i < j->count; i++) {
        weft_split_part *p = &j->parts[i];
        ncclComm_t made = p->settled ? atomic_exchange(&p->made, NULL) : NULL;
        if (made)
            p->c->library->ncclCommAbort(made);
    }
}

bool weft_split_make(weft_split *j) {
    for (int from = 0, until; from < j->count; from = until) {
        for (until = from + 1; until < j->count && j->parts[until].c->key == j->parts[from].c->key &&
                               j->parts[until].c->library == j->parts[from].c->library;)
            until++;
        if (!split(j, from, until)) {
            for (int i = from; i < until; i++) {
                j->parts[i].settled = false;
                j->parts[i].started &= !j->parts[i].c->blocking; /* a blocking call has returned: NCCL is done */
            }
            return false;
        }
    }
    return true;
}

/* --- ending siblings whose communicator stays ------------------------------------------------------------------- */

typedef struct {
    weft_nccl *l;
    ncclComm_t handles[NCCL_LIMITS];
} ending;

static void *abort_all(void *argument) {
    ending *e = argument;
    weft_nccl_private(true);
    bool grouped = e->l->ncclGroupStart() == NCCL_SUCCESS; /* all are aborted before any is waited for */
    for (int i = 0; i < NCCL_LIMITS; i++)
        if (e->handles[i])
            e->l->ncclCommAbort(e->handles[i]);
    if (grouped)
        e->l->ncclGroupEnd();
    free(e);
    return NULL;
}

/* NCCL waits for the communicator's work, which may be queued behind a sibling's collective, and for a sibling's work,
 * which may be queued behind the communicator's. So a separate thread aborts the siblings meanwhile. A group would not
 * help: an abort makes the group blocking, and NCCL refuses non-blocking communicators in such a group. */
void weft_abort_siblings(weft_comm *c) {
    ending *e = c ? calloc(1, sizeof *e) : NULL;
    bool any = false;
    pthread_t thread;
    for (int i = 1; e && i < NCCL_LIMITS; i++)
        any |= (e->handles[i] = atomic_exchange(&c->sibling[i], NULL)) != NULL;
    if (any) {
        e->l = c->library;
        if (pthread_create(&thread, NULL, abort_all, e) == 0) {
            pthread_detach(thread);
            return;
        }
    }
    free(e);
}
