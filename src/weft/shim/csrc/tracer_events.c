/* The tracer's events: a pool per context, the host time of a base event, and when each event fired. */
#define _GNU_SOURCE
#include "tracer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CONTEXTS = 32 /* one bit each in a word */, CHUNK = 256, NOT_READY = 600, DISABLE_TIMING = 2, NON_BLOCKING = 1 };
enum { WARM = 8, BASE_TRIES = 8, BASE_LIMIT_NS = 1000000000, REBASE_NS = 50000000 };

static weft_trace_context contexts[CONTEXTS];
static _Atomic int context_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t counters[WEFT_TRACED_COUNTERS];

static uint64_t (*_Atomic clock_of_test)(void);

void weft_trace_set_clock(uint64_t (*clock)(void)) { atomic_store(&clock_of_test, clock); }

uint64_t weft_trace_now(void) {
    uint64_t (*clock)(void) = atomic_load_explicit(&clock_of_test, memory_order_relaxed);
    if (UNLIKELY(clock != NULL))
        return clock();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void weft_trace_count(int counter, uint64_t n) {
    atomic_fetch_add_explicit(&counters[counter], n, memory_order_relaxed);
}
uint64_t weft_trace_counted(int counter) { return atomic_load(&counters[counter]); }

static bool complete(const weft_cuda_calls *cu) {
    return cu->cuEventCreate && cu->cuEventRecord && cu->cuEventQuery && cu->cuEventElapsedTime &&
           cu->cuEventDestroy_v2 && cu->cuCtxGetCurrent && cu->cuCtxSetCurrent && cu->cuStreamCreateWithPriority &&
           cu->cuStreamDestroy_v2 && cu->cuStreamWaitEvent;
}

/* A stream for our own waits. Streams of one priority share a few hardware queues, in which our wait would block the
 * program's launches; no framework uses this priority. */
CUstream weft_trace_side_stream(void) {
    const weft_cuda_calls *cu = weft_cuda();
    int least = 0, greatest = 0;
    if (cu->cuCtxGetStreamPriorityRange)
        cu->cuCtxGetStreamPriorityRange(&least, &greatest);
    return weft_trace_stream(greatest / 2 - (greatest < -2));
}

CUstream weft_trace_stream(int priority) {
    CUstream made = NULL;
    return weft_cuda()->cuStreamCreateWithPriority(&made, NON_BLOCKING, priority) == CUDA_SUCCESS ? made : NULL;
}

void weft_trace_side_over(CUstream stream) { weft_cuda()->cuStreamDestroy_v2(stream); }

/* The base event fires on an idle stream, so the host can bound the time at which it fires. Keeps the try with the
 * tightest bound. */
static bool take_base(weft_trace_context *c) {
    const weft_cuda_calls *cu = weft_cuda();
    uint64_t closest = UINT64_MAX, limit = weft_trace_now() + BASE_LIMIT_NS;
    CUevent tried;
    if (!(c->own = weft_trace_side_stream()))
        return false;
    for (int i = 0; i < BASE_TRIES; i++) {
        if (cu->cuEventCreate(&tried, 0) != CUDA_SUCCESS)
            continue;
        uint64_t start = weft_trace_now(), end;
        CUresult state = cu->cuEventRecord(tried, c->own);
        while (state == CUDA_SUCCESS && (state = cu->cuEventQuery(tried)) == NOT_READY && weft_trace_now() < limit)
            state = CUDA_SUCCESS;
        end = weft_trace_now();
        if (state == CUDA_SUCCESS && end < limit && end - start < closest) {
            CUevent worse = c->base;
            closest = end - start;
            c->base = tried;
            c->base_ns = (int64_t)(start + (end - start) / 2);
            tried = worse;
        }
        if (tried)
            cu->cuEventDestroy_v2(tried);
        if (state != CUDA_SUCCESS)
            break;
    }
    c->anchor = c->base;
    c->anchor_ns = c->base_ns;
    return c->base != NULL;
}

static weft_trace_context *add_context(CUcontext context) {
    const weft_cuda_calls *cu = weft_cuda();
    int i = atomic_load(&context_count);
    if (i == CONTEXTS)
        return NULL;
    weft_trace_context *c = &contexts[i];
    *c = (weft_trace_context){.context = context, .device = -1};
    int mode = weft_capture_relax();
    if (cu->cuCtxGetDevice)
        cu->cuCtxGetDevice(&c->device);
    bool usable = complete(cu) && take_base(c);
    weft_capture_restore(mode);
    if (!usable) {
        if (c->own)
            cu->cuStreamDestroy_v2(c->own);
        weft_trace_count(WEFT_TRACED_EVENT_FAILURES, 1);
        atomic_store(&c->gone, true); /* not asked again in this trace */
    }
    atomic_store_explicit(&context_count, i + 1, memory_order_release);
    return c;
}

weft_trace_context *weft_trace_context_now(void) {
    CUcontext now = NULL;
    if (!weft_cuda()->cuCtxGetCurrent || weft_cuda()->cuCtxGetCurrent(&now) != CUDA_SUCCESS || !now)
        return NULL;
    weft_trace_context *c = NULL;
    for (int pass = 0; pass < 2 && !c; pass++) {
        if (pass)
            pthread_mutex_lock(&lock);
        int count = atomic_load_explicit(&context_count, memory_order_acquire);
        for (int i = 0; i < count && !c; i++)
            if (contexts[i].context == now)
                c = &contexts[i];
        if (pass) {
            if (!c)
                c = add_context(now);
            pthread_mutex_unlock(&lock);
        }
    }
    return c && !atomic_load_explicit(&c->gone, memory_order_relaxed) ? c : NULL;
}

static void make_events(weft_trace_context *c, bool timed) {
    const weft_cuda_calls *cu = weft_cuda();
    __typeof__(c->pool[0]) *p = &c->pool[timed ? 0 : 1];
    if (p->made + CHUNK > p->room) {
        size_t room = p->room ? p->room * 2 : 4 * CHUNK;
        CUevent *grown = realloc(p->all, room * sizeof *grown);
        if (!grown)
            return;
        p->all = grown;
        p->room = room;
    }
    int mode = weft_capture_relax();
    for (int i = 0; i < CHUNK; i++) {
        if (cu->cuEventCreate(&p->all[p->made], timed ? 0 : DISABLE_TIMING) != CUDA_SUCCESS)
            break;
        p->made++;
        weft_trace_count(WEFT_TRACED_EVENTS, 1);
    }
    weft_capture_restore(mode);
}

CUevent weft_trace_event(weft_trace_context *c, bool timed) {
    __typeof__(c->pool[0]) *p = &c->pool[timed ? 0 : 1];
    CUevent e = NULL;
    pthread_mutex_lock(&lock);
    if (!atomic_load(&c->gone)) {
        if (p->taken == p->made)
            make_events(c, timed);
        if (p->taken < p->made)
            e = p->all[p->taken++];
        else
            weft_trace_count(WEFT_TRACED_EVENT_FAILURES, 1);
    }
    pthread_mutex_unlock(&lock);
    return e;
}

/* Everything that might make the driver wait for the GPU is done here, between steps. Loading a module inside a step,
 * between the collectives of two ranks in one process, could wait forever. */
void weft_trace_warm(weft_trace_context *c) {
    int mode = weft_capture_relax();
    weft_trace_stamps_load(c);
    weft_capture_restore(mode);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < WARM && !atomic_load(&c->gone); i++)
        make_events(c, true);
    for (int i = 0; i < 4 && !atomic_load(&c->gone); i++)
        c->spare[i] = weft_trace_side_stream();
    pthread_mutex_unlock(&lock);
    weft_trace_calibrate(c);
}

