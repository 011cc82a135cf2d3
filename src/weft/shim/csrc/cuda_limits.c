/* How much dynamic shared memory a kernel may be launched with. Over 48 KiB it must be allowed first, by the program
 * for its own launches and by weft for shaped ones.
 *
 * The limit in the driver is never under what the program set: weft raises it and lowers it again only to the larger
 * of both needs, and the program's own calls take turns with that. */
#include "cuda_shim.h"

#include <pthread.h>
#include <stdlib.h>

enum { TURNS = 64, KNOWN = 1 << 17 };

typedef struct {
    int asked;      /* by the program; -1: never */
    int needed;     /* by shaped launches */
    uint32_t epoch; /* a handle that came back since is another function's */
} need;

static weft_map needs; /* by function */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t turns[TURNS] = {[0 ... TURNS - 1] =
                                           PTHREAD_MUTEX_INITIALIZER}; /* by function: a call may wait for the GPU */

static pthread_mutex_t *turn_of(CUfunction f) { return &turns[weft_map_hash((uint64_t)(uintptr_t)f, 0) % TURNS]; }

/* Callers have the function's turn. NULL where no memory is left: then nothing is lowered. */
static need *need_of(CUfunction f) {
    pthread_mutex_lock(&lock);
    need *n = weft_map_find(&needs, (uint64_t)(uintptr_t)f, 0);
    if (!n && needs.live < KNOWN && (n = malloc(sizeof *n))) {
        *n = (need){-1, 0, 0};
        if (!weft_map_put(&needs, (uint64_t)(uintptr_t)f, 0, n)) {
            free(n);
            n = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
    if (n && n->epoch != weft_handle_epoch())
        *n = (need){-1, 0, weft_handle_epoch()};
    return n;
}

static CUresult set(CUfunction f, int bytes) {
    return weft_cuda()->cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
}

static bool get(CUfunction f, int attribute, int *value) {
    return weft_cuda()->cuFuncGetAttribute(value, attribute, f) == CUDA_SUCCESS;
}

static void lower(CUfunction f, int before, int shaped) {
    pthread_mutex_t *turn = turn_of(f);
    pthread_mutex_lock(turn);
    need *n = need_of(f);
    if (n) {
        n->needed = shaped > n->needed ? shaped : n->needed;
        int own = n->asked >= 0 ? n->asked : before;
        set(f, own > n->needed ? own : n->needed);
    }
    pthread_mutex_unlock(turn);
}

/* What it was before weft ever raised it: another thread may be measuring right now. */
static bool limit_before(CUfunction f, int *before) {
    pthread_mutex_t *turn = turn_of(f);
    pthread_mutex_lock(turn);
    need *n = need_of(f);
    bool known = get(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, before);
    if (n && n->asked >= 0)
        *before = n->asked;
    else if (n && known)
        n->asked = *before; /* the first to look sees the limit as the program left it */
    pthread_mutex_unlock(turn);
    return known;
}

bool weft_pin_function(CUfunction f, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes) {
    const weft_cuda_calls *cu = weft_cuda();
    int fixed, before, limit = weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    if (!f || !cu->cuFuncGetAttribute || !cu->cuFuncSetAttribute ||
        !get(f, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &fixed) || limit <= fixed || !limit_before(f, &before) ||
        dynamic_bytes > (size_t)before || /* the driver refuses the program's own launch: we must not allow it */
        set(f, limit - fixed) != CUDA_SUCCESS)
        return false;
    bool pinned = weft_pin_size(weft_occupancy, f, threads, dynamic_bytes, (size_t)(limit - fixed), blocks, bytes);
    lower(f, before, pinned ? (int)*bytes : 0);
    return pinned;
}

/* --- the program's own calls --------------------------------------------------------------------------------- */

/* Call the driver with the program's value, which it may refuse, and then with ours where that is larger. */
#define IN_TURN(f, CALL, AGAIN)                                                                                        \
    pthread_mutex_t *turn = turn_of(f);                                                                                \
    pthread_mutex_lock(turn);                                                                                          \
    CUresult result = CALL;                                                                                            \
    need *n = result == CUDA_SUCCESS ? need_of(f) : NULL;                                                              \
    if (n) {                                                                                                           \
        n->asked = value;                                                                                              \
        if (n->needed > value)                                                                                         \
            AGAIN;                                                                                                     \
    }                                                                                                                  \
    pthread_mutex_unlock(turn);                                                                                        \
    return result

CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || !f || !weft_attach(WEFT_API_CUDA))
        return REAL(cuFuncSetAttribute)(f, attribute, value);
    IN_TURN(f, REAL(cuFuncSetAttribute)(f, attribute, value), set(f, n->needed));
}

CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) {
    CUfunction f = NULL;
    CUdevice current;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || !kernel || !weft_attach(WEFT_API_CUDA) ||
        !weft_cuda()->cuCtxGetDevice || weft_cuda()->cuCtxGetDevice(&current) != CUDA_SUCCESS || current != device ||
        !weft_cuda()->cuKernelGetFunction || weft_cuda()->cuKernelGetFunction(&f, kernel) != CUDA_SUCCESS)
        return REAL(cuKernelSetAttribute)(attribute, value, kernel, device);
    IN_TURN(f, REAL(cuKernelSetAttribute)(attribute, value, kernel, device), set(f, n->needed));
}

void weft_forget_limits(void) {
    pthread_mutex_init(&lock, NULL);
    for (int i = 0; i < TURNS; i++)
        pthread_mutex_init(&turns[i], NULL);
    weft_map_clear(&needs);
}
