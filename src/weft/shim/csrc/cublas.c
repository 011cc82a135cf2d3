/* Keeps SMs free of GEMMs (compute.sm_reserve). cuBLAS accepts a number of SMs that a GEMM should use, per handle;
 * cuBLASLt accepts it per descriptor. The shim sets it for one call while a collective is in flight, and resets it
 * before the call returns.
 *
 * A GEMM may then use another kernel and round differently. So nothing is changed if the program asks for reproducible
 * results, or if it has set a number itself. Programs reach cuBLAS through the linker (torch does). The shim does not
 * reach a program that finds the functions with dlsym or links them statically. */
#define _GNU_SOURCE
#include "cuda_shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 128, SM_COUNT_TARGET = 15 };
enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, ARCH_MISMATCH = 8, NOT_SUPPORTED = 15 };

typedef int status;

/* --- the exported functions and the library's own --------------------------------------------------------------- */

#define GEMM(name, args, ...) EXPORT status name(void *handle, __VA_ARGS__);
#include "cublas_hooks.def"

#define LT_HEURISTIC                                                                                                   \
    void *lt, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *found
#define LT_MATMUL                                                                                                      \
    void *lt, void *desc, const void *alpha, const void *a, void *ad, const void *b, void *bd, const void *beta,       \
        const void *c, void *cd, void *d, void *dd, const void *algo, void *workspace, size_t size, CUstream stream
EXPORT status cublasLtMatmulAlgoGetHeuristic(LT_HEURISTIC);
EXPORT status cublasLtMatmul(LT_MATMUL);

/* One library's own functions; cuBLAS and cuBLASLt are separate libraries. */
typedef struct blas {
    struct blas *next;
    void *base;
#define GEMM(name, args, ...) __typeof__(&name) name;
#include "cublas_hooks.def"
    __typeof__(&cublasLtMatmulAlgoGetHeuristic) cublasLtMatmulAlgoGetHeuristic;
    __typeof__(&cublasLtMatmul) cublasLtMatmul;
    status (*cublasGetStream_v2)(void *, CUstream *);
    status (*cublasSetSmCountTarget)(void *, int);
    status (*cublasGetSmCountTarget)(void *, int *);
    status (*cublasLtMatmulDescSetAttribute)(void *, int, const void *, size_t);
    status (*cublasLtMatmulDescGetAttribute)(void *, int, void *, size_t, size_t *);
} blas;

static blas *libraries; /* guarded by the lock; never freed, since `callers` point to them */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static _Thread_local struct {
    void *address, *function;
    const blas *library;
} callers[CALLERS];
static _Thread_local int inside;     /* > 0 inside an intercepted GEMM; the library's own nested calls are unchanged */
static _Thread_local void *reserved; /* the descriptor for which an algorithm was last chosen with SMs kept free */
static _Thread_local int reserved_target;

bool weft_cublas_inside(void) { return inside > 0; }

/* --- which library ----------------------------------------------------------------------------------------------- */

static void *in_file(const char *path, const char *name) {
    void *handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD), *real = handle ? weft_real_symbol(handle, name) : NULL;
    if (handle)
        dlclose(handle);
    return real;
}

/* Resolves as the linker would have for the caller: in the program's libraries, then in those that the caller was
 * loaded with. */
static void *bound_for(void *caller, const char *name, void *ours) {
    Dl_info info;
    void *real = weft_next_symbol(name);
    if (!real && dladdr(caller, &info) && info.dli_fname)
        real = in_file(info.dli_fname, name);
    if (!real || real == ours) {
        static const char *const words[] = {"cublas", NULL};
        weft_files found;
        weft_loaded_files(words, &found);
        for (int i = 0; i < found.count && (!real || real == ours); i++)
            real = in_file(found.paths[i], name);
    }
    return real == ours ? NULL : real;
}

void *weft_cublas_own(const char *name) {
    static const struct {
        const char *name;
        void *ours;
    } hooks[] = {
#define GEMM(name, args, ...) {#name, (void *)name},
#include "cublas_hooks.def"
        {"cublasLtMatmulAlgoGetHeuristic", (void *)cublasLtMatmulAlgoGetHeuristic},
        {"cublasLtMatmul", (void *)cublasLtMatmul},
    };
    for (size_t i = 0; i < sizeof hooks / sizeof *hooks; i++)
        if (strcmp(hooks[i].name, name) == 0)
            return hooks[i].ours;
    return NULL;
}

bool weft_cublas_library(const char *name) { return bound_for(NULL, name, weft_cublas_own(name)) != NULL; }

