/* Starts and stops the tracer and holds the records of one trace. */
#define _GNU_SOURCE
#include "tracer_state.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CAPACITY = 1 << 18 };

enum { EMPTY, RECORDING, ENDED, CHANGING };
static _Atomic int state;
static _Atomic int users; /* threads between weft_trace_use_begins and weft_trace_use_ends */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static weft_trace_record *records;
static uint64_t record_count;
static uint64_t marks[WEFT_TRACE_STEPS], mark_count, period[2];
static _Atomic uint32_t epoch;

weft_trace_context *weft_trace_use_begins(void) {
    atomic_fetch_add(&users, 1);
    return atomic_load(&state) == RECORDING ? weft_trace_context_now() : NULL;
}

void weft_trace_use_ends(void) { atomic_fetch_sub(&users, 1); }
void weft_trace_lock(void) { pthread_mutex_lock(&lock); }
void weft_trace_unlock(void) { pthread_mutex_unlock(&lock); }
uint32_t weft_trace_epoch(void) { return atomic_load_explicit(&epoch, memory_order_relaxed); }

weft_trace_record *weft_trace_new_record(weft_trace_context *c) {
    if (atomic_load(&state) != RECORDING || record_count == CAPACITY) {
        weft_trace_count(WEFT_TRACED_DROPPED, 1);
        return NULL;
    }
    weft_trace_record *r = &records[record_count++];
    r->context = c;
    r->span.step = (uint32_t)mark_count;
    return r;
}

uint64_t weft_trace_records(weft_trace_record **all) { return *all = records, record_count; }
const uint64_t *weft_trace_period(void) { return period; }
uint64_t weft_trace_marks(const uint64_t **all) { return *all = marks, mark_count; }

void *weft_trace_reserve(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A forked child does not continue its parent's trace. */
void weft_forget_tracer(void) {
    atomic_store(&weft_hot.tracing, WEFT_TRACE_OFF);
    atomic_store(&state, EMPTY);
    atomic_store(&users, 0);
    pthread_mutex_init(&lock, NULL);
}

static void clear(void) {
    record_count = mark_count = 0;
    atomic_fetch_add_explicit(&epoch, 1, memory_order_relaxed);
    weft_trace_lanes_clear();
    weft_trace_graphs_clear();
    weft_trace_completion_clear();
}

static void free_records(void) {
    if (records)
        munmap(records, CAPACITY * sizeof *records);
    records = NULL;
    weft_trace_graphs_over();
}

int weft_trace_begin(void) {
    int idle = EMPTY;
    if (!weft_attach(WEFT_API_CUDA) || !atomic_compare_exchange_strong(&state, &idle, CHANGING))
        return -1;
    pthread_mutex_lock(&lock);
    clear();
    records = weft_trace_reserve(CAPACITY * sizeof *records);
    bool room = weft_trace_graphs_reserve() && records;
    if (!room)
        free_records();
    pthread_mutex_unlock(&lock);
    weft_trace_context *c = room ? weft_trace_context_now() : NULL;
    if (c)
        weft_trace_warm(c);
    period[0] = period[1] = weft_trace_now();
    atomic_store(&state, room ? RECORDING : EMPTY);
    atomic_store(&weft_hot.tracing, room ? WEFT_TRACE_RECORD : WEFT_TRACE_OFF);
    return room ? 0 : -1;
}

void weft_trace_watch(void) {
    int off = WEFT_TRACE_OFF;
    if (weft_attach(WEFT_API_CUDA) && atomic_load(&state) == EMPTY)
        atomic_compare_exchange_strong(&weft_hot.tracing, &off, WEFT_TRACE_LEARN);
}

void weft_trace_mark(void) {
    pthread_mutex_lock(&lock);
    if (atomic_load(&state) == RECORDING && mark_count < WEFT_TRACE_STEPS)
        marks[mark_count++] = weft_trace_now();
    pthread_mutex_unlock(&lock);
}

/* Threads that are inside an operation leave it by themselves; their records stay valid until then. */
static bool wait_for_users(void) {
    for (int i = 0; i < 40000 && atomic_load(&users) > 0; i++)
        usleep(50);
    return atomic_load(&users) == 0;
}

void weft_trace_pause(void) { atomic_store(&weft_hot.tracing, WEFT_TRACE_OFF); }

void weft_trace_end(void) {
    int recording = RECORDING;
    atomic_store(&weft_hot.tracing, WEFT_TRACE_OFF);
    if (!atomic_compare_exchange_strong(&state, &recording, CHANGING))
        return;
    period[1] = weft_trace_now();
    if (wait_for_users())
        weft_trace_lanes_close();
    atomic_store(&state, ENDED);
}

void weft_trace_free(void) {
    int ended = ENDED;
    if (!atomic_compare_exchange_strong(&state, &ended, CHANGING))
        return;
    if (!wait_for_users()) { /* a thread hangs inside the driver, so the records it uses must stay */
        weft_trace_count(WEFT_TRACED_LEFT_BEHIND, 1);
        return;
    }
    weft_trace_lanes_over();
    weft_trace_events_over();
    pthread_mutex_lock(&lock);
    free_records();
    clear();
    pthread_mutex_unlock(&lock);
    atomic_store(&state, EMPTY);
}

int weft_trace_state(void) {
    int now = atomic_load(&state);
    return now == CHANGING ? ENDED + 1 : now;
}