CUstream weft_trace_spare(weft_trace_context *c) {
    CUstream found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4 && !found; i++) {
        found = c->spare[i];
        c->spare[i] = NULL;
    }
    if (!found && !atomic_load(&c->gone))
        found = weft_trace_side_stream();
    pthread_mutex_unlock(&lock);
    return found;
}

/* --- reading ------------------------------------------------------------------------------------------------ */

bool weft_trace_enter(weft_trace_context *c, CUcontext *before) {
    const weft_cuda_calls *cu = weft_cuda();
    *before = NULL;
    if (atomic_load(&c->gone))
        return false;
    cu->cuCtxGetCurrent(before);
    return *before == c->context || cu->cuCtxSetCurrent(c->context) == CUDA_SUCCESS;
}

void weft_trace_leave(CUcontext before) {
    CUcontext now = NULL;
    const weft_cuda_calls *cu = weft_cuda();
    if (cu->cuCtxGetCurrent(&now) == CUDA_SUCCESS && now != before)
        cu->cuCtxSetCurrent(before);
}

/* The driver returns milliseconds as a float, which is exact to 4 ns up to 50 ms. Longer distances are measured in
 * stages, by moving the anchor event. */
int64_t weft_trace_time(weft_trace_context *c, CUevent e, uint64_t deadline_ns) {
    const weft_cuda_calls *cu = weft_cuda();
    float ms = 0;
    CUresult state = CUDA_SUCCESS;
    if (!e)
        return -1;
    for (;;) {
        pthread_mutex_lock(&lock); /* keeps the context alive: see weft_trace_context_gone */
        bool gone = atomic_load(&c->gone);
        state = gone ? CUDA_ERROR_NOT_FOUND : cu->cuEventQuery(e);
        if (state == CUDA_SUCCESS)
            state = cu->cuEventElapsedTime(&ms, c->anchor, e);
        pthread_mutex_unlock(&lock);
        if (state != NOT_READY || weft_trace_now() >= deadline_ns)
            break;
        usleep(200);
    }
    if (state != CUDA_SUCCESS)
        return -1;
    int64_t ns = (int64_t)((double)ms * 1e6 + (ms < 0 ? -0.5 : 0.5)), at = c->anchor_ns + ns;
    if (ns > REBASE_NS || ns < -REBASE_NS) {
        c->anchor = e;
        c->anchor_ns = at;
    }
    return at;
}

