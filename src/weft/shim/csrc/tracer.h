/* The tracer: CUDA events around launches, copies and graphs of chosen steps, read after the steps are over.
 *
 * While it is off, a launch pays one load and one branch (weft_tracing). While it is on, each operation takes events
 * from a pool and a record from an array; nothing is read, and no lock is held while the driver is called to launch.
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

enum {                        /* weft_trace_span.flags */
       WEFT_SPAN_CHAINED = 1, /* a programmatic dependent launch: no event between it and the kernel in front */
       WEFT_SPAN_OPEN = 2,    /* no end of its own: it ends with the chain that it belongs to */
       WEFT_SPAN_LATE = 4,    /* its end event was recorded when the stream was idle again: the end is an upper bound */
       WEFT_SPAN_FAILED = 8,  /* the driver refused the operation */
       WEFT_SPAN_UNTIMED = 16, /* no event could be had */
       WEFT_SPAN_COMM = 32,    /* communicates; a graph: holds a kernel that does */
       WEFT_SPAN_PDL_SPLIT =
           64, /* an event stood between this launch and the one it depends on: seen for the first time */
       WEFT_SPAN_COOPERATIVE = 128,
       WEFT_SPAN_STALLED = 256, /* the stream was held until all was queued: the events tell its duration */
};

typedef struct {
    uint64_t host_ns, host_end_ns; /* of the call, CLOCK_MONOTONIC */
    uint64_t host_front_ns;        /* before the event in front was recorded */
    uint64_t host_placed_ns;       /* after the event behind the launch completion was, or the one of `again_ns` */
    int64_t before_ns, after_ns, placed_ns; /* when events fired, same clock; -1: there was none */
    int64_t again_ns; /* a second event behind `after`, with an empty kernel between: what events cost just then */
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
       WEFT_TRACED_EVENT_FAILURES,  /* that could not be created or recorded */
       WEFT_TRACED_DROPPED,         /* operations for which there was no room */
       WEFT_TRACED_PLACED_FAILURES, /* launch-completion events that the driver refused */
       WEFT_TRACED_CAPTURED,        /* launches into a capture: nothing recorded */
       WEFT_TRACED_CONTEXTS_GONE,
       WEFT_TRACED_UNFINISHED,  /* operations whose events did not fire in time */
       WEFT_TRACED_LEFT_BEHIND, /* events that could not be destroyed */
       WEFT_TRACED_PDL_SPLITS,
       WEFT_TRACED_STALLS,         /* short waits of ours, to time kernels shorter than their launch */
       WEFT_TRACED_SKIPPED_FRONTS, /* operations whose start is the end of the one in front on their stream */
       WEFT_TRACED_STAMPS,         /* kernels of ours that tell when a collective was placed */
       WEFT_TRACED_STAMP_FAILURES, /* that the driver refused: the start is "stream ready" */
       WEFT_TRACED_PROBES,         /* empty kernels of ours on streams of the program, to time the events around them */
       WEFT_TRACED_COUNTERS = 16,
};

/* weft_trace_header.calibrated_ns: between two events on an idle stream, all queued before the GPU reaches them, with
 * this between them. */
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
    int64_t calibrated_ns[WEFT_CALIBRATIONS]; /* least seen; -1: unknown */
    int64_t realtime_offset_ns;
    int32_t rank, world, pid, by_steps;
    uint32_t devices, unused;
    uint64_t counters[WEFT_TRACED_COUNTERS];
    weft_trace_device device[WEFT_TRACE_DEVICES];
    char process_file[256]; /* whose rows hold the kernels' names */
} weft_trace_header;

static inline int weft_tracing(void) { return atomic_load_explicit(&weft_hot.tracing, memory_order_relaxed); }

enum { CALIBRATION_ROUNDS = 4, STAMPS = 2 };

/* --- tracer_events.c: contexts, events and the time they fired ---------------------------------------- */

typedef struct weft_trace_context {
    CUcontext context;
    int device;
    _Atomic bool gone;
    CUevent base, anchor;
    int64_t base_ns, anchor_ns;
    CUstream own, spare[4]; /* spare: side streams in stock */
    CUfunction wait;        /* holds a stream for a while; NULL: there is none */
    uint64_t mhz;
    _Atomic(CUevent) comm;    /* behind the latest collective */
    CUfunction stamp[STAMPS]; /* tells when a collective was placed: of few registers, and of as many as NCCL's */
    struct {
        CUevent before, after;
    } calibration[CALIBRATION_ROUNDS][WEFT_CALIBRATIONS];
    struct {
        CUevent *all;
        size_t made, taken, room;
    } pool[2]; /* with and without timing */
} weft_trace_context;

uint64_t weft_trace_now(void);                  /* CLOCK_MONOTONIC */
EXPORT void weft_trace_side_priority(int same); /* side streams get the priority of the collective's stream */
EXPORT void weft_trace_set_clock(uint64_t (*clock)(void)); /* for tests: that of a simulated GPU */
void weft_trace_count(int counter, uint64_t n);
uint64_t weft_trace_counted(int counter);
weft_trace_context *weft_trace_context_now(void);            /* of the calling thread; NULL: cannot be traced */
CUevent weft_trace_event(weft_trace_context *c, bool timed); /* from the pool; NULL: none to be had */
void weft_trace_warm(weft_trace_context *c);                 /* events in stock */
CUstream weft_trace_spare(weft_trace_context *c);            /* a side stream from stock, or a new one */
CUstream weft_trace_side_stream(void);                       /* a new stream in the current context, or NULL */
CUstream weft_trace_stream(int priority);
void weft_trace_side_over(CUstream stream);
int64_t weft_trace_time(weft_trace_context *c, CUevent e, uint64_t deadline_ns); /* -1: unknown */
bool weft_trace_enter(weft_trace_context *c, CUcontext *before); /* make it current; false: it is gone */
void weft_trace_leave(CUcontext before);
void weft_trace_devices(weft_trace_header *h);
weft_trace_context *weft_trace_contexts(int *count);
void weft_trace_events_over(void);                   /* destroys everything */
uint32_t weft_trace_context_gone(CUcontext context); /* NULL: all of them; returns which, as bits */
void weft_trace_contexts_back(uint32_t which);       /* they have not gone */

