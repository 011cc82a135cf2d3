/* Shared by the source files that split communicators into siblings. */
#ifndef WEFT_NCCL_SPLIT_H
#define WEFT_NCCL_SPLIT_H

#include "cuda_shim.h"
#include "nccl.h"

#include <pthread.h>

/* One communicator and the sibling that NCCL makes of it. NCCL reads the configuration and writes the sibling when the
 * split ends, possibly long after the deadline, so a part is freed only once NCCL has reported the end. */
typedef struct {
    weft_comm *c;
    ncclComm_t handle; /* of `c`; by the time a late split ends, `c` may be another communicator */
    _Atomic(ncclComm_t) made;
    nccl_config config;
    bool started, settled;
} weft_split_part;

typedef struct weft_split {
    struct weft_split *next; /* in the list of splits that NCCL may still write to */
    int ctas, place;
    uint64_t deadline_ns;
    CUcontext context;
    int count, room;
    weft_split_part *parts;
    char why[NCCL_WHY];
    bool failed, over, abandoned; /* guarded by the lock of nccl_split.c */
    pthread_cond_t changed;
} weft_split;

uint64_t weft_split_now_ns(void);

/* --- nccl_siblings.c: ncclCommSplit itself ---------------------------------------------------------------------- */

bool weft_split_make(weft_split *j); /* false: failed, and `why` has the reason */
void weft_split_undo(weft_split *j); /* aborts the completed siblings */

/* --- nccl_late.c: splits that end after their deadline ---------------------------------------------------------- */

void weft_split_mark_late(weft_split *j); /* the program's calls on these communicators wait until NCCL is done */
void weft_split_discard(weft_split *j);   /* frees it: NCCL is done with it */
void weft_split_let_go(weft_split *j);    /* frees it, or keeps it if NCCL may still write to it */
void weft_split_collect_late(void);       /* called by one thread at a time */
void weft_forget_late_splits(void);

#endif
