/* Time for the fake driver: streams, events, copies and kernels on a simulated GPU of 132 SMs.
 *
 * Every call advances the host's clock a little, and so does fake_host; an event has fired once that clock has passed
 * its time. A kernel starts when its stream is ready and its SMs are free, in the order of launches. The true times are
 * kept as `truth`s, for tests to compare with. */
#define _GNU_SOURCE
#include "cuda_api.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { STREAMS = 512, TRUTHS = 1 << 18, COSTS = 256, SMS = 132, NOT_READY = 600, INVALID_HANDLE = 400, WINDOW = 64 };
enum { DISABLE_TIMING = 2, LATENCY_NS = 2000, CALL_NS = 500, EARLY_NS = 3000, STAMP_NS = 1000, EMPTY_NS = 620 };

int fake_failing(const char *api);     /* in fake_cuda.c */
int fake_is_capturing(void *stream);
void fake_unsafe(void);                /* records a call that a capture may forbid */

__thread int64_t fake_spin_ns;

struct CUevent_st {
    unsigned flags;
    int recorded, destroyed, of_launch; /* of_launch: 1 + the truth whose launch completion it marks */
    int64_t at;
};

typedef struct {
    char name[256];
    void *stream;
    int64_t start, end, ready;
    int programmatic, sms, priority;
} truth;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void after_fork(void) { pthread_mutex_init(&lock, NULL); }
__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, after_fork); }
static int64_t host = 1000000;
static truth *truths;
static int truth_count;
static struct {
    void *stream;
    int64_t ready;
    int behind;      /* 1 + the truth that a kernel of no higher priority is placed after */
    int priority, after_event, destroyed;
    int last_kernel; /* index of the truth that a programmatic launch may follow; -1: none */
} streams[STREAMS];
static struct {
    char name[256];
    int64_t ns;
    int sms;
} costs[COSTS];
static int cost_count;
static int live_events, live_streams, captured_events, broken_programmatic, dead_calls, timed_completions, context_dead;
static int event_calls;
static unsigned long long next_stream = 0x5000;

static int64_t event_gap, kernel_gap, event_load, event_load_comm;
API void fake_kernel_gap(int64_t ns) { kernel_gap = ns; } /* between two kernels of a busy stream */
API void fake_event_gap(int64_t ns) { event_gap = ns; } /* from an event to the kernel queued behind it */
/* The extra cost of an event between two kernels: usually, and while a collective runs. */
API void fake_event_load(int64_t ns, int64_t during_comm) { event_load = ns, event_load_comm = during_comm; }

API void fake_host(int64_t ns) { __atomic_fetch_add(&host, ns, __ATOMIC_RELAXED); }
API uint64_t fake_clock(void) { return (uint64_t)__atomic_load_n(&host, __ATOMIC_RELAXED); }
API int fake_live_events(void) { return live_events; }
API int fake_live_streams(void) { return live_streams; }
API int fake_captured_events(void) { return captured_events; }
API int fake_broken_programmatic(void) { return broken_programmatic; }
API int fake_dead_calls(void) { return dead_calls; }
API int fake_event_calls(void) { return event_calls; }
API int fake_truths(void) { return truth_count; }
API const truth *fake_truth(int i) { return &truths[i]; }
API void fake_context_destroyed(void) { context_dead = 1; }
API void fake_context_alive(void) { context_dead = 0; }

API void fake_cost(const char *name, int64_t ns, int sms) {
    snprintf(costs[cost_count].name, sizeof costs[0].name, "%s", name);
    costs[cost_count].ns = ns;
    costs[cost_count++].sms = sms;
}

static void call_made(void) { __atomic_fetch_add(&host, CALL_NS, __ATOMIC_RELAXED); }

static int at(void *stream) {
    for (int i = 0; i < STREAMS; i++) {
        if (streams[i].stream == stream)
            return i;
        if (!streams[i].stream) {
            streams[i].stream = stream;
            streams[i].last_kernel = -1;
            return i;
        }
    }
    abort();
}

/* Advance the host's clock until all streams are idle. */
API void fake_sync(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].ready > host)
            host = streams[i].ready;
    pthread_mutex_unlock(&lock);
}

