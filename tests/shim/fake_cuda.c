/* A libcuda.so.1 for tests, as unkind as the real one: it keeps a log of launches, models one Hopper SM's occupancy,
 * captures and replays graphs, finishes streams only on request, frees memory and functions with their context, answers
 * slowly where FAKE_SLOW is set, and fails the n-th call overall, or the next calls of one function. Built by the
 * tests; with FAKE_OLD it lacks what CUDA 12.2 lacks. */
#define _GNU_SOURCE
#include "cuda_api.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { KERNELS = 1 << 18, LOG = 65536, NODES = 256, STREAMS = 512, WRITES = 1024 };
enum { NOT_SUPPORTED = 801, INVALID_HANDLE = 400, ILLEGAL_STATE = 401 };

typedef struct {
    uint32_t magic; /* 'F' for a CUfunction, 'K' for a CUkernel */
    char name[256];
    int registers, static_shared;
    _Atomic int max_dynamic;
    struct CUfunc_st *function; /* of a CUkernel */
} kernel;

typedef struct {
    char route[40];
    char name[256];
    unsigned grid[3], block[3], shared;
    void *stream;
    int priority, has_priority, cooperative, attributes, captured;
    unsigned cluster[3];
} record;

typedef struct {
    kernel *k;
    unsigned grid, block, shared;
    struct graph *child;
    bool conditional; /* the body runs as often as the GPU decides */
    void *stream;
    int priority, has_priority;
} node;

struct graph {
    int count;
    node nodes[NODES];
};

static kernel kernels[KERNELS];
static _Atomic int kernel_count;
static record records[LOG];
static _Atomic int record_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool logging = true, slow;
static _Atomic long calls, fail_at; /* over all functions; fail_at 0: none fails */
static _Atomic int context_number;  /* contexts that were reset or destroyed so far */
static __thread int capture_mode = 0;
static int unsafe_calls; /* calls that a capture forbids to the calling thread */

static struct {
    char api[64];
    int times, code;
} failures[16];

static struct {
    void *stream;
    struct graph *capture;
    struct {
        uint32_t *where, value;
    } writes[WRITES];
    int pending;
} streams[STREAMS];

/* fake_cuda_events.c: time */
void fake_timed_launch(const char *name, void *stream, const CUlaunchAttribute *attributes, unsigned count);
void fake_timed_operation(const char *name, void *stream, int64_t ns);
int fake_completion_allowed(const CUlaunchAttribute *attributes, unsigned count);
void fake_context_destroyed(void);
int fake_failing(const char *api);
int fake_is_capturing(void *stream);
void fake_stream_destroyed(void *stream);
extern __thread int64_t fake_spin_ns;
void fake_placed_wait(void **params);
void fake_timed_write(void *stream, uint64_t where, uint32_t value);

/* --- called by tests ---------------------------------------------------------------------------------- */

API void *fake_kernel(const char *name, int registers, int static_shared, int as_kernel) {
    kernel *k = &kernels[kernel_count++];
    *k = (kernel){'F', "", registers, static_shared, 48 * 1024, NULL};
    snprintf(k->name, sizeof k->name, "%s", name);
    if (!as_kernel)
        return k;
    kernel *handle = &kernels[kernel_count++];
    *handle = *k;
    handle->magic = 'K';
    handle->function = (struct CUfunc_st *)k;
    return handle;
}

API void fake_rename(void *handle, const char *name) {
    snprintf(((kernel *)handle)->name, sizeof ((kernel *)handle)->name, "%s", name);
}

API int fake_max_dynamic(void *handle) {
    kernel *k = handle;
    return k->function ? ((kernel *)k->function)->max_dynamic : k->max_dynamic;
}

API int fake_launches(void) { return record_count; }
API const record *fake_launch(int i) { return &records[i]; }
API void fake_forget(void) { record_count = 0; }
API void fake_logging(int on) { logging = on; }
static __thread unsigned last_shared;
API unsigned fake_last_shared(void) { return last_shared; } /* this thread's latest launch */
API long fake_calls_so_far(void) { return calls; }
API void fake_fail_at(long n) {
    calls = 0;
    fail_at = n;
}
static void after_fork(void) { pthread_mutex_init(&lock, NULL); }
__attribute__((constructor)) static void begin(void) {
    slow = getenv("FAKE_SLOW") != NULL;
    pthread_atfork(NULL, NULL, after_fork);
}

/* About a microsecond, the time of a driver call. */
static void take_time(void) {
    for (volatile int i = 0; slow && i < 1500; i++)
        ;
}
API int fake_unsafe_calls(void) { return unsafe_calls; }

