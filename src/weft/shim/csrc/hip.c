/* The HIP side of the shim: applies the same policy to libamdhip64's launch calls, which can be interposed directly.
 *
 * Residency uses dynamic LDS, as it uses shared memory on CUDA. HIP has no launch attribute for priority; high
 * priority reaches torch's collectives through an environment variable (see apply.py). There is no head start and no
 * way to keep SMs free of GEMMs; both are counted as not applied. Graphs are not tracked: a captured launch is counted
 * once, and each graph launch counts as an interface that weft does not account for. Written from the HIP headers and
 * tested against a fake libamdhip64; not run on AMD hardware. */
#define _GNU_SOURCE
#include "weft.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint32_t x, y, z;
} dim3;

typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
    void *attributes;
    unsigned count;
} hipLaunchConfig_t;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    void *attributes;
    unsigned count;
} HIP_LAUNCH_CONFIG;

#define MODULE_ARGS void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz

EXPORT int hipLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream);
EXPORT int hipLaunchKernel_spt(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream);
EXPORT int hipExtLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream,
                              void *start, void *stop, int flags);
EXPORT int hipLaunchKernelExC(const hipLaunchConfig_t *config, const void *f, void **args);
EXPORT int hipModuleLaunchKernel(MODULE_ARGS, unsigned shared, void *stream, void **params, void **extra);
EXPORT int hipExtModuleLaunchKernel(MODULE_ARGS, size_t shared, void *stream, void **params, void **extra, void *start,
                                    void *stop, uint32_t flags);
EXPORT int hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *config, void *f, void **params, void **extra);
EXPORT int hipGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags, void *status);
EXPORT int hipGraphLaunch(void *exec, void *stream);
EXPORT int hipGraphLaunch_spt(void *exec, void *stream);
EXPORT int hipModuleUnload(void *module);
EXPORT int hipDeviceReset(void);

static struct {
#define HOOK(symbol) _Atomic(__typeof__(&symbol)) symbol;
#include "hip_hooks.def"
} real;

static const struct {
    const char *symbol;
    void *ours;
    _Atomic(void *) *real;
} hooks[] = {
#define HOOK(symbol) {#symbol, (void *)symbol, (_Atomic(void *) *)&real.symbol},
#include "hip_hooks.def"
};
enum { HOOKS = sizeof hooks / sizeof *hooks, HIP_NOT_FOUND = 500 };

static int not_there(void) { return HIP_NOT_FOUND; }

static int index_of(const char *name) {
    for (int i = 0; i < HOOKS; i++)
        if (strcmp(hooks[i].symbol, name) == 0)
            return i;
    return -1;
}

