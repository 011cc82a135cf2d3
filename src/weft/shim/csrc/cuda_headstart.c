/* The head start: a kernel with one thread waits on the compute stream, so that a collective's blocks are placed first.
 * The wait is bounded by clock cycles and by the GPU's timer, whichever ends first. The timed kernel waits for a fixed
 * time; the placed kernel ends as soon as the collective was placed (cuda_placed.c). */
#include "cuda_shim.h"

#include <pthread.h>

enum { COMPUTE_STREAMS = 1024, WAYS = 4, CONTEXTS = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* PTX of the oldest version that has both timers; the driver compiles it for the GPU. Cycles measure the wait, since
 * the nanosecond timer may tick only once a microsecond; nanoseconds bound it. */
#define TIME_WAIT                                                                                                      \
    ".version 6.0\n"                                                                                                   \
    ".target sm_50\n"                                                                                                  \
    ".address_size 64\n"                                                                                               \
    ".visible .entry weft_head_start(.param .u64 cycles, .param .u64 limit_ns)\n"                                      \
    "{\n"                                                                                                              \
    "  .reg .pred %p<3>;\n"                                                                                            \
    "  .reg .u64 %r<9>;\n"                                                                                             \
    "  ld.param.u64 %r1, [cycles];\n"                                                                                  \
    "  ld.param.u64 %r2, [limit_ns];\n"                                                                                \
    "  mov.u64 %r3, %clock64;\n"                                                                                       \
    "  mov.u64 %r4, %globaltimer;\n"                                                                                   \
    "AGAIN:\n"                                                                                                         \
    "  mov.u64 %r5, %clock64;\n"                                                                                       \
    "  sub.u64 %r6, %r5, %r3;\n"                                                                                       \
    "  setp.ge.u64 %p1, %r6, %r1;\n"                                                                                   \
    "  @%p1 bra OVER;\n"                                                                                               \
    "  mov.u64 %r7, %globaltimer;\n"                                                                                   \
    "  sub.u64 %r8, %r7, %r4;\n"                                                                                       \
    "  setp.lt.u64 %p2, %r8, %r2;\n"                                                                                   \
    "  @%p2 bra AGAIN;\n"                                                                                              \
    "OVER:\n"                                                                                                          \
    "  ret;\n"                                                                                                         \
    "}\n"

/* Reads the words of up to WEFT_PLACED_SLOTS streams until each has reached its number or the time is up. It does not
 * wait for a stream where more than one collective is still to be placed: that would take a whole collective or longer.
 * After a wait that timed out, the next waits are skipped, twice as many each time (1 to 64). The words of `tally` are:
 * the timeouts, the waits still to be skipped, the latest number of skipped waits, and the streams not waited for. */
/* clang-format off */
#define EACH_SLOT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define SLOT(i) ".param .u64 at" #i ", .param .u32 number" #i ", "
#define TAKE(i)                                                                                                        \
    "  ld.param.u64 %a" #i ", [at" #i "];\n"                                                                           \
    "  ld.param.u32 %t" #i ", [number" #i "];\n"                                                                       \
    "  mov.b32 %v" #i ", %t" #i ";\n"
#define READ(i)                                                                                                        \
    "  setp.gt.u32 %p1, %count, " #i ";\n"                                                                             \
    "  @%p1 ld.volatile.global.u32 %v" #i ", [%a" #i "];\n"
#define TEST(i)                                                                                                        \
    "  sub.s32 %v, %v" #i ", %t" #i ";\n"                                                                              \
    "  setp.lt.s32 %p1, %v, 0;\n"                                                                                      \
    "  @%p1 bra WAIT;\n"
#define BEHIND(i)                                                                                                      \
    "  sub.s32 %v, %v" #i ", %t" #i ";\n"                                                                              \
    "  setp.lt.s32 %p1, %v, -1;\n"                                                                                     \
    "  selp.b32 %t" #i ", %v" #i ", %t" #i ", %p1;\n"                                                                  \
    "  @%p1 add.u32 %b, %b, 1;\n"
#define PLACED_WAIT                                                                                                    \
    ".visible .entry weft_head_start_placed(" EACH_SLOT(SLOT)                                                          \
    ".param .u32 slots, .param .u64 cycles, .param .u64 limit_ns, .param .u64 tally)\n"                                \
    "{\n"                                                                                                              \
    "  .reg .pred %p1, %p2;\n"                                                                                         \
    "  .reg .b32 %v, %b, %count, %v<8>, %t<8>;\n"                                                                      \
    "  .reg .b64 %tally, %c0, %n0, %c, %n, %c1, %n1, %a<8>;\n"                                                         \
    "  ld.param.u32 %count, [slots];\n"                                                                                \
    "  ld.param.u64 %c1, [cycles];\n"                                                                                  \
    "  ld.param.u64 %n1, [limit_ns];\n"                                                                                \
    "  ld.param.u64 %tally, [tally];\n"                                                                                \
    "  mov.u64 %c0, %clock64;\n"                                                                                       \
    "  mov.u64 %n0, %globaltimer;\n"                                                                                   \
    EACH_SLOT(TAKE)                                                                                                    \
    "  ld.volatile.global.u32 %v, [%tally+4];\n"                                                                       \
    "  setp.eq.u32 %p1, %v, 0;\n"                                                                                      \
    "  @%p1 bra FIRST;\n"                                                                                              \
    "  sub.u32 %v, %v, 1;\n"                                                                                           \
    "  st.volatile.global.u32 [%tally+4], %v;\n"                                                                       \
    "  ret;\n"                                                                                                         \
    "FIRST:\n"                                                                                                         \
    EACH_SLOT(READ)                                                                                                    \
    "  mov.u32 %b, 0;\n"                                                                                               \
    EACH_SLOT(BEHIND)                                                                                                  \
    "  setp.eq.u32 %p1, %b, 0;\n"                                                                                      \
    "  @%p1 bra LOOK;\n"                                                                                               \
    "  ld.volatile.global.u32 %v, [%tally+12];\n"                                                                      \
    "  add.u32 %v, %v, %b;\n"                                                                                          \
    "  st.volatile.global.u32 [%tally+12], %v;\n"                                                                      \
    "  bra LOOK;\n"                                                                                                    \
    "AGAIN:\n"                                                                                                         \
    EACH_SLOT(READ)                                                                                                    \
    "LOOK:\n"                                                                                                          \
    EACH_SLOT(TEST)                                                                                                    \
    "  setp.eq.u32 %p1, %b, 0;\n"                                                                                      \
    "  @%p1 st.volatile.global.u32 [%tally+8], %b;\n"                                                                  \
    "  ret;\n"                                                                                                         \
    "WAIT:\n"                                                                                                          \
    "  mov.u64 %c, %clock64;\n"                                                                                        \
    "  sub.u64 %c, %c, %c0;\n"                                                                                         \
    "  setp.ge.u64 %p1, %c, %c1;\n"                                                                                    \
    "  mov.u64 %n, %globaltimer;\n"                                                                                    \
    "  sub.u64 %n, %n, %n0;\n"                                                                                         \
    "  setp.ge.u64 %p2, %n, %n1;\n"                                                                                    \
    "  or.pred %p1, %p1, %p2;\n"                                                                                       \
    "  @!%p1 bra AGAIN;\n"                                                                                             \
    "  ld.volatile.global.u32 %v, [%tally];\n"                                                                         \
    "  add.u32 %v, %v, 1;\n"                                                                                           \
    "  st.volatile.global.u32 [%tally], %v;\n"                                                                         \
    "  ld.volatile.global.u32 %v, [%tally+8];\n"                                                                       \
    "  shl.b32 %v, %v, 1;\n"                                                                                           \
    "  max.u32 %v, %v, 1;\n"                                                                                           \
    "  min.u32 %v, %v, 64;\n"                                                                                          \
    "  st.volatile.global.u32 [%tally+8], %v;\n"                                                                       \
    "  st.volatile.global.u32 [%tally+4], %v;\n"                                                                       \
    "  ret;\n"                                                                                                         \
    "}\n"
/* clang-format on */
static const char WAIT_PTX[] = TIME_WAIT PLACED_WAIT;

static struct {
    CUcontext context; /* NULL: free */
    weft_waits found;  /* no kernels: not available, or being loaded */
} waits[CONTEXTS];

static struct {
    _Atomic(CUstream) stream;
    _Atomic uint64_t seen;
} compute[COMPUTE_STREAMS];

static weft_waits load_waits(void) {
    const weft_cuda_calls *cu = weft_cuda();
    CUmodule module;
    weft_waits found = {NULL, NULL, 0};
    int khz = weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    found.mhz = khz > 0 ? (uint64_t)khz / 1000 : 1500;
    if (!cu->cuModuleLoadData || !cu->cuModuleGetFunction || cu->cuModuleLoadData(&module, WAIT_PTX) != CUDA_SUCCESS)
        return found;
    if (cu->cuModuleGetFunction(&found.timed, module, "weft_head_start") != CUDA_SUCCESS)
        found.timed = NULL;
    if (cu->cuModuleGetFunction(&found.placed, module, "weft_head_start_placed") != CUDA_SUCCESS)
        found.placed = NULL;
    return found;
}

static int place_of(CUcontext context) {
    int i = 0;
    while (i < CONTEXTS && waits[i].context != context)
        i++;
    return i;
}

/* The driver may wait for the GPU while it loads, so no lock is held, and other threads go without a head start. */
static weft_waits load_in(CUcontext context) {
    weft_waits found = load_waits();
    pthread_mutex_lock(&lock);
    int i = place_of(context);
    if (i < CONTEXTS)
        waits[i].found = found;
    pthread_mutex_unlock(&lock);
    return found;
}

weft_waits weft_wait_kernels(void) {
    CUcontext context = NULL;
    weft_waits found = {NULL, NULL, 0};
    if (!weft_cuda()->cuCtxGetCurrent || weft_cuda()->cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
        return found;
    pthread_mutex_lock(&lock);
    int i = place_of(context);
    bool known = i < CONTEXTS;
    if (known) {
        found = waits[i].found;
    } else if ((i = place_of(NULL)) < CONTEXTS) {
        waits[i].context = context;
        waits[i].found = found;
    }
    pthread_mutex_unlock(&lock);
    return known || i == CONTEXTS ? found : load_in(context);
}

CUresult weft_wait_launch(CUfunction wait, uint64_t mhz, uint64_t ns, CUstream stream) {
    uint64_t cycles = ns * mhz / 1000, limit_ns = ns * 4;
    void *params[] = {&cycles, &limit_ns};
    return REAL(cuLaunchKernel)(wait, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

CUresult weft_placed_launch(const weft_waits *kernels, const weft_placed *p, uint64_t ns, CUstream stream) {
    weft_placed with = *p;
    uint64_t cycles = ns * kernels->mhz / 1000, limit_ns = ns;
    void *params[2 * WEFT_PLACED_SLOTS + 4];
    for (int i = 0; i < WEFT_PLACED_SLOTS; i++) {
        params[2 * i] = &with.at[i];
        params[2 * i + 1] = &with.number[i];
    }
    void **rest = params + (size_t)2 * WEFT_PLACED_SLOTS;
    rest[0] = &with.count;
    rest[1] = &cycles;
    rest[2] = &limit_ns;
    rest[3] = &with.tally;
    return REAL(cuLaunchKernel)(kernels->placed, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

/* Whether this stream has not yet waited for the latest collective; records that it now has. A stream without a place
 * takes the least recently used one of its set. */
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

static void timed(const weft_waits *found, uint32_t ns, CUstream stream) {
    if (found->timed && weft_wait_launch(found->timed, found->mhz, ns, stream) == CUDA_SUCCESS) {
        if (!weft_capturing(stream))
            weft_count(WEFT_COUNT_HEAD_STARTS);
    } else {
        weft_count(WEFT_COUNT_HEAD_START_FAILURES);
    }
}

/* A wait for placement is never captured, because the number it waits for belongs to one launch. */
static void placed(const weft_rules *rules, CUstream stream) {
    weft_placed pending;
    if (weft_capturing(stream)) {
        weft_count(WEFT_COUNT_PLACED_CAPTURED);
        return;
    }
    if (!weft_placed_pending(stream, &pending))
        return;
    weft_waits found = weft_wait_kernels();
    if (found.placed && weft_placed_launch(&found, &pending, rules->data.head_start_ns, stream) == CUDA_SUCCESS)
        weft_count(WEFT_COUNT_HEAD_STARTS);
    else
        weft_count(WEFT_COUNT_HEAD_START_FAILURES);
}

void weft_head_start(const weft_rules *rules, CUstream stream) {
    if (LIKELY(!first_since_comm(stream)))
        return;
    int mode = weft_capture_relax();
    if (rules->data.flags & WEFT_HEAD_START_PLACED) {
        placed(rules, stream);
        weft_capture_restore(mode);
        return;
    }
    weft_waits found = weft_wait_kernels();
    weft_capture_restore(mode);
    timed(&found, rules->data.head_start_ns, stream);
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