API void fake_fail(const char *api, int times, int code) {
    for (int i = 0; i < 16; i++)
        if (!failures[i].times) {
            snprintf(failures[i].api, sizeof failures[i].api, "%s", api);
            failures[i].times = times;
            failures[i].code = code;
            return;
        }
}

static int stream_index(void *stream) {
    for (int i = 0; i < STREAMS; i++) {
        if (streams[i].stream == stream)
            return i;
        if (!streams[i].stream) {
            streams[i].stream = stream;
            return i;
        }
    }
    abort();
}

/* Finish the stream: make its pending writes. */
API void fake_finish(void *stream) {
    int s = stream_index(stream);
    for (int i = 0; i < streams[s].pending; i++)
        *streams[s].writes[i].where = streams[s].writes[i].value;
    streams[s].pending = 0;
}

/* Finish all streams. */
API void fake_finish_all(void) {
    for (int i = 0; i < STREAMS && streams[i].stream; i++)
        fake_finish(streams[i].stream);
}

static int failing(const char *api) {
    if (fail_at && ++calls == fail_at)
        return 999;
    for (int i = 0; i < 16; i++)
        if (failures[i].times && strcmp(failures[i].api, api) == 0) {
            failures[i].times--;
            return failures[i].code;
        }
    return 0;
}

int fake_failing(const char *api) { return failing(api); }

int fake_is_capturing(void *stream) {
    for (int i = 0; i < STREAMS && streams[i].stream; i++)
        if (streams[i].stream == stream)
            return streams[i].capture != NULL;
    return 0;
}

#define MAY_FAIL(api)                                                                                        \
    do {                                                                                                     \
        int code_ = failing(api);                                                                            \
        if (code_)                                                                                           \
            return code_;                                                                                    \
    } while (0)

static void unsafe(void) {
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].capture && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
            unsafe_calls++;
}

void fake_unsafe(void) { unsafe(); }

static void *explicit_stream(void *stream, bool per_thread) {
    return stream ? stream : per_thread ? (void *)CU_STREAM_PER_THREAD : (void *)CU_STREAM_LEGACY;
}

/* --- occupancy of one SM of an H200 -------------------------------------------------------------------- */

enum { SM_SHARED = 233472, BLOCK_SHARED = 232448, RESERVED = 1024, SM_REGISTERS = 65536, SM_THREADS = 2048, SM_BLOCKS = 32 };

static kernel *function(void *handle) {
    kernel *k = handle;
    if (!k || (k->magic != 'F' && k->magic != 'K'))
        return NULL;
    return k->magic == 'K' ? (kernel *)k->function : k;
}

static int blocks_that_fit(kernel *k, int threads, size_t dynamic) {
    int warps = (threads + 31) / 32;
    int shared = (int)((dynamic + (size_t)k->static_shared + RESERVED + 127) / 128 * 128);
    int registers = (k->registers * 32 + 255) / 256 * 256 * ((warps + 3) / 4 * 4);
    int fit = SM_BLOCKS;
    fit = fit < SM_THREADS / (warps * 32) ? fit : SM_THREADS / (warps * 32);
    fit = fit < SM_REGISTERS / registers ? fit : SM_REGISTERS / registers;
    return fit < SM_SHARED / shared ? fit : SM_SHARED / shared;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t dynamic) {
    MAY_FAIL("cuOccupancyMaxActiveBlocksPerMultiprocessor");
    kernel *k = function(f);
    take_time();
    if (!k || threads <= 0 || (int)dynamic > k->max_dynamic) /* a launch that is not allowed does not fit */
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = blocks_that_fit(k, threads, dynamic);
    return 0;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int threads, size_t dynamic,
                                                                  unsigned flags) {
    return (void)flags, cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, dynamic);
}

/* --- facts ------------------------------------------------------------------------------------------------ */

API CUresult cuInit(unsigned flags) { return (void)flags, 0; }
#ifdef FAKE_OLD
API CUresult cuDriverGetVersion(int *v) { return *v = 12020, 0; }
#else
API CUresult cuDriverGetVersion(int *v) { return *v = 13000, 0; }
#endif
API CUresult cuCtxGetCurrent(CUcontext *c) {
    MAY_FAIL("cuCtxGetCurrent");
    return *c = (CUcontext)(0x1000 + 0x10 * (uintptr_t)context_number), 0;
}
API CUresult cuCtxGetDevice(CUdevice *d) {
    MAY_FAIL("cuCtxGetDevice");
    return *d = 0, 0;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) {
    MAY_FAIL("cuDevicePrimaryCtxGetState");
    return (void)d, *flags = 0, *active = 1, 0;
}
API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    MAY_FAIL("cuCtxGetStreamPriorityRange");
    return *least = 0, *greatest = -5, 0;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice d) {
    MAY_FAIL("cuDeviceGetAttribute");
    (void)d;
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT                ? 132
             : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? BLOCK_SHARED
                                                                                  : 0;
    return 0;
}