/* The next definition after the shim: HIP's symbols are bound by the linker. */
static void *next_symbol(const char *name) {
    void *found = weft_next_symbol(name);
    for (int i = 0; i < HOOKS && !found; i++) { /* the library was loaded without the linker */
        Dl_info info;
        void *known = atomic_load(hooks[i].real);
        void *library = known && dladdr(known, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        if (library)
            found = weft_real_symbol(library, name);
    }
    return found;
}

static void *find(const char *name) {
    int i = index_of(name);
    void *known = atomic_load(hooks[i].real);
    if (!known && (known = next_symbol(name)) && known != hooks[i].ours)
        weft_hip_found(name, known);
    return known && known != hooks[i].ours ? known : (void *)not_there;
}

#define REAL(symbol)                                                                                                   \
    ({                                                                                                                 \
        __typeof__(&symbol) real_ = atomic_load_explicit(&real.symbol, memory_order_relaxed);                          \
        LIKELY(real_ != NULL) ? real_ : (__typeof__(&symbol))find(#symbol);                                            \
    })

void *weft_hip_own(const char *name) {
    int i = index_of(name);
    return i < 0 ? NULL : hooks[i].ours;
}

bool weft_hip_driver(const char *name) { return find(name) != (void *)not_there; }

void weft_hip_found(const char *name, void *function) {
    void *none = NULL;
    int i = index_of(name);
    if (function != hooks[i].ours && !atomic_load(hooks[i].real))
        weft_pin_library(function);
    if (function != hooks[i].ours)
        atomic_compare_exchange_strong(hooks[i].real, &none, function);
}

/* --- the runtime's facts about a kernel: hipLaunchKernel takes a host function, modules a hipFunction_t ------- */

#define HIP_CALLS(X)                                                                                                   \
    X(hipKernelNameRef, const char *(*)(void *))                                                                       \
    X(hipKernelNameRefByPtr, const char *(*)(const void *, void *))                                                    \
    X(hipOccupancyMaxActiveBlocksPerMultiprocessor, int (*)(int *, const void *, int, size_t))                         \
    X(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, int (*)(int *, void *, int, size_t))                         \
    X(hipGetDevice, int (*)(int *))                                                                                    \
    X(hipDeviceGetAttribute, int (*)(int *, int, int))                                                                 \
    X(hipHostRegister, int (*)(void *, size_t, unsigned))                                                              \
    X(hipHostGetDevicePointer, int (*)(void **, void *, unsigned))                                                     \
    X(hipThreadExchangeStreamCaptureMode, int (*)(int *))                                                              \
    X(hipStreamIsCapturing, int (*)(void *, int *))                                                                    \
    X(hipStreamWriteValue32, int (*)(void *, void *, uint32_t, unsigned))

static struct {
#define X(name, type) __typeof__((type)0) name;
    HIP_CALLS(X)
#undef X
} hip;

static void find_calls(void) {
#define X(name, type) hip.name = (__typeof__((type)0))next_symbol(#name);
    HIP_CALLS(X)
#undef X
}

static void ready(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_calls);
}

enum { ATTRIBUTE_CUS = 63, ATTRIBUTE_LDS_PER_BLOCK = 74, LDS_DEFAULT = 64 * 1024 }; /* hipDeviceAttribute_t, ROCm 5+ */

static int attribute(int number) {
    int device, value;
    if (!hip.hipGetDevice || !hip.hipDeviceGetAttribute || hip.hipGetDevice(&device) != 0 ||
        hip.hipDeviceGetAttribute(&value, number, device) != 0)
        return 0;
    return value;
}

static uint32_t cu_count(void) { return (uint32_t)attribute(ATTRIBUTE_CUS); }

static bool copy_name(const char *name, char *out, size_t size) {
    if (name)
        snprintf(out, size, "%s", name);
    return name != NULL;
}

static bool host_name(void *f, char *out, size_t size) {
    return hip.hipKernelNameRefByPtr && copy_name(hip.hipKernelNameRefByPtr(f, NULL), out, size);
}

static bool module_name(void *f, char *out, size_t size) {
    return hip.hipKernelNameRef && copy_name(hip.hipKernelNameRef(f), out, size);
}

static int host_blocks(void *f, unsigned threads, size_t lds) {
    int blocks = 0;
    if (!hip.hipOccupancyMaxActiveBlocksPerMultiprocessor ||
        hip.hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, (int)threads, lds) != 0)
        return 0;
    return blocks;
}

static int module_blocks(void *f, unsigned threads, size_t lds) {
    int blocks = 0;
    if (!hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor ||
        hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, (int)threads, lds) != 0)
        return 0;
    return blocks;
}

static bool pin(int (*fit)(void *, unsigned, size_t), void *f, unsigned threads, size_t lds, unsigned blocks,
                uint32_t *bytes) {
    int limit = attribute(ATTRIBUTE_LDS_PER_BLOCK);
    return weft_pin_size(fit, f, threads, lds, limit > 0 ? (size_t)limit : LDS_DEFAULT, blocks, bytes);
}

static bool host_pin(void *f, unsigned threads, size_t lds, unsigned blocks, uint32_t *bytes) {
    return pin(host_blocks, f, threads, lds, blocks, bytes);
}

static bool module_pin(void *f, unsigned threads, size_t lds, unsigned blocks, uint32_t *bytes) {
    return pin(module_blocks, f, threads, lds, blocks, bytes);
}

/* Works while another thread captures; it touches nothing that is being captured. */
static int register_memory(void *memory, size_t size) {
    enum { PORTABLE_AND_MAPPED = 3, RELAXED = 2 };
    int mode = RELAXED;
    bool relaxed = hip.hipThreadExchangeStreamCaptureMode && hip.hipThreadExchangeStreamCaptureMode(&mode) == 0;
    int result = hip.hipHostRegister(memory, size, PORTABLE_AND_MAPPED);
    if (relaxed)
        hip.hipThreadExchangeStreamCaptureMode(&mode);
    return result;
}

