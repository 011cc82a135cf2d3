/* Collectives in flight: behind every collective the GPU writes its number into host memory, so that a compute
 * launch learns by a plain load whether one is still running; no event, no query, nothing that capture forbids. */
#include "weft.h"

#include <pthread.h>

enum { COMM_STREAMS = 16 };

static struct {
    _Atomic(void *) stream;
    _Atomic uint32_t issued;
} comm[COMM_STREAMS];
static _Atomic(volatile uint32_t *) done; /* one number per stream, written by the GPU */
static uint64_t done_device;
static _Atomic uint64_t launched; /* collectives launched or captured so far */
static _Atomic(void *) latest;
static _Atomic uint32_t captured; /* collectives in the captures that are open now */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t weft_comm_count(void) { return atomic_load_explicit(&launched, memory_order_relaxed); }
void *weft_comm_latest(void) { return atomic_load_explicit(&latest, memory_order_relaxed); }

static bool map_done(const weft_backend *api) {
    if (atomic_load(&done))
        return true;
    pthread_mutex_lock(&lock);
    volatile uint32_t *host;
    if (!atomic_load(&done) && api->host_words && api->host_words(COMM_STREAMS, &host, &done_device)) {
        for (int i = 0; i < COMM_STREAMS; i++)
            host[i] = 0;
        atomic_store(&done, host);
    }
    pthread_mutex_unlock(&lock);
    return atomic_load(&done) != NULL;
}

static int place_of(void *stream) {
    for (int i = 0; i < COMM_STREAMS; i++) {
        void *there = atomic_load_explicit(&comm[i].stream, memory_order_relaxed);
        if (!there && atomic_compare_exchange_strong(&comm[i].stream, &there, stream))
            return i;
        if (there == stream)
            return i;
    }
    return (int)(((uintptr_t)stream >> 4) % COMM_STREAMS); /* shared: in flight until the last of them ends */
}

static void track(const weft_backend *api, void *stream) {
    int i = place_of(stream);
    if (!map_done(api)) {
        weft_count(WEFT_COUNT_TRACKING_FAILURES);
        return;
    }
    uint32_t number = atomic_fetch_add(&comm[i].issued, 1) + 1;
    if (!api->write_word(stream, done_device + (uint64_t)i * sizeof(uint32_t), number)) {
        atomic_load(&done)[i] = number; /* never in flight for ever */
        weft_count(WEFT_COUNT_TRACKING_FAILURES);
    }
}

void weft_comm_launched(const weft_backend *api, const weft_rules *rules, void *stream, bool capturing) {
    atomic_store_explicit(&latest, stream, memory_order_relaxed);
    atomic_fetch_add_explicit(&launched, 1, memory_order_relaxed);
    if (capturing)
        atomic_fetch_add(&captured, 1);
    else if (rules->data.flags & (WEFT_WHEN_OVERLAP | WEFT_TRACK))
        track(api, stream);
}

void weft_comm_capture_over(void) { atomic_store(&captured, 0); }

/* In a capture nothing runs yet: what follows a captured collective on another stream may run beside it. */
bool weft_comm_in_flight(void *stream, bool capturing) {
    if (capturing)
        return atomic_load(&captured) > 0 && weft_comm_latest() != stream;
    volatile uint32_t *ended = atomic_load_explicit(&done, memory_order_acquire);
    if (!ended)
        return false;
    for (int i = 0; i < COMM_STREAMS; i++) {
        void *there = atomic_load_explicit(&comm[i].stream, memory_order_relaxed);
        if (!there)
            break;
        if (there != stream && atomic_load_explicit(&comm[i].issued, memory_order_relaxed) != ended[i])
            return true;
    }
    return false;
}
