/* The exact head start: compute waits until the GPU has queued the collective's launch for SMs, but no longer than the
 * policy allows.
 *
 * A launch-completion event on the collective's launch fires once the launch is in the GPU's queue for SMs. Blocks of
 * later launches with the same or a lower priority are placed after it. A helper stream waits for that event and writes
 * the collective's number into host memory. Before the first compute launch after the collective, a kernel with one
 * thread polls this number until it appears or the time is up. So the wait of compute is bounded, whatever the
 * collective's stream still waits for, and nothing in the program waits for the helper. If the program has its own
 * event on the launch, weft uses that one. */
#include "tracer.h"

#include <pthread.h>
#include <string.h>

enum {
    LANES = 64,    /* streams with collectives, over all contexts */
    PENDING = 256, /* pending collectives per stream; further ones get no event */
    TALLY = 256,   /* index of the tally's first word among the spare words; the words before it belong to lanes */
    REFUSALS = 4,  /* after this many refusals the driver is not asked again */
    SINCE_CUDA = 12030,
    DISABLE_TIMING = 2,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* One stream with collectives. `issued` numbers the collectives with an event; the GPU writes each number to the lane's
 * word. Numbers only grow, so an idle lane can be given to another stream. */
static struct {
    _Atomic(CUcontext) context; /* NULL: free */
    _Atomic(CUstream) stream;
    _Atomic uint32_t issued;
    _Atomic uint32_t met; /* the latest number that a compute launch has seen */
    _Atomic bool marked;  /* the latest collective has an event */
    _Atomic bool busy;    /* a thread is launching on it */
    CUstream helper;
    CUevent events[PENDING]; /* used in turn; no event is recorded again before its number was written */
} lanes[LANES];
static _Atomic uint32_t timeouts_seen, behind_seen;
static _Atomic int refusals;

static bool supported(void) {
    static _Atomic int version;
    const weft_cuda_calls *cu = weft_cuda();
    int known = atomic_load_explicit(&version, memory_order_relaxed);
    if (UNLIKELY(known == 0)) {
        if (!cu->cuDriverGetVersion || cu->cuDriverGetVersion(&known) != CUDA_SUCCESS)
            return false;
        atomic_store_explicit(&version, known, memory_order_relaxed);
    }
    return known >= SINCE_CUDA && atomic_load_explicit(&refusals, memory_order_relaxed) < REFUSALS &&
           cu->cuEventCreate && cu->cuStreamWaitEvent && cu->cuStreamCreateWithPriority && cu->cuStreamWriteValue32_v2;
}

/* Streams of one priority share a few hardware queues, in which our wait would block the program's launches. torch uses
 * priorities 0 to -3; NCCL's own streams use the highest. */
static CUstream make_helper(void) {
    int least = 0, greatest = 0;
    if (weft_cuda()->cuCtxGetStreamPriorityRange)
        weft_cuda()->cuCtxGetStreamPriorityRange(&least, &greatest);
    return weft_trace_stream(greatest <= -5 ? greatest + 1 : greatest);
}

static CUcontext current(void) {
    CUcontext context = NULL;
    if (!weft_cuda()->cuCtxGetCurrent || weft_cuda()->cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return NULL;
    return context;
}

/* The lane of this stream, marked busy for the caller; -1: no lane is free, or another thread is launching on it. */
static int take_lane(CUcontext context, CUstream stream, const _Atomic uint32_t *words) {
    int found = -1, spare = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < LANES && found < 0; i++) {
        CUcontext owner = atomic_load(&lanes[i].context);
        if (owner == context && atomic_load(&lanes[i].stream) == stream)
            found = i;
        else if (!owner)
            spare = spare < 0 || atomic_load(&lanes[spare].context) ? i : spare;
        else if (spare < 0 && owner == context && !atomic_load(&lanes[i].busy) &&
                 atomic_load(&words[i]) == atomic_load(&lanes[i].issued))
            spare = i; /* its stream has nothing pending; the new stream can reuse its helper and events */
    }
    if (found < 0 && spare >= 0) {
        found = spare;
        atomic_store(&lanes[found].marked, false);
        atomic_store(&lanes[found].met, atomic_load(&lanes[found].issued)); /* the previous stream's are all placed */
        atomic_store(&lanes[found].stream, stream);
        atomic_store(&lanes[found].context, context);
    }
    if (found >= 0 && atomic_exchange(&lanes[found].busy, true))
        found = -1;
    pthread_mutex_unlock(&lock);
    return found;
}

/* The event for the lane's next collective: the program's own if the launch has one, or ours. */
static CUevent choose_event(const CUlaunchConfig *config, int lane, bool *own) {
    const weft_cuda_calls *cu = weft_cuda();
    *own = false;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT &&
            config->attrs[i].value.launchCompletionEvent.event)
            return config->attrs[i].value.launchCompletionEvent.event;
    *own = true;
    CUevent *event = &lanes[lane].events[atomic_load(&lanes[lane].issued) % PENDING];
    if (!*event && cu->cuEventCreate(event, DISABLE_TIMING) != CUDA_SUCCESS)
        *event = NULL;
    return *event;
}