/* The earliest time, not before `from`, at which `sms` SMs are free. */
static int64_t placed(int64_t from, int sms) {
    for (;;) {
        int taken = 0;
        int64_t next = INT64_MAX;
        for (int i = truth_count > WINDOW ? truth_count - WINDOW : 0; i < truth_count; i++)
            if (truths[i].start <= from && from < truths[i].end) {
                taken += truths[i].sms;
                next = truths[i].end < next ? truths[i].end : next;
            }
        if (taken + sms <= SMS || next == INT64_MAX)
            return from;
        from = next;
    }
}

/* `percent` of the event's extra cost at this time: one part delays the event, the other the next kernel. */
static int64_t load(int64_t at, int percent) {
    int64_t ns = event_load;
    for (int i = truth_count > WINDOW ? truth_count - WINDOW : 0; i < truth_count; i++)
        if (strncmp(truths[i].name, "nccl", 4) == 0 && truths[i].start <= at && at < truths[i].end)
            ns = event_load_comm;
    return ns * percent / 100;
}

static truth *happened(const char *name, void *stream, int64_t ready, int64_t start, int64_t ns, int sms) {
    if (!truths)
        truths = calloc(TRUTHS, sizeof *truths);
    truth *t = &truths[truth_count < TRUTHS - 1 ? truth_count++ : truth_count];
    *t = (truth){.stream = stream, .ready = ready, .start = start, .end = start + ns, .sms = sms};
    snprintf(t->name, sizeof t->name, "%s", name);
    return t;
}

/* --- the exact head start ---------------------------------------------------------------------------------------- */

enum { WRITTEN = 4096, SLOTS = 8 };
static struct {
    uint64_t where;
    uint32_t value;
    int64_t at;
    int behind; /* the launch whose completion the writing stream waited for */
} written[WRITTEN];
static int written_count;
static __thread void **placed_params;

void fake_placed_wait(void **params) { placed_params = params; }

/* Notes when a stream writes a word, on the simulated clock. */
void fake_timed_write(void *stream, uint64_t where, uint32_t value) {
    pthread_mutex_lock(&lock);
    int s = at(stream), i = written_count++ % WRITTEN;
    int64_t ready = host + LATENCY_NS > streams[s].ready ? host + LATENCY_NS : streams[s].ready;
    written[i].where = where;
    written[i].value = value;
    written[i].at = ready;
    written[i].behind = streams[s].behind;
    pthread_mutex_unlock(&lock);
}

/* How long weft's waiting kernel runs from `start`: mirrors its PTX, with the values that the words have then. */
static int64_t placed_wait(void **params, int64_t start, int *behind) {
    uint32_t count = *(uint32_t *)params[2 * SLOTS], *tally = (uint32_t *)(uintptr_t)*(uint64_t *)params[2 * SLOTS + 3];
    int64_t limit = *(int64_t *)params[2 * SLOTS + 2], until = start;
    int last = 0, left_out = 0;
    if (tally[1]) {
        tally[1]--;
        return STAMP_NS;
    }
    for (uint32_t slot = 0; slot < count; slot++) {
        uint64_t where = *(uint64_t *)params[2 * slot];
        uint32_t number = *(uint32_t *)params[2 * slot + 1];
        int64_t reached = (int32_t)(*(uint32_t *)(uintptr_t)where - number) >= 0 ? start : INT64_MAX;
        uint32_t now = *(uint32_t *)(uintptr_t)where;
        for (int i = 0; i < WRITTEN && i < written_count; i++)
            if (written[i].where == where && written[i].at <= start && (int32_t)(written[i].value - now) > 0)
                now = written[i].value;
        if ((int32_t)(now - number) < -1) {
            tally[3]++;
            left_out++;
            continue;
        }
        for (int i = 0; i < WRITTEN && i < written_count; i++)
            if (written[i].where == where && (int32_t)(written[i].value - number) >= 0 && written[i].at < reached) {
                reached = written[i].at;
                last = written[i].behind > last ? written[i].behind : last;
            }
        until = reached > until ? reached : until;
    }
    if (until - start < limit)
        return tally[2] = left_out ? tally[2] : 0, *behind = last, until - start + STAMP_NS;
    tally[0]++;
    tally[2] = tally[2] ? 2 * tally[2] : 1;
    tally[2] = tally[2] > 64 ? 64 : tally[2];
    tally[1] = tally[2];
    return limit;
}

