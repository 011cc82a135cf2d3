/* The tracer: records CUDA events around launches, copies and graphs of chosen steps and reads them after the steps.
 *
 * While it is off, a launch pays one load and one branch (weft_tracing). While it is on, each operation takes events
 * from a pool and a record from an array; no event is read, and no lock is held during the driver's launch call.
 * src/weft/shim/tracer.py mirrors weft_trace_span, weft_trace_header and the enums. */
#ifndef WEFT_TRACER_H
#define WEFT_TRACER_H

#include "cuda_shim.h"

#define WEFT_TRACE_MAGIC "wefttrc"
enum { WEFT_TRACE_VERSION = 3, WEFT_TRACE_DEVICES = 16, WEFT_TRACE_STEPS = 4096 };
enum {
    WEFT_TRACE_OFF = 0,
    WEFT_TRACE_RECORD = 1,
    WEFT_TRACE_LEARN = 2
}; /* LEARN: which kernels precede PDL launches */
enum { WEFT_TRACE_KERNEL, WEFT_TRACE_MEMCPY, WEFT_TRACE_MEMSET, WEFT_TRACE_GRAPH };
enum { WEFT_COPY_UNKNOWN, WEFT_COPY_HTOD, WEFT_COPY_DTOH, WEFT_COPY_DTOD, WEFT_COPY_PTOP, WEFT_COPY_HTOH };

enum {                         /* weft_trace_span.flags; 128 is unused */
       WEFT_SPAN_CHAINED = 1,  /* a programmatic dependent launch, with no event between it and the kernel before it */
       WEFT_SPAN_OPEN = 2,     /* has no end event; it ends with its chain */
       WEFT_SPAN_LATE = 4,     /* its end event was recorded on an already idle stream: the end is an upper bound */
       WEFT_SPAN_FAILED = 8,   /* the driver refused the operation */
       WEFT_SPAN_UNTIMED = 16, /* no event was available */
       WEFT_SPAN_COMM = 32,    /* a communication kernel, or a graph that contains one */
       WEFT_SPAN_PDL_SPLIT = 64, /* an event separates it from the launch it depends on: first time this was seen */
       WEFT_SPAN_STALLED = 256,  /* the stream was held back until all was queued, so the events give its duration */
};

typedef struct {
    uint64_t host_ns, host_end_ns;          /* start and end of the call, CLOCK_MONOTONIC */
    uint64_t host_front_ns;                 /* before the event `before` was recorded */
    uint64_t host_placed_ns;                /* after the event of `placed_ns` or `again_ns` was recorded */
    int64_t before_ns, after_ns, placed_ns; /* when the events fired, same clock; -1: no event */
    int64_t again_ns; /* a second event after `after`, with an empty kernel between them, to measure the events' cost */
    uint64_t stream, bytes, comm_key, count, comm_sequence;
    uint32_t kind, row, lane, step, thread, flags;
    int32_t device;
    uint32_t grid[3], block[3], shared, static_shared, registers, blocks_per_sm;
    uint32_t copy, graph, graph_kernels;
    int32_t operation, dtype, comm_rank, comm_size, calls, unused;
} weft_trace_span;

typedef struct {
    int32_t ordinal, sms, major, minor, threads_per_sm, registers_per_sm, shared_per_sm, shared_optin;
    char name[96];
} weft_trace_device;

enum {                              /* weft_trace_header.counters */
       WEFT_TRACED_EVENTS,          /* events created */
       WEFT_TRACED_EVENT_FAILURES,  /* events that could not be created or recorded */
       WEFT_TRACED_DROPPED,         /* operations for which there was no room */
       WEFT_TRACED_PLACED_FAILURES, /* launch-completion events that the driver refused */
       WEFT_TRACED_CAPTURED,        /* launches into a capture, which are not recorded */
       WEFT_TRACED_CONTEXTS_GONE,
       WEFT_TRACED_UNFINISHED,  /* operations whose events did not fire in time */
       WEFT_TRACED_LEFT_BEHIND, /* events that could not be destroyed */
       WEFT_TRACED_PDL_SPLITS,
       WEFT_TRACED_STALLS,         /* short waits inserted to time kernels that are shorter than their launch */
       WEFT_TRACED_SKIPPED_FRONTS, /* operations whose start is the end of the preceding one on their stream */
       WEFT_TRACED_STAMPS,         /* stamp kernels, which show when a collective was placed */
       WEFT_TRACED_STAMP_FAILURES, /* stamp kernels that the driver refused: the start is "stream ready" */
       WEFT_TRACED_PROBES,         /* empty kernels on the program's streams, to time the events around them */
       WEFT_TRACED_COUNTERS = 16,
};