#ifndef FAKE_OLD
API CUresult cuFuncGetName(const char **name, CUfunction f) {
    MAY_FAIL("cuFuncGetName");
    kernel *k = (kernel *)f;
    if (!k || k->magic != 'F') /* like drivers that refuse a CUkernel here */
        return INVALID_HANDLE;
    *name = k->name;
    return 0;
}

API CUresult cuKernelGetName(const char **name, CUkernel handle) {
    MAY_FAIL("cuKernelGetName");
    kernel *k = (kernel *)handle;
    if (!k || k->magic != 'K')
        return INVALID_HANDLE;
    *name = k->name;
    return 0;
}

#endif

API CUresult cuKernelGetFunction(CUfunction *f, CUkernel handle) {
    MAY_FAIL("cuKernelGetFunction");
    kernel *k = (kernel *)handle;
    if (!k || k->magic != 'K')
        return INVALID_HANDLE;
    *f = (CUfunction)k->function;
    return 0;
}

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction f) {
    MAY_FAIL("cuFuncGetAttribute");
    kernel *k = (kernel *)f;
    if (!k || k->magic != 'F')
        return INVALID_HANDLE;
    *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? k->static_shared
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS        ? k->registers
                                                              : k->max_dynamic;
    return 0;
}

API CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value) {
    MAY_FAIL("cuFuncSetAttribute");
    kernel *k = function(f);
    if (!k || attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value + k->static_shared > BLOCK_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    k->max_dynamic = value;
    return 0;
}

static _Atomic int module_loads;
API int fake_module_loads(void) { return module_loads; }
API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    module_loads++;
    unsafe();
    MAY_FAIL("cuModuleLoadData");
    *module = (CUmodule)0x2000;
    return strstr(image, ".entry weft_head_start(") || strstr(image, ".entry weft_stamp_wide(") ||
                   strstr(image, ".entry ncclDevKernel_") /* a paced collective */
               ? 0
               : 218;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size) {
    MAY_FAIL("cuMemAlloc_v2");
    return (void)size, *at = 0x40000000, 0;
}
API CUresult cuMemFree_v2(CUdeviceptr at) {
    MAY_FAIL("cuMemFree_v2");
    return at == 0x40000000 ? 0 : 1;
}

enum { OWN = 4 };
static struct {
    const char *name;
    int registers;
    CUfunction f;
} own[OWN] = {{"weft_head_start", 16, NULL}, {"weft_stamp", 16, NULL}, {"weft_stamp_wide", 96, NULL}, {"weft_head_start_placed", 16, NULL}}; /* weft's, in this context */

API CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
    MAY_FAIL("cuModuleGetFunction");
    (void)module;
    for (int i = 0; i < OWN; i++)
        if (strcmp(own[i].name, name) == 0) {
            if (!own[i].f)
                own[i].f = fake_kernel(name, own[i].registers, 0, 0);
            *f = own[i].f;
            return 0;
        }
    return *f = fake_kernel(name, 32, 0, 0), 0;
}

API CUresult cuLibraryGetKernel(CUkernel *k, CUlibrary library, const char *name) {
    MAY_FAIL("cuLibraryGetKernel");
    return (void)library, *k = fake_kernel(name, 32, 0, 1), 0;
}

API CUresult cuKernelSetAttribute(int attribute, int value, CUkernel k, CUdevice d) {
    MAY_FAIL("cuKernelSetAttribute");
    (void)d;
    kernel *f = function(k);
    if (!f || attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value + f->static_shared > BLOCK_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    f->max_dynamic = value;
    return 0;
}

API CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel k, CUdevice d) {
    MAY_FAIL("cuKernelGetAttribute");
    (void)d;
    kernel *f = ((kernel *)k)->magic == 'K' ? function(k) : NULL;
    if (!f)
        return INVALID_HANDLE;
    *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? f->static_shared
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS        ? f->registers
                                                              : f->max_dynamic;
    return 0;
}

static void *registered; /* memory that the GPU may write to until its context ends */