/* Called by fake_cuda.c for every kernel that is not captured. */
void fake_timed_launch(const char *name, void *stream, const CUlaunchAttribute *attributes, unsigned count) {
    int64_t ns = 10000;
    int sms = 1, programmatic = 0;
    CUevent completion = NULL;
    for (int i = 0; i < cost_count; i++)
        if (strcmp(costs[i].name, name) == 0) {
            ns = costs[i].ns;
            sms = costs[i].sms;
        }
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            programmatic = attributes[i].value.cooperative;
        if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
            completion = attributes[i].value.launchCompletionEvent.event;
    }
    if (strncmp(name, "weft_", 5) == 0)
        ns = fake_spin_ns ? fake_spin_ns + EMPTY_NS : strncmp(name, "weft_stamp", 10) == 0 ? EMPTY_NS : STAMP_NS;
    call_made();
    pthread_mutex_lock(&lock);
    int s = at(stream), priority = streams[s].priority;
    for (unsigned i = 0; i < count; i++)
        if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_PRIORITY)
            priority = attributes[i].value.priority;
    int64_t ready = host + LATENCY_NS > streams[s].ready ? host + LATENCY_NS : streams[s].ready;
    if (programmatic && streams[s].last_kernel >= 0) {
        ready -= EARLY_NS;
        if (ready < truths[streams[s].last_kernel].start)
            ready = truths[streams[s].last_kernel].start;
    } else if (programmatic) {
        broken_programmatic++;
    }
    if (streams[s].after_event && ready < streams[s].ready + event_gap + load(streams[s].ready, 35))
        ready = streams[s].ready + event_gap + load(streams[s].ready, 35);
    if (!streams[s].after_event && streams[s].last_kernel >= 0 && ready < streams[s].ready + kernel_gap && !programmatic)
        ready = streams[s].ready + kernel_gap;
    streams[s].after_event = 0;
    int64_t from = ready;
    const truth *front = streams[s].behind ? &truths[streams[s].behind - 1] : NULL;
    if (front && priority >= front->priority && from < front->start)
        from = front->start;
    int64_t start = placed(from, sms);
    if (placed_params)
        ns = placed_wait(placed_params, start, &streams[s].behind);
    placed_params = NULL;
    truth *t = happened(name, stream, ready, start, ns, sms);
    t->priority = priority;
    t->programmatic = programmatic;
    if (t->end < streams[s].ready)
        t->end = streams[s].ready;
    streams[s].ready = t->end;
    streams[s].last_kernel = (int)(t - truths);
    if (completion) {
        completion->recorded = 1;
        completion->at = ready; /* the event does not wait for SMs */
        completion->of_launch = 1 + (int)(t - truths);
    }
    pthread_mutex_unlock(&lock);
}

/* The driver's rule: the attribute needs an event without timing. */
int fake_completion_allowed(const CUlaunchAttribute *attributes, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) {
            int code = fake_failing("launch completion event");
            if (code || !(attributes[i].value.launchCompletionEvent.event->flags & DISABLE_TIMING))
                return timed_completions++, 0;
        }
    return 1;
}

API int fake_timed_completions(void) { return timed_completions; }

void fake_timed_operation(const char *name, void *stream, int64_t ns) {
    call_made();
    pthread_mutex_lock(&lock);
    int s = at(stream);
    int64_t ready = host + LATENCY_NS > streams[s].ready ? host + LATENCY_NS : streams[s].ready;
    streams[s].ready = happened(name, stream, ready, ready, ns, 0)->end;
    streams[s].last_kernel = -1;
    pthread_mutex_unlock(&lock);
}

/* --- the driver's functions ----------------------------------------------------------------------------------------- */

#define MAY_FAIL(api)                                                                                        \
    do {                                                                                                     \
        int code_ = fake_failing(api);                                                                       \
        if (code_)                                                                                           \
            return code_;                                                                                    \
    } while (0)

static void *explicit_stream(void *stream, int per_thread) {
    return stream ? stream : per_thread ? (void *)CU_STREAM_PER_THREAD : (void *)CU_STREAM_LEGACY;
}