static int attribute(CUdevice device, int what) {
    int value = 0;
    if (!weft_cuda()->cuDeviceGetAttribute || weft_cuda()->cuDeviceGetAttribute(&value, what, device) != CUDA_SUCCESS)
        return 0;
    return value;
}

weft_trace_context *weft_trace_contexts(int *count) { return *count = atomic_load(&context_count), contexts; }

void weft_trace_devices(weft_trace_header *h) {
    int count = atomic_load(&context_count);
    for (int i = 0; i < count && h->devices < WEFT_TRACE_DEVICES; i++) {
        bool known = contexts[i].device < 0;
        for (uint32_t j = 0; j < h->devices; j++)
            known |= h->device[j].ordinal == contexts[i].device;
        if (known)
            continue;
        weft_trace_device *d = &h->device[h->devices++];
        CUdevice device = contexts[i].device;
        d->ordinal = device;
        d->sms = attribute(device, 16);
        d->major = attribute(device, 75);
        d->minor = attribute(device, 76);
        d->threads_per_sm = attribute(device, 39);
        d->registers_per_sm = attribute(device, 82);
        d->shared_per_sm = attribute(device, 81);
        d->shared_optin = attribute(device, 97);
        if (weft_cuda()->cuDeviceGetName)
            weft_cuda()->cuDeviceGetName(d->name, sizeof d->name, device);
    }
    for (int i = 0; i < WEFT_TRACED_COUNTERS; i++)
        h->counters[i] = weft_trace_counted(i);
}

/* --- the end ------------------------------------------------------------------------------------------------- */

static void destroy(weft_trace_context *c) {
    const weft_cuda_calls *cu = weft_cuda();
    CUcontext before;
    bool there = weft_trace_enter(c, &before);
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < c->pool[k].made; i++)
            if (there && cu->cuEventDestroy_v2(c->pool[k].all[i]) != CUDA_SUCCESS)
                weft_trace_count(WEFT_TRACED_LEFT_BEHIND, 1);
        free(c->pool[k].all);
    }
    if (there) {
        if (c->base)
            cu->cuEventDestroy_v2(c->base);
        if (c->own)
            cu->cuStreamDestroy_v2(c->own);
        for (int i = 0; i < 4; i++)
            if (c->spare[i])
                cu->cuStreamDestroy_v2(c->spare[i]);
        weft_trace_leave(before);
    }
}

void weft_trace_events_over(void) {
    pthread_mutex_lock(&lock);
    int mode = weft_capture_relax();
    for (int i = 0; i < atomic_load(&context_count); i++)
        destroy(&contexts[i]);
    weft_capture_restore(mode);
    memset(contexts, 0, sizeof contexts);
    atomic_store(&context_count, 0);
    for (int i = 0; i < WEFT_TRACED_COUNTERS; i++)
        if (i != WEFT_TRACED_LEFT_BEHIND)
            atomic_store(&counters[i], 0);
    pthread_mutex_unlock(&lock);
}

/* A context's events and streams are destroyed with it. */
uint32_t weft_trace_context_gone(CUcontext context) {
    uint32_t which = 0;
    if (LIKELY(atomic_load_explicit(&context_count, memory_order_relaxed) == 0))
        return which;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < atomic_load(&context_count); i++)
        if ((!context || contexts[i].context == context) && !atomic_exchange(&contexts[i].gone, true)) {
            weft_trace_count(WEFT_TRACED_CONTEXTS_GONE, 1);
            which |= 1u << i;
        }
    pthread_mutex_unlock(&lock);
    return which;
}

void weft_trace_contexts_back(uint32_t which) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < atomic_load(&context_count); i++)
        if (which >> i & 1 && contexts[i].base && atomic_exchange(&contexts[i].gone, false))
            weft_trace_count(WEFT_TRACED_CONTEXTS_GONE, (uint64_t)-1);
    pthread_mutex_unlock(&lock);
}

void weft_forget_events(void) {
    pthread_mutex_init(&lock, NULL);
    atomic_store(&context_count, 0);
}