/* Its work ends with the context, and so do weft's kernels and the right to write to host memory. */
static CUresult end_context(const char *api) {
    MAY_FAIL(api);
    for (int i = 0; i < OWN; i++) {
        if (own[i].f)
            ((kernel *)own[i].f)->magic = 'X';
        own[i].f = NULL;
    }
    registered = NULL;
    context_number++;
    fake_context_destroyed();
    pthread_mutex_lock(&lock);
    for (int i = 0; i < STREAMS; i++) {
        streams[i].pending = 0;
        streams[i].capture = NULL;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

API CUresult cuModuleUnload(CUmodule m) {
    MAY_FAIL("cuModuleUnload");
    return (void)m, 0;
}
API CUresult cuLibraryUnload(CUlibrary l) {
    MAY_FAIL("cuLibraryUnload");
    return (void)l, 0;
}
API CUresult cuStreamDestroy_v2(CUstream stream);
API CUresult cuCtxDestroy_v2(CUcontext c) { return (void)c, end_context("cuCtxDestroy_v2"); }
API CUresult cuDevicePrimaryCtxReset_v2(CUdevice d) { return (void)d, end_context("cuDevicePrimaryCtxReset_v2"); }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) {
    MAY_FAIL("cuDevicePrimaryCtxRelease_v2");
    return (void)d, 0;
}
API CUresult cuGreenCtxCreate(CUgreenCtx *made, void *resources, CUdevice d, unsigned flags) {
    MAY_FAIL("cuGreenCtxCreate");
    return (void)resources, (void)d, (void)flags, *made = (CUgreenCtx)0x9000, 0;
}
API CUresult cuCtxFromGreenCtx(CUcontext *c, CUgreenCtx g) {
    MAY_FAIL("cuCtxFromGreenCtx");
    return (void)g, *c = (CUcontext)0x9100, 0;
}
API CUresult cuGreenCtxDestroy(CUgreenCtx g) {
    MAY_FAIL("cuGreenCtxDestroy");
    return (void)g, 0;
}

API CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned flags) {
    unsafe();
    MAY_FAIL("cuMemHostRegister_v2");
    (void)flags, (void)size;
    if (registered == p)
        return 712;
    registered = p;
    return 0;
}

/* Host memory that the GPU can access, and the values in it that streams wait for. */
enum { WAITS = 4096 };
static char *host_memory;
static size_t host_size;
static struct {
    void *stream;
    uint32_t *where, value;
} waits[WAITS];
static _Atomic int wait_count;

API CUresult cuMemHostAlloc(void **p, size_t size, unsigned flags) {
    MAY_FAIL("cuMemHostAlloc");
    (void)flags;
    *p = host_memory = malloc(host_size = size);
    return host_memory ? 0 : 2;
}

API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr where, uint32_t value, unsigned flags) {
    MAY_FAIL("cuStreamWaitValue32_v2");
    (void)flags;
    if (!host_memory || where < (CUdeviceptr)(uintptr_t)host_memory || where >= (CUdeviceptr)(uintptr_t)host_memory + host_size)
        abort();
    int i = wait_count++ % WAITS;
    waits[i].stream = stream, waits[i].where = (uint32_t *)(uintptr_t)where, waits[i].value = value;
    return 0;
}

