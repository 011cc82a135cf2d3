/* The driver's own functions: how they are found, and how ours take their place. */
#define _GNU_SOURCE
#include "cuda_shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

weft_cuda_real weft_real;

typedef struct {
    const char *symbol;
    const char *asked;
    int per_thread; /* 0, 1, or 2: either */
    int from, until;
    void *ours;
    _Atomic(void *) *real;
} hook;

#define HOOK(symbol, asked, per_thread, from, until)                                                        \
    {#symbol, #asked, per_thread, from, until, (void *)symbol, (_Atomic(void *) *)&weft_real.symbol},
#define ALIAS HOOK
static const hook hooks[] = {
#include "cuda_hooks.def"
};
enum { HOOKS = sizeof hooks / sizeof *hooks };

static const hook *by_symbol(const char *symbol) {
    for (int i = 0; i < HOOKS; i++)
        if (strcmp(hooks[i].symbol, symbol) == 0)
            return &hooks[i];
    return NULL;
}

static void *library(void) {
    static _Atomic(void *) found;
    void *handle = atomic_load(&found);
    if (handle)
        return handle;
    for (int i = 0; i < HOOKS && !handle; i++) { /* the one that the program uses, wherever it lies */
        void *real = atomic_load(hooks[i].real);
        Dl_info info;
        if (real && dladdr(real, &info))
            handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (!handle)
        handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    atomic_store(&found, handle);
    return handle;
}

static void remember(const hook *h, void *real) {
    void *none = NULL;
    if (real != h->ours)
        atomic_compare_exchange_strong(h->real, &none, real);
}

static CUresult not_there(void) { return CUDA_ERROR_NOT_FOUND; }

void *weft_cuda_find(const char *symbol) {
    const hook *h = by_symbol(symbol);
    void *handle = library();
    void *real = handle ? weft_real_symbol(handle, symbol) : NULL;
    if (real && real != h->ours)
        remember(h, real);
    void *known = atomic_load(h->real);
    return known ? known : (void *)not_there; /* a program linked to a function that its driver lacks */
}

void *weft_cuda_own(const char *name) {
    const hook *h = by_symbol(name);
    return h ? h->ours : NULL;
}

bool weft_cuda_driver(const char *name) {
    return weft_cuda_find(name) != (void *)not_there;
}

void weft_cuda_found(const char *name, void *real) {
    remember(by_symbol(name), real);
}

/* One name may stand for several functions, by version and default stream: all must fit. */
static const hook *by_question(const char *asked, int version, cuuint64_t flags) {
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    for (int i = 0; i < HOOKS; i++) {
        const hook *h = &hooks[i];
        if (strcmp(h->asked, asked) == 0 && (h->per_thread == 2 || h->per_thread == per_thread) &&
            version >= h->from && version <= h->until)
            return h;
    }
    return NULL;
}

static void substitute_answer(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    if (!symbol || !pfn || !*pfn || !weft_enabled())
        return;
    const hook *h = by_question(symbol, version, flags);
    if (h) {
        remember(h, *pfn);
        *pfn = h->ours;
    }
}

CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    CUresult result = REAL(cuGetProcAddress)(symbol, pfn, version, flags);
    if (result == CUDA_SUCCESS)
        substitute_answer(symbol, pfn, version, flags);
    return result;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags, int *status) {
    CUresult result = REAL(cuGetProcAddress_v2)(symbol, pfn, version, flags, status);
    if (result == CUDA_SUCCESS)
        substitute_answer(symbol, pfn, version, flags);
    return result;
}

static weft_cuda_calls calls;

static void find_calls(void) {
    void *handle = library();
    if (!handle)
        return;
#define X(name, type) calls.name = (__typeof__((type)0))weft_real_symbol(handle, #name);
    CUDA_CALLS(X)
#undef X
}

const weft_cuda_calls *weft_cuda(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_calls);
    return &calls;
}

int weft_capture_relax(void) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    const weft_cuda_calls *cu = weft_cuda();
    if (!cu->cuThreadExchangeStreamCaptureMode || cu->cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS)
        return -1;
    return mode;
}

void weft_capture_restore(int mode) {
    if (mode >= 0)
        weft_cuda()->cuThreadExchangeStreamCaptureMode(&mode);
}

/* --- what the driver knows about a kernel ------------------------------------------------------------- */

/* A handle may be a CUfunction, or a CUkernel, which has a function of its own in every context. */
static CUfunction function_of(void *handle) {
    const weft_cuda_calls *cu = weft_cuda();
    CUfunction f = NULL;
    int bytes;
    if (cu->cuFuncGetAttribute &&
        cu->cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle) == CUDA_SUCCESS)
        return handle;
    if (cu->cuKernelGetFunction && cu->cuKernelGetFunction(&f, handle) == CUDA_SUCCESS)
        return f;
    return NULL;
}