static void fill(blas *l, void *handle) {
#define FIND(name) l->name = (__typeof__(l->name))weft_real_symbol(handle, #name);
#define GEMM(name, args, ...) FIND(name)
#include "cublas_hooks.def"
    FIND(cublasLtMatmulAlgoGetHeuristic)
    FIND(cublasLtMatmul)
    FIND(cublasGetStream_v2)
    FIND(cublasSetSmCountTarget)
    FIND(cublasGetSmCountTarget)
    FIND(cublasLtMatmulDescSetAttribute)
    FIND(cublasLtMatmulDescGetAttribute)
#undef FIND
}

static const blas *with(void *real) {
    Dl_info info;
    if (!real || !dladdr(real, &info))
        return NULL;
    void *handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); /* not closed, to keep it loaded */
    if (!handle)
        return NULL;
    blas found = {.base = info.dli_fbase};
    fill(&found, handle);
    pthread_mutex_lock(&lock);
    blas *known = libraries;
    while (known && known->base != found.base)
        known = known->next;
    if (!known && (known = malloc(sizeof *known))) {
        *known = found;
        known->next = libraries;
        libraries = known;
    }
    pthread_mutex_unlock(&lock);
    return known;
}

/* Each call site is looked up once per thread, because a lookup costs microseconds. Call sites with the same hash use
 * the next free slots. One call site may call several functions through a pointer. */
static const blas *of_caller(void *caller, const char *name, void *ours) {
    unsigned first = (unsigned)(((uintptr_t)caller * 0x9e3779b97f4a7c15u) >> 57), at = first; /* CALLERS is 2^7 */
    for (unsigned i = 0; i < CALLERS && callers[at].address; i++, at = (first + i) % CALLERS)
        if (LIKELY(callers[at].address == caller && callers[at].function == ours))
            return callers[at].library;
    const blas *l = with(bound_for(caller, name, ours));
    dlerror(); /* the program must not see our failed lookups */
    if (l) {   /* if all slots are taken, this replaces the first one */
        callers[at].address = caller;
        callers[at].function = ours;
        callers[at].library = l;
    }
    return l;
}

/* --- when SMs are kept free ------------------------------------------------------------------------------------- */

/* torch and cuBLAS document that this variable makes results reproducible. */
static bool wants_determinism(void) {
    static _Atomic int known;
    int now = atomic_load_explicit(&known, memory_order_relaxed);
    if (now == 0) {
        const char *value = getenv("CUBLAS_WORKSPACE_CONFIG");
        now = value && *value ? 1 : -1;
        atomic_store_explicit(&known, now, memory_order_relaxed);
    }
    return now > 0;
}

static uint32_t reserve_now(void) {
    if (inside || !weft_enabled() || !weft_attach(WEFT_API_CUDA))
        return 0;
    return weft_policy_now()->data.sm_reserve;
}

/* The number of SMs for a GEMM now; 0: leave it unchanged. `stream`: NULL if unknown. */
static int target(uint32_t reserve, CUstream stream) {
    CUstream which = stream ? weft_stream(stream, false) : NULL;
    if (!weft_comm_in_flight(which, which && weft_capturing(which)))
        return 0;
    if (wants_determinism()) {
        weft_count(WEFT_COUNT_SM_DETERMINISM);
        return 0;
    }
    int mode = weft_capture_relax();
    uint32_t sms = weft_cuda_backend.sm_count();
    weft_capture_restore(mode);
    if (sms <= reserve) {
        weft_count(WEFT_COUNT_SM_FAILURES);
        return 0;
    }
    return (int)(sms - reserve);
}

/* --- cuBLAS ----------------------------------------------------------------------------------------------------- */

static bool handle_reserve(const blas *l, void *handle) {
    uint32_t reserve = reserve_now();
    CUstream stream = NULL;
    int own = 0;
    if (LIKELY(!reserve))
        return false;
    if (!l->cublasSetSmCountTarget || !l->cublasGetSmCountTarget || !l->cublasGetStream_v2 ||
        l->cublasGetStream_v2(handle, &stream) != SUCCESS || l->cublasGetSmCountTarget(handle, &own) != SUCCESS) {
        weft_count(WEFT_COUNT_SM_FAILURES);
        return false;
    }
    int sms = target(reserve, weft_stream(stream, false));
    if (!sms)
        return false;
    if (own) {
        weft_count(WEFT_COUNT_SM_OWN);
        return false;
    }
    if (l->cublasSetSmCountTarget(handle, sms) != SUCCESS) {
        weft_count(WEFT_COUNT_SM_FAILURES);
        return false;
    }
    return true;
}

static void handle_restore(const blas *l, void *handle) {
    for (int tries = 0; tries < 2; tries++) /* the handle must not keep our setting */
        if (l->cublasSetSmCountTarget(handle, 0) == SUCCESS)
            return;
}

/* Counts a GEMM call with SMs kept free. True: cuBLAS refused it, and the program's own call must be made. A GEMM that
 * failed while it ran may have written part of its result, so the program gets the error. */