API int fake_waits(void) { return wait_count; }
API int fake_wait_is_over(int i) {
    return (int32_t)(__atomic_load_n(waits[i % WAITS].where, __ATOMIC_ACQUIRE) - waits[i % WAITS].value) >= 0;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned flags) {
    MAY_FAIL("cuMemHostGetDevicePointer_v2");
    (void)flags;
    *d = (CUdeviceptr)(uintptr_t)p;
    return 0;
}

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr where, uint32_t value, unsigned flags) {
    MAY_FAIL("cuStreamWriteValue32_v2");
    (void)flags;
    bool in_host = host_memory && where >= (CUdeviceptr)(uintptr_t)host_memory &&
                   where < (CUdeviceptr)(uintptr_t)host_memory + host_size;
    if (!in_host && (!registered || where < (CUdeviceptr)(uintptr_t)registered ||
                     where >= (CUdeviceptr)(uintptr_t)registered + 4096))
        abort(); /* on a GPU this write would fault and end the program */
    pthread_mutex_lock(&lock);
    int s = stream_index(stream), refused = streams[s].capture || (streams[s].pending == WRITES && logging);
    if (!refused && streams[s].pending == WRITES)
        streams[s].pending = 0; /* in a long run no test finishes streams: they finish by themselves */
    if (!refused) {
        streams[s].writes[streams[s].pending].where = (uint32_t *)(uintptr_t)where;
        streams[s].writes[streams[s].pending++].value = value;
    }
    if (!refused && !logging)
        __atomic_store_n((uint32_t *)(uintptr_t)where, value, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    if (!refused)
        fake_timed_write(stream, where, value);
    return refused ? NOT_SUPPORTED : 0;
}

/* --- launches --------------------------------------------------------------------------------------------- */

/* How long the waiting kernel will take, at the clock assumed for an unknown rate. */
static void fake_spin(CUfunction f, void **params) {
    kernel *k = function(f);
    fake_spin_ns = k && params && strcmp(k->name, "weft_head_start") == 0 ? *(int64_t *)params[0] * 1000 / 1500 : 0;
    fake_placed_wait(k && strcmp(k->name, "weft_head_start_placed") == 0 ? params : NULL);
}

static CUresult launch(const char *route, const CUlaunchConfig *c, void *f, bool per_thread, bool cooperative) {
    kernel *k = function(f);
    if (!k)
        return INVALID_HANDLE; /* also if its context is gone */
    if ((int)c->sharedMemBytes > k->max_dynamic || (int)c->sharedMemBytes + k->static_shared > BLOCK_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    if (c->numAttrs && !c->attrs)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fake_completion_allowed(c->attrs, c->numAttrs))
        return CUDA_ERROR_INVALID_VALUE;
    if (strncmp(k->name, "weft_stamp", 10) == 0)
        MAY_FAIL("stamp");
    last_shared = c->sharedMemBytes;
    if (!logging)
        return 0;
    record r = {.grid = {c->gridDimX, c->gridDimY, c->gridDimZ}, .block = {c->blockDimX, c->blockDimY, c->blockDimZ}};
    snprintf(r.route, sizeof r.route, "%s", route);
    snprintf(r.name, sizeof r.name, "%s", k->name);
    r.shared = c->sharedMemBytes;
    r.stream = explicit_stream(c->hStream, per_thread);
    r.cooperative = cooperative;
    r.attributes = (int)c->numAttrs;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
            r.has_priority++;
            r.priority = c->attrs[i].value.priority;
        }
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            r.cooperative = c->attrs[i].value.cooperative;
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            memcpy(r.cluster, c->attrs[i].value.cluster, sizeof r.cluster);
    }
    pthread_mutex_lock(&lock);
    struct graph *capture = streams[stream_index(r.stream)].capture;
    r.captured = capture != NULL;
    if (capture && capture->count < NODES)
        capture->nodes[capture->count++] = (node){.k = f, .grid = c->gridDimX, .block = c->blockDimX * c->blockDimY * c->blockDimZ, .shared = c->sharedMemBytes};
    if (record_count < LOG)
        records[record_count++] = r;
    pthread_mutex_unlock(&lock);
    if (!r.captured)
        fake_timed_launch(k->name, r.stream, c->attrs, c->numAttrs);
    return 0;
}

