/* What the parts of the tracer share: whether it records, its lock, lanes and records. */
#ifndef WEFT_TRACER_STATE_H
#define WEFT_TRACER_STATE_H

#include "tracer.h"

/* --- tracer.c: on and off, and the records of one trace ------------------------------------------------------ */

/* The context of this thread while a trace is recorded, else NULL. Until weft_trace_use_ends, no event is destroyed;
 * every call is followed by that one, whatever it returned. */
weft_trace_context *weft_trace_use_begins(void);
void weft_trace_use_ends(void);
void weft_trace_lock(void); /* of lanes, records and rows of graphs */
void weft_trace_unlock(void);
weft_trace_record *weft_trace_new_record(weft_trace_context *c); /* called with the lock; NULL: dropped */
uint32_t weft_trace_epoch(void);                                 /* the number of this trace */

/* --- tracer_lanes.c: one for each stream --------------------------------------------------------------------- */

struct weft_trace_lane {
    CUstream stream;
    weft_trace_context *context;
    uint32_t thread, number; /* thread: of the per-thread default stream */
    uint64_t id;
    weft_trace_record *last, *second; /* the latest two operations */
    weft_trace_record *open;          /* launched, and its end event not yet recorded */
    bool disturbed, implicit;
    _Atomic(CUstream) side; /* for the launch-completion events of collectives */
    bool side_tried;
    int priority;
    _Atomic uint32_t busy; /* kernels that were launched while it had work */
    _Atomic uint32_t idle; /* and while it had none, but a collective was running */
};

uint32_t weft_trace_thread(void);                                                       /* the calling one */
weft_trace_lane *weft_trace_lane_of(CUstream stream, weft_trace_context *c, bool make); /* called with the lock */
bool weft_trace_blocking_streams(void); /* the legacy stream waits for some stream of this trace */
void weft_trace_lanes_close(void);      /* records the ends that are still open */
void weft_trace_lanes_over(void);       /* destroys side streams */
void weft_trace_lanes_clear(void);

/* --- tracer_operation.c --------------------------------------------------------------------------------------- */

/* The end of a kernel that was left open, now that it is known not to be followed programmatically. */
void weft_trace_close(weft_trace_record *open, CUstream stream);
void weft_trace_completion_clear(void); /* a new trace tries launch-completion events again */

/* --- tracer_graphs.c ------------------------------------------------------------------------------------------- */

bool weft_trace_graphs_reserve(void);
void weft_trace_graphs_over(void);
void weft_trace_graphs_clear(void);

void *weft_trace_reserve(size_t size); /* tracer.c; NULL: no memory. Pages come with use */

#endif
