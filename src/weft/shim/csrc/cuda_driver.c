/* Finds the driver's own functions and substitutes ours for them. */
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
    int per_thread; /* 0: no; 1: yes; 2: either */
    int from, until;
    void *ours;
    _Atomic(void *) *real;
} hook;

#define HOOK(symbol, asked, per_thread, from, until)                                                                   \
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

static _Atomic(void *) pinned; /* a handle of the driver that is never closed */

/* Keeps the driver loaded. A program may open the driver, close it and load it again elsewhere, but the functions found
 * so far must stay valid. */
static void pin(void *real) {
    Dl_info info;
    void *none = NULL, *handle = NULL;
    if (atomic_load_explicit(&pinned, memory_order_acquire) || !dladdr(real, &info))
        return;
    weft_pin_library(real);
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (handle && weft_real_symbol(handle, "cuDriverGetVersion"))
        atomic_compare_exchange_strong(&pinned, &none, handle);
}

static void *library(void) {
    void *handle = atomic_load_explicit(&pinned, memory_order_acquire), *none = NULL;
    for (int i = 0; i < HOOKS && !handle; i++) { /* the driver that the program uses, whatever its file name */
        void *real = atomic_load(hooks[i].real);
        if (real)
            pin(real);
        handle = atomic_load(&pinned);
    }
    if (!handle && (handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE)))
        atomic_compare_exchange_strong(&pinned, &none, handle);
    return handle;
}

static void remember(const hook *h, void *real) {
    void *none = NULL;
    if (real == h->ours || atomic_load_explicit(h->real, memory_order_relaxed))
        return;
    pin(real);
    atomic_compare_exchange_strong(h->real, &none, real);
}

static CUresult not_there(void) { return CUDA_ERROR_NOT_FOUND; }

/* The linker bound the caller to the shim. The next definition is what it would have been bound to without the shim,
 * possibly another tool's. */
void *weft_cuda_find(const char *symbol) {
    const hook *h = by_symbol(symbol);
    void *real = weft_next_symbol(symbol);
    void *handle = real ? NULL : library();
    if (handle)
        real = weft_real_symbol(handle, symbol);
    if (real)
        remember(h, real);
    void *known = atomic_load(h->real);
    return known ? known : (void *)not_there; /* the program is linked to a function that its driver lacks */
}

void *weft_cuda_own(const char *name) {
    const hook *h = by_symbol(name);
    return h ? h->ours : NULL;
}

bool weft_cuda_driver(const char *name) { return weft_cuda_find(name) != (void *)not_there; }

void weft_cuda_found(const char *name, void *real) { remember(by_symbol(name), real); }

/* A name may stand for several functions, depending on version and default stream, so all three must match. */
static const hook *by_question(const char *asked, int version, cuuint64_t flags) {
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    for (int i = 0; i < HOOKS; i++) {
        const hook *h = &hooks[i];
        if (strcmp(h->asked, asked) == 0 && (h->per_thread == 2 || h->per_thread == per_thread) && version >= h->from &&
            version <= h->until)
            return h;
    }
    return NULL;
}

/* The newest CUDA version whose headers were compared with the table of hooks. A later version may give a function more
 * parameters. Therefore ours replaces it only if the driver returns the same function for both versions. */
enum { KNOWN_CUDA = 13040 };

/* AS_OF repeats the driver's lookup for the version `version_` and writes the result to `known_`. */
#define SUBSTITUTE_ANSWER(AS_OF)                                                                                       \
    const hook *h = result == CUDA_SUCCESS && symbol && pfn && *pfn && weft_enabled()                                  \
                        ? by_question(symbol, version, flags)                                                          \
                        : NULL;                                                                                        \
    void *known_ = NULL;                                                                                               \
    int version_ = KNOWN_CUDA;                                                                                         \
    if (h && version > version_ && (AS_OF != CUDA_SUCCESS || known_ != *pfn))                                          \
        h = NULL;                                                                                                      \
    if (h) {                                                                                                           \
        remember(h, *pfn);                                                                                             \
        *pfn = h->ours;                                                                                                \
    }                                                                                                                  \
    return result

CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    CUresult result = REAL(cuGetProcAddress)(symbol, pfn, version, flags);
    SUBSTITUTE_ANSWER(REAL(cuGetProcAddress)(symbol, &known_, version_, flags));
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags, int *status) {
    CUresult result = REAL(cuGetProcAddress_v2)(symbol, pfn, version, flags, status);
    int found_;
    SUBSTITUTE_ANSWER(REAL(cuGetProcAddress_v2)(symbol, &known_, version_, flags, &found_));
}

static weft_cuda_calls calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const weft_cuda_calls no_calls;

/* Repeated until a driver is loaded: Python may call the shim before that. */
const weft_cuda_calls *weft_cuda(void) {
    static _Atomic bool found;
    if (LIKELY(atomic_load_explicit(&found, memory_order_acquire)))
        return &calls;
    void *handle = library();
    if (!handle)
        return &no_calls;
    weft_cuda_calls these;
#define X(name, type) these.name = (__typeof__((type)0))weft_real_symbol(handle, #name);
    CUDA_CALLS(X)
#undef X
    pthread_mutex_lock(&lock);
    if (!atomic_load(&found)) {
        calls = these;
        atomic_store_explicit(&found, true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    dlerror(); /* the program must not see our failed lookups */
    return &calls;
}

void weft_forget_driver(void) { pthread_mutex_init(&lock, NULL); }

int weft_capture_relax(void) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    const weft_cuda_calls *cu = weft_cuda();
    if (!cu->cuThreadExchangeStreamCaptureMode || cu->cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS)
        return -1;
    return mode;
}

void weft_capture_restore(int mode) {
    for (int tries = 0; mode >= 0 && tries < 2; tries++) /* the thread must not stay in our mode */
        if (weft_cuda()->cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS)
            return;
}

/* --- the driver's facts about a kernel ----------------------------------------------------------------- */

/* A handle may be a CUfunction or a CUkernel; a CUkernel has a separate function in every context. */
CUfunction weft_cuda_function(void *handle) {
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
    CUfunction f = weft_cuda_function(handle);
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
    if (!cu->cuFuncGetName || cu->cuFuncGetName(&name, handle) != CUDA_SUCCESS)
        name = NULL;
    if (!name && (!cu->cuKernelGetName || cu->cuKernelGetName(&name, handle) != CUDA_SUCCESS))
        name = NULL;
    weft_capture_restore(mode);
    if (name)
        snprintf(out, size, "%s", name);
    return name || weft_name_noted(handle, out, size);
}

int weft_occupancy(void *f, unsigned threads, size_t dynamic_bytes) {
    const weft_cuda_calls *cu = weft_cuda();
    int blocks = 0;
    if (!f || !cu->cuOccupancyMaxActiveBlocksPerMultiprocessor ||
        cu->cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, (int)threads, dynamic_bytes) != CUDA_SUCCESS)
        return 0;
    return blocks;
}

static int cuda_blocks_per_sm(void *handle, unsigned threads, size_t dynamic_bytes) {
    int mode = weft_capture_relax();
    int blocks = weft_occupancy(weft_cuda_function(handle), threads, dynamic_bytes);
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

static bool cuda_pin(void *handle, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes) {
    int mode = weft_capture_relax();
    bool found = weft_pin_function(weft_cuda_function(handle), threads, dynamic_bytes, blocks, bytes);
    weft_capture_restore(mode);
    return found;
}

static bool cuda_exceeds_limit(void *handle, size_t dynamic_bytes) {
    int mode = weft_capture_relax();
    bool over = weft_limit_exceeded(handle, dynamic_bytes);
    weft_capture_restore(mode);
    return over;
}

static bool register_memory(void *memory, size_t size, uint64_t *device) {
    const weft_cuda_calls *cu = weft_cuda();
    if (!cu->cuMemHostRegister_v2 || !cu->cuMemHostGetDevicePointer_v2 || !cu->cuStreamWriteValue32_v2)
        return false;
    CUresult result =
        cu->cuMemHostRegister_v2(memory, size, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_ALREADY_REGISTERED)
        return false;
    return cu->cuMemHostGetDevicePointer_v2(device, memory, 0) == CUDA_SUCCESS;
}

static bool cuda_share(void *memory, size_t size, uint64_t *device) {
    int mode = weft_capture_relax();
    bool shared = register_memory(memory, size, device);
    weft_capture_restore(mode);
    return shared;
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
    .exceeds_limit = cuda_exceeds_limit,
    .share = cuda_share,
    .write_word = cuda_write_word,
};
