/* The tracer's hot path: decides which operations get events, and where.
 *
 * A span ends when the event after it fires. It begins when the event before it fires or, if the stream was still
 * busy, at the end of the preceding span; one event per kernel is then enough. A programmatic launch (PDL) must
 * directly follow its predecessor. So a kernel that such a launch was seen to follow gets no event after it until the
 * next operation shows whether it is part of a chain. Collectives also get a launch-completion event and a stamp
 * (tracer_stamp.c), since they may wait for SMs long after their stream is ready. */
#define _GNU_SOURCE
#include "tracer_state.h"

#include <string.h>

enum { NOT_READY = 600, PROBE_EVERY = 4, STALL_NS = 20000, MOST_STALLED = 1024 };
enum { WITH_COMPLETION = 12030 }; /* the CUDA version that has the attribute */

static _Atomic bool completion_refused, same_priority;

/* --- programmatic launches ------------------------------------------------------------------------------------- */

bool weft_trace_programmatic(const CUlaunchConfig *c) {
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION && c->attrs[i].value.cooperative)
            return true;
    return false;
}

/* Before a trace: records which kernel a programmatic launch follows, so that no event will separate them. */
void weft_trace_learn(weft_variant *v, CUstream stream, bool programmatic) {
    static _Thread_local struct {
        CUstream stream;
        weft_variant *v;
    } latest[4];
    unsigned at = (unsigned)((uintptr_t)stream >> 4) % 4;
    if (programmatic && latest[at].v && latest[at].stream == stream)
        atomic_store_explicit(&latest[at].v->before_programmatic, true, memory_order_relaxed);
    latest[at].stream = stream;
    latest[at].v = v;
}

/* --- an operation ------------------------------------------------------------------------------------------------ */

static bool put(CUevent e, CUstream stream) {
    if (e && weft_cuda()->cuEventRecord(e, stream) == CUDA_SUCCESS)
        return true;
    if (e)
        weft_trace_count(WEFT_TRACED_EVENT_FAILURES, 1);
    return false;
}

/* Whether the work before this event is unfinished. To test a stream, pass the event after its second-latest operation,
 * which leaves a margin. */
static bool still_busy(CUevent earlier) {
    if (!earlier)
        return false;
    int mode = weft_capture_relax_where_open();
    bool busy = weft_cuda()->cuEventQuery(earlier) == NOT_READY;
    weft_capture_restore(mode);
    return busy;
}

void weft_trace_close(weft_trace_record *open, CUstream stream) {
    if (!open)
        return;
    int mode = weft_capture_relax_where_open();
    if (weft_cuda()->cuStreamQuery && weft_cuda()->cuStreamQuery(stream) == CUDA_SUCCESS)
        open->span.flags |= WEFT_SPAN_LATE;
    weft_capture_restore(mode);
    if (put(open->after, stream))
        open->span.flags &= ~(uint32_t)WEFT_SPAN_OPEN;
}

/* Finds the lane and takes a record. Returns the open kernel to close, whether an event before the operation is needed,
 * and the earlier event to query. */
static weft_trace_lane *enter(weft_trace_op *op, CUstream stream, weft_trace_context *c, bool *programmatic,
                              weft_trace_record **open, bool *front, CUevent *earlier) {
    weft_trace_lock();
    weft_trace_lane *l = weft_trace_lane_of(stream, c, true);
    if (!l)
        weft_trace_count(WEFT_TRACED_DROPPED, 1);
    if (l && (op->record = weft_trace_new_record(c))) {
        weft_trace_record *last = l->last;
        *programmatic &= last && !l->disturbed && last->span.kind == WEFT_TRACE_KERNEL;
        if (*programmatic && !l->open)
            op->record->span.flags |= WEFT_SPAN_PDL_SPLIT;
        if (*programmatic)
            op->record->span.flags |= WEFT_SPAN_CHAINED;
        *open = *programmatic ? NULL : l->open;
        *front = !*programmatic && (!last || l->disturbed || *open || (l->implicit && weft_trace_blocking_streams()));
        *earlier = l->second && !*open ? l->second->after : NULL;
        l->open = NULL;
        op->record->span.lane = l->number;
        op->record->span.stream = l->id;
    } else {
        l = NULL;
    }
    weft_trace_unlock();
    return l;
}

static void describe_kernel(weft_trace_span *s, weft_variant *v) {
    s->row = v ? v->row : UINT32_MAX;
    if (!v)
        return;
    uint32_t known = atomic_load_explicit(&v->registers, memory_order_relaxed);
    if (UNLIKELY(!known)) {
        int registers = 0, fixed = 0;
        weft_cuda_kernel_sizes((void *)(uintptr_t)v->handle, &registers, &fixed);
        atomic_store_explicit(&v->static_shared, (uint32_t)fixed, memory_order_relaxed);
        atomic_store_explicit(&v->registers, known = (uint32_t)registers + 1, memory_order_relaxed);
    }
    s->registers = known - 1;
    s->static_shared = atomic_load_explicit(&v->static_shared, memory_order_relaxed);
    s->blocks_per_sm = (uint32_t)v->natural_blocks;
    if (v->kind == WEFT_KIND_COMM)
        s->flags |= WEFT_SPAN_COMM;
}

