/* The limit of dynamic shared memory per kernel launch. More than 48 KiB must be allowed first, by the program for its
 * own launches and by weft for shaped ones.
 *
 * The limit in the driver is never below the program's own. weft raises it, and lowers it only to the larger of both
 * needs; a lock per function serializes this with the program's own calls. The program must not notice: it reads back
 * its own limit, and for a launch over that limit, weft resets the limit in the driver, which then refuses the launch
 * as it would without weft. Such launches are detected when a kernel is looked up for the first time. They are not
 * cached, so each one is detected. */
#include "cuda_shim.h"

#include <pthread.h>
#include <stdlib.h>

enum { TURNS = 64, KNOWN = 1 << 17 };

typedef struct {
    int asked;        /* the program's own limit; -1: not read yet */
    int needed;       /* the limit that shaped launches need */
    int in_driver;    /* the value that weft or the program set last */
    int measured_by;  /* number of threads that have raised it temporarily, to measure */
    uint32_t largest; /* the largest size among the launches that were looked up */
    void *launched;   /* the handle of those launches if it is not the function but a CUkernel */
    uint32_t epoch;   /* after a later unload, the handle may belong to another function */
} need;

static weft_map needs; /* by function */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* One lock per function (by hash), since a driver call may wait for the GPU. */
static pthread_mutex_t turns[TURNS] = {[0 ... TURNS - 1] = PTHREAD_MUTEX_INITIALIZER};
static _Atomic bool raised;               /* some function's limit is, or was, above the program's own */
static _Thread_local bool in_turn;        /* set during driver calls, from which a profiler may call us back */
static _Thread_local CUfunction withheld; /* the function whose limit is reset until the driver refused its launch */

static pthread_mutex_t *turn_of(CUfunction f) { return &turns[weft_map_hash((uint64_t)(uintptr_t)f, 0) % TURNS]; }

static CUresult set(CUfunction f, int bytes) {
    return weft_cuda()->cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
}

static bool get(CUfunction f, int attribute, int *value) {
    return weft_cuda()->cuFuncGetAttribute(value, attribute, f) == CUDA_SUCCESS;
}

/* After something was unloaded: if the function still has the limit that weft set, it is the same function. */
static void check_age(CUfunction f, need *n) {
    uint32_t now = weft_handle_epoch();
    int limit;
    if (n->epoch == now)
        return;
    if (n->asked >= 0 && n->in_driver > n->asked && get(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &limit) &&
        limit == n->in_driver)
        n->epoch = now;
    else
        *n = (need){.asked = -1, .epoch = now};
}

static need *known_need(CUfunction f) {
    pthread_mutex_lock(&lock);
    need *n = weft_map_find(&needs, (uint64_t)(uintptr_t)f, 0);
    pthread_mutex_unlock(&lock);
    if (n)
        check_age(f, n);
    return n;
}

