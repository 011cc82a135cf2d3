/* Traces copies and fills, and notes operations that delay a stream but are not spans: waits and host functions. While
 * no trace is recorded, each costs one branch. Bytes copied from the host are always counted; live tuning uses them to
 * recognize steps with longer inputs. */
#include "tracer.h"

enum { POINTER_MEMORY_TYPE = 2, POINTER_DEVICE = 9, TYPE_HOST = 1, TYPE_DEVICE = 2 };

#define RECORDING() UNLIKELY(weft_tracing() == WEFT_TRACE_RECORD)

/* --- operations that delay a stream ------------------------------------------------------------------------------ */

#define DELAYS(name, per_thread, params, ...)                                                                          \
    CUresult name params {                                                                                             \
        if (RECORDING())                                                                                               \
            weft_trace_disturbed(weft_stream(stream, per_thread));                                                     \
        return REAL(name)(__VA_ARGS__);                                                                                \
    }
#define DELAYS_PAIR(name, params, ...)                                                                                 \
    DELAYS(name, false, params, __VA_ARGS__)                                                                           \
    DELAYS(name##_ptsz, true, params, __VA_ARGS__)

DELAYS_PAIR(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), stream, event, flags)
DELAYS_PAIR(cuLaunchHostFunc, (CUstream stream, void *function, void *data), stream, function, data)
DELAYS_PAIR(cuLaunchHostFunc_v2, (CUstream stream, void *function, void *data, unsigned mode), stream, function, data,
            mode)
DELAYS_PAIR(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), stream, at,
            value, flags)
DELAYS_PAIR(cuStreamWaitValue64_v2, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags), stream, at,
            value, flags)
DELAYS_PAIR(cuStreamBatchMemOp_v2, (CUstream stream, unsigned count, void *operations, unsigned flags), stream, count,
            operations, flags)

/* --- copies ------------------------------------------------------------------------------------------------------ */

/* The driver does not know pageable host memory, so its query fails for it. */
static bool on_device(CUdeviceptr p, int *device) {
    unsigned type = 0;
    *device = -1;
    if (!weft_cuda()->cuPointerGetAttribute ||
        weft_cuda()->cuPointerGetAttribute(&type, POINTER_MEMORY_TYPE, p) != CUDA_SUCCESS || type != TYPE_DEVICE)
        return false;
    weft_cuda()->cuPointerGetAttribute(device, POINTER_DEVICE, p);
    return true;
}

static uint32_t direction(bool to_device, bool from_device, bool peers) {
    if (to_device)
        return !from_device ? WEFT_COPY_HTOD : peers ? WEFT_COPY_PTOP : WEFT_COPY_DTOD;
    return from_device ? WEFT_COPY_DTOH : WEFT_COPY_HTOH;
}

static uint32_t between(CUdeviceptr to, CUdeviceptr from) {
    int to_device, from_device, mode = weft_capture_relax();
    bool a = on_device(to, &to_device), b = on_device(from, &from_device);
    weft_capture_restore(mode);
    return direction(a, b, to_device != from_device);
}

/* If a batch has several directions, a copy between devices determines its direction, since that one communicates. */
static uint32_t of_batch(const CUdeviceptr *to, const CUdeviceptr *from, size_t count) {
    enum { EXAMINED = 64 };
    uint32_t found = WEFT_COPY_UNKNOWN;
    for (size_t i = 0; to && from && i < count && i < EXAMINED && found != WEFT_COPY_PTOP; i++) {
        uint32_t one = between(to[i], from[i]);
        found = i == 0 || one == WEFT_COPY_PTOP ? one : found;
    }
    return found;
}

static size_t sum(const size_t *sizes, size_t count) {
    size_t all = 0;
    for (size_t i = 0; sizes && i < count; i++)
        all += sizes[i];
    return all;
}

static uint32_t of_types(int to, int from) {
    bool known = to >= TYPE_HOST && to <= 3 && from >= TYPE_HOST && from <= 3; /* 4: unified, either side */
    return known ? direction(to != TYPE_HOST, from != TYPE_HOST, false) : WEFT_COPY_UNKNOWN;
}

#define uncounted(result, size) (result)

static inline CUresult from_host(CUresult result, size_t size) {
    if (result == CUDA_SUCCESS)
        weft_add(WEFT_COUNT_COPIED_BYTES, size);
    return result;
}

