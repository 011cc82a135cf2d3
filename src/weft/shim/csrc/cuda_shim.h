/* The CUDA side of the shim: the exported functions, the driver's real functions, and the internal interfaces. */
#ifndef WEFT_CUDA_SHIM_H
#define WEFT_CUDA_SHIM_H

#include "cuda_api.h"
#include "weft.h"

/* --- the functions that replace the driver's (names and signatures are the driver's) --------------- */

#define LAUNCH_ARGS                                                                                                    \
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,       \
        CUstream stream, void **params
#define PAIR(name, ...)                                                                                                \
    EXPORT CUresult name(__VA_ARGS__);                                                                                 \
    EXPORT CUresult name##_ptsz(__VA_ARGS__)

EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags);
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags, int *status);
PAIR(cuLaunchKernel, LAUNCH_ARGS, void **extra);
PAIR(cuLaunchKernelEx, const CUlaunchConfig *config, CUfunction f, void **params, void **extra);
PAIR(cuLaunchCooperativeKernel, LAUNCH_ARGS);
PAIR(cuStreamBeginCapture_v2, CUstream stream, int mode);
PAIR(cuStreamBeginCaptureToGraph, CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const void *data,
     size_t count, int mode);
PAIR(cuStreamBeginRecaptureToGraph, CUstream stream, int mode, CUgraph graph, void *callback, void *data);
PAIR(cuStreamEndCapture, CUstream stream, CUgraph *graph);
PAIR(cuStreamBeginCaptureToCig, CUstream stream, void *params);
PAIR(cuStreamEndCaptureToCig, CUstream stream);
EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size);
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
PAIR(cuGraphInstantiateWithParams, CUgraphExec *exec, CUgraph graph, void *params);
EXPORT CUresult cuGraphAddKernelNode(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                     const CUDA_KERNEL_NODE_PARAMS *params);
EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                        const CUDA_KERNEL_NODE_PARAMS *params);
EXPORT CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params);
EXPORT CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params);
EXPORT CUresult cuGraphAddNode(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUgraphNodeParams *params);
EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies, const void *data,
                                  size_t count, CUgraphNodeParams *params);
EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies, const void *data,
                                  size_t count, CUgraphNodeParams *params);