static void take_over(const _Atomic uint32_t *word, _Atomic uint32_t *seen, int counter) {
    uint32_t now = atomic_load_explicit(word, memory_order_relaxed);
    uint32_t before = atomic_exchange_explicit(seen, now, memory_order_relaxed);
    if (now != before)
        atomic_fetch_add_explicit(&weft_hot.self->counters[counter], now - before, memory_order_relaxed);
}

/* Adds the waiting kernels' counts to the process's counters, at every collective and at exit. */
static void note_tally(void) {
    const _Atomic uint32_t *words = weft_spare_words_known();
    if (!words || !weft_hot.self)
        return;
    take_over(&words[TALLY], &timeouts_seen, WEFT_COUNT_PLACED_TIMEOUTS);
    take_over(&words[TALLY + 3], &behind_seen, WEFT_COUNT_PLACED_BEHIND);
}

__attribute__((destructor)) static void at_end(void) { note_tally(); }

static bool begin(const CUlaunchConfig *config, CUstream stream, weft_placed_mark *mark) {
    uint64_t device;
    CUcontext context = supported() ? current() : NULL;
    _Atomic uint32_t *words = context ? weft_spare_words(&weft_cuda_backend, &device) : NULL;
    if (!words) {
        weft_count(WEFT_COUNT_PLACED_FAILURES);
        return false;
    }
    note_tally();
    int lane = take_lane(context, stream, words);
    if (lane < 0 || atomic_load(&lanes[lane].issued) - atomic_load(&words[lane]) >= PENDING) {
        weft_count(WEFT_COUNT_PLACED_BUSY);
        if (lane >= 0) {
            atomic_store(&lanes[lane].marked, false);
            atomic_store(&lanes[lane].busy, false);
        }
        return false;
    }
    if (!lanes[lane].helper)
        lanes[lane].helper = make_helper();
    CUevent event = lanes[lane].helper ? choose_event(config, lane, &mark->own) : NULL;
    if (!event) {
        weft_count(WEFT_COUNT_PLACED_FAILURES);
        atomic_store(&lanes[lane].marked, false);
        atomic_store(&lanes[lane].busy, false);
        return false;
    }
    mark->lane = lane;
    mark->event = event;
    return true;
}

bool weft_placed_begin(const CUlaunchConfig *config, CUstream stream, weft_placed_mark *mark) {
    int mode = weft_capture_relax();
    bool begun = begin(config, stream, mark);
    weft_capture_restore(mode);
    return begun;
}

void weft_placed_refused(void) {
    atomic_fetch_add(&refusals, 1);
    weft_count(WEFT_COUNT_PLACED_FAILURES);
}

/* Called after the launch. The helper waits for the event's current recording, so the event may be reused later. */
static bool write_number(const weft_placed_mark *mark, uint32_t number) {
    const weft_cuda_calls *cu = weft_cuda();
    CUstream helper = lanes[mark->lane].helper;
    uint64_t device;
    return weft_spare_words(&weft_cuda_backend, &device) &&
           cu->cuStreamWaitEvent(helper, mark->event, 0) == CUDA_SUCCESS &&
           weft_cuda_backend.write_word(helper, device + (uint64_t)mark->lane * sizeof(uint32_t), number);
}

