/* Graphs: kernels are captured once and run at every replay, so they are counted when the graph is launched. */
#include "tracer.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct graph_kernels {
    struct graph_kernels *next;
    CUgraphExec exec;
    size_t count;
    bool communicates;
    _Atomic uint64_t traced; /* where the tracer listed its kernels */
    weft_variant *kernels[];
} graph_kernels;

enum { BUCKETS = 1024 };
static graph_kernels *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int captures; /* open now; may only ever be too high, which costs a question per launch */

bool weft_capturing(CUstream stream) {
    if (LIKELY(atomic_load_explicit(&captures, memory_order_relaxed) <= 0))
        return false;
    int status = 0;
    return weft_cuda()->cuStreamIsCapturing && weft_cuda()->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != 0;
}

bool weft_capture_open(void) { return atomic_load(&captures) > 0; }

/* --- what a graph holds --------------------------------------------------------------------------------- */

typedef struct {
    weft_variant **kernels;
    size_t count, room;
} list;

static void append(list *l, weft_variant *v) {
    if (l->count == l->room) {
        size_t room = l->room ? l->room * 2 : 64;
        weft_variant **grown = realloc(l->kernels, room * sizeof *grown);
        if (!grown)
            return;
        l->kernels = grown;
        l->room = room;
    }
    l->kernels[l->count++] = v;
}

static void read_kernel(CUgraphNode node, list *into) {
    CUDA_KERNEL_NODE_PARAMS p = {0};
    if (!weft_cuda()->cuGraphKernelNodeGetParams_v2 ||
        weft_cuda()->cuGraphKernelNodeGetParams_v2(node, &p) != CUDA_SUCCESS)
        return;
    void *handle = p.func ? (void *)p.func : (void *)p.kern;
    unsigned threads = p.blockDimX * p.blockDimY * p.blockDimZ;
    weft_variant *v = handle ? weft_lookup(&weft_cuda_backend, handle, threads, p.sharedMemBytes) : NULL;
    if (v)
        append(into, v);
}