#define TRACED(name, per_thread, trace_kind, copy_kind, size, counted, params, ...)                                    \
    CUresult name params {                                                                                             \
        weft_trace_op op;                                                                                              \
        if (!RECORDING() || !weft_attach(WEFT_API_CUDA) ||                                                             \
            !weft_trace_before(&op, trace_kind, NULL, weft_stream(stream, per_thread), false))                         \
            return counted(REAL(name)(__VA_ARGS__), size);                                                             \
        op.record->span.copy = copy_kind;                                                                              \
        op.record->span.bytes = size;                                                                                  \
        CUresult result = REAL(name)(__VA_ARGS__);                                                                     \
        weft_trace_after(&op, weft_stream(stream, per_thread), result);                                                \
        return counted(result, size);                                                                                  \
    }
#define COPIES(name, copy_kind, size, counted, params, ...)                                                            \
    TRACED(name, false, WEFT_TRACE_MEMCPY, copy_kind, size, counted, params, __VA_ARGS__)                              \
    TRACED(name##_ptsz, true, WEFT_TRACE_MEMCPY, copy_kind, size, counted, params, __VA_ARGS__)
#define COPY(name, copy_kind, size, params, ...) COPIES(name, copy_kind, size, uncounted, params, __VA_ARGS__)
#define FILL(name, size, params, ...)                                                                                  \
    TRACED(name, false, WEFT_TRACE_MEMSET, WEFT_COPY_UNKNOWN, size, uncounted, params, __VA_ARGS__)                    \
    TRACED(name##_ptsz, true, WEFT_TRACE_MEMSET, WEFT_COPY_UNKNOWN, size, uncounted, params, __VA_ARGS__)

COPY(cuMemcpyAsync, between(to, from), size, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), to, from,
     size, stream)
COPIES(cuMemcpyHtoDAsync_v2, WEFT_COPY_HTOD, size, from_host,
       (CUdeviceptr to, const void *from, size_t size, CUstream stream), to, from, size, stream)
COPY(cuMemcpyDtoHAsync_v2, WEFT_COPY_DTOH, size, (void *to, CUdeviceptr from, size_t size, CUstream stream), to, from,
     size, stream)
COPY(cuMemcpyDtoDAsync_v2, between(to, from), size, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
     to, from, size, stream)
COPY(cuMemcpyPeerAsync, to_context == from_context ? WEFT_COPY_DTOD : WEFT_COPY_PTOP, size,
     (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size, CUstream stream), to,
     to_context, from, from_context, size, stream)
/* NCCL's copy-engine collectives use batches. Each batch is one span, since its copies may run in any order. */
COPY(cuMemcpyBatchAsync, of_batch(to, from, count), sum(sizes, count),
     (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, void *attributes, size_t *places,
      size_t attribute_count, size_t *failed, CUstream stream),
     to, from, sizes, count, attributes, places, attribute_count, failed, stream)
COPY(cuMemcpyBatchAsync_v2, of_batch(to, from, count), sum(sizes, count),
     (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, void *attributes, size_t *places,
      size_t attribute_count, CUstream stream),
     to, from, sizes, count, attributes, places, attribute_count, stream)
COPY(cuMemcpy2DAsync_v2, copy ? of_types(copy->dstMemoryType, copy->srcMemoryType) : WEFT_COPY_UNKNOWN,
     copy ? copy->WidthInBytes * copy->Height : 0, (const CUDA_MEMCPY2D *copy, CUstream stream), copy, stream)
COPY(cuMemcpy3DAsync_v2, copy ? of_types(copy->dstMemoryType, copy->srcMemoryType) : WEFT_COPY_UNKNOWN,
     copy ? copy->WidthInBytes * copy->Height * copy->Depth : 0, (const CUDA_MEMCPY3D *copy, CUstream stream), copy,
     stream)

FILL(cuMemsetD8Async, count, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream), to, value, count,
     stream)
FILL(cuMemsetD16Async, count * 2, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), to, value,
     count, stream)
FILL(cuMemsetD32Async, count * 4, (CUdeviceptr to, unsigned value, size_t count, CUstream stream), to, value, count,
     stream)
FILL(cuMemsetD2D8Async, width *height,
     (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream), to, pitch,
     value, width, height, stream)
FILL(cuMemsetD2D16Async, width * height * 2,
     (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream), to, pitch,
     value, width, height, stream)
FILL(cuMemsetD2D32Async, width * height * 4,
     (CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height, CUstream stream), to, pitch, value,
     width, height, stream)