/* weft_trace_header.calibrated_ns: the time between two events on an idle stream with this operation between them, all
 * queued before the GPU reaches them. */
enum {
    WEFT_CALIBRATED_SPIN,
    WEFT_CALIBRATED_SPIN_TWICE,
    WEFT_CALIBRATED_STAMP,
    WEFT_CALIBRATED_NOTHING,
    WEFT_CALIBRATIONS
};

typedef struct {
    char magic[8];
    uint32_t version, span_size;
    uint64_t spans, marks, graph_rows;
    uint64_t begin_ns, end_ns;                /* CLOCK_MONOTONIC */
    int64_t calibrated_ns[WEFT_CALIBRATIONS]; /* the smallest measured; -1: unknown */
    int64_t realtime_offset_ns;
    int32_t rank, world, pid, by_steps;
    uint32_t devices, unused;
    uint64_t counters[WEFT_TRACED_COUNTERS];
    weft_trace_device device[WEFT_TRACE_DEVICES];
    char process_file[256]; /* the file whose rows hold the kernels' names */
} weft_trace_header;

static inline int weft_tracing(void) { return atomic_load_explicit(&weft_hot.tracing, memory_order_relaxed); }

enum { CALIBRATION_ROUNDS = 4, STAMPS = 2 };

/* --- tracer_events.c: contexts, events and when they fired --------------------------------------------- */

typedef struct weft_trace_context {
    CUcontext context;
    int device;
    _Atomic bool gone;
    CUevent base, anchor;
    int64_t base_ns, anchor_ns;
    CUstream own, spare[4]; /* spare: side streams made in advance */
    CUfunction wait;        /* holds a stream back for a while; NULL: not available */
    uint64_t mhz;
    _Atomic(CUevent) comm;    /* the event after the latest collective */
    CUfunction stamp[STAMPS]; /* stamp kernels: one with few registers, one with as many as NCCL's kernels */
    struct {
        CUevent before, after;
    } calibration[CALIBRATION_ROUNDS][WEFT_CALIBRATIONS];
    struct {
        CUevent *all;
        size_t made, taken, room;
    } pool[2]; /* with and without timing */
} weft_trace_context;

uint64_t weft_trace_now(void);                  /* CLOCK_MONOTONIC */
EXPORT void weft_trace_side_priority(int same); /* give side streams the priority of the collective's stream */
EXPORT void weft_trace_set_clock(uint64_t (*clock)(void)); /* for tests: the clock of a simulated GPU */
void weft_trace_count(int counter, uint64_t n);
uint64_t weft_trace_counted(int counter);
weft_trace_context *weft_trace_context_now(void);            /* of the calling thread; NULL: cannot be traced */
CUevent weft_trace_event(weft_trace_context *c, bool timed); /* from the pool; NULL: none available */
void weft_trace_warm(weft_trace_context *c);                 /* makes events, streams and kernels in advance */
CUstream weft_trace_spare(weft_trace_context *c);            /* a side stream made in advance, or a new one */
CUstream weft_trace_side_stream(void);                       /* a new stream in the current context, or NULL */
CUstream weft_trace_stream(int priority);
void weft_trace_side_over(CUstream stream);
int64_t weft_trace_time(weft_trace_context *c, CUevent e, uint64_t deadline_ns); /* -1: unknown */
bool weft_trace_enter(weft_trace_context *c, CUcontext *before); /* makes it current; false: it was destroyed */
void weft_trace_leave(CUcontext before);
void weft_trace_devices(weft_trace_header *h);
weft_trace_context *weft_trace_contexts(int *count);
void weft_trace_events_over(void);                   /* destroys everything */
uint32_t weft_trace_context_gone(CUcontext context); /* NULL: all contexts; returns a bit mask of those marked gone */
void weft_trace_contexts_back(uint32_t which);       /* undoes that: they still exist */

/* --- tracer_operation.c: one operation -------------------------------------------------------------------- */

typedef struct weft_trace_lane weft_trace_lane;

typedef struct {
    weft_trace_span span;
    weft_trace_context *context;
    weft_variant *variant;
    CUevent before, after, again;
    CUevent placed; /* timed; on a side stream, after the launch-completion event and the stamp */
} weft_trace_record;