void weft_cuda_kernel_sizes(void *handle, int *registers, int *static_shared) {
    const weft_cuda_calls *cu = weft_cuda();
    int mode = weft_capture_relax();
    CUfunction f = function_of(handle);
    if (f && cu->cuFuncGetAttribute) {
        cu->cuFuncGetAttribute(registers, CU_FUNC_ATTRIBUTE_NUM_REGS, f);
        cu->cuFuncGetAttribute(static_shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f);
    }
    weft_capture_restore(mode);
}

static bool cuda_name(void *handle, char *out, size_t size) {
    const weft_cuda_calls *cu = weft_cuda();
    const char *name = NULL;
    int mode = weft_capture_relax();
    if (!(cu->cuFuncGetName && cu->cuFuncGetName(&name, handle) == CUDA_SUCCESS && name))
        if (!(cu->cuKernelGetName && cu->cuKernelGetName(&name, handle) == CUDA_SUCCESS))
            name = NULL;
    weft_capture_restore(mode);
    if (name)
        snprintf(out, size, "%s", name);
    return name != NULL;
}

static int occupancy(void *f, unsigned threads, size_t dynamic_bytes) {
    const weft_cuda_calls *cu = weft_cuda();
    int blocks = 0;
    if (!f || !cu->cuOccupancyMaxActiveBlocksPerMultiprocessor ||
        cu->cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, (int)threads, dynamic_bytes) != CUDA_SUCCESS)
        return 0;
    return blocks;
}

static int cuda_blocks_per_sm(void *handle, unsigned threads, size_t dynamic_bytes) {
    int mode = weft_capture_relax();
    int blocks = occupancy(function_of(handle), threads, dynamic_bytes);
    weft_capture_restore(mode);
    return blocks;
}

int weft_cuda_device_attribute(int attribute) {
    const weft_cuda_calls *cu = weft_cuda();
    CUdevice device;
    int value;
    if (!cu->cuCtxGetDevice || !cu->cuDeviceGetAttribute || cu->cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        cu->cuDeviceGetAttribute(&value, attribute, device) != CUDA_SUCCESS)
        return 0;
    return value;
}

static uint32_t cuda_sm_count(void) {
    return (uint32_t)weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

/* Over 48 KiB a kernel must be allowed its shared memory first, for the question and for the launch. */
static bool pin_function(CUfunction f, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes) {
    const weft_cuda_calls *cu = weft_cuda();
    int fixed, before, limit = weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    if (!f || !cu->cuFuncGetAttribute || !cu->cuFuncSetAttribute ||
        cu->cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f) != CUDA_SUCCESS ||
        cu->cuFuncGetAttribute(&before, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, f) != CUDA_SUCCESS ||
        limit <= fixed ||
        cu->cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, limit - fixed) != CUDA_SUCCESS)
        return false;
    bool pinned = weft_pin_size(occupancy, f, threads, dynamic_bytes, (size_t)(limit - fixed), blocks, bytes);
    int keep = pinned && (int)*bytes > before ? (int)*bytes : before;
    return cu->cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, keep) == CUDA_SUCCESS && pinned;
}

static bool cuda_pin(void *handle, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes) {
    int mode = weft_capture_relax();
    bool pinned = pin_function(function_of(handle), threads, dynamic_bytes, blocks, bytes);
    weft_capture_restore(mode);
    return pinned;
}

static bool allocate_words(uint32_t count, volatile uint32_t **host, uint64_t *device) {
    const weft_cuda_calls *cu = weft_cuda();
    void *memory;
    if (!cu->cuMemHostAlloc || !cu->cuMemHostGetDevicePointer_v2 || !cu->cuStreamWriteValue32_v2 ||
        cu->cuMemHostAlloc(&memory, count * sizeof **host, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) !=
            CUDA_SUCCESS)
        return false;
    *host = memory;
    return cu->cuMemHostGetDevicePointer_v2(device, memory, 0) == CUDA_SUCCESS;
}

static bool cuda_host_words(uint32_t count, volatile uint32_t **host, uint64_t *device) {
    int mode = weft_capture_relax();
    bool there = allocate_words(count, host, device);
    weft_capture_restore(mode);
    return there;
}

static bool cuda_write_word(void *stream, uint64_t device, uint32_t value) {
    return weft_cuda()->cuStreamWriteValue32_v2(stream, device, value, 0) == CUDA_SUCCESS;
}

const weft_backend weft_cuda_backend = {
    .api = WEFT_API_CUDA,
    .name = cuda_name,
    .blocks_per_sm = cuda_blocks_per_sm,
    .sm_count = cuda_sm_count,
    .pin = cuda_pin,
    .host_words = cuda_host_words,
    .write_word = cuda_write_word,
};