static bool share(void *memory, size_t size, uint64_t *device) {
    enum { ALREADY_REGISTERED = 712 };
    void *address;
    if (!hip.hipHostRegister || !hip.hipHostGetDevicePointer || !hip.hipStreamWriteValue32)
        return false;
    int result = register_memory(memory, size);
    if ((result != 0 && result != ALREADY_REGISTERED) || hip.hipHostGetDevicePointer(&address, memory, 0) != 0)
        return false;
    *device = (uint64_t)(uintptr_t)address;
    return true;
}

/* Default streams get handles here, so that they can be told apart. HIP knows the legacy stream's since ROCm 6.2. */
#define STREAM_LEGACY ((void *)1)
#define STREAM_PER_THREAD ((void *)2)

static void *as_hip_knows_it(void *stream) { return stream == STREAM_LEGACY ? NULL : stream; }

static bool write_word(void *stream, uint64_t device, uint32_t value) {
    return hip.hipStreamWriteValue32(as_hip_knows_it(stream), (void *)(uintptr_t)device, value, 0) == 0;
}

/* Nothing of ours may enter a capture: HIP would refuse our word write and invalidate the capture. Using the legacy
 * stream while another stream captures is an error, so that counts as capturing too. */
static bool capturing(void *stream) {
    int status = 0;
    return hip.hipStreamIsCapturing && (hip.hipStreamIsCapturing(as_hip_knows_it(stream), &status) != 0 || status != 0);
}

static const weft_backend host_backend = {WEFT_API_HIP, host_name, host_blocks, cu_count,
                                          host_pin,     NULL,      share,       write_word};
static const weft_backend module_backend = {WEFT_API_HIP, module_name, module_blocks, cu_count,
                                            module_pin,   NULL,        share,         write_word};

/* --- launches ------------------------------------------------------------------------------------------------ */

typedef struct {
    const weft_backend *api;
    const weft_rules *rules; /* NULL: weft does not handle this launch */
    weft_kernel k;
    size_t asked, shared; /* dynamic LDS that the program requests, and that it gets */
    uint64_t blocks;
    void *stream;
} decision;

static decision decide(const weft_backend *api, const void *f, uint64_t blocks, unsigned threads, size_t shared,
                       void *stream) {
    decision d = {.api = api, .asked = shared, .shared = shared, .stream = stream ? stream : STREAM_LEGACY};
    if (!f || shared > UINT32_MAX || !weft_attach(WEFT_API_HIP))
        return d;
    ready();
    weft_lookup(api, (void *)f, threads, (unsigned)shared, &d.k);
    d.rules = weft_policy_now();
    d.blocks = blocks;
    bool track = d.rules->data.flags & WEFT_TRACK, reserve = d.rules->data.sm_reserve > 0;
    if (d.k.kind != WEFT_KIND_COMPUTE || !(track || reserve || d.rules->shapes))
        return d;
    bool in_flight = weft_comm_in_flight(d.stream, false) && !capturing(d.stream);
    if (reserve && in_flight)
        weft_count(WEFT_COUNT_SM_OTHERS);
    if (track && in_flight)
        weft_count_overlapped(d.k.cell);
    if (d.rules->shapes)
        d.shared = weft_shape(api, d.rules, &d.k, blocks, in_flight);
    return d;
}

/* Whether the launch must be repeated as the program requested it. */
static bool refused(decision *d, int result) {
    if (result == 0 || d->shared == d->asked)
        return false;
    weft_shape_refused(&d->k, d->rules);
    d->shared = d->asked;
    return true;
}

static int finished(const decision *d, int result) {
    if (result == 0 && d->rules) {
        weft_count_launch(d->k.cell, 1, d->shared != d->asked);
        if (d->k.kind == WEFT_KIND_COMM) {
            weft_note_ctas(&d->k, d->blocks);
            if (d->rules->data.head_start_ns)
                weft_count(d->rules->data.flags & WEFT_HEAD_START_PLACED ? WEFT_COUNT_PLACED_FAILURES
                                                                         : WEFT_COUNT_HEAD_START_FAILURES);
            weft_comm_launched(d->api, d->rules, d->stream, weft_comm_tracked(d->rules) && capturing(d->stream));
        }
    }
    return result;
}

/* CALL is the real launch, written with `d.shared`. */
#define MAKE(CALL)                                                                                                     \
    int result = CALL;                                                                                                 \
    if (UNLIKELY(refused(&d, result)))                                                                                 \
        result = CALL;                                                                                                 \
    return finished(&d, result)

