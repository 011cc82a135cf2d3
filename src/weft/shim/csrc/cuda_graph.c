/* Graphs: kernels are captured once and run at every replay, so they are counted when the graph is launched. */
#include "cuda_shim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    CUgraphNode node;
    uint32_t row;
    bool shaped, communicates;
} graph_kernel;

typedef struct {
    size_t count, room;
    bool unhandled; /* it holds nodes whose kernels cannot be counted: bodies that run as often as the GPU decides */
    graph_kernel *kernels;
} graph_kernels;

enum { EXECUTABLES = 1 << 18, CAPTURES = 64 };
static weft_map executables; /* what each launches; guarded by the lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Streams that capture now. One too many costs a question per launch and no more. */
static CUstream capture_streams[CAPTURES]; /* guarded by the lock */
static _Atomic int captures;               /* how many, those that are not listed included */

static bool is_capturing(CUstream stream) {
    int status = 0;
    return weft_cuda()->cuStreamIsCapturing && weft_cuda()->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != 0;
}

bool weft_capturing(CUstream stream) {
    if (LIKELY(atomic_load_explicit(&captures, memory_order_relaxed) <= 0))
        return false;
    return is_capturing(stream);
}

/* --- what a graph holds --------------------------------------------------------------------------------- */

static void append(graph_kernels *l, graph_kernel k) {
    if (l->count == l->room) {
        size_t room = l->room ? l->room * 2 : 64;
        graph_kernel *grown = realloc(l->kernels, room * sizeof *grown);
        if (!grown)
            return;
        l->kernels = grown;
        l->room = room;
    }
    l->kernels[l->count++] = k;
}

static bool describe(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p, graph_kernel *out) {
    void *handle = p->func ? (void *)p->func : (void *)p->kern;
    unsigned threads = p->blockDimX * p->blockDimY * p->blockDimZ;
    *out = (graph_kernel){.node = node};
    if (!handle)
        return false;
    if (weft_shaped_form(handle, threads, p->sharedMemBytes, &out->row)) {
        out->shaped = true;
        return true;
    }
    weft_kernel k;
    weft_lookup(&weft_cuda_backend, handle, threads, p->sharedMemBytes, &k);
    out->row = k.row;
    out->communicates = k.kind == WEFT_KIND_COMM;
    return true;
}

static void read_kernel(CUgraphNode node, graph_kernels *into) {
    CUDA_KERNEL_NODE_PARAMS p = {0};
    graph_kernel k;
    if (weft_cuda()->cuGraphKernelNodeGetParams_v2 &&
        weft_cuda()->cuGraphKernelNodeGetParams_v2(node, &p) == CUDA_SUCCESS && describe(node, &p, &k))
        append(into, k);
    else
        into->unhandled = true;
}

static void read_graph(CUgraph graph, graph_kernels *into, int depth) {
    const weft_cuda_calls *cu = weft_cuda();
    size_t count = 0;
    if (depth > 16 || !cu->cuGraphGetNodes || !cu->cuGraphNodeGetType ||
        cu->cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS) {
        into->unhandled = true;
        return;
    }
    CUgraphNode *nodes = calloc(count ? count : 1, sizeof *nodes);
    if (!nodes || cu->cuGraphGetNodes(graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; i < count; i++) {
        int type = -1;
        CUgraph child;
        if (cu->cuGraphNodeGetType(nodes[i], &type) != CUDA_SUCCESS)
            into->unhandled = true;
        else if (type == CU_GRAPH_NODE_TYPE_KERNEL)
            read_kernel(nodes[i], into);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && cu->cuGraphChildGraphNodeGetGraph &&
                 cu->cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS)
            read_graph(child, into, depth + 1);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH || type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
            into->unhandled = true;
    }
    free(nodes);
}

/* --- what each executable graph launches ---------------------------------------------------------------- */

static uint64_t key_of(CUgraphExec exec) { return (uint64_t)(uintptr_t)exec; }

static void drop(graph_kernels *g) {
    if (g)
        free(g->kernels);
    free(g);
}

/* Replaces what is known of an executable graph; NULL: nothing. */
static void replace(CUgraphExec exec, graph_kernels *g) {
    pthread_mutex_lock(&lock);
    graph_kernels *old = weft_map_find(&executables, key_of(exec), 0);
    if (!g)
        weft_map_remove(&executables, key_of(exec), 0);
    else if ((!old && executables.live >= EXECUTABLES) || !weft_map_put(&executables, key_of(exec), 0, g)) {
        drop(g); /* its kernels will not be counted */
        weft_map_remove(&executables, key_of(exec), 0);
    }
    pthread_mutex_unlock(&lock);
    drop(old);
}

