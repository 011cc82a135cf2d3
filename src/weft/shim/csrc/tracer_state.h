/* Internal interface between the tracer's source files: its state, lock, lanes and records. */
#ifndef WEFT_TRACER_STATE_H
#define WEFT_TRACER_STATE_H

#include "tracer.h"

/* --- tracer.c: on and off, and the records of one trace ------------------------------------------------------ */

/* The context of this thread while a trace is recorded, otherwise NULL. No event is destroyed until
 * weft_trace_use_ends, which must follow every call, whatever this returned. */
weft_trace_context *weft_trace_use_begins(void);
void weft_trace_use_ends(void);
void weft_trace_lock(void); /* guards lanes, records and graph rows */
void weft_trace_unlock(void);
weft_trace_record *weft_trace_new_record(weft_trace_context *c); /* called with the lock; NULL: dropped */
uint32_t weft_trace_epoch(void);                                 /* the number of this trace */

/* --- tracer_lanes.c: one lane per stream --------------------------------------------------------------------- */

struct weft_trace_lane {
    CUstream stream;
    weft_trace_context *context;
    uint32_t thread, number; /* thread: the owner of a per-thread default stream */
    uint64_t id;
    weft_trace_record *last, *second; /* the latest operation and the one before it */
    weft_trace_record *open;          /* launched, but its end event is not yet recorded */
    bool disturbed, implicit;
    _Atomic(CUstream) side; /* for the launch-completion events of collectives */
    bool side_tried;
    int priority;
    _Atomic uint32_t busy; /* kernels launched while the stream had work */
    _Atomic uint32_t idle; /* kernels launched while it had none but a collective was running */
};

uint32_t weft_trace_thread(void);                                                       /* the calling thread */
weft_trace_lane *weft_trace_lane_of(CUstream stream, weft_trace_context *c, bool make); /* called with the lock */
bool weft_trace_blocking_streams(void); /* the legacy stream waits for some stream of this trace */
void weft_trace_lanes_close(void);      /* records the ends that are still open */
void weft_trace_lanes_over(void);       /* destroys side streams */
void weft_trace_lanes_clear(void);

/* --- tracer_operation.c --------------------------------------------------------------------------------------- */

/* Records the end of a kernel that was left open, now that no programmatic launch follows it. */
void weft_trace_close(weft_trace_record *open, CUstream stream);
void weft_trace_completion_clear(void); /* a new trace tries launch-completion events again */

/* --- tracer_graphs.c ------------------------------------------------------------------------------------------- */

bool weft_trace_graphs_reserve(void);
void weft_trace_graphs_over(void);
void weft_trace_graphs_clear(void);

void *weft_trace_reserve(size_t size); /* tracer.c; pages are allocated on first use. NULL: out of memory */

#endif
