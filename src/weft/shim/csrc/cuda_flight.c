/* Collectives in flight, and the head start they are given.
 *
 * In flight: behind every collective the GPU writes its number into host memory, so that a compute launch
 * learns by a plain load whether one is still running; no event, no query, nothing that capture forbids.
 * Head start: a kernel of one thread that waits on the compute stream. It is bounded twice, by the GPU's
 * timer and by clock cycles, so it can never wait for anything but time. */
#define _GNU_SOURCE
#include "cuda_shim.h"

#include <pthread.h>

enum { COMM_STREAMS = 16, COMPUTE_STREAMS = 256, CONTEXTS = 32 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- in flight ------------------------------------------------------------------------------------------ */

static struct {
    _Atomic(CUstream) stream;
    _Atomic uint32_t issued;
} comm[COMM_STREAMS];
static _Atomic(volatile uint32_t *) done; /* one number per comm stream, written by the GPU */
static CUdeviceptr done_device;
static _Atomic uint64_t comm_epoch; /* collectives launched or captured so far */
static _Atomic(CUstream) latest_comm_stream;
static _Atomic uint32_t captured; /* collectives in the captures that are open now */

static bool map_done(void) {
    const weft_cuda_calls *cu = weft_cuda();
    if (atomic_load(&done))
        return true;
    if (!cu->cuMemHostAlloc || !cu->cuMemHostGetDevicePointer_v2 || !cu->cuStreamWriteValue32_v2)
        return false;
    pthread_mutex_lock(&lock);
    void *memory = NULL;
    if (!atomic_load(&done) &&
        cu->cuMemHostAlloc(&memory, COMM_STREAMS * sizeof(uint32_t),
                           CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) == CUDA_SUCCESS &&
        cu->cuMemHostGetDevicePointer_v2(&done_device, memory, 0) == CUDA_SUCCESS) {
        for (int i = 0; i < COMM_STREAMS; i++)
            ((uint32_t *)memory)[i] = 0;
        atomic_store(&done, (volatile uint32_t *)memory);
    }
    pthread_mutex_unlock(&lock);
    return atomic_load(&done) != NULL;
}

static int comm_slot(CUstream stream) {
    for (int i = 0; i < COMM_STREAMS; i++) {
        CUstream there = atomic_load_explicit(&comm[i].stream, memory_order_relaxed);
        if (there == stream)
            return i;
        if (!there && atomic_compare_exchange_strong(&comm[i].stream, &there, stream))
            return i;
        if (there == stream)
            return i;
    }
    return (int)((uintptr_t)stream >> 4) % COMM_STREAMS; /* shared: in flight until the last of them ends */
}

static void track(CUstream stream) {
    int mode = weft_capture_relax();
    int i = comm_slot(stream);
    if (map_done()) {
        uint32_t number = atomic_fetch_add(&comm[i].issued, 1) + 1;
        CUdeviceptr where = done_device + (CUdeviceptr)i * sizeof(uint32_t);
        if (weft_cuda()->cuStreamWriteValue32_v2(stream, where, number, 0) != CUDA_SUCCESS) {
            atomic_load(&done)[i] = number; /* never in flight for ever */
            weft_count(WEFT_COUNT_TRACKING_FAILURES);
        }
    } else {
        weft_count(WEFT_COUNT_TRACKING_FAILURES);
    }
    weft_capture_restore(mode);
}

void weft_comm_launched(const weft_rules *rules, CUstream stream, bool capturing) {
    atomic_store_explicit(&latest_comm_stream, stream, memory_order_relaxed);
    atomic_fetch_add_explicit(&comm_epoch, 1, memory_order_relaxed);
    if (capturing)
        atomic_fetch_add(&captured, 1);
    else if (rules->data.flags & WEFT_WHEN_OVERLAP)
        track(stream);
}

void weft_comm_capture_over(void) {
    atomic_store(&captured, 0);
}

/* In a capture nothing runs yet: what follows a captured collective on another stream may run beside it. */
bool weft_comm_in_flight(CUstream stream, bool capturing) {
    if (capturing)
        return atomic_load(&captured) > 0 && atomic_load(&latest_comm_stream) != stream;
    volatile uint32_t *ended = atomic_load_explicit(&done, memory_order_acquire);
    if (!ended)
        return false;
    for (int i = 0; i < COMM_STREAMS; i++) {
        CUstream there = atomic_load_explicit(&comm[i].stream, memory_order_relaxed);
        if (!there)
            break;
        if (there != stream && atomic_load_explicit(&comm[i].issued, memory_order_relaxed) != ended[i])
            return true;
    }
    return false;
}

/* --- head start ------------------------------------------------------------------------------------------ */

/* PTX of the oldest version that has both timers; the driver compiles it for the GPU it finds. */
static const char WAIT_PTX[] = ".version 6.0\n"
                               ".target sm_50\n"
                               ".address_size 64\n"
                               ".visible .entry weft_head_start(.param .u64 ns, .param .u64 cycles)\n"
                               "{\n"
                               "  .reg .pred %p<3>;\n"
                               "  .reg .u64 %r<9>;\n"
                               "  ld.param.u64 %r1, [ns];\n"
                               "  ld.param.u64 %r2, [cycles];\n"
                               "  mov.u64 %r3, %globaltimer;\n"
                               "  mov.u64 %r4, %clock64;\n"
                               "AGAIN:\n"
                               "  mov.u64 %r5, %globaltimer;\n"
                               "  sub.u64 %r6, %r5, %r3;\n"
                               "  setp.ge.u64 %p1, %r6, %r1;\n"
                               "  @%p1 bra OVER;\n"
                               "  mov.u64 %r7, %clock64;\n"
                               "  sub.u64 %r8, %r7, %r4;\n"
                               "  setp.lt.u64 %p2, %r8, %r2;\n"
                               "  @%p2 bra AGAIN;\n"
                               "OVER:\n"
                               "  ret;\n"
                               "}\n";

static struct {
    CUcontext context;
    CUfunction wait;
    bool failed;
} waits[CONTEXTS];
static int contexts;

static struct {
    _Atomic(CUstream) stream;
    _Atomic uint64_t seen;
} compute[COMPUTE_STREAMS];

static CUfunction load_wait(void) {
    const weft_cuda_calls *cu = weft_cuda();
    CUmodule module;
    CUfunction f;
    if (!cu->cuModuleLoadData || !cu->cuModuleGetFunction || cu->cuModuleLoadData(&module, WAIT_PTX) != CUDA_SUCCESS ||
        cu->cuModuleGetFunction(&f, module, "weft_head_start") != CUDA_SUCCESS)
        return NULL;
    return f;
}

/* The waiting kernel in the current context, loaded once in each; NULL where it cannot be had. */
static CUfunction wait_kernel(void) {
    CUcontext context = NULL;
    if (!weft_cuda()->cuCtxGetCurrent || weft_cuda()->cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
        return NULL;
    pthread_mutex_lock(&lock);
    CUfunction f = NULL;
    int i = 0;
    while (i < contexts && waits[i].context != context)
        i++;
    if (i < contexts) {
        f = waits[i].wait;
    } else if (contexts < CONTEXTS) {
        f = load_wait();
        waits[contexts].context = context;
        waits[contexts++].wait = f;
    }
    pthread_mutex_unlock(&lock);
    return f;
}

/* Whether this stream has not yet waited for the latest collective; notes that it now has. */
static bool first_since_comm(CUstream stream) {
    uint64_t now = atomic_load_explicit(&comm_epoch, memory_order_relaxed);
    if (now == 0 || atomic_load_explicit(&latest_comm_stream, memory_order_relaxed) == stream)
        return false;
    uint32_t start = (uint32_t)((uintptr_t)stream >> 4) ^ (uint32_t)((uintptr_t)stream >> 14);
    for (int i = 0; i < COMPUTE_STREAMS; i++) {
        uint32_t at = (start + (uint32_t)i) % COMPUTE_STREAMS;
        CUstream there = atomic_load_explicit(&compute[at].stream, memory_order_relaxed);
        if (!there && atomic_compare_exchange_strong(&compute[at].stream, &there, stream))
            there = stream;
        if (there == stream)
            return atomic_exchange_explicit(&compute[at].seen, now, memory_order_relaxed) != now;
    }
    return false; /* more streams than places: no head start for the rest */
}

void weft_head_start(const weft_rules *rules, CUstream stream) {
    if (LIKELY(!first_since_comm(stream)))
        return;
    int mode = weft_capture_relax();
    CUfunction wait = wait_kernel();
    weft_capture_restore(mode);
    uint64_t ns = rules->data.head_start_ns, cycles = ns * 4; /* no GPU runs above 4 GHz */
    void *params[] = {&ns, &cycles};
    if (wait && REAL(cuLaunchKernel)(wait, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL) == CUDA_SUCCESS) {
        if (!weft_capturing(stream))
            weft_count(WEFT_COUNT_HEAD_STARTS);
    } else {
        weft_count(WEFT_COUNT_HEAD_START_FAILURES);
    }
}

void weft_flight_forget(void) {
    pthread_mutex_lock(&lock);
    contexts = 0; /* modules died with their contexts; load again where still needed */
    pthread_mutex_unlock(&lock);
}