#define ARGS CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params
#define CONFIG {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0}
#define LAUNCHES(suffix, per_thread)                                                                         \
    API CUresult cuLaunchKernel##suffix(ARGS, void **extra) {                                                \
        MAY_FAIL("cuLaunchKernel" #suffix);                                                                  \
        CUlaunchConfig c = CONFIG;                                                                           \
        (void)extra;                                                                                         \
        fake_spin(f, params);                                                                                \
        return launch("cuLaunchKernel" #suffix, &c, f, per_thread, false);                                   \
    }                                                                                                        \
    API CUresult cuLaunchKernelEx##suffix(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) { \
        MAY_FAIL("cuLaunchKernelEx" #suffix);                                                                \
        (void)extra;                                                                                         \
        fake_spin(f, params);                                                                                \
        return c ? launch("cuLaunchKernelEx" #suffix, c, f, per_thread, false) : CUDA_ERROR_INVALID_VALUE;   \
    }                                                                                                        \
    API CUresult cuLaunchCooperativeKernel##suffix(ARGS) {                                                   \
        MAY_FAIL("cuLaunchCooperativeKernel" #suffix);                                                       \
        CUlaunchConfig c = CONFIG;                                                                           \
        (void)params;                                                                                        \
        return launch("cuLaunchCooperativeKernel" #suffix, &c, f, per_thread, true);                         \
    }
LAUNCHES(, false)
LAUNCHES(_ptsz, true)

/* --- capture and graphs ------------------------------------------------------------------------------------- */

API CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    MAY_FAIL("cuThreadExchangeStreamCaptureMode");
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

API CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    MAY_FAIL("cuStreamIsCapturing");
    pthread_mutex_lock(&lock);
    *status = streams[stream_index(stream)].capture != NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}

#define CAPTURES(suffix, per_thread)                                                                         \
    API CUresult cuStreamBeginCapture_v2##suffix(CUstream stream, int mode) {                                \
        MAY_FAIL("cuStreamBeginCapture_v2" #suffix);                                                         \
        (void)mode;                                                                                          \
        streams[stream_index(explicit_stream(stream, per_thread))].capture = calloc(1, sizeof(struct graph)); \
        return 0;                                                                                            \
    }                                                                                                        \
    API CUresult cuStreamBeginCaptureToGraph##suffix(CUstream stream, CUgraph g, const CUgraphNode *d,       \
                                                     const void *data, size_t n, int mode) {                 \
        (void)d, (void)data, (void)n, (void)mode;                                                            \
        streams[stream_index(explicit_stream(stream, per_thread))].capture = (struct graph *)g;              \
        return 0;                                                                                            \
    }                                                                                                        \
    API CUresult cuStreamBeginRecaptureToGraph##suffix(CUstream stream, int mode, CUgraph g, void *f, void *data) { \
        (void)mode, (void)f, (void)data;                                                                     \
        MAY_FAIL("cuStreamBeginRecaptureToGraph" #suffix);                                                   \
        ((struct graph *)g)->count = 0;                                                                      \
        streams[stream_index(explicit_stream(stream, per_thread))].capture = (struct graph *)g;              \
        return 0;                                                                                            \
    }                                                                                                        \
    API CUresult cuStreamEndCapture##suffix(CUstream stream, CUgraph *graph) {                               \
        MAY_FAIL("cuStreamEndCapture" #suffix);                                                              \
        int s = stream_index(explicit_stream(stream, per_thread));                                           \
        if (!streams[s].capture)                                                                             \
            return ILLEGAL_STATE;                                                                            \
        *graph = (CUgraph)streams[s].capture;                                                                \
        streams[s].capture = NULL;                                                                           \
        return 0;                                                                                            \
    }                                                                                                        \
    API CUresult cuStreamBeginCaptureToCig##suffix(CUstream stream, void *params) {                          \
        MAY_FAIL("cuStreamBeginCaptureToCig" #suffix);                                                       \
        (void)params;                                                                                        \
        streams[stream_index(explicit_stream(stream, per_thread))].capture = calloc(1, sizeof(struct graph)); \
        return 0;                                                                                            \
    }                                                                                                        \
    API CUresult cuStreamEndCaptureToCig##suffix(CUstream stream) {                                          \
        MAY_FAIL("cuStreamEndCaptureToCig" #suffix);                                                         \
        streams[stream_index(explicit_stream(stream, per_thread))].capture = NULL;                           \
        return 0;                                                                                            \
    }                                                                                                        \
    API CUresult cuGraphInstantiateWithParams##suffix(CUgraphExec *e, CUgraph g, void *p) {                  \
        MAY_FAIL("cuGraphInstantiateWithParams" #suffix);                                                    \
        (void)p;                                                                                             \
        return *e = (CUgraphExec)g, 0;                                                                       \
    }                                                                                                        \
    API CUresult cuGraphLaunch##suffix(CUgraphExec e, CUstream stream) {                                     \
        MAY_FAIL("cuGraphLaunch" #suffix);                                                                   \
        if (e)                                                                                               \
            fake_timed_operation("graph", explicit_stream(stream, per_thread), 50000);                       \
        return e ? 0 : INVALID_HANDLE;                                                                       \
    }
CAPTURES(, false)
CAPTURES(_ptsz, true)

/* A second stream joins the capture of the first, as through an event wait. */
API void fake_join_capture(void *from, void *stream) { streams[stream_index(stream)].capture = streams[stream_index(from)].capture; }
API void fake_leave_capture(void *stream) { streams[stream_index(stream)].capture = NULL; }
API void fake_add_child(CUgraph graph, CUgraph child) {
    struct graph *g = (struct graph *)graph;
    g->nodes[g->count++].child = (struct graph *)child;
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *e, CUgraph g, CUgraphNode *n, char *l, size_t s) {
    (void)n, (void)l, (void)s;
    return *e = (CUgraphExec)g, 0;
}
API CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags) {
    MAY_FAIL("cuGraphInstantiateWithFlags");
    (void)flags;
    return *e = (CUgraphExec)g, 0;
}
API CUresult cuGraphExecUpdate(CUgraphExec e, CUgraph g, CUgraphNode *n, int *r) { return (void)e, (void)g, (void)n, *r = 0, 0; }
API CUresult cuGraphExecUpdate_v2(CUgraphExec e, CUgraph g, void *r) { return (void)e, (void)g, (void)r, 0; }
API CUresult cuGraphExecDestroy(CUgraphExec e) {
    MAY_FAIL("cuGraphExecDestroy");
    return (void)e, 0;
}
static CUresult allowed(const CUDA_KERNEL_NODE_PARAMS *p) {
    kernel *k = function(p->func ? (void *)p->func : (void *)p->kern);
    return k && (int)p->sharedMemBytes <= k->max_dynamic ? 0 : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuGraphAddKernelNode_v2(CUgraphNode *n, CUgraph graph, const CUgraphNode *d, size_t count, const CUDA_KERNEL_NODE_PARAMS *p) {
    struct graph *g = (struct graph *)graph;
    (void)d, (void)count;
    if (allowed(p) != 0 || g->count == NODES)
        return CUDA_ERROR_INVALID_VALUE;
    g->nodes[g->count] = (node){.k = p->func ? (void *)p->func : (void *)p->kern, .grid = p->gridDimX, .block = p->blockDimX, .shared = p->sharedMemBytes};
    return *n = (CUgraphNode)&g->nodes[g->count++], 0;
}
API CUresult cuGraphAddNode_v2(CUgraphNode *n, CUgraph g, const CUgraphNode *d, const void *data, size_t count, CUgraphNodeParams *p) {
    return (void)data, cuGraphAddKernelNode_v2(n, g, d, count, &p->kernel);
}
API CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) { return (void)n, allowed(p); }
API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
    MAY_FAIL("cuGraphExecKernelNodeSetParams_v2");
    return (void)e, (void)n, (void)p, 0;
}
API CUresult cuGraphExecKernelNodeSetParams(CUgraphExec e, CUgraphNode n, const void *p) {
    MAY_FAIL("cuGraphExecKernelNodeSetParams");
    return (void)e, (void)n, (void)p, 0;
}
API CUresult cuGraphExecNodeSetParams(CUgraphExec e, CUgraphNode n, CUgraphNodeParams *p) {
    MAY_FAIL("cuGraphExecNodeSetParams");
    return (void)e, (void)n, (void)p, 0;
}
API CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec e, CUgraphNode n, CUgraph g) {
    MAY_FAIL("cuGraphExecChildGraphNodeSetParams");
    return (void)e, (void)n, (void)g, 0;
}
API CUresult cuGraphNodeSetEnabled(CUgraphExec e, CUgraphNode n, unsigned enabled) {
    MAY_FAIL("cuGraphNodeSetEnabled");
    return (void)e, (void)n, (void)enabled, 0;
}
API void fake_add_conditional(CUgraph graph) { ((struct graph *)graph)->nodes[((struct graph *)graph)->count++].conditional = true; }
void fake_stream_destroyed(void *stream) {
    pthread_mutex_lock(&lock);
    streams[stream_index(stream)].capture = NULL;
    pthread_mutex_unlock(&lock);
}

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    MAY_FAIL("cuGraphGetNodes");
    struct graph *g = (struct graph *)graph;
    *count = (size_t)g->count;
    for (int i = 0; nodes && i < g->count; i++)
        nodes[i] = (CUgraphNode)&g->nodes[i];
    return 0;
}
API CUresult cuGraphNodeGetType(CUgraphNode n, int *type) {
    MAY_FAIL("cuGraphNodeGetType");
    *type = ((node *)n)->conditional ? CU_GRAPH_NODE_TYPE_CONDITIONAL
            : ((node *)n)->child     ? CU_GRAPH_NODE_TYPE_GRAPH
                                     : CU_GRAPH_NODE_TYPE_KERNEL;
    return 0;
}
API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode n, CUgraph *g) {
    MAY_FAIL("cuGraphChildGraphNodeGetGraph");
    return *g = (CUgraph)((node *)n)->child, 0;
}
API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *p) {
    MAY_FAIL("cuGraphKernelNodeGetParams_v2");
    node *n = (node *)handle;
    *p = (CUDA_KERNEL_NODE_PARAMS){.gridDimX = n->grid, .gridDimY = 1, .gridDimZ = 1, .blockDimX = n->block, .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = n->shared};
    if (n->k->magic == 'K')
        p->kern = (CUkernel)n->k;
    else
        p->func = (CUfunction)n->k;
    return 0;
}