/* --- tracer_operation.c: one operation -------------------------------------------------------------------- */

typedef struct weft_trace_lane weft_trace_lane;

typedef struct {
    weft_trace_span span;
    weft_trace_context *context;
    weft_variant *variant;
    CUevent before, after, again;
    CUevent placed; /* timed: on a side stream, behind the launch-completion event */
} weft_trace_record;

/* An operation that is being traced. */
typedef struct {
    weft_trace_record *record;
    weft_trace_lane *lane;
    weft_variant *variant;
    CUevent completion; /* without timing: the launch's attribute */
    bool own_completion;
    unsigned cluster[3];
    int priority;
} weft_trace_op;

/* Whether this operation is traced; records the event in front where one is needed. */
bool weft_trace_before(weft_trace_op *op, uint32_t kind, weft_variant *v, CUstream stream, bool programmatic);
void weft_trace_after(weft_trace_op *op, CUstream stream, CUresult result);
void weft_trace_learn(weft_variant *v, CUstream stream, bool programmatic);
bool weft_trace_programmatic(const CUlaunchConfig *c);
/* A launch-completion event for this launch: adds the attribute to `with`, which has room for one more. */
bool weft_trace_completion(weft_trace_op *op, CUlaunchAttribute *with, unsigned *count);
void weft_trace_completion_refused(weft_trace_op *op);

/* --- tracer_lanes.c ------------------------------------------------------------------------------------------- */

void weft_trace_disturbed(CUstream stream);   /* something may delay what comes next on this stream */
void weft_trace_stream_gone(CUstream stream); /* about to be destroyed; its handle may come back as another stream's */

/* --- tracer_graphs.c ------------------------------------------------------------------------------------------ */

void weft_trace_graph_of(_Atomic uint64_t *known, const weft_graph_kernel *kernels, size_t count, weft_trace_op *op);
uint64_t weft_trace_graph_rows(uint32_t **rows);

/* --- tracer.c: on and off, and the records of one trace --------------------------------------------------- */

uint64_t weft_trace_records(weft_trace_record **all);
uint64_t weft_trace_marks(const uint64_t **marks);
const uint64_t *weft_trace_period(void); /* when it began and ended */

/* For Python and for tracer_output.c */
EXPORT int weft_trace_begin(void);  /* 0: on; else it is in use, or cannot be had */
EXPORT void weft_trace_watch(void); /* learn which launches are programmatic, until begin or end */
EXPORT void weft_trace_mark(void);  /* a step ends here */
EXPORT void weft_trace_pause(void); /* records no more; never waits */
EXPORT void weft_trace_end(void);   /* the same, and can be read: waits for threads that are launching */
EXPORT void weft_trace_free(void);  /* destroys events and records */
EXPORT int weft_trace_state(void);  /* 0 off and empty, 1 recording, 2 ended: can be read, 3 changing */

EXPORT int64_t weft_trace_read(weft_trace_header *h, weft_trace_span *spans, uint64_t room, double timeout_s);
EXPORT int64_t weft_trace_read_marks(uint64_t *out, uint64_t room);
EXPORT int64_t weft_trace_read_graph_rows(uint32_t *out, uint64_t room);
EXPORT void weft_trace_steps_come(void);        /* somebody looks for the program's steps: do not go by time yet */
EXPORT int weft_trace_steps_known(void);        /* a step was found: 0, or the trace goes by time already */
EXPORT int weft_trace_finish(double timeout_s); /* end, write what was recorded into the job's folder, free */

/* --- tracer_calls.c: which collective a kernel belongs to ----------------------------------------------- */

void weft_trace_call(uint64_t key, uint64_t sequence, int rank, int size, int operation, uint64_t count, int dtype,
                     uint64_t bytes, CUstream stream);
void weft_trace_calls_over(void); /* this thread's call or group is over */
void weft_trace_take_call(weft_trace_span *span, CUstream stream);

/* --- tracer_stamp.c: our own kernels ------------------------------------------------------------------------ */

void weft_trace_stamps_load(weft_trace_context *c); /* and what the kernels need; may wait for the GPU */
/* A kernel as large as one CTA, or cluster, of this collective: it is placed after the collective's CTAs. */
bool weft_trace_stamp(weft_trace_context *c, const weft_trace_op *op, CUstream side);
bool weft_trace_probe(const weft_trace_context *c, CUstream stream); /* an empty kernel */
void weft_trace_calibrate(weft_trace_context *c);
void weft_trace_calibrations(weft_trace_header *h);
void weft_trace_stamps_forget(void); /* a context went away, and our kernels with it */

/* --- tracer_output.c --------------------------------------------------------------------------------------- */

void weft_trace_attached(void); /* the first launch of this process: under `weft run --trace`, plan the trace */

#endif