EXPORT CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params);
EXPORT CUresult cuGraphNodeSetParams_v2(CUgraphNode node, CUgraphNodeParams *params);
EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error, int *result);
EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void *result);
EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const void *params);
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                  const CUDA_KERNEL_NODE_PARAMS *params);
EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params);
EXPORT CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child);
EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled);
EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec);
PAIR(cuGraphLaunch, CUgraphExec exec, CUstream stream);
EXPORT CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value);
EXPORT CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device);
EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction f);
EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device);
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads,
                                                            size_t dynamic_bytes);
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int threads,
                                                                     size_t dynamic_bytes, unsigned flags);
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name);
EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name);
EXPORT CUresult cuKernelGetFunction(CUfunction *f, CUkernel kernel);
EXPORT CUresult cuStreamDestroy_v2(CUstream stream);
EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *made, void *resources, CUdevice device, unsigned flags);
EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx context);
PAIR(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned flags);
PAIR(cuLaunchHostFunc, CUstream stream, void *function, void *data);
PAIR(cuLaunchHostFunc_v2, CUstream stream, void *function, void *data, unsigned mode);
PAIR(cuStreamWaitValue32_v2, CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags);
PAIR(cuStreamWaitValue64_v2, CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags);
PAIR(cuStreamBatchMemOp_v2, CUstream stream, unsigned count, void *operations, unsigned flags);
PAIR(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
PAIR(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t size, CUstream stream);
PAIR(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t size, CUstream stream);
PAIR(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
PAIR(cuMemcpyPeerAsync, CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size,
     CUstream stream);
PAIR(cuMemcpyBatchAsync, CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, void *attributes,
     size_t *places, size_t attribute_count, size_t *failed, CUstream stream);
PAIR(cuMemcpyBatchAsync_v2, CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, void *attributes,
     size_t *places, size_t attribute_count, CUstream stream);
PAIR(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *copy, CUstream stream);
PAIR(cuMemcpy3DAsync_v2, const CUDA_MEMCPY3D *copy, CUstream stream);
PAIR(cuMemsetD8Async, CUdeviceptr to, unsigned char value, size_t count, CUstream stream);
PAIR(cuMemsetD16Async, CUdeviceptr to, unsigned short value, size_t count, CUstream stream);
PAIR(cuMemsetD32Async, CUdeviceptr to, unsigned value, size_t count, CUstream stream);
PAIR(cuMemsetD2D8Async, CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
     CUstream stream);
PAIR(cuMemsetD2D16Async, CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
     CUstream stream);
PAIR(cuMemsetD2D32Async, CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height, CUstream stream);
EXPORT CUresult cuModuleUnload(CUmodule module);
EXPORT CUresult cuLibraryUnload(CUlibrary library);
EXPORT CUresult cuCtxDestroy_v2(CUcontext context);
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);

/* --- cuda_driver.c: the driver's own functions ------------------------------------------------------- */

/* The real function behind each hook. */
typedef struct {
#define HOOK(symbol, asked, per_thread, from, until) _Atomic(__typeof__(&symbol)) symbol;
#define ALIAS(symbol, asked, per_thread, from, until)
#include "cuda_hooks.def"
} weft_cuda_real;
extern weft_cuda_real weft_real;

/* REAL(name): the real function, found on first use. If a hook is reached, the driver normally has its function. */
#define REAL(symbol)                                                                                                   \
    ({                                                                                                                 \
        __typeof__(&symbol) real_ = atomic_load_explicit(&weft_real.symbol, memory_order_relaxed);                     \
        LIKELY(real_ != NULL) ? real_ : (__typeof__(&symbol))weft_cuda_find(#symbol);                                  \
    })
void *weft_cuda_find(const char *symbol);
void *weft_cuda_own(const char *name);              /* our function of that name, or NULL */
bool weft_cuda_driver(const char *name);            /* whether a loaded driver has this function */
void weft_cuda_found(const char *name, void *real); /* remember the real function that the program found */

/* Driver functions for the shim's own use, which bypass other tools. Any may be NULL on an old driver. */
#define CUDA_CALLS(X)                                                                                                  \
    X(cuFuncGetName, CUresult (*)(const char **, CUfunction))                                                          \
    X(cuKernelGetName, CUresult (*)(const char **, CUkernel))                                                          \
    X(cuKernelGetFunction, CUresult (*)(CUfunction *, CUkernel))                                                       \
    X(cuFuncGetAttribute, CUresult (*)(int *, int, CUfunction))                                                        \
    X(cuFuncSetAttribute, CUresult (*)(CUfunction, int, int))                                                          \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, CUresult (*)(int *, CUfunction, int, size_t))                       \
    X(cuCtxGetCurrent, CUresult (*)(CUcontext *))                                                                      \
    X(cuCtxSetCurrent, CUresult (*)(CUcontext))                                                                        \
    X(cuCtxFromGreenCtx, CUresult (*)(CUcontext *, CUgreenCtx))                                                        \
    X(cuCtxGetDevice, CUresult (*)(CUdevice *))                                                                        \
    X(cuCtxGetStreamPriorityRange, CUresult (*)(int *, int *))                                                         \
    X(cuDeviceGetAttribute, CUresult (*)(int *, int, CUdevice))                                                        \
    X(cuStreamIsCapturing, CUresult (*)(CUstream, int *))                                                              \
    X(cuThreadExchangeStreamCaptureMode, CUresult (*)(int *))                                                          \
    X(cuStreamWriteValue32_v2, CUresult (*)(CUstream, CUdeviceptr, uint32_t, unsigned))                                \
    X(cuMemHostRegister_v2, CUresult (*)(void *, size_t, unsigned))                                                    \
    X(cuDevicePrimaryCtxGetState, CUresult (*)(CUdevice, unsigned *, int *))                                           \
    X(cuMemHostGetDevicePointer_v2, CUresult (*)(CUdeviceptr *, void *, unsigned))                                     \
    X(cuModuleLoadData, CUresult (*)(CUmodule *, const void *))                                                        \
    X(cuModuleGetFunction, CUresult (*)(CUfunction *, CUmodule, const char *))                                         \
    X(cuGraphGetNodes, CUresult (*)(CUgraph, CUgraphNode *, size_t *))                                                 \
    X(cuGraphNodeGetType, CUresult (*)(CUgraphNode, int *))                                                            \
    X(cuGraphKernelNodeGetParams_v2, CUresult (*)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS *))                             \
    X(cuGraphChildGraphNodeGetGraph, CUresult (*)(CUgraphNode, CUgraph *))                                             \
    X(cuDriverGetVersion, CUresult (*)(int *))                                                                         \
    X(cuDeviceGetName, CUresult (*)(char *, int, CUdevice))                                                            \
    X(cuPointerGetAttribute, CUresult (*)(void *, int, CUdeviceptr))                                                   \
    X(cuEventCreate, CUresult (*)(CUevent *, unsigned))                                                                \
    X(cuEventRecord, CUresult (*)(CUevent, CUstream))                                                                  \
    X(cuEventQuery, CUresult (*)(CUevent))                                                                             \
    X(cuEventElapsedTime, CUresult (*)(float *, CUevent, CUevent))                                                     \
    X(cuEventDestroy_v2, CUresult (*)(CUevent))                                                                        \
    X(cuStreamCreateWithPriority, CUresult (*)(CUstream *, unsigned, int))                                             \
    X(cuStreamDestroy_v2, CUresult (*)(CUstream))                                                                      \
    X(cuStreamQuery, CUresult (*)(CUstream))                                                                           \
    X(cuStreamGetFlags, CUresult (*)(CUstream, unsigned *))                                                            \
    X(cuStreamGetId, CUresult (*)(CUstream, unsigned long long *))                                                     \
    X(cuStreamGetPriority, CUresult (*)(CUstream, int *))                                                              \
    X(cuStreamWaitEvent, CUresult (*)(CUstream, CUevent, unsigned))