static void remember(CUgraphExec exec, CUgraph graph) {
    if (!weft_attach(WEFT_API_CUDA))
        return;
    graph_kernels *g = calloc(1, sizeof *g);
    if (g)
        read_graph(graph, g, 0);
    replace(exec, g);
}

static CUresult instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph) {
    if (result == CUDA_SUCCESS && exec && *exec)
        remember(*exec, graph);
    return result;
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
    return instantiated(REAL(cuGraphInstantiate_v2)(exec, graph, error, log, size), exec, graph);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiated(REAL(cuGraphInstantiateWithFlags)(exec, graph, flags), exec, graph);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, void *params) {
    return instantiated(REAL(cuGraphInstantiateWithParams)(exec, graph, params), exec, graph);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, void *params) {
    return instantiated(REAL(cuGraphInstantiateWithParams_ptsz)(exec, graph, params), exec, graph);
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error, int *outcome) {
    return instantiated(REAL(cuGraphExecUpdate)(exec, graph, error, outcome), &exec, graph);
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void *outcome) {
    return instantiated(REAL(cuGraphExecUpdate_v2)(exec, graph, outcome), &exec, graph);
}

/* A node of the executable graph now launches another kernel, or this one with another shape. */
static void change(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    graph_kernel k;
    if (!params || !weft_attach(WEFT_API_CUDA) || !describe(node, params, &k))
        return;
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    for (size_t i = 0; g && i < g->count; i++)
        if (g->kernels[i].node == node)
            g->kernels[i] = k;
    pthread_mutex_unlock(&lock);
}

/* Version 1 of the structure is the first part of version 2. */
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const void *params) {
    CUresult result = REAL(cuGraphExecKernelNodeSetParams)(exec, node, params);
    if (result == CUDA_SUCCESS && params) {
        CUDA_KERNEL_NODE_PARAMS p = {0};
        memcpy(&p, params, offsetof(CUDA_KERNEL_NODE_PARAMS, kern));
        change(exec, node, &p);
    }
    return result;
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    CUresult result = REAL(cuGraphExecKernelNodeSetParams_v2)(exec, node, params);
    if (result == CUDA_SUCCESS)
        change(exec, node, params);
    return result;
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params) {
    CUresult result = REAL(cuGraphExecNodeSetParams)(exec, node, params);
    if (result == CUDA_SUCCESS && params && params->type == CU_GRAPH_NODE_TYPE_KERNEL)
        change(exec, node, &params->kernel);
    return result;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    if (weft_attach(WEFT_API_CUDA))
        replace(exec, NULL);
    return REAL(cuGraphExecDestroy)(exec);
}

static CUresult launched(CUresult result, CUgraphExec exec, CUstream stream) {
    if (result != CUDA_SUCCESS || !weft_attach(WEFT_API_CUDA))
        return result;
    if (weft_capturing(stream)) { /* a graph inside a graph: counted when the outer one runs */
        weft_count(WEFT_COUNT_CAPTURED);
        return result;
    }
    weft_count(WEFT_COUNT_GRAPH_LAUNCHES);
    bool communicates = false;
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    for (size_t i = 0; g && i < g->count; i++) {
        weft_count_launch(weft_cell_at(g->kernels[i].row), 1, g->kernels[i].shaped);
        communicates |= g->kernels[i].communicates;
    }
    bool unhandled = !g || g->unhandled;
    pthread_mutex_unlock(&lock);
    if (unhandled)
        weft_count(WEFT_COUNT_UNHANDLED);
    if (communicates)
        weft_comm_launched(&weft_cuda_backend, weft_policy_now(), stream, false);
    return result;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    return launched(REAL(cuGraphLaunch)(exec, stream), exec, weft_stream(stream, false));
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    return launched(REAL(cuGraphLaunch_ptsz)(exec, stream), exec, weft_stream(stream, true));
}

/* --- captures --------------------------------------------------------------------------------------------- */

static CUresult begun(CUresult result, CUstream stream) {
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < CAPTURES && capture_streams[i])
        i++;
    if (i < CAPTURES)
        capture_streams[i] = stream;
    atomic_fetch_add(&captures, 1);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Callers hold the lock. */
