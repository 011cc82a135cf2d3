/* The tracer's hot path: which operations get events, and where.
 *
 * A span ends where the event behind it fires. It begins where the event in front fires, or, where the stream was
 * still busy, at the end of the span in front: one event for each kernel is then enough. A kernel that launches
 * programmatically (PDL) must follow its predecessor directly, so a kernel that such a launch was seen to follow gets
 * no event behind it until the next operation tells whether it is one of a chain. Collectives also get a
 * launch-completion event and a stamp (tracer_stamp.c): they may wait for SMs long after their stream is ready. */
#define _GNU_SOURCE
#include "tracer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LANES = 1024, CAPACITY = 1 << 18, GRAPH_ROWS = 1 << 20, NOT_READY = 600, NON_BLOCKING = 1 };
enum { AGAIN_EVERY = 4 };
enum { STALL_NS = 12000, MOST_STALLED = 1024 };
enum { WITH_COMPLETION = 12030 }; /* the CUDA version that has the attribute */

struct weft_trace_lane {
    CUstream stream;
    weft_trace_context *context;
    uint32_t thread; /* of the per-thread default stream */
    uint64_t id;
    weft_trace_record *last, *second; /* the latest two operations */
    weft_trace_record *open;          /* launched, and its end event not yet recorded */
    bool disturbed, implicit;
    CUstream side; /* for the launch-completion events of collectives */
    bool side_tried;
    int priority;
    uint32_t busy; /* kernels that were launched while it had work */
};

_Atomic int weft_trace_on;
enum { EMPTY, RECORDING, ENDED, CHANGING };
static _Atomic int state;
static _Atomic int users; /* threads inside before … after */
static _Atomic bool completion_refused, blocking_streams, same_priority;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static weft_trace_lane lanes[LANES];
static uint32_t lane_count;
static weft_trace_record *records;
static uint64_t record_count;
static uint64_t marks[WEFT_TRACE_STEPS], mark_count, period[2];
static uint32_t *graph_rows, graph_row_count, graph_epoch;

static uint32_t this_thread(void) {
    static _Thread_local uint32_t id;
    if (UNLIKELY(!id))
        id = (uint32_t)syscall(SYS_gettid);
    return id;
}

/* --- lanes: one for each stream ------------------------------------------------------------------------------ */

static bool is_lane(const weft_trace_lane *l, CUstream stream, const weft_trace_context *c) {
    return l->stream == stream && l->context == c && (stream != CU_STREAM_PER_THREAD || l->thread == this_thread());
}

/* The legacy stream waits for blocking streams, and they for it, without any call that could be seen. */
static void describe(weft_trace_lane *l) {
    const weft_cuda_calls *cu = weft_cuda();
    unsigned flags = 0;
    unsigned long long id;
    int mode = weft_capture_relax();
    bool legacy = l->stream == CU_STREAM_LEGACY;
    bool blocking = !legacy && (!cu->cuStreamGetFlags || cu->cuStreamGetFlags(l->stream, &flags) != CUDA_SUCCESS ||
                                !(flags & NON_BLOCKING));
    l->implicit = legacy || blocking;
    if (blocking)
        atomic_store(&blocking_streams, true);
    bool known = cu->cuStreamGetId && cu->cuStreamGetId(l->stream, &id) == CUDA_SUCCESS;
    l->id = known ? id : (uint64_t)(uintptr_t)l->stream;
    if (cu->cuStreamGetPriority && cu->cuStreamGetPriority(l->stream, &l->priority) != CUDA_SUCCESS)
        l->priority = 0;
    weft_capture_restore(mode);
}

/* Called with the lock. A table of few streams: the latest is nearly always near the front. */
static weft_trace_lane *lane_of(CUstream stream, weft_trace_context *c, bool make) {
    for (uint32_t i = 0; i < lane_count; i++)
        if (is_lane(&lanes[i], stream, c))
            return &lanes[i];
    if (!make || lane_count == LANES)
        return NULL;
    weft_trace_lane *l = &lanes[lane_count++];
    *l = (weft_trace_lane){.stream = stream, .context = c, .thread = this_thread()};
    describe(l);
    return l;
}