static void read_graph(CUgraph graph, list *into, int depth) {
    const weft_cuda_calls *cu = weft_cuda();
    size_t count = 0;
    if (depth > 16 || !cu->cuGraphGetNodes || !cu->cuGraphNodeGetType ||
        cu->cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    if (!nodes || cu->cuGraphGetNodes(graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; i < count; i++) {
        int type = -1;
        CUgraph child;
        if (cu->cuGraphNodeGetType(nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_KERNEL)
            read_kernel(nodes[i], into);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && cu->cuGraphChildGraphNodeGetGraph &&
                 cu->cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS)
            read_graph(child, into, depth + 1);
    }
    free(nodes);
}

/* --- what each executable graph launches ---------------------------------------------------------------- */

static graph_kernels **place_of(CUgraphExec exec) {
    graph_kernels **at = &buckets[((uintptr_t)exec >> 4) % BUCKETS];
    while (*at && (*at)->exec != exec)
        at = &(*at)->next;
    return at;
}

static void forget(CUgraphExec exec) {
    graph_kernels **at = place_of(exec);
    graph_kernels *old = *at;
    if (old) {
        *at = old->next;
        free(old);
    }
}

static void remember(CUgraphExec exec, CUgraph graph) {
    if (!weft_attach(WEFT_API_CUDA))
        return;
    list found = {0};
    read_graph(graph, &found, 0);
    graph_kernels *g = malloc(sizeof *g + found.count * sizeof *g->kernels);
    if (g) {
        g->exec = exec;
        g->count = found.count;
        g->communicates = false;
        g->traced = 0;
        for (size_t i = 0; i < found.count; i++) {
            g->kernels[i] = found.kernels[i];
            g->communicates |= found.kernels[i]->kind == WEFT_KIND_COMM;
        }
        pthread_mutex_lock(&lock);
        forget(exec);
        graph_kernels **at = place_of(exec);
        g->next = *at;
        *at = g;
        pthread_mutex_unlock(&lock);
    }
    free(found.kernels);
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

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    if (weft_attach(WEFT_API_CUDA)) {
        pthread_mutex_lock(&lock);
        forget(exec);
        pthread_mutex_unlock(&lock);
    }
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
    graph_kernels *g = *place_of(exec);
    for (size_t i = 0; g && i < g->count; i++)
        weft_count_launch(g->kernels[i], 1, false);
    communicates = g && g->communicates;
    pthread_mutex_unlock(&lock);
    if (communicates)
        weft_comm_launched(&weft_cuda_backend, weft_policy_now(), stream, false);
    return result;
}

static bool trace_graph(weft_trace_op *op, CUgraphExec exec, CUstream stream) {
    if (!weft_attach(WEFT_API_CUDA) || !weft_trace_before(op, WEFT_TRACE_GRAPH, NULL, stream, false))
        return false;
    pthread_mutex_lock(&lock);
    graph_kernels *g = *place_of(exec);
    if (g)
        weft_trace_graph_of(&g->traced, g->kernels, g->count, op);
    pthread_mutex_unlock(&lock);
    return true;
}

#define GRAPH_LAUNCH(name, per_thread)                                                                      \
    CUresult name(CUgraphExec exec, CUstream stream) {                                                      \
        CUstream named = weft_stream(stream, per_thread);                                                   \
        weft_trace_op op;                                                                                   \
        bool traced = UNLIKELY(weft_tracing() == WEFT_TRACE_RECORD) && trace_graph(&op, exec, named);       \
        CUresult result = REAL(name)(exec, stream);                                                         \
        if (traced)                                                                                         \
            weft_trace_after(&op, named, result);                                                           \
        return launched(result, exec, named);                                                               \
    }
GRAPH_LAUNCH(cuGraphLaunch, false)
GRAPH_LAUNCH(cuGraphLaunch_ptsz, true)

/* --- captures --------------------------------------------------------------------------------------------- */

static CUresult begun(CUresult result) {
    if (result == CUDA_SUCCESS)
        atomic_fetch_add(&captures, 1);
    return result;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    return begun(REAL(cuStreamBeginCapture_v2)(stream, mode));
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) {
    return begun(REAL(cuStreamBeginCapture_v2_ptsz)(stream, mode));
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                     const void *data, size_t count, int mode) {
    return begun(REAL(cuStreamBeginCaptureToGraph)(stream, graph, dependencies, data, count, mode));
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                          const void *data, size_t count, int mode) {
    return begun(REAL(cuStreamBeginCaptureToGraph_ptsz)(stream, graph, dependencies, data, count, mode));
}

static void ended(bool was_capturing) {
    if (was_capturing && atomic_fetch_sub(&captures, 1) <= 1)
        weft_comm_capture_over();
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    bool was_capturing = weft_capturing(weft_stream(stream, false));
    CUresult result = REAL(cuStreamEndCapture)(stream, graph);
    ended(was_capturing);
    return result;
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    bool was_capturing = weft_capturing(weft_stream(stream, true));
    CUresult result = REAL(cuStreamEndCapture_ptsz)(stream, graph);
    ended(was_capturing);
    return result;
}

/* --- handles that die ------------------------------------------------------------------------------------- */

CUresult cuModuleUnload(CUmodule module) {
    weft_forget_handles();
    return REAL(cuModuleUnload)(module);
}

CUresult cuLibraryUnload(CUlibrary library) {
    weft_forget_handles();
    return REAL(cuLibraryUnload)(library);
}

#define CONTEXT_GOES(name, type, context)                                                                   \
    CUresult name(type what) {                                                                              \
        weft_trace_context_gone(context);                                                                   \
        weft_forget_handles();                                                                              \
        weft_head_start_forget();                                                                           \
        weft_trace_stamps_forget();                                                                         \
        return REAL(name)(what);                                                                            \
    }
CONTEXT_GOES(cuCtxDestroy_v2, CUcontext, what)
CONTEXT_GOES(cuDevicePrimaryCtxReset_v2, CUdevice, NULL)
CONTEXT_GOES(cuDevicePrimaryCtxRelease_v2, CUdevice, NULL)
