/* Splits that end after their deadline: memory that NCCL may still write to is kept until NCCL is done. */
#define _GNU_SOURCE
#include "nccl_split.h"

#include <stdlib.h>

enum { SETTLE_MS = 60000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static weft_split *lingering; /* guarded by the lock */

static bool in_progress(const weft_split_part *p) {
    ncclResult_t state = NCCL_SUCCESS;
    return p->c->library->ncclCommGetAsyncError(p->handle, &state) == NCCL_SUCCESS && state == NCCL_IN_PROGRESS;
}

static bool is_gone(const weft_split_part *p) {
    return atomic_load(&p->c->dead) || atomic_load(&p->c->handle) != p->handle;
}

void weft_split_mark_late(weft_split *j) {
    for (int i = 0; i < j->count; i++)
        if (j->parts[i].started && !j->parts[i].settled && !j->parts[i].c->blocking && in_progress(&j->parts[i]))
            atomic_store(&j->parts[i].c->splitting, true);
}

/* Whether NCCL is done with this part; aborts a sibling that was made too late. If the program has ended the
 * communicator meanwhile, the state of the split is unknown, and its memory is never freed. */
static bool has_settled(weft_split_part *p) {
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

static bool all_settled(weft_split *j) {
    bool settled = true;
    for (int i = 0; i < j->count; i++)
        settled &= has_settled(&j->parts[i]);
    return settled;
}

void weft_split_discard(weft_split *j) {
    pthread_cond_destroy(&j->changed);
    free(j->parts);
    free(j);
}

void weft_split_let_go(weft_split *j) {
    bool settled = true;
    for (int i = 0; i < j->count; i++)
        settled &= !j->parts[i].started || j->parts[i].settled;
    if (settled) {
        weft_split_discard(j);
        return;
    }
    pthread_mutex_lock(&lock);
    j->next = lingering;
    lingering = j;
    pthread_mutex_unlock(&lock);
}

void weft_split_collect_late(void) {
    pthread_mutex_lock(&lock);
    weft_split *late = lingering, *kept = NULL;
    lingering = NULL;
    pthread_mutex_unlock(&lock);
    while (late) {
        weft_split *j = late;
        late = j->next;
        if (all_settled(j)) {
            weft_split_discard(j);
        } else {
            j->next = kept;
            kept = j;
        }
    }
    pthread_mutex_lock(&lock);
    while (kept) {
        weft_split *j = kept;
        kept = j->next;
        j->next = lingering;
        lingering = j;
    }
    pthread_mutex_unlock(&lock);
}

/* NCCL refuses calls on a communicator with a split in progress. Its peers may just be late, so wait for the end. */
void weft_route_settle(weft_comm *c) {
    ncclResult_t state = NCCL_IN_PROGRESS;
    uint64_t deadline = weft_split_now_ns() + SETTLE_MS * 1000000ull;
    while (state == NCCL_IN_PROGRESS && weft_split_now_ns() < deadline) {
        if (c->library->ncclCommGetAsyncError(c->handle, &state) != NCCL_SUCCESS)
            break;
        if (state == NCCL_IN_PROGRESS)
            weft_nap();
    }
    atomic_store(&c->splitting, false);
}

void weft_forget_late_splits(void) {
    pthread_mutex_init(&lock, NULL);
    lingering = NULL;
}