void weft_trace_disturbed(CUstream stream) {
    atomic_fetch_add(&users, 1);
    weft_trace_context *c = atomic_load(&state) == RECORDING ? weft_trace_context_now() : NULL;
    if (c) {
        pthread_mutex_lock(&lock);
        weft_trace_lane *l = lane_of(stream, c, false);
        if (l)
            l->disturbed = true;
        pthread_mutex_unlock(&lock);
    }
    atomic_fetch_sub(&users, 1);
}

/* --- programmatic launches ------------------------------------------------------------------------------------- */

bool weft_trace_programmatic(const CUlaunchConfig *c) {
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION && c->attrs[i].value.cooperative)
            return true;
    return false;
}

/* Before a trace: note whom a programmatic launch follows, so that no event will stand between them. */
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

/* Whether work that was launched earlier on this stream is still to be done, with some to spare. */
static bool still_busy(CUevent earlier) { return earlier && weft_cuda()->cuEventQuery(earlier) == NOT_READY; }

/* The end of a kernel that was left open, now that it is known not to be followed programmatically. */
static void close_open(weft_trace_record *open, CUstream stream) {
    if (!open)
        return;
    if (weft_cuda()->cuStreamQuery && weft_cuda()->cuStreamQuery(stream) == CUDA_SUCCESS)
        open->span.flags |= WEFT_SPAN_LATE;
    if (put(open->after, stream))
        open->span.flags &= ~(uint32_t)WEFT_SPAN_OPEN;
}

static weft_trace_record *new_record(weft_trace_context *c) {
    if (atomic_load(&state) != RECORDING || record_count == CAPACITY) {
        weft_trace_count(WEFT_TRACED_DROPPED, 1);
        return NULL;
    }
    weft_trace_record *r = &records[record_count++];
    r->context = c;
    r->span.step = (uint32_t)mark_count;
    return r;
}