/* Callers hold the function's turn. NULL if out of memory or space; the limit is then not lowered again. */
static need *need_of(CUfunction f) {
    pthread_mutex_lock(&lock);
    need *n = weft_map_find(&needs, (uint64_t)(uintptr_t)f, 0);
    if (!n && needs.live < KNOWN && (n = malloc(sizeof *n))) {
        *n = (need){.asked = -1, .epoch = weft_handle_epoch()};
        if (!weft_map_put(&needs, (uint64_t)(uintptr_t)f, 0, n)) {
            free(n);
            n = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
    if (n)
        check_age(f, n);
    return n;
}

/* The limit in the driver is now above the program's own: check launches again that were looked up before. */
static void note_raised(CUfunction f, const need *n) {
    atomic_store(&raised, true);
    if (n->largest > (uint32_t)n->asked) {
        weft_forget_larger(f, (uint32_t)n->asked);
        if (n->launched)
            weft_forget_larger(n->launched, (uint32_t)n->asked);
    }
}

static void set_to_both(CUfunction f, need *n) {
    int bytes = n->asked > n->needed ? n->asked : n->needed;
    if (set(f, bytes) == CUDA_SUCCESS)
        n->in_driver = bytes;
    if (n->in_driver > n->asked)
        note_raised(f, n);
}

static void lower(CUfunction f, int before, int shaped) {
    pthread_mutex_t *turn = turn_of(f);
    pthread_mutex_lock(turn);
    need *n = need_of(f);
    if (n) {
        n->measured_by -= n->measured_by > 0;
        n->needed = shaped > n->needed ? shaped : n->needed;
        n->asked = n->asked >= 0 ? n->asked : before;
        set_to_both(f, n);
    }
    pthread_mutex_unlock(turn);
}

/* A limit in the driver that is not weft's is the program's own; it may have been set in a way that weft cannot see. */
static bool learn_limit(CUfunction f, need *n) {
    int limit;
    if (n->measured_by)
        return true;
    if (!get(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &limit))
        return false;
    if (n->asked < 0 || limit != n->in_driver)
        n->asked = n->in_driver = limit;
    return true;
}

/* Raises the limit to the maximum, to measure. `before`: the limit before weft ever raised it, since another thread may
 * be measuring right now. */
static bool raise_from(CUfunction f, size_t dynamic_bytes, int most, int *before) {
    pthread_mutex_t *turn = turn_of(f);
    pthread_mutex_lock(turn);
    need *n = need_of(f);
    bool known = n ? learn_limit(f, n) : get(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, before);
    if (n && known)
        *before = n->asked;
    bool done = known && dynamic_bytes <= (size_t)*before && /* else the driver refuses the program's own launch */
                set(f, most) == CUDA_SUCCESS;
    if (done && n)
        n->measured_by++;
    pthread_mutex_unlock(turn);
    return done;
}

bool weft_pin_function(CUfunction f, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes) {
    const weft_cuda_calls *cu = weft_cuda();
    int fixed, before, limit = weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    if (!f || !cu->cuFuncGetAttribute || !cu->cuFuncSetAttribute ||
        !get(f, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &fixed) || limit <= fixed ||
        !raise_from(f, dynamic_bytes, limit - fixed, &before))
        return false;
    bool pinned = weft_pin_size(weft_occupancy, f, threads, dynamic_bytes, (size_t)(limit - fixed), blocks, bytes);
    lower(f, before, pinned ? (int)*bytes : 0);
    return pinned;
}

/* --- launches over the program's own limit ------------------------------------------------------------------- */

static bool exceeded(CUfunction f, need *n, size_t dynamic_bytes) {
    if (!learn_limit(f, n) || dynamic_bytes <= (size_t)n->asked)
        return false;
    if (n->in_driver > n->asked && set(f, n->asked) == CUDA_SUCCESS)
        withheld = f;
    return true;
}

bool weft_limit_exceeded(void *handle, size_t dynamic_bytes) {
    const weft_cuda_calls *cu = weft_cuda();
    CUfunction f = dynamic_bytes > 0 && cu->cuFuncSetAttribute ? weft_cuda_function(handle) : NULL;
    if (!f || !cu->cuFuncGetAttribute)
        return false;
    pthread_mutex_t *turn = turn_of(f);
    pthread_mutex_lock(turn);
    need *n = need_of(f);
    bool over = n && exceeded(f, n, dynamic_bytes);
    if (n && !over) {
        n->largest = dynamic_bytes > n->largest ? (uint32_t)dynamic_bytes : n->largest;
        n->launched = handle != (void *)f ? handle : n->launched;
    }
    pthread_mutex_unlock(turn);
    return over;
}

void weft_limit_restore(void) {
    CUfunction f = withheld;
    if (LIKELY(!f))
        return;
    withheld = NULL;
    pthread_mutex_t *turn = turn_of(f);
    pthread_mutex_lock(turn);
    need *n = known_need(f);
    if (n && n->asked >= 0 && n->in_driver > n->asked)
        set(f, n->in_driver);
    pthread_mutex_unlock(turn);
}

bool weft_limit_withheld(void *handle, size_t dynamic_bytes) {
    return atomic_load(&raised) && weft_attach(WEFT_API_CUDA) && weft_limit_exceeded(handle, dynamic_bytes);
}

/* --- the program's own calls --------------------------------------------------------------------------------- */

/* cuDNN sets the limit before many launches, so the driver is asked only once which function a handle is. A CUkernel is
 * a different function in each context. */
static CUfunction function_of(void *handle) {
    enum { REMEMBERED = 64 };
    static _Thread_local struct {
        void *handle;
        CUcontext context;
        CUfunction function;
        uint32_t epoch;
    } remembered[REMEMBERED];
    CUcontext context;
    uint32_t now = weft_handle_epoch();
    if (!weft_cuda()->cuCtxGetCurrent || weft_cuda()->cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return weft_cuda_function(handle);
    __typeof__(&remembered[0]) one = &remembered[weft_map_hash((uint64_t)(uintptr_t)handle, 0) % REMEMBERED];
    if (one->handle != handle || one->context != context || one->epoch != now) {
        one->function = weft_cuda_function(handle);
        one->handle = one->function ? handle : NULL;
        one->context = context;
        one->epoch = now;
    }
    return one->function;
}

/* The function whose limit the program's call is about; NULL: the call is only forwarded. */
static CUfunction of_program(void *handle, int attribute) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || !handle || in_turn ||
        !weft_attach(WEFT_API_CUDA))
        return NULL;
    return function_of(handle);
}

static CUfunction of_program_on(CUkernel kernel, int attribute, CUdevice device) {
    CUdevice current;
    if (!weft_cuda()->cuCtxGetDevice || weft_cuda()->cuCtxGetDevice(&current) != CUDA_SUCCESS || current != device)
        return NULL;
    return of_program(kernel, attribute);
}

/* The driver has accepted the program's value; set ours again if it is larger. */
static void note_set(CUfunction f, int value) {
    need *n = need_of(f);
    if (!n)
        return;
    n->asked = n->in_driver = value;
    if (n->needed > value)
        set_to_both(f, n);
}

static void tell_own(CUfunction f, int *value) {
    need *n = known_need(f);
    if (n && n->asked >= 0 && (n->measured_by || *value == n->in_driver))
        *value = n->asked;
}

/* Makes the driver's call in the function's turn and, if it succeeds, THEN. */
#define IN_TURN(f, CALL, THEN)                                                                                         \
    pthread_mutex_t *turn = turn_of(f);                                                                                \
    pthread_mutex_lock(turn);                                                                                          \
    in_turn = true;                                                                                                    \
    CUresult result = CALL;                                                                                            \
    in_turn = false;                                                                                                   \
    if (result == CUDA_SUCCESS)                                                                                        \
        THEN;                                                                                                          \
    pthread_mutex_unlock(turn);                                                                                        \
    return result

CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value) {
    CUfunction own = of_program(f, attribute);
    if (!own)
        return REAL(cuFuncSetAttribute)(f, attribute, value);
    IN_TURN(own, REAL(cuFuncSetAttribute)(f, attribute, value), note_set(own, value));
}

CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) {
    CUfunction own = of_program_on(kernel, attribute, device);
    if (!own)
        return REAL(cuKernelSetAttribute)(attribute, value, kernel, device);
    IN_TURN(own, REAL(cuKernelSetAttribute)(attribute, value, kernel, device), note_set(own, value));
}

CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction f) {
    CUfunction own = atomic_load(&raised) ? of_program(f, attribute) : NULL;
    if (!own)
        return REAL(cuFuncGetAttribute)(value, attribute, f);
    IN_TURN(own, REAL(cuFuncGetAttribute)(value, attribute, f), tell_own(own, value));
}

CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device) {
    CUfunction own = atomic_load(&raised) ? of_program_on(kernel, attribute, device) : NULL;
    if (!own)
        return REAL(cuKernelGetAttribute)(value, attribute, kernel, device);
    IN_TURN(own, REAL(cuKernelGetAttribute)(value, attribute, kernel, device), tell_own(own, value));
}

/* The driver's answer depends on the limit, too. */
#define OCCUPANCY(CALL)                                                                                                \
    bool over = weft_limit_withheld(f, dynamic_bytes);                                                                 \
    CUresult result = CALL;                                                                                            \
    if (over)                                                                                                          \
        weft_limit_restore();                                                                                          \
    return result

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t dynamic_bytes) {
    OCCUPANCY(REAL(cuOccupancyMaxActiveBlocksPerMultiprocessor)(blocks, f, threads, dynamic_bytes));
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int threads,
                                                              size_t dynamic_bytes, unsigned flags) {
    OCCUPANCY(REAL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(blocks, f, threads, dynamic_bytes, flags));
}

void weft_forget_limits(void) {
    pthread_mutex_init(&lock, NULL);
    for (int i = 0; i < TURNS; i++)
        pthread_mutex_init(&turns[i], NULL);
    weft_map_clear(&needs);
    atomic_store(&raised, false);
    withheld = NULL;
}