API CUresult cuCtxSetCurrent(CUcontext c) { return (void)c, 0; }
API CUresult cuDeviceGetName(char *name, int size, CUdevice d) { return (void)d, snprintf(name, (size_t)size, "Fake H200"), 0; }

API CUresult cuEventCreate(CUevent *e, unsigned flags) {
    MAY_FAIL("cuEventCreate");
    *e = calloc(1, sizeof **e);
    (*e)->flags = flags;
    __atomic_fetch_add(&live_events, 1, __ATOMIC_RELAXED);
    return 0;
}

API CUresult cuEventDestroy_v2(CUevent e) {
    if (context_dead)
        return dead_calls++, INVALID_HANDLE;
    __atomic_fetch_sub(&live_events, 1, __ATOMIC_RELAXED);
    free(e);
    return 0;
}

API CUresult cuEventRecord(CUevent e, CUstream stream) {
    MAY_FAIL("cuEventRecord");
    if (context_dead)
        return dead_calls++, INVALID_HANDLE;
    __atomic_fetch_add(&event_calls, 1, __ATOMIC_RELAXED);
    if (fake_is_capturing(stream))
        return captured_events++, 0;
    call_made();
    pthread_mutex_lock(&lock);
    int s = at(explicit_stream(stream, 0));
    dead_calls += streams[s].destroyed;
    if (streams[s].ready < host + LATENCY_NS)
        streams[s].ready = host + LATENCY_NS;
    else if (streams[s].last_kernel >= 0)
        streams[s].ready += load(streams[s].ready, 65);
    e->recorded = 1;
    streams[s].after_event = 1;
    e->of_launch = 0;
    e->at = streams[s].ready;
    streams[s].last_kernel = -1;
    pthread_mutex_unlock(&lock);
    return 0;
}

API CUresult cuEventQuery(CUevent e) {
    if (context_dead)
        return dead_calls++, INVALID_HANDLE;
    fake_unsafe();
    __atomic_fetch_add(&event_calls, 1, __ATOMIC_RELAXED);
    call_made();
    pthread_mutex_lock(&lock);
    int fired = !e->recorded || e->at <= host;
    pthread_mutex_unlock(&lock);
    return fired ? 0 : NOT_READY;
}

API CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
    MAY_FAIL("cuEventElapsedTime");
    if (context_dead)
        return dead_calls++, INVALID_HANDLE;
    if (!from->recorded || !to->recorded || ((from->flags | to->flags) & DISABLE_TIMING))
        return INVALID_HANDLE;
    *ms = (float)((double)(to->at - from->at) / 1e6);
    return 0;
}

API CUresult cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority) {
    MAY_FAIL("cuStreamCreateWithPriority");
    (void)flags;
    *s = (CUstream)(uintptr_t)__atomic_fetch_add(&next_stream, 16, __ATOMIC_RELAXED);
    pthread_mutex_lock(&lock);
    streams[at(*s)].priority = priority;
    pthread_mutex_unlock(&lock);
    __atomic_fetch_add(&live_streams, 1, __ATOMIC_RELAXED);
    return 0;
}

void fake_stream_destroyed(void *stream); /* fake_cuda.c */

API CUresult cuStreamDestroy_v2(CUstream s) {
    if (context_dead)
        return dead_calls++, INVALID_HANDLE;
    fake_stream_destroyed(s);
    pthread_mutex_lock(&lock);
    int i = at(s);
    streams[i].ready = 0;
    streams[i].behind = 0;
    streams[i].destroyed = 1;
    pthread_mutex_unlock(&lock);
    __atomic_fetch_sub(&live_streams, 1, __ATOMIC_RELAXED);
    return 0;
}

/* A new stream reuses the handle of a destroyed one. */
API void fake_stream_again(void *stream) {
    pthread_mutex_lock(&lock);
    streams[at(stream)].destroyed = 0;
    pthread_mutex_unlock(&lock);
}

API CUresult cuStreamGetFlags(CUstream s, unsigned *flags) { return *flags = s != CU_STREAM_LEGACY, 0; }
API CUresult cuStreamGetId(CUstream s, unsigned long long *id) { return *id = (unsigned long long)(uintptr_t)s, 0; }

