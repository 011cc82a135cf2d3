/* Delays on a CUDA stream without a kernel. They represent copies by copy engines that one GPU cannot make.
 *
 * When the stream reaches a delay, it writes a number to host memory, then waits for the same number in the next word.
 * A host thread sees the first number, and writes the second one when the delay is over. It spins while a delay is
 * pending. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
enum { OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, TIMEOUT = 702, LONGEST_WAIT_S = 10 };

typedef int (*stream_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);

typedef struct { /* in host memory that the GPU can reach */
    _Atomic uint32_t started, ended;
} slot;

typedef struct {
    unsigned place;
    uint32_t number;
    uint64_t ns, start; /* start: 0 until the stream reaches the delay */
} pending;

static struct {
    stream_value write, wait;
    slot *slots;
    uint64_t address; /* GPU address of the slots */
    unsigned count;
    uint32_t *numbers; /* number of the latest delay in each slot */
    unsigned *free;
    unsigned free_count;
    pending *given; /* delays that the thread has not taken yet */
    unsigned given_count;
    bool running;
} all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sem_t work;
static _Atomic uint64_t delays, latest_by_ns;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static unsigned take(pending *into, unsigned room) {
    unsigned taken = 0;
    pthread_mutex_lock(&lock);
    while (all.given_count && taken < room)
        into[taken++] = all.given[--all.given_count];
    pthread_mutex_unlock(&lock);
    return taken;
}

static void give_back(unsigned place) {
    pthread_mutex_lock(&lock);
    all.free[all.free_count++] = place;
    pthread_mutex_unlock(&lock);
}

/* Whether the delay is over. Numbers wrap around: `started` has reached `number` if it is less than 2^31 ahead, as in
 * the GPU's comparison. */
static bool over(pending *one) {
    slot *s = &all.slots[one->place];
    if (!one->start) {
        if ((int32_t)(atomic_load_explicit(&s->started, memory_order_acquire) - one->number) < 0)
            return false;
        one->start = now_ns();
    }
    uint64_t passed = now_ns() - one->start;
    if (passed < one->ns)
        return false;
    atomic_store_explicit(&s->ended, one->number, memory_order_release);
    if (passed - one->ns > atomic_load(&latest_by_ns))
        atomic_store(&latest_by_ns, passed - one->ns);
    give_back(one->place);
    return true;
}

static void *run(void *unused) {
    (void)unused;
    pending *held = malloc(all.count * sizeof *held);
    unsigned count = 0;
    while (held) {
        if (!count)
            while (sem_wait(&work) && errno == EINTR)
                ;
        else
            while (!sem_trywait(&work))
                ; /* the delays are all taken below */
        count += take(held + count, all.count - count);
        for (unsigned i = count; i-- > 0;)
            if (over(&held[i]))
                held[i] = held[--count];
        if (count)
            sched_yield();
    }
    return NULL;
}

/* Start the thread; later calls do nothing. `slots`: zeroed host memory for `count` pairs of words, which the GPU
 * accesses at `address`. */
EXPORT int weft_delay_open(stream_value write, stream_value wait, void *slots, uint64_t address, unsigned count) {
    pthread_mutex_lock(&lock);
    int result = 0;
    if (!all.running) {
        all.write = write, all.wait = wait, all.slots = slots, all.address = address, all.count = count;
        all.numbers = calloc(count, sizeof *all.numbers);
        all.free = calloc(count, sizeof *all.free);
        all.given = calloc(count, sizeof *all.given);
        for (unsigned i = 0; all.free && i < count; i++)
            all.free[all.free_count++] = count - 1 - i;
        pthread_t thread;
        bool ready = all.numbers && all.free && all.given && !sem_init(&work, 0, 0);
        if (ready && !pthread_create(&thread, NULL, run, NULL)) {
            pthread_detach(thread);
            all.running = true;
        } else
            result = OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Take a free slot; waits for one if all are pending. */
static int find_slot(unsigned *place, uint32_t *number) {
    for (uint64_t start = now_ns(); now_ns() - start < LONGEST_WAIT_S * UINT64_C(1000000000); sched_yield()) {
        pthread_mutex_lock(&lock);
        bool found = all.free_count;
        if (found) {
            *place = all.free[--all.free_count];
            *number = ++all.numbers[*place];
        }
        pthread_mutex_unlock(&lock);
        if (found)
            return 0;
    }
    return TIMEOUT;
}

/* Start a delay of `ns` when the stream gets here; `weft_delay_end` holds the stream up until the delay is over. Work
 * issued between the two calls runs during the delay. Returns a CUresult; on an error there is no delay. */
EXPORT int weft_delay_begin(void *stream, uint64_t ns, uint64_t *ticket) {
    unsigned place;
    uint32_t number;
    if (!all.running)
        return NOT_INITIALIZED;
    int result = find_slot(&place, &number);
    if (result)
        return result;
    if ((result = all.write(stream, all.address + place * sizeof(slot), number, 0))) {
        give_back(place);
        return result;
    }
    atomic_fetch_add(&delays, 1);
    pthread_mutex_lock(&lock);
    all.given[all.given_count++] = (pending){.place = place, .number = number, .ns = ns};
    pthread_mutex_unlock(&lock);
    sem_post(&work);
    *ticket = (uint64_t)place << 32 | number;
    return 0;
}

/* The slot may have been reused since `weft_delay_begin`, so the stream waits for this number or a later one. */
EXPORT int weft_delay_end(void *stream, uint64_t ticket) {
    uint64_t at = all.address + (ticket >> 32) * sizeof(slot) + sizeof(uint32_t);
    return all.wait(stream, at, (uint32_t)ticket, 0);
}

/* Hold up a stream for `ns` from the moment it gets here. Returns a CUresult; on an error the stream is not held up. */
EXPORT int weft_delay(void *stream, uint64_t ns) {
    uint64_t ticket;
    int result = weft_delay_begin(stream, ns, &ticket);
    return result ? result : weft_delay_end(stream, ticket);
}

/* Number of delays so far, and the most nanoseconds by which the host ended one too late. */
EXPORT void weft_delay_counts(uint64_t *count, uint64_t *late_ns) {
    *count = atomic_load(&delays);
    *late_ns = atomic_load(&latest_by_ns);
}