/* The helper may have a wait queued with no number after it that would tell when the wait is over. The driver lets a
 * destroyed stream finish its queued work. */
static void give_up_helper(int lane) {
    if (weft_cuda()->cuStreamDestroy_v2)
        weft_trace_side_over(lanes[lane].helper);
    lanes[lane].helper = NULL;
}

void weft_placed_end(const weft_placed_mark *mark, bool launched) {
    uint32_t number = atomic_load(&lanes[mark->lane].issued) + 1;
    int mode = weft_capture_relax();
    bool written = launched && write_number(mark, number);
    if (launched && !written)
        give_up_helper(mark->lane);
    weft_capture_restore(mode);
    if (written)
        atomic_store(&lanes[mark->lane].issued, number);
    atomic_store(&lanes[mark->lane].marked, written);
    if (launched)
        weft_count(written ? WEFT_COUNT_PLACED_EVENTS : WEFT_COUNT_PLACED_FAILURES);
    atomic_store(&lanes[mark->lane].busy, false);
}

bool weft_placed_pending(CUstream stream, weft_placed *out) {
    uint64_t device;
    CUcontext context = current();
    _Atomic uint32_t *words = context ? weft_spare_words(&weft_cuda_backend, &device) : NULL;
    bool marked = false;
    memset(out, 0, sizeof *out);
    if (!words)
        return false;
    for (int i = 0; i < LANES && out->count < WEFT_PLACED_SLOTS; i++) {
        if (atomic_load(&lanes[i].context) != context || atomic_load(&lanes[i].stream) == stream ||
            !atomic_load(&lanes[i].marked))
            continue;
        /* Of several collectives launched in a row, compute waits only for the first; the others just follow it. */
        uint32_t latest = atomic_load(&lanes[i].issued), met = atomic_exchange(&lanes[i].met, latest);
        uint32_t number = met == latest ? latest : met + 1;
        marked = true;
        if ((int32_t)(atomic_load(&words[i]) - number) >= 0)
            continue;
        out->at[out->count] = device + (uint64_t)i * sizeof(uint32_t);
        out->number[out->count++] = number;
    }
    out->tally = device + TALLY * sizeof(uint32_t);
    if (marked && out->count == 0)
        weft_count(WEFT_COUNT_PLACED_READY);
    return out->count > 0;
}

/* A context's events and helpers are destroyed with it, so the numbers that they would have written never come. */
void weft_placed_context_gone(CUcontext context) {
    _Atomic uint32_t *words = weft_spare_words_known();
    pthread_mutex_lock(&lock);
    for (int i = 0; i < LANES; i++) {
        CUcontext owner = atomic_load(&lanes[i].context);
        if (!owner || (context && owner != context))
            continue;
        atomic_store(&lanes[i].context, NULL);
        atomic_store(&lanes[i].marked, false);
        lanes[i].helper = NULL;
        memset(lanes[i].events, 0, sizeof lanes[i].events);
        if (words)
            atomic_store(&words[i], atomic_load(&lanes[i].issued));
    }
    pthread_mutex_unlock(&lock);
}

void weft_forget_placed(void) {
    pthread_mutex_init(&lock, NULL);
    for (int i = 0; i < LANES; i++) {
        atomic_store(&lanes[i].context, NULL);
        atomic_store(&lanes[i].stream, NULL);
        atomic_store(&lanes[i].issued, 0);
        atomic_store(&lanes[i].met, 0);
        atomic_store(&lanes[i].marked, false);
        atomic_store(&lanes[i].busy, false);
        lanes[i].helper = NULL;
        memset(lanes[i].events, 0, sizeof lanes[i].events);
    }
    atomic_store(&timeouts_seen, 0);
    atomic_store(&behind_seen, 0);
    atomic_store(&refusals, 0);
}