typedef struct {
#define X(name, type) __typeof__((type)0) name;
    CUDA_CALLS(X)
#undef X
} weft_cuda_calls;
const weft_cuda_calls *weft_cuda(void);

extern const weft_backend weft_cuda_backend;
CUfunction weft_cuda_function(void *handle); /* of a CUfunction or a CUkernel, in this context; NULL: unknown */
void weft_cuda_kernel_sizes(void *handle, int *registers, int *static_shared); /* unknown values stay unchanged */
int weft_cuda_device_attribute(int attribute); /* of the current context's device; 0: unknown */

/* Allow our own driver calls while another thread captures; they touch nothing that is being captured. */
int weft_capture_relax(void);
int weft_capture_relax_where_open(void); /* the same; costs one load while nothing is captured */
void weft_capture_restore(int mode);

/* A stream as an explicit handle: NULL becomes the default stream of the calling convention. */
static inline CUstream weft_stream(CUstream stream, bool per_thread) {
    return stream ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* --- cuda_limits.c, cuda_names.c ------------------------------------------------------------------------- */

/* Finds the dynamic shared memory with which exactly `blocks` blocks of this function fit, and raises its limit so that
 * it can be launched with that amount. */
bool weft_pin_function(CUfunction f, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes);
/* Whether this is more than the program's own limit. If so, and weft has raised the limit, it is reset to the program's
 * own until weft_limit_restore, which this thread calls after the driver has refused the launch. */
bool weft_limit_exceeded(void *handle, size_t dynamic_bytes);
void weft_limit_restore(void);
bool weft_limit_withheld(void *handle, size_t dynamic_bytes); /* the same; only one load if weft raised no limit */
int weft_occupancy(void *f, unsigned threads, size_t dynamic_bytes); /* 0: unknown */
bool weft_name_noted(void *handle, char *out, size_t size); /* the name by which the program looked up the kernel */

/* --- cuda_graph.c -------------------------------------------------------------------------------------- */

/* A kernel of a graph. */
typedef struct {
    CUgraphNode node;
    CUgraphNode child; /* the child-graph node of the outermost graph that contains it; NULL: that graph itself */
    uint32_t row;
    bool shaped, communicates, disabled;
} weft_graph_kernel;

/* --- cuda_capture.c ------------------------------------------------------------------------------------ */

bool weft_is_capturing(CUstream stream); /* asks the driver */

static inline bool weft_capturing(CUstream stream) {
    return UNLIKELY(atomic_load_explicit(&weft_hot.captures, memory_order_relaxed) > 0) && weft_is_capturing(stream);
}

bool weft_capture_open(void); /* whether any stream captures; asks the driver */

/* --- cuda_headstart.c ---------------------------------------------------------------------------------- */

/* Our waiting kernels in the current context, loaded once per context; NULL if not available. */
typedef struct {
    CUfunction timed, placed;
    uint64_t mhz; /* the highest clock of the GPU's SMs */
} weft_waits;

void weft_head_start(const weft_rules *rules, CUstream stream);
/* Forgets our kernels in a destroyed context. */
void weft_head_start_context_gone(/* NULL: all contexts */ CUcontext context);
weft_waits weft_wait_kernels(void);
CUresult weft_wait_launch(CUfunction wait, uint64_t mhz, uint64_t ns, CUstream stream);

/* --- cublas.c ---------------------------------------------------------------------------------------- */

bool weft_cublas_inside(void);              /* whether this thread is inside a GEMM call that weft intercepted */
void *weft_cublas_own(const char *name);    /* our function of that name, or NULL */
bool weft_cublas_library(const char *name); /* whether a loaded cuBLAS has this function */

/* --- cuda_placed.c ---------------------------------------------------------------------------------- */

enum { WEFT_PLACED_SLOTS = 8 };

/* The collectives that a compute launch waits for: words that the GPU writes, and the number each must reach. */
typedef struct {
    uint64_t at[WEFT_PLACED_SLOTS];
    uint32_t number[WEFT_PLACED_SLOTS];
    uint32_t count;
    uint64_t tally; /* see cuda_headstart.c */
} weft_placed;

/* The launch-completion event for a collective's launch. */
typedef struct {
    int lane; /* -1: none */
    CUevent event;
    bool own; /* the event is ours and must be added to the launch */
} weft_placed_mark;

bool weft_placed_begin(const CUlaunchConfig *config, CUstream stream, weft_placed_mark *mark);
void weft_placed_refused(void); /* the driver refused the launch with the event but accepted it without */
void weft_placed_end(const weft_placed_mark *mark, bool launched);
bool weft_placed_pending(CUstream stream, weft_placed *out); /* collectives that this stream must wait for */
void weft_placed_context_gone(CUcontext context);            /* NULL: all contexts */

#endif
