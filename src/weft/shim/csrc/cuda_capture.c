/* Open captures, and the destruction of streams, modules and contexts. */
#include "tracer.h"

#include <pthread.h>
#include <string.h>

enum { CAPTURES = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The streams that are capturing now. A stale entry only costs a driver query per launch. */
static CUstream capture_streams[CAPTURES]; /* guarded by the lock */

bool weft_is_capturing(CUstream stream) {
    int status = 0;
    return weft_cuda()->cuStreamIsCapturing && weft_cuda()->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != 0;
}

int weft_capture_relax_where_open(void) {
    return LIKELY(atomic_load_explicit(&weft_hot.captures, memory_order_relaxed) <= 0) ? -1 : weft_capture_relax();
}

static CUresult begun(CUresult result, CUstream stream) {
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < CAPTURES && capture_streams[i])
        i++;
    if (i < CAPTURES)
        capture_streams[i] = stream;
    atomic_fetch_add(&weft_hot.captures, 1);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Callers hold the lock. */
static void close_capture(int i) {
    capture_streams[i] = NULL;
    if (atomic_fetch_sub(&weft_hot.captures, 1) <= 1)
        weft_comm_capture_over();
}

static void ended(CUstream stream, bool was_capturing) {
    if (!was_capturing)
        return;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < CAPTURES && capture_streams[i] != stream)
        i++;
    if (i < CAPTURES)
        close_capture(i);
    else if (atomic_fetch_sub(&weft_hot.captures, 1) <= 1) /* this capture did not fit into the list */
        weft_comm_capture_over();
    pthread_mutex_unlock(&lock);
}

/* If a stream is destroyed, its capture ends without cuStreamEndCapture, so the driver is asked about listed
 * streams. */
bool weft_capture_open(void) {
    CUstream streams[CAPTURES];
    if (atomic_load(&weft_hot.captures) <= 0)
        return false;
    pthread_mutex_lock(&lock);
    memcpy(streams, capture_streams, sizeof streams);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < CAPTURES; i++)
        if (streams[i] && !weft_is_capturing(streams[i]))
            ended(streams[i], true);
    return atomic_load(&weft_hot.captures) > 0;
}

static void stream_gone(CUstream stream) {
    if (atomic_load(&weft_hot.captures) <= 0)
        return;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES; i++)
        if (capture_streams[i] == stream)
            close_capture(i);
    pthread_mutex_unlock(&lock);
}

#define BEGINS(suffix, per_thread)                                                                                     \
    CUresult cuStreamBeginCapture_v2##suffix(CUstream stream, int mode) {                                              \
        return begun(REAL(cuStreamBeginCapture_v2##suffix)(stream, mode), weft_stream(stream, per_thread));            \
    }                                                                                                                  \
    CUresult cuStreamBeginCaptureToGraph##suffix(CUstream stream, CUgraph graph, const CUgraphNode *nodes,             \
                                                 const void *data, size_t count, int mode) {                           \
        return begun(REAL(cuStreamBeginCaptureToGraph##suffix)(stream, graph, nodes, data, count, mode),               \
                     weft_stream(stream, per_thread));                                                                 \
    }                                                                                                                  \
    CUresult cuStreamBeginRecaptureToGraph##suffix(CUstream stream, int mode, CUgraph graph, void *callback,           \
                                                   void *data) {                                                       \
        return begun(REAL(cuStreamBeginRecaptureToGraph##suffix)(stream, mode, graph, callback, data),                 \
                     weft_stream(stream, per_thread));                                                                 \
    }                                                                                                                  \
    CUresult cuStreamEndCapture##suffix(CUstream stream, CUgraph *graph) {                                             \
        CUstream which = weft_stream(stream, per_thread);                                                              \
        bool was_capturing = weft_capturing(which);                                                                    \
        CUresult result = REAL(cuStreamEndCapture##suffix)(stream, graph);                                             \
        ended(which, was_capturing && (result == CUDA_SUCCESS || !weft_is_capturing(which)));                          \
        return result;                                                                                                 \
    }                                                                                                                  \
    CUresult cuStreamBeginCaptureToCig##suffix(CUstream stream, void *params) {                                        \
        return begun(REAL(cuStreamBeginCaptureToCig##suffix)(stream, params), weft_stream(stream, per_thread));        \
    }                                                                                                                  \
    CUresult cuStreamEndCaptureToCig##suffix(CUstream stream) {                                                        \
        CUresult result = REAL(cuStreamEndCaptureToCig##suffix)(stream);                                               \
        if (result == CUDA_SUCCESS)                                                                                    \
            stream_gone(weft_stream(stream, per_thread)); /* ends the capture's entry */                               \
        return result;                                                                                                 \
    }
BEGINS(, false)
BEGINS(_ptsz, true)

/* --- destroyed handles ------------------------------------------------------------------------------------ */

CUresult cuStreamDestroy_v2(CUstream stream) {
    stream_gone(stream);
    weft_trace_stream_gone(stream);
    return REAL(cuStreamDestroy_v2)(stream);
}

CUresult cuModuleUnload(CUmodule module) {
    weft_forget_handles();
    return REAL(cuModuleUnload)(module);
}

CUresult cuLibraryUnload(CUlibrary library) {
    weft_forget_handles();
    return REAL(cuLibraryUnload)(library);
}

/* A destroyed context loses its kernels, including ours, its captures, and the collectives it had in flight. */
static CUresult context_gone(CUresult result, CUcontext context, bool gone) {
    if (result == CUDA_SUCCESS && gone) {
        weft_forget_handles();
        weft_head_start_context_gone(context);
        weft_placed_context_gone(context);
        weft_trace_stamps_forget();
        weft_flight_context_gone();
    }
    return result;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    weft_trace_context_gone(context);
    weft_forget_handles();
    return context_gone(REAL(cuCtxDestroy_v2)(context), context, true);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    weft_trace_context_gone(NULL);
    weft_forget_handles();
    return context_gone(REAL(cuDevicePrimaryCtxReset_v2)(device), NULL, true);
}

/* The last release destroys the context. Some libraries (UCX) retain and release it for every operation, so nothing is
 * forgotten if it still exists. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    unsigned flags;
    int active = 0;
    uint32_t held = weft_trace_context_gone(NULL); /* until the context's state is known */
    CUresult result = REAL(cuDevicePrimaryCtxRelease_v2)(device);
    if (weft_cuda()->cuDevicePrimaryCtxGetState &&
        weft_cuda()->cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS)
        active = 0;
    if (held && active)
        weft_trace_contexts_back(held);
    return context_gone(result, NULL, !active);
}

CUresult cuGreenCtxCreate(CUgreenCtx *made, void *resources, CUdevice device, unsigned flags) {
    weft_sms_partitioned();
    return REAL(cuGreenCtxCreate)(made, resources, device, flags);
}

/* Other contexts are kept, unless the driver does not say which context this is; then all are forgotten. */
CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    CUcontext context = NULL;
    if (!weft_cuda()->cuCtxFromGreenCtx || weft_cuda()->cuCtxFromGreenCtx(&context, green) != CUDA_SUCCESS)
        context = NULL;
    weft_forget_handles();
    return context_gone(REAL(cuGreenCtxDestroy)(green), context, true);
}

void weft_forget_captures(void) {
    pthread_mutex_init(&lock, NULL);
    memset(capture_streams, 0, sizeof capture_streams);
    atomic_store(&weft_hot.captures, 0);
}