#define COUNT(d) ((uint64_t)(d).x * (d).y * (d).z)

int hipLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    decision d = decide(&host_backend, f, COUNT(grid), (unsigned)COUNT(block), shared, stream);
    MAKE(REAL(hipLaunchKernel)(f, grid, block, args, d.shared, stream));
}

int hipLaunchKernel_spt(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    void *named = stream ? stream : STREAM_PER_THREAD;
    decision d = decide(&host_backend, f, COUNT(grid), (unsigned)COUNT(block), shared, named);
    MAKE(REAL(hipLaunchKernel_spt)(f, grid, block, args, d.shared, stream));
}

int hipExtLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream, void *start,
                       void *stop, int flags) {
    decision d = decide(&host_backend, f, COUNT(grid), (unsigned)COUNT(block), shared, stream);
    MAKE(REAL(hipExtLaunchKernel)(f, grid, block, args, d.shared, stream, start, stop, flags));
}

int hipLaunchKernelExC(const hipLaunchConfig_t *config, const void *f, void **args) {
    if (!config || config->count > 0) /* attributes: it may be cooperative */
        return REAL(hipLaunchKernelExC)(config, f, args);
    hipLaunchConfig_t changed = *config;
    decision d =
        decide(&host_backend, f, COUNT(config->grid), (unsigned)COUNT(config->block), config->shared, config->stream);
    MAKE((changed.shared = d.shared, REAL(hipLaunchKernelExC)(&changed, f, args)));
}

int hipModuleLaunchKernel(MODULE_ARGS, unsigned shared, void *stream, void **params, void **extra) {
    decision d = decide(&module_backend, f, (uint64_t)gx * gy * gz, bx * by * bz, shared, stream);
    MAKE(REAL(hipModuleLaunchKernel)(f, gx, gy, gz, bx, by, bz, (unsigned)d.shared, stream, params, extra));
}

/* Here the grid is given in threads. */
int hipExtModuleLaunchKernel(MODULE_ARGS, size_t shared, void *stream, void **params, void **extra, void *start,
                             void *stop, uint32_t flags) {
    uint64_t threads = (uint64_t)bx * by * bz;
    uint64_t blocks = threads ? (uint64_t)gx * gy * gz / threads : 0;
    decision d = decide(&module_backend, f, blocks, (unsigned)threads, shared, stream);
    MAKE(
        REAL(hipExtModuleLaunchKernel)(f, gx, gy, gz, bx, by, bz, d.shared, stream, params, extra, start, stop, flags));
}

int hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *config, void *f, void **params, void **extra) {
    if (!config || config->count > 0)
        return REAL(hipDrvLaunchKernelEx)(config, f, params, extra);
    HIP_LAUNCH_CONFIG changed = *config;
    const unsigned *g = config->grid, *b = config->block;
    decision d =
        decide(&module_backend, f, (uint64_t)g[0] * g[1] * g[2], b[0] * b[1] * b[2], config->shared, config->stream);
    MAKE((changed.shared = (unsigned)d.shared, REAL(hipDrvLaunchKernelEx)(&changed, f, params, extra)));
}

int hipGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags, void *status) {
    int result = REAL(hipGetProcAddress)(symbol, pfn, version, flags, status);
    if (result == 0 && symbol && pfn && *pfn && weft_enabled() && weft_hip_own(symbol)) {
        weft_hip_found(symbol, *pfn);
        *pfn = weft_hip_own(symbol);
    }
    return result;
}

static int replayed(int result) {
    if (result == 0 && weft_attach(WEFT_API_HIP)) {
        weft_count(WEFT_COUNT_GRAPH_LAUNCHES);
        weft_count(WEFT_COUNT_UNHANDLED);
    }
    return result;
}

int hipGraphLaunch(void *exec, void *stream) { return replayed(REAL(hipGraphLaunch)(exec, stream)); }
int hipGraphLaunch_spt(void *exec, void *stream) { return replayed(REAL(hipGraphLaunch_spt)(exec, stream)); }

int hipModuleUnload(void *module) {
    weft_forget_handles();
    return REAL(hipModuleUnload)(module);
}

int hipDeviceReset(void) {
    weft_forget_handles();
    int result = REAL(hipDeviceReset)();
    weft_flight_context_gone();
    return result;
}