static bool counted(status result) {
    weft_count(result == SUCCESS ? WEFT_COUNT_SM_RESERVED : WEFT_COUNT_SM_FAILURES);
    return result == ALLOC_FAILED || result == INVALID_VALUE || result == ARCH_MISMATCH || result == NOT_SUPPORTED;
}

#define UNWRAP(...) __VA_ARGS__
#define GEMM(name, args, ...)                                                                                          \
    status name(void *handle, __VA_ARGS__) {                                                                           \
        const blas *l = of_caller(__builtin_return_address(0), #name, (void *)name);                                   \
        if (UNLIKELY(!l || !l->name))                                                                                  \
            return NOT_INITIALIZED;                                                                                    \
        bool changed = handle_reserve(l, handle);                                                                      \
        inside++;                                                                                                      \
        status result = l->name(handle, UNWRAP args);                                                                  \
        if (UNLIKELY(changed)) {                                                                                       \
            handle_restore(l, handle);                                                                                 \
            if (counted(result))                                                                                       \
                result = l->name(handle, UNWRAP args);                                                                 \
        }                                                                                                              \
        inside--;                                                                                                      \
        return result;                                                                                                 \
    }
#include "cublas_hooks.def"

/* --- cuBLASLt --------------------------------------------------------------------------------------------------- */

static bool desc_set(const blas *l, void *desc, int sms) {
    return l->cublasLtMatmulDescSetAttribute(desc, SM_COUNT_TARGET, &sms, sizeof sms) == SUCCESS;
}

static void desc_restore(const blas *l, void *desc) {
    for (int tries = 0; tries < 2 && !desc_set(l, desc, 0); tries++)
        ;
}

/* Whether weft may set the descriptor's number of SMs: it is not set, and the library supports the attribute. */
static bool desc_free(const blas *l, void *desc) {
    int own = 0;
    size_t written = 0;
    if (!l->cublasLtMatmulDescSetAttribute || !l->cublasLtMatmulDescGetAttribute ||
        l->cublasLtMatmulDescGetAttribute(desc, SM_COUNT_TARGET, &own, sizeof own, &written) != SUCCESS) {
        weft_count(WEFT_COUNT_SM_FAILURES);
        return false;
    }
    if (own)
        weft_count(WEFT_COUNT_SM_OWN);
    return own == 0;
}

/* The number of SMs matters when the algorithm is chosen. The call that runs it gets the same number. */
status cublasLtMatmulAlgoGetHeuristic(LT_HEURISTIC) {
    const blas *l = of_caller(__builtin_return_address(0), "cublasLtMatmulAlgoGetHeuristic",
                              (void *)cublasLtMatmulAlgoGetHeuristic);
    if (UNLIKELY(!l || !l->cublasLtMatmulAlgoGetHeuristic))
        return NOT_INITIALIZED;
    uint32_t reserve = reserve_now();
    int sms = UNLIKELY(reserve) ? target(reserve, NULL) : 0;
    bool changed = sms && desc_free(l, desc) && desc_set(l, desc, sms);
    status result = l->cublasLtMatmulAlgoGetHeuristic(lt, desc, a, b, c, d, preference, wanted, results, found);
    if (UNLIKELY(changed)) {
        desc_restore(l, desc);
        changed = result == SUCCESS && *found > 0;
        if (!changed)
            result = l->cublasLtMatmulAlgoGetHeuristic(lt, desc, a, b, c, d, preference, wanted, results, found);
    }
    if (UNLIKELY(reserve) && !inside) {
        reserved = changed ? desc : NULL;
        reserved_target = sms;
    }
    return result;
}

status cublasLtMatmul(LT_MATMUL) {
    const blas *l = of_caller(__builtin_return_address(0), "cublasLtMatmul", (void *)cublasLtMatmul);
    if (UNLIKELY(!l || !l->cublasLtMatmul))
        return NOT_INITIALIZED;
    uint32_t reserve = reserve_now();
    int sms = 0;
    if (UNLIKELY(reserve)) /* an algorithm that was chosen for all SMs runs on all of them */
        sms = !algo ? target(reserve, weft_stream(stream, false)) : reserved == desc ? reserved_target : 0;
    bool changed = sms && desc_free(l, desc) && desc_set(l, desc, sms);
    inside++;
    status result = l->cublasLtMatmul(lt, desc, alpha, a, ad, b, bd, beta, c, cd, d, dd, algo, workspace, size, stream);
    if (UNLIKELY(changed)) {
        desc_restore(l, desc);
        if (counted(result))
            result =
                l->cublasLtMatmul(lt, desc, alpha, a, ad, b, bd, beta, c, cd, d, dd, algo, workspace, size, stream);
    }
    inside--;
    return result;
}

void weft_forget_cublas(void) { pthread_mutex_init(&lock, NULL); }