void weft_trace_side_priority(int same) { atomic_store(&same_priority, same != 0); }

/* Gives a stream its own side stream at its first collective; waits on a shared side stream would delay each other. */
static void prepare_completion(weft_trace_op *op) {
    weft_trace_lane *l = op->lane;
    weft_trace_lock();
    bool make = !l->side_tried && !atomic_load(&completion_refused);
    l->side_tried = true;
    weft_trace_unlock();
    if (!make)
        return;
    int version = 0, mode = weft_capture_relax();
    if (weft_cuda()->cuDriverGetVersion && weft_cuda()->cuDriverGetVersion(&version) == CUDA_SUCCESS &&
        version >= WITH_COMPLETION)
        l->side = atomic_load(&same_priority) ? weft_trace_stream(l->priority) : weft_trace_spare(l->context);
    weft_capture_restore(mode);
}

static bool traceable(CUstream stream) {
    if (UNLIKELY(weft_capturing(stream))) {
        weft_trace_count(WEFT_TRACED_CAPTURED, 1);
        return false;
    }
    return true;
}

/* On an idle stream a kernel may end before the event after it is even submitted, so the events show when it was
 * launched, not how long it took. Therefore some launches of each kernel, increasingly rarely, are held back until all
 * of their events are queued. */
static bool stall(const weft_trace_context *c, weft_variant *v, CUstream stream) {
    uint64_t epoch = weft_trace_epoch(), number = epoch << 32;
    uint64_t seen = atomic_load_explicit(&v->idle_launches, memory_order_relaxed);
    number = seen >> 32 == epoch ? seen + 1 : number + 1;
    atomic_store_explicit(&v->idle_launches, number, memory_order_relaxed);
    uint32_t count = (uint32_t)number;
    if (count < 4 || count > MOST_STALLED || (count & (count - 1)))
        return false;
    if (!c->wait || weft_wait_launch(c->wait, c->mhz, STALL_NS, stream) != CUDA_SUCCESS)
        return false;
    weft_trace_count(WEFT_TRACED_STALLS, 1);
    return true;
}

bool weft_trace_before(weft_trace_op *op, uint32_t kind, weft_variant *v, CUstream stream, bool programmatic) {
    weft_trace_record *open = NULL;
    CUevent earlier = NULL;
    bool front = true;
    *op = (weft_trace_op){.variant = v};
    if (!traceable(stream))
        return false;
    weft_trace_context *c = weft_trace_use_begins(); /* until weft_trace_after */
    op->lane = c ? enter(op, stream, c, &programmatic, &open, &front, &earlier) : NULL;
    if (!op->lane) {
        weft_trace_use_ends();
        return false;
    }
    weft_trace_record *r = op->record;
    weft_trace_span *s = &r->span;
    r->variant = v;
    s->kind = kind;
    s->thread = weft_trace_thread();
    s->device = c->device;
    s->operation = -1;
    describe_kernel(s, v);
    bool comm = kind == WEFT_TRACE_KERNEL && (s->flags & WEFT_SPAN_COMM);
    weft_trace_close(open, stream);
    bool idle = !programmatic && !still_busy(earlier);
    front |= !programmatic && (comm || kind == WEFT_TRACE_GRAPH || idle);
    r->after = weft_trace_event(c, true);
    if (idle && v && v->kind == WEFT_KIND_COMPUTE && stall(c, v, stream))
        s->flags |= WEFT_SPAN_STALLED;
    s->host_front_ns = weft_trace_now();
    if (front && (r->before = weft_trace_event(c, true)) && !put(r->before, stream))
        r->before = NULL;
    if (!front && !programmatic)
        weft_trace_count(WEFT_TRACED_SKIPPED_FRONTS, 1);
    if (comm && !programmatic)
        prepare_completion(op);
    s->host_ns = weft_trace_now();
    return true;
}