/* Finds the lane and takes a record; what is open, and what must be asked, is handed out. */
static weft_trace_lane *enter(weft_trace_op *op, CUstream stream, weft_trace_context *c, bool *programmatic,
                              weft_trace_record **open, bool *front, CUevent *earlier) {
    pthread_mutex_lock(&lock);
    weft_trace_lane *l = lane_of(stream, c, true);
    if (l && (op->record = new_record(c))) {
        weft_trace_record *last = l->last;
        *programmatic &= last && !l->disturbed && last->span.kind == WEFT_TRACE_KERNEL;
        if (*programmatic && !l->open)
            op->record->span.flags |= WEFT_SPAN_PDL_SPLIT;
        if (*programmatic)
            op->record->span.flags |= WEFT_SPAN_CHAINED;
        *open = *programmatic ? NULL : l->open;
        *front = !*programmatic && (!last || l->disturbed || *open || (l->implicit && atomic_load(&blocking_streams)));
        *earlier = l->second && !*open ? l->second->after : NULL;
        l->open = NULL;
        op->record->span.lane = (uint32_t)(l - lanes);
        op->record->span.stream = l->id;
    } else {
        l = NULL;
    }
    pthread_mutex_unlock(&lock);
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

/* The first collective of a stream gets it a side stream of its own: waits on a shared one would hold each other up. */
static void prepare_completion(weft_trace_op *op) {
    weft_trace_lane *l = op->lane;
    pthread_mutex_lock(&lock);
    bool make = !l->side_tried && !atomic_load(&completion_refused);
    l->side_tried = true;
    pthread_mutex_unlock(&lock);
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

/* On an idle stream a kernel may be over before the event behind it is even submitted, so the events tell when it was
 * launched, not how long it took. A few launches of each kernel, ever rarer, are held back until all is queued. */
static bool stall(const weft_trace_context *c, weft_variant *v, CUstream stream) {
    uint64_t number = (uint64_t)graph_epoch << 32;
    uint64_t seen = atomic_load_explicit(&v->idle_launches, memory_order_relaxed);
    number = seen >> 32 == graph_epoch ? seen + 1 : number + 1;
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
    atomic_fetch_add(&users, 1); /* from here on until weft_trace_after, no event is destroyed */
    weft_trace_context *c = atomic_load(&state) == RECORDING ? weft_trace_context_now() : NULL;
    op->lane = c ? enter(op, stream, c, &programmatic, &open, &front, &earlier) : NULL;
    if (!op->lane) {
        atomic_fetch_sub(&users, 1);
        return false;
    }
    weft_trace_record *r = op->record;
    weft_trace_span *s = &r->span;
    r->variant = v;
    s->kind = kind;
    s->thread = this_thread();
    s->device = c->device;
    s->operation = -1;
    describe_kernel(s, v);
    bool comm = kind == WEFT_TRACE_KERNEL && (s->flags & WEFT_SPAN_COMM);
    close_open(open, stream);
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
            op->completion = with[i].value.launchCompletionEvent.event; /* the program's own serves as well */
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

/* While collectives write to memory, an event fires some microseconds after the kernel in front of it has ended. Two
 * events in a row tell how much. */
static void put_again(weft_trace_op *op, CUstream stream) {
    weft_trace_record *r = op->record;
    CUevent e = NULL;
    if (r->before || r->span.kind != WEFT_TRACE_KERNEL || ++op->lane->busy % AGAIN_EVERY)
        return;
    if ((e = weft_trace_event(r->context, true)) && put(e, stream))
        r->again = e;
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
        put_again(op, stream);
    if (!failed && op->completion)
        put_placed(op);
    pthread_mutex_lock(&lock);
    if (failed) {
        if ((r->span.flags & WEFT_SPAN_CHAINED) && l->last && (l->last->span.flags & WEFT_SPAN_OPEN))
            l->open = l->last; /* nothing follows it yet */
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
    pthread_mutex_unlock(&lock);
    atomic_fetch_sub(&users, 1);
}

/* --- graphs ----------------------------------------------------------------------------------------------------- */

/* The kernels of a graph, listed once for each executable graph and trace: `known` keeps the place. */
void weft_trace_graph_of(_Atomic uint64_t *known, const weft_graph_kernel *kernels, size_t count, weft_trace_op *op) {
    bool communicates = false;
    for (size_t i = 0; i < count; i++)
        communicates |= kernels[i].communicates;
    pthread_mutex_lock(&lock);
    uint64_t place = atomic_load(known);
    if (place >> 32 != graph_epoch) {
        size_t room = GRAPH_ROWS - graph_row_count, taken = count < room ? count : room;
        place = (uint64_t)graph_epoch << 32 | graph_row_count;
        for (size_t i = 0; graph_rows && i < taken; i++)
            graph_rows[graph_row_count + i] = kernels[i].row;
        graph_row_count += graph_rows ? (uint32_t)taken : 0;
        atomic_store(known, place);
    }
    pthread_mutex_unlock(&lock);
    op->record->span.graph = (uint32_t)place;
    op->record->span.graph_kernels = (uint32_t)count;
    op->record->span.flags |= communicates ? WEFT_SPAN_COMM : 0;
}

uint64_t weft_trace_graph_rows(uint32_t **rows) { return *rows = graph_rows, graph_row_count; }
uint64_t weft_trace_records(weft_trace_record **all) { return *all = records, record_count; }
const uint64_t *weft_trace_period(void) { return period; }
uint64_t weft_trace_marks(const uint64_t **all) { return *all = marks, mark_count; }

/* --- on and off ---------------------------------------------------------------------------------------------------- */

static void *reserve(size_t size) { /* pages come with use */
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A forked child traces nothing that its parent was tracing. */
void weft_forget_tracer(void) {
    atomic_store(&weft_trace_on, WEFT_TRACE_OFF);
    atomic_store(&state, EMPTY);
    atomic_store(&users, 0);
    pthread_mutex_init(&lock, NULL);
}

static void clear(void) {
    lane_count = graph_row_count = 0;
    record_count = mark_count = 0;
    graph_epoch++;
    atomic_store(&completion_refused, false);
    atomic_store(&blocking_streams, false);
}

int weft_trace_begin(void) {
    int idle = EMPTY;
    if (!weft_attach(WEFT_API_CUDA) || !atomic_compare_exchange_strong(&state, &idle, CHANGING))
        return -1;
    pthread_mutex_lock(&lock);
    clear();
    records = reserve(CAPACITY * sizeof *records);
    graph_rows = reserve(GRAPH_ROWS * sizeof *graph_rows);
    bool room = records && graph_rows;
    pthread_mutex_unlock(&lock);
    weft_trace_context *c = room ? weft_trace_context_now() : NULL;
    if (c)
        weft_trace_warm(c);
    period[0] = period[1] = weft_trace_now();
    atomic_store(&state, room ? RECORDING : EMPTY);
    atomic_store(&weft_trace_on, room ? WEFT_TRACE_RECORD : WEFT_TRACE_OFF);
    return room ? 0 : -1;
}

void weft_trace_watch(void) {
    int off = WEFT_TRACE_OFF;
    if (weft_attach(WEFT_API_CUDA) && atomic_load(&state) == EMPTY)
        atomic_compare_exchange_strong(&weft_trace_on, &off, WEFT_TRACE_LEARN);
}

void weft_trace_mark(void) {
    pthread_mutex_lock(&lock);
    if (atomic_load(&state) == RECORDING && mark_count < WEFT_TRACE_STEPS)
        marks[mark_count++] = weft_trace_now();
    pthread_mutex_unlock(&lock);
}

/* Threads that are inside an operation come out by themselves; they find their records as they left them. */
static bool wait_for_users(void) {
    for (int i = 0; i < 40000 && atomic_load(&users) > 0; i++)
        usleep(50);
    return atomic_load(&users) == 0;
}

static void close_all(void) {
    for (uint32_t i = 0; i < lane_count; i++) {
        CUcontext before;
        if (lanes[i].open && weft_trace_enter(lanes[i].context, &before)) {
            if (lanes[i].stream != CU_STREAM_PER_THREAD || lanes[i].thread == this_thread())
                close_open(lanes[i].open, lanes[i].stream);
            weft_trace_leave(before);
        }
        lanes[i].open = NULL;
    }
}

void weft_trace_pause(void) { atomic_store(&weft_trace_on, WEFT_TRACE_OFF); }

void weft_trace_end(void) {
    int recording = RECORDING;
    atomic_store(&weft_trace_on, WEFT_TRACE_OFF);
    if (!atomic_compare_exchange_strong(&state, &recording, CHANGING))
        return;
    period[1] = weft_trace_now();
    if (wait_for_users())
        close_all();
    atomic_store(&state, ENDED);
}

void weft_trace_free(void) {
    int ended = ENDED;
    if (!atomic_compare_exchange_strong(&state, &ended, CHANGING))
        return;
    if (!wait_for_users()) { /* a thread hangs inside the driver: what it uses must stay */
        weft_trace_count(WEFT_TRACED_LEFT_BEHIND, 1);
        return;
    }
    for (uint32_t i = 0; i < lane_count; i++) {
        CUcontext before;
        if (lanes[i].side && weft_trace_enter(lanes[i].context, &before)) {
            weft_trace_side_over(lanes[i].side);
            weft_trace_leave(before);
        }
    }
    weft_trace_events_over();
    munmap(records, CAPACITY * sizeof *records);
    munmap(graph_rows, GRAPH_ROWS * sizeof *graph_rows);
    pthread_mutex_lock(&lock);
    records = NULL;
    graph_rows = NULL;
    clear();
    pthread_mutex_unlock(&lock);
    atomic_store(&state, EMPTY);
}

int weft_trace_state(void) {
    int now = atomic_load(&state);
    return now == CHANGING ? ENDED + 1 : now;
}