/* An operation that is being traced. */
typedef struct {
    weft_trace_record *record;
    weft_trace_lane *lane;
    weft_variant *variant;
    CUevent completion; /* without timing; the launch's launch-completion event */
    bool own_completion;
    unsigned cluster[3];
    int priority;
} weft_trace_op;

/* Whether this operation is traced; records the event before it if one is needed. */
bool weft_trace_before(weft_trace_op *op, uint32_t kind, weft_variant *v, CUstream stream, bool programmatic);
void weft_trace_after(weft_trace_op *op, CUstream stream, CUresult result);
void weft_trace_learn(weft_variant *v, CUstream stream, bool programmatic);
bool weft_trace_programmatic(const CUlaunchConfig *c);
/* Gives this launch a launch-completion event: adds the attribute to `with`, which has room for one more. */
bool weft_trace_completion(weft_trace_op *op, CUlaunchAttribute *with, unsigned *count);
void weft_trace_completion_refused(weft_trace_op *op);

/* --- tracer_lanes.c ------------------------------------------------------------------------------------------- */

void weft_trace_disturbed(CUstream stream);   /* something may delay the next operation on this stream */
void weft_trace_stream_gone(CUstream stream); /* about to be destroyed; its handle may be reused for another stream */

/* --- tracer_graphs.c ------------------------------------------------------------------------------------------ */

void weft_trace_graph_of(_Atomic uint64_t *known, const weft_graph_kernel *kernels, size_t count, weft_trace_op *op);
uint64_t weft_trace_graph_rows(uint32_t **rows);

/* --- tracer.c: on and off, and the records of one trace --------------------------------------------------- */

uint64_t weft_trace_records(weft_trace_record **all);
uint64_t weft_trace_marks(const uint64_t **marks);
const uint64_t *weft_trace_period(void); /* when the trace began and ended */

/* For Python and for tracer_output.c */
EXPORT int weft_trace_begin(void);  /* 0: recording; otherwise the tracer is in use or not available */
EXPORT void weft_trace_watch(void); /* learns which kernels precede programmatic launches, until begin or end */
EXPORT void weft_trace_mark(void);  /* marks the end of a step */
EXPORT void weft_trace_pause(void); /* stops recording; never waits */
EXPORT void weft_trace_end(void);   /* stops recording, waits for threads that are launching; then it can be read */
EXPORT void weft_trace_free(void);  /* destroys events and records */
EXPORT int weft_trace_state(void);  /* 0: off and empty; 1: recording; 2: ended, can be read; 3: changing */

EXPORT int64_t weft_trace_read(weft_trace_header *h, weft_trace_span *spans, uint64_t room, double timeout_s);
EXPORT int64_t weft_trace_read_marks(uint64_t *out, uint64_t room);
EXPORT int64_t weft_trace_read_graph_rows(uint32_t *out, uint64_t room);
EXPORT void weft_trace_steps_come(void);        /* steps are being searched for: do not trace by time yet */
EXPORT int weft_trace_steps_known(void);        /* a step was found; returns -1 if the trace already goes by time */
EXPORT int weft_trace_finish(double timeout_s); /* ends the trace, writes it to the job's folder and frees it */

/* --- tracer_calls.c: which collective a kernel belongs to ----------------------------------------------- */

void weft_trace_call(uint64_t key, uint64_t sequence, int rank, int size, int operation, uint64_t count, int dtype,
                     uint64_t bytes, CUstream stream);
void weft_trace_calls_over(void); /* this thread's call or group has ended */
void weft_trace_take_call(weft_trace_span *span, CUstream stream);

/* --- tracer_stamp.c: our own kernels ------------------------------------------------------------------------ */

void weft_trace_stamps_load(weft_trace_context *c); /* loads the wait and stamp kernels; may wait for the GPU */
/* Launches a kernel as large as one CTA or cluster of this collective, which is placed after the collective's CTAs. */
bool weft_trace_stamp(weft_trace_context *c, const weft_trace_op *op, CUstream side);
bool weft_trace_probe(const weft_trace_context *c, CUstream stream); /* launches an empty kernel */
void weft_trace_calibrate(weft_trace_context *c);
void weft_trace_calibrations(weft_trace_header *h);
void weft_trace_stamps_forget(void); /* a context was destroyed, and our kernels with it */

/* --- tracer_output.c --------------------------------------------------------------------------------------- */

void weft_trace_attached(void); /* at this process's first launch: plans the trace under `weft run --trace` */

#endif