bool weft_trace_completion(weft_trace_op *op, CUlaunchAttribute *with, unsigned *count) {
    weft_trace_record *r = op->record;
    if (!(r->span.flags & WEFT_SPAN_COMM) || !op->lane->side || atomic_load(&completion_refused))
        return false;
    op->priority = op->lane->priority;
    for (unsigned i = 0; i < *count; i++) {
        if (with[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            memcpy(op->cluster, with[i].value.cluster, sizeof op->cluster);
        if (with[i].id == CU_LAUNCH_ATTRIBUTE_PRIORITY)
            op->priority = with[i].value.priority;
        if (with[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
            op->completion = with[i].value.launchCompletionEvent.event; /* use the program's own event */
    }
    if (op->completion)
        return false;
    op->completion = weft_trace_event(r->context, false);
    if (!op->completion)
        return false;
    op->own_completion = true;
    memset(&with[*count], 0, sizeof *with);
    with[*count].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
    with[(*count)++].value.launchCompletionEvent.event = op->completion;
    return true;
}

void weft_trace_completion_refused(weft_trace_op *op) {
    weft_trace_count(WEFT_TRACED_PLACED_FAILURES, 1);
    atomic_store(&completion_refused, true);
    op->completion = NULL;
}

static void put_placed(weft_trace_op *op) {
    weft_trace_record *r = op->record;
    CUevent stamp = weft_trace_event(r->context, true);
    CUstream side = op->lane->side;
    if (stamp && weft_cuda()->cuStreamWaitEvent(side, op->completion, 0) == CUDA_SUCCESS &&
        weft_trace_stamp(r->context, op, side) && put(stamp, side))
        r->placed = stamp;
    r->span.host_placed_ns = weft_trace_now();
}

static bool rarely(_Atomic uint32_t *counter) {
    uint32_t n = atomic_fetch_add_explicit(counter, 1, memory_order_relaxed) + 1;
    return n < PROBE_EVERY ? !(n & (n - 1)) : n % PROBE_EVERY == 0;
}

/* Whether a collective is running. Once none is, the driver is not asked again until the next collective. */
static bool comm_runs(weft_trace_context *c) {
    CUevent latest = atomic_load_explicit(&c->comm, memory_order_relaxed);
    if (!latest || still_busy(latest))
        return latest != NULL;
    atomic_compare_exchange_strong(&c->comm, &latest, NULL);
    return false;
}

/* While the host submits work, and while collectives write to memory, an event fires some microseconds after the
 * preceding kernel has ended, and the next kernel starts later. A probe, an empty kernel between two events, measures
 * this delay. Probes follow some kernels on a busy stream, all held-back kernels, and some kernels on an idle stream
 * while a collective runs. Otherwise events on an idle stream cost what the calibration measured. */
static void probe(weft_trace_op *op, CUstream stream) {
    weft_trace_record *r = op->record;
    if (r->span.kind != WEFT_TRACE_KERNEL || (r->span.flags & WEFT_SPAN_COMM))
        return;
    if (!(r->span.flags & WEFT_SPAN_STALLED) &&
        !(r->before ? comm_runs(r->context) && rarely(&op->lane->idle) : rarely(&op->lane->busy)))
        return;
    CUevent e = weft_trace_event(r->context, true);
    if (e && weft_trace_probe(r->context, stream) && put(e, stream))
        r->again = e;
    r->span.host_placed_ns = weft_trace_now();
}

void weft_trace_after(weft_trace_op *op, CUstream stream, CUresult result) {
    weft_trace_record *r = op->record;
    weft_trace_lane *l = op->lane;
    bool failed = result != CUDA_SUCCESS;
    bool open = !failed && r->after && r->span.kind == WEFT_TRACE_KERNEL && op->variant &&
                atomic_load_explicit(&op->variant->before_programmatic, memory_order_relaxed);
    r->span.host_end_ns = weft_trace_now();
    if (failed)
        r->span.flags |= WEFT_SPAN_FAILED;
    else if (open)
        r->span.flags |= WEFT_SPAN_OPEN;
    else if (!put(r->after, stream))
        r->span.flags |= WEFT_SPAN_UNTIMED;
    else
        probe(op, stream);
    if (!failed && op->completion)
        put_placed(op);
    if (!failed && (r->span.flags & WEFT_SPAN_COMM) && !open)
        atomic_store(&r->context->comm, r->after);
    weft_trace_lock();
    if (failed) {
        if ((r->span.flags & WEFT_SPAN_CHAINED) && l->last && (l->last->span.flags & WEFT_SPAN_OPEN))
            l->open = l->last; /* it is still without a successor */
        l->disturbed = true;
    } else {
        if ((r->span.flags & WEFT_SPAN_CHAINED) && l->last && l->last->variant)
            atomic_store_explicit(&l->last->variant->before_programmatic, true, memory_order_relaxed);
        if (r->span.flags & WEFT_SPAN_PDL_SPLIT)
            weft_trace_count(WEFT_TRACED_PDL_SPLITS, 1);
        l->second = l->last;
        l->last = r;
        l->open = open ? r : NULL;
        l->disturbed = (r->span.flags & WEFT_SPAN_UNTIMED) != 0;
    }
    weft_trace_unlock();
    weft_trace_use_ends();
}

void weft_trace_completion_clear(void) { atomic_store(&completion_refused, false); }