API CUresult cuStreamQuery(CUstream stream) {
    fake_unsafe();
    call_made();
    pthread_mutex_lock(&lock);
    int s = at(explicit_stream(stream, 0)), idle = streams[s].ready <= host;
    dead_calls += streams[s].destroyed;
    pthread_mutex_unlock(&lock);
    return idle ? 0 : NOT_READY;
}

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr p) {
    if (p < 0x10000) /* like pageable host memory */
        return 1;
    *(int *)value = attribute == 2 ? 2 : p >= 0x9000000 ? 1 : 0; /* device memory; the second GPU's lies high */
    return 0;
}

#define PAIR(name, ns, per_thread_params, stream_of)                                                        \
    API CUresult name per_thread_params {                                                                   \
        MAY_FAIL(#name);                                                                                    \
        fake_timed_operation(#name, explicit_stream(stream_of, 0), ns);                                     \
        return 0;                                                                                           \
    }                                                                                                       \
    API CUresult name##_ptsz per_thread_params {                                                            \
        fake_timed_operation(#name, explicit_stream(stream_of, 1), ns);                                     \
        return 0;                                                                                           \
    }
PAIR(cuMemcpyAsync, (int64_t)n, (CUdeviceptr a __attribute__((unused)), CUdeviceptr b __attribute__((unused)), size_t n, CUstream s), s)
PAIR(cuMemcpyHtoDAsync_v2, (int64_t)n, (CUdeviceptr a __attribute__((unused)), const void *b __attribute__((unused)), size_t n, CUstream s), s)
PAIR(cuMemcpyDtoHAsync_v2, (int64_t)n, (void *a __attribute__((unused)), CUdeviceptr b __attribute__((unused)), size_t n, CUstream s), s)
PAIR(cuMemcpyDtoDAsync_v2, (int64_t)n, (CUdeviceptr a __attribute__((unused)), CUdeviceptr b __attribute__((unused)), size_t n, CUstream s), s)
PAIR(cuMemsetD8Async, (int64_t)n, (CUdeviceptr a __attribute__((unused)), unsigned char v __attribute__((unused)), size_t n, CUstream s), s)
PAIR(cuMemsetD32Async, (int64_t)n * 4, (CUdeviceptr a __attribute__((unused)), unsigned v __attribute__((unused)), size_t n, CUstream s), s)

static int64_t first_of(const size_t *sizes, size_t count) { return count ? (int64_t)sizes[0] : 0; }
PAIR(cuMemcpyBatchAsync_v2, first_of(n, count), (CUdeviceptr *a __attribute__((unused)), CUdeviceptr *b __attribute__((unused)), size_t *n, size_t count, void *c __attribute__((unused)), size_t *d __attribute__((unused)), size_t e __attribute__((unused)), CUstream s), s)

static CUresult wait_event(void *stream, CUevent e) {
    call_made();
    pthread_mutex_lock(&lock);
    int s = at(stream);
    if (e->recorded && e->at > streams[s].ready)
        streams[s].ready = e->at;
    streams[s].behind = e->of_launch;
    streams[s].last_kernel = -1;
    pthread_mutex_unlock(&lock);
    return 0;
}

API CUresult cuStreamGetPriority(CUstream s, int *priority) {
    pthread_mutex_lock(&lock);
    *priority = streams[at(s)].priority;
    pthread_mutex_unlock(&lock);
    return 0;
}

API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) {
    MAY_FAIL("cuStreamWaitEvent");
    return (void)flags, wait_event(explicit_stream(s, 0), e);
}
API CUresult cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned flags) { return (void)flags, wait_event(explicit_stream(s, 1), e); }
API CUresult cuLaunchHostFunc(CUstream s, void *f, void *d) { return (void)s, (void)f, (void)d, 0; }
static unsigned host_mode;
API unsigned fake_host_mode(void) { return host_mode; }
API CUresult cuLaunchHostFunc_v2(CUstream s, void *f, void *d, unsigned mode) { return (void)s, (void)f, (void)d, host_mode = mode, 0; }
API CUresult cuLaunchHostFunc_v2_ptsz(CUstream s, void *f, void *d, unsigned mode) { return cuLaunchHostFunc_v2(s, f, d, mode); }
API CUresult cuLaunchHostFunc_ptsz(CUstream s, void *f, void *d) { return (void)s, (void)f, (void)d, 0; }