/* --- cuGetProcAddress: as the driver answers, by name, version and default stream ---------------------------- */

API CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags);
API CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags, int *status);

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
API CUresult cuLaunchHostFunc(CUstream stream, void *f, void *data);
API CUresult cuLaunchHostFunc_ptsz(CUstream stream, void *f, void *data);
API CUresult cuLaunchHostFunc_v2(CUstream stream, void *f, void *data, unsigned mode);
API CUresult cuLaunchHostFunc_v2_ptsz(CUstream stream, void *f, void *data, unsigned mode);
API CUresult fake_newer_wait(CUstream stream, CUevent event, unsigned flags, void *more) {
    return (void)stream, (void)event, (void)flags, (void)more, 0;
}

static const struct {
    const char *asked;
    int from, until, per_thread;
    void *function;
} entries[] = {
#define ONE(name, f) {#name, 0, 1 << 30, 2, (void *)f}
#define TWO(name, f) {#name, 0, 1 << 30, 0, (void *)f}, {#name, 0, 1 << 30, 1, (void *)f##_ptsz}
    {"cuGetProcAddress", 0, 11999, 2, (void *)cuGetProcAddress},
    {"cuGetProcAddress", 12000, 1 << 30, 2, (void *)cuGetProcAddress_v2},
    {"cuGraphInstantiate", 11000, 11999, 2, (void *)cuGraphInstantiate_v2},
    {"cuGraphInstantiate", 12000, 1 << 30, 2, (void *)cuGraphInstantiateWithFlags},
    {"cuGraphExecUpdate", 0, 11999, 2, (void *)cuGraphExecUpdate},
    {"cuGraphExecUpdate", 12000, 1 << 30, 2, (void *)cuGraphExecUpdate_v2},
    {"cuLaunchHostFunc", 10000, 13009, 0, (void *)cuLaunchHostFunc},
    {"cuLaunchHostFunc", 10000, 13009, 1, (void *)cuLaunchHostFunc_ptsz},
    {"cuLaunchHostFunc", 13010, 1 << 30, 0, (void *)cuLaunchHostFunc_v2},
    {"cuLaunchHostFunc", 13010, 1 << 30, 1, (void *)cuLaunchHostFunc_v2_ptsz},
    {"cuStreamWaitEvent", 0, 14999, 2, (void *)cuStreamWaitEvent},
    {"cuStreamWaitEvent", 15000, 1 << 30, 2, (void *)fake_newer_wait}, /* a version later than weft knows */
    TWO(cuLaunchKernel, cuLaunchKernel),
    TWO(cuLaunchKernelEx, cuLaunchKernelEx),
    TWO(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel),
    TWO(cuStreamBeginCapture, cuStreamBeginCapture_v2),
    TWO(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph),
    TWO(cuStreamBeginRecaptureToGraph, cuStreamBeginRecaptureToGraph),
    TWO(cuStreamEndCapture, cuStreamEndCapture),
    TWO(cuGraphInstantiateWithParams, cuGraphInstantiateWithParams),
    TWO(cuGraphLaunch, cuGraphLaunch),
    ONE(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags),
    ONE(cuGraphExecDestroy, cuGraphExecDestroy),
    {"cuGraphExecKernelNodeSetParams", 0, 11999, 2, (void *)cuGraphExecKernelNodeSetParams},
    {"cuGraphExecKernelNodeSetParams", 12000, 1 << 30, 2, (void *)cuGraphExecKernelNodeSetParams_v2},
    ONE(cuGraphExecNodeSetParams, cuGraphExecNodeSetParams),
    ONE(cuGraphExecChildGraphNodeSetParams, cuGraphExecChildGraphNodeSetParams),
    ONE(cuGraphNodeSetEnabled, cuGraphNodeSetEnabled),
    TWO(cuStreamBeginCaptureToCig, cuStreamBeginCaptureToCig),
    TWO(cuStreamEndCaptureToCig, cuStreamEndCaptureToCig),
    ONE(cuFuncSetAttribute, cuFuncSetAttribute),
    ONE(cuKernelSetAttribute, cuKernelSetAttribute),
    ONE(cuModuleGetFunction, cuModuleGetFunction),
    ONE(cuLibraryGetKernel, cuLibraryGetKernel),
    ONE(cuKernelGetFunction, cuKernelGetFunction),
    ONE(cuStreamDestroy, cuStreamDestroy_v2),
    ONE(cuGreenCtxCreate, cuGreenCtxCreate),
    ONE(cuGreenCtxDestroy, cuGreenCtxDestroy),
    ONE(cuModuleUnload, cuModuleUnload),
    ONE(cuLibraryUnload, cuLibraryUnload),
    ONE(cuCtxDestroy, cuCtxDestroy_v2),
    ONE(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2),
    ONE(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2),
    ONE(cuInit, cuInit),
};

static CUresult get_address(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    *pfn = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (strcmp(entries[i].asked, symbol) == 0 && version >= entries[i].from && version <= entries[i].until &&
            (entries[i].per_thread == 2 || entries[i].per_thread == per_thread))
            return *pfn = entries[i].function, 0;
    return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) { return get_address(symbol, pfn, version, flags); }
API CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags, int *status) {
    CUresult result = get_address(symbol, pfn, version, flags);
    if (status) /* the CUDA runtime of a torch built for CUDA passes NULL */
        *status = result ? 1 : 0;
    return result;
}
