/* The head start: a kernel of one thread that waits on the compute stream, so that a collective's blocks are placed
 * first. It is bounded twice, by clock cycles and by the GPU's timer: it can never wait for anything but time. */
#include "cuda_shim.h"

#include <pthread.h>

enum { COMPUTE_STREAMS = 1024, WAYS = 4, CONTEXTS = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* PTX of the oldest version that has both timers; the driver compiles it for the GPU it finds. Cycles measure the
 * wait, since the nanosecond timer may tick only once a microsecond; nanoseconds bound it. */
static const char WAIT_PTX[] = ".version 6.0\n"
                               ".target sm_50\n"
                               ".address_size 64\n"
                               ".visible .entry weft_head_start(.param .u64 cycles, .param .u64 limit_ns)\n"
                               "{\n"
                               "  .reg .pred %p<3>;\n"
                               "  .reg .u64 %r<9>;\n"
                               "  ld.param.u64 %r1, [cycles];\n"
                               "  ld.param.u64 %r2, [limit_ns];\n"
                               "  mov.u64 %r3, %clock64;\n"
                               "  mov.u64 %r4, %globaltimer;\n"
                               "AGAIN:\n"
                               "  mov.u64 %r5, %clock64;\n"
                               "  sub.u64 %r6, %r5, %r3;\n"
                               "  setp.ge.u64 %p1, %r6, %r1;\n"
                               "  @%p1 bra OVER;\n"
                               "  mov.u64 %r7, %globaltimer;\n"
                               "  sub.u64 %r8, %r7, %r4;\n"
                               "  setp.lt.u64 %p2, %r8, %r2;\n"
                               "  @%p2 bra AGAIN;\n"
                               "OVER:\n"
                               "  ret;\n"
                               "}\n";

static struct {
    CUcontext context; /* NULL: free */
    CUfunction wait;   /* NULL: cannot be had, or is being loaded */
    uint64_t mhz;      /* the highest clock of the GPU's SMs */
} waits[CONTEXTS];

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

static int place_of(CUcontext context) {
    int i = 0;
    while (i < CONTEXTS && waits[i].context != context)
        i++;
    return i;
}

/* The driver may wait for the GPU while it loads: no lock is held then, and other threads do without a head start. */
static CUfunction load_in(CUcontext context, uint64_t *mhz) {
    CUfunction wait = load_wait();
    int khz = weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    *mhz = khz > 0 ? (uint64_t)khz / 1000 : 1500;
    pthread_mutex_lock(&lock);
    int i = place_of(context);
    if (i < CONTEXTS) {
        waits[i].wait = wait;
        waits[i].mhz = *mhz;
    }
    pthread_mutex_unlock(&lock);
    return wait;
}

/* The waiting kernel in the current context, loaded once in each; NULL where it cannot be had. */
CUfunction weft_wait_kernel(uint64_t *mhz) {
    CUcontext context = NULL;
    if (!weft_cuda()->cuCtxGetCurrent || weft_cuda()->cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
        return NULL;
    pthread_mutex_lock(&lock);
    int i = place_of(context);
    bool known = i < CONTEXTS;
    CUfunction f = known ? waits[i].wait : NULL;
    *mhz = known ? waits[i].mhz : 0;
    if (!known && (i = place_of(NULL)) < CONTEXTS)
        waits[i].context = context;
    pthread_mutex_unlock(&lock);
    return known || i == CONTEXTS ? f : load_in(context, mhz);
}

CUresult weft_wait_launch(CUfunction wait, uint64_t mhz, uint64_t ns, CUstream stream) {
    uint64_t cycles = ns * mhz / 1000, limit_ns = ns * 4;
    void *params[] = {&cycles, &limit_ns};
    return REAL(cuLaunchKernel)(wait, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

/* Whether this stream has not yet waited for the latest collective; notes that it now has. A stream that finds no place
 * of its own takes the one that was used longest ago. */
static bool first_since_comm(CUstream stream) {
    uint64_t now = weft_comm_count(), oldest = UINT64_MAX;
    if (now == 0 || weft_comm_latest() == stream)
        return false;
    uint32_t start = (uint32_t)weft_map_hash((uint64_t)(uintptr_t)stream, 0) % (COMPUTE_STREAMS / WAYS) * WAYS,
             taken = start;
    for (uint32_t i = start; i < start + WAYS; i++) {
        uint64_t seen = atomic_load_explicit(&compute[i].seen, memory_order_relaxed);
        if (atomic_load_explicit(&compute[i].stream, memory_order_relaxed) == stream)
            return atomic_exchange_explicit(&compute[i].seen, now, memory_order_relaxed) != now;
        if (seen < oldest) {
            oldest = seen;
            taken = i;
        }
    }
    atomic_store_explicit(&compute[taken].stream, stream, memory_order_relaxed);
    atomic_store_explicit(&compute[taken].seen, now, memory_order_relaxed);
    return true;
}

void weft_head_start(const weft_rules *rules, CUstream stream) {
    if (LIKELY(!first_since_comm(stream)))
        return;
    int mode = weft_capture_relax();
    uint64_t mhz = 0;
    CUfunction wait = weft_wait_kernel(&mhz);
    weft_capture_restore(mode);
    if (wait && weft_wait_launch(wait, mhz, rules->data.head_start_ns, stream) == CUDA_SUCCESS) {
        if (!weft_capturing(stream))
            weft_count(WEFT_COUNT_HEAD_STARTS);
    } else {
        weft_count(WEFT_COUNT_HEAD_START_FAILURES);
    }
}

void weft_head_start_context_gone(CUcontext context) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CONTEXTS; i++)
        if (!context || waits[i].context == context)
            waits[i].context = NULL;
    pthread_mutex_unlock(&lock);
}

void weft_forget_headstart(void) {
    pthread_mutex_init(&lock, NULL);
    weft_head_start_context_gone(NULL);
    for (int i = 0; i < COMPUTE_STREAMS; i++)
        atomic_store(&compute[i].seen, 0);
}
