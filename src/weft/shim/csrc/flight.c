/* Tracks collectives in flight. After every collective the GPU writes its number into host memory, so that a compute
 * launch learns with a plain load whether one is still running. This needs no event, no query and nothing that a
 * capture forbids.
 *
 * The memory is ours and outlives every context; only its registration with the GPU is renewed. Each stream with a
 * collective in flight has a place, which becomes free once its last collective has ended. */
#define _GNU_SOURCE
#include "weft.h"

#include <pthread.h>
#include <sys/mman.h>

enum { COMM_STREAMS = 64 };

static struct {
    _Atomic(void *) stream;
    _Atomic uint32_t issued;
} comm[COMM_STREAMS];
static _Atomic int places;               /* in use so far */
static _Atomic(_Atomic uint32_t *) done; /* one number per place, written by the GPU */
static _Atomic uint64_t done_device;     /* device address of `done`; 0: not registered with the GPU */
static _Atomic uint64_t launched;        /* collectives launched or captured so far */
static _Atomic(void *) latest;
static _Atomic uint32_t captured; /* collectives in the currently open captures */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t weft_comm_count(void) { return atomic_load_explicit(&launched, memory_order_relaxed); }
void *weft_comm_latest(void) { return atomic_load_explicit(&latest, memory_order_relaxed); }

static _Atomic uint32_t *words(void) {
    _Atomic uint32_t *found = atomic_load_explicit(&done, memory_order_acquire);
    if (LIKELY(found != NULL))
        return found;
    pthread_mutex_lock(&lock);
    found = atomic_load(&done);
    if (!found) {
        void *memory = mmap(NULL, WEFT_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        found = memory == MAP_FAILED ? NULL : memory;
        if (found)
            madvise(memory, WEFT_PAGE, MADV_DONTFORK); /* pages that the GPU writes to must not be copied on write */
        atomic_store_explicit(&done, found, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Calls the driver without holding our lock, since the driver may wait for the GPU. */
static uint64_t device_of(const weft_backend *api, _Atomic uint32_t *memory) {
    uint64_t device = atomic_load_explicit(&done_device, memory_order_acquire);
    if (UNLIKELY(device == 0) && api->share && api->share((void *)memory, WEFT_PAGE, &device))
        atomic_store_explicit(&done_device, device, memory_order_release);
    return device;
}

_Atomic uint32_t *weft_spare_words(const weft_backend *api, uint64_t *device) {
    _Atomic uint32_t *memory = words();
    uint64_t base = memory ? device_of(api, memory) : 0;
    *device = base + WEFT_SPARE_WORDS * sizeof(uint32_t);
    return base ? memory + WEFT_SPARE_WORDS : NULL;
}

_Atomic uint32_t *weft_spare_words_known(void) {
    _Atomic uint32_t *memory = atomic_load(&done);
    return memory ? memory + WEFT_SPARE_WORDS : NULL;
}

static bool idle(int place, _Atomic uint32_t *ended) {
    return atomic_load(&comm[place].issued) == atomic_load(&ended[place]);
}

/* The place of this stream, and the number of its next collective; -1: all places belong to busy streams. */
static int take_place(void *stream, _Atomic uint32_t *ended, uint32_t *number) {
    int free_place = -1;
    pthread_mutex_lock(&lock);
    int count = atomic_load(&places), place = 0;
    while (place < count && atomic_load(&comm[place].stream) != stream) {
        if (free_place < 0 && idle(place, ended))
            free_place = place;
        place++;
    }
    if (place == count) {
        place = free_place >= 0 ? free_place : count < COMM_STREAMS ? count : -1;
        if (place >= 0)
            atomic_store(&comm[place].stream, stream);
        if (place == count)
            atomic_store(&places, count + 1);
    }
    if (place >= 0)
        *number = atomic_fetch_add(&comm[place].issued, 1) + 1;
    pthread_mutex_unlock(&lock);
    return place;
}

static void track(const weft_backend *api, void *stream) {
    _Atomic uint32_t *ended = words();
    uint64_t device = ended ? device_of(api, ended) : 0;
    uint32_t number;
    int place = device ? take_place(stream, ended, &number) : -1;
    if (place < 0) {
        weft_count(WEFT_COUNT_TRACKING_FAILURES); /* this collective counts as not in flight */
        return;
    }
    if (!api->write_word(stream, device + (uint64_t)place * sizeof(uint32_t), number)) {
        atomic_store(&ended[place], atomic_load(&comm[place].issued)); /* otherwise it would stay in flight forever */
        weft_count(WEFT_COUNT_TRACKING_FAILURES);
    }
}

_Thread_local uint64_t weft_comm_launches_here;

void weft_comm_launched(const weft_backend *api, const weft_rules *rules, void *stream, bool capturing) {
    atomic_store_explicit(&latest, stream, memory_order_relaxed);
    atomic_fetch_add_explicit(&launched, 1, memory_order_relaxed);
    weft_comm_launches_here++;
    if (capturing)
        atomic_fetch_add(&captured, 1);
    else if (weft_comm_tracked(rules))
        track(api, stream);
}

void weft_comm_capture_over(void) { atomic_store(&captured, 0); }

/* Nothing runs yet in a capture, but a launch on another stream after a captured collective may overlap with it. */
bool weft_comm_in_flight(void *stream, bool capturing) {
    if (capturing)
        return atomic_load(&captured) > 0 && weft_comm_latest() != stream;
    _Atomic uint32_t *ended = atomic_load_explicit(&done, memory_order_acquire);
    int count = atomic_load_explicit(&places, memory_order_acquire);
    for (int i = 0; i < count; i++)
        if (atomic_load_explicit(&comm[i].issued, memory_order_relaxed) !=
                atomic_load_explicit(&ended[i], memory_order_relaxed) &&
            atomic_load_explicit(&comm[i].stream, memory_order_relaxed) != stream)
            return true;
    return false;
}

/* Marks everything as ended. Collectives of other contexts may still run; the numbers that they will write are already
 * there, and do no harm. */
void weft_flight_context_gone(void) {
    _Atomic uint32_t *ended = atomic_load(&done);
    atomic_store(&done_device, 0);
    pthread_mutex_lock(&lock);
    for (int i = 0; ended && i < atomic_load(&places); i++)
        atomic_store(&ended[i], atomic_load(&comm[i].issued));
    pthread_mutex_unlock(&lock);
}

void weft_forget_flight(void) {
    pthread_mutex_init(&lock, NULL);
    atomic_store(&places, 0);
    atomic_store(&done, NULL);
    atomic_store(&done_device, 0);
    atomic_store(&launched, 0);
    atomic_store(&latest, NULL);
    atomic_store(&captured, 0);
    for (int i = 0; i < COMM_STREAMS; i++) {
        atomic_store(&comm[i].stream, NULL);
        atomic_store(&comm[i].issued, 0);
    }
}