static void close_capture(int i) {
    capture_streams[i] = NULL;
    if (atomic_fetch_sub(&captures, 1) <= 1)
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
    else if (atomic_fetch_sub(&captures, 1) <= 1) /* one that had no place */
        weft_comm_capture_over();
    pthread_mutex_unlock(&lock);
}

/* A capture ends without cuStreamEndCapture where its stream is destroyed; those still listed are asked. */
bool weft_capture_open(void) {
    CUstream streams[CAPTURES];
    if (atomic_load(&captures) <= 0)
        return false;
    pthread_mutex_lock(&lock);
    memcpy(streams, capture_streams, sizeof streams);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < CAPTURES; i++)
        if (streams[i] && !is_capturing(streams[i]))
            ended(streams[i], true);
    return atomic_load(&captures) > 0;
}

static void stream_gone(CUstream stream) {
    if (atomic_load(&captures) <= 0)
        return;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES; i++)
        if (capture_streams[i] == stream)
            close_capture(i);
    pthread_mutex_unlock(&lock);
}

#define BEGINS(suffix, per_thread)                                                                          \
    CUresult cuStreamBeginCapture_v2##suffix(CUstream stream, int mode) {                                   \
        return begun(REAL(cuStreamBeginCapture_v2##suffix)(stream, mode), weft_stream(stream, per_thread)); \
    }                                                                                                       \
    CUresult cuStreamBeginCaptureToGraph##suffix(CUstream stream, CUgraph graph, const CUgraphNode *nodes,  \
                                                 const void *data, size_t count, int mode) {                \
        return begun(REAL(cuStreamBeginCaptureToGraph##suffix)(stream, graph, nodes, data, count, mode),    \
                     weft_stream(stream, per_thread));                                                      \
    }                                                                                                       \
    CUresult cuStreamBeginRecaptureToGraph##suffix(CUstream stream, int mode, CUgraph graph, void *callback, \
                                                   void *data) {                                            \
        return begun(REAL(cuStreamBeginRecaptureToGraph##suffix)(stream, mode, graph, callback, data),      \
                     weft_stream(stream, per_thread));                                                      \
    }                                                                                                       \
    CUresult cuStreamEndCapture##suffix(CUstream stream, CUgraph *graph) {                                  \
        CUstream which = weft_stream(stream, per_thread);                                                   \
        bool was_capturing = weft_capturing(which);                                                         \
        CUresult result = REAL(cuStreamEndCapture##suffix)(stream, graph);                                  \
        ended(which, was_capturing && (result == CUDA_SUCCESS || !is_capturing(which)));                    \
        return result;                                                                                      \
    }
BEGINS(, false)
BEGINS(_ptsz, true)

/* --- handles that die ------------------------------------------------------------------------------------- */

CUresult cuStreamDestroy_v2(CUstream stream) {
    stream_gone(stream);
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

/* With a context go its kernels, ours included, its captures, and what it had in flight. */
static CUresult context_gone(CUresult result, CUcontext context, bool gone) {
    if (result == CUDA_SUCCESS && gone) {
        weft_forget_handles();
        weft_head_start_context_gone(context);
        weft_flight_context_gone();
    }
    return result;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    weft_forget_handles();
    return context_gone(REAL(cuCtxDestroy_v2)(context), context, true);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    weft_forget_handles();
    return context_gone(REAL(cuDevicePrimaryCtxReset_v2)(device), NULL, true);
}

/* The last release destroys it. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    unsigned flags;
    int active = 0;
    weft_forget_handles();
    CUresult result = REAL(cuDevicePrimaryCtxRelease_v2)(device);
    if (weft_cuda()->cuDevicePrimaryCtxGetState &&
        weft_cuda()->cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS)
        active = 0;
    return context_gone(result, NULL, !active);
}

CUresult cuGreenCtxCreate(CUgreenCtx *made, void *resources, CUdevice device, unsigned flags) {
    weft_sms_partitioned();
    return REAL(cuGreenCtxCreate)(made, resources, device, flags);
}

CUresult cuGreenCtxDestroy(CUgreenCtx context) {
    weft_forget_handles();
    return context_gone(REAL(cuGreenCtxDestroy)(context), NULL, true);
}

void weft_forget_graph(void) {
    pthread_mutex_init(&lock, NULL);
    weft_map_clear(&executables);
    memset(capture_streams, 0, sizeof capture_streams);
    atomic_store(&captures, 0);
}
