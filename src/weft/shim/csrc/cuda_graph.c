/* Graphs: kernels are captured once but run at every replay, so they are counted when the graph is launched. */
#include "tracer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* How often one launch of a graph runs a kernel. */
typedef struct {
    uint32_t row;
    bool shaped, communicates;
    uint64_t times;
} graph_tally;

typedef struct {
    size_t count, room;
    bool unhandled; /* it has kernels that cannot be counted, as in conditional nodes: the GPU decides how often */
    weft_graph_kernel *kernels;
    size_t tallied, tally_room;
    graph_tally *tally;      /* one entry per distinct kernel: a graph has thousands of nodes but few kernels */
    size_t changed;          /* index after the node that was changed last */
    _Atomic uint64_t traced; /* trace number << 32 | index of its kernels in the tracer's list */
} graph_kernels;

enum { EXECUTABLES = 1 << 18 };
static weft_map executables; /* graph_kernels by executable graph; guarded by the lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- the kernels of a graph ----------------------------------------------------------------------------- */

static void append(graph_kernels *l, weft_graph_kernel k) {
    if (l->count == l->room) {
        size_t room = l->room ? l->room * 2 : 64;
        weft_graph_kernel *grown = realloc(l->kernels, room * sizeof *grown);
        if (!grown) {
            l->unhandled = true; /* this node's kernel will not be counted */
            return;
        }
        l->kernels = grown;
        l->room = room;
    }
    l->kernels[l->count++] = k;
}

static bool describe(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p, weft_graph_kernel *out) {
    void *handle = p->func ? (void *)p->func : (void *)p->kern;
    unsigned threads = p->blockDimX * p->blockDimY * p->blockDimZ;
    *out = (weft_graph_kernel){.node = node};
    if (!handle)
        return false;
    if (weft_shaped_form(&weft_cuda_backend, handle, threads, p->sharedMemBytes, &out->row)) {
        out->shaped = true;
        return true;
    }
    weft_kernel k;
    weft_lookup(&weft_cuda_backend, handle, threads, p->sharedMemBytes, &k);
    weft_limit_restore(); /* the node was captured when the program's limit allowed it */
    out->row = k.row;
    out->communicates = k.kind == WEFT_KIND_COMM;
    return true;
}

static void read_kernel(CUgraphNode node, CUgraphNode child, graph_kernels *into) {
    CUDA_KERNEL_NODE_PARAMS p = {0};
    weft_graph_kernel k;
    if (weft_cuda()->cuGraphKernelNodeGetParams_v2 &&
        weft_cuda()->cuGraphKernelNodeGetParams_v2(node, &p) == CUDA_SUCCESS && describe(node, &p, &k)) {
        k.child = child;
        append(into, k);
    } else {
        into->unhandled = true;
    }
}

/* `within`: the node of the outermost graph that contains this graph; NULL: this is the outermost graph. */
static void read_graph(CUgraph graph, graph_kernels *into, CUgraphNode within, int depth) {
    const weft_cuda_calls *cu = weft_cuda();
    size_t count = 0;
    if (depth > 16 || !cu->cuGraphGetNodes || !cu->cuGraphNodeGetType ||
        cu->cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS) {
        into->unhandled = true;
        return;
    }
    CUgraphNode *nodes = calloc(count ? count : 1, sizeof *nodes);
    if (!nodes || (count && cu->cuGraphGetNodes(graph, nodes, &count) != CUDA_SUCCESS)) {
        into->unhandled = true;
        count = 0;
    }
    for (size_t i = 0; i < count; i++) {
        int type = -1;
        CUgraph child;
        if (cu->cuGraphNodeGetType(nodes[i], &type) != CUDA_SUCCESS)
            into->unhandled = true;
        else if (type == CU_GRAPH_NODE_TYPE_KERNEL)
            read_kernel(nodes[i], within, into);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && cu->cuGraphChildGraphNodeGetGraph &&
                 cu->cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS)
            read_graph(child, into, within ? within : nodes[i], depth + 1);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH || type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
            into->unhandled = true;
    }
    free(nodes);
}

/* --- how often a graph launches each kernel --------------------------------------------------------------- */

static void tally(graph_kernels *g, weft_graph_kernel k, uint64_t times) {
    size_t i = 0;
    while (i < g->tallied && (g->tally[i].row != k.row || g->tally[i].shaped != k.shaped))
        i++;
    if (i == g->tallied && i == g->tally_room) {
        size_t room = g->tally_room ? g->tally_room * 2 : 16;
        graph_tally *grown = realloc(g->tally, room * sizeof *grown);
        if (!grown) {
            g->unhandled = true; /* this kernel will not be counted */
            return;
        }
        g->tally = grown;
        g->tally_room = room;
    }
    if (i == g->tallied)
        g->tally[g->tallied++] = (graph_tally){k.row, k.shaped, k.communicates, 0};
    g->tally[i].times += times;
}

static int by_kernel(const void *a, const void *b) {
    const weft_graph_kernel *x = a, *y = b;
    return x->row != y->row ? (x->row > y->row) - (x->row < y->row) : x->shaped - y->shaped;
}

/* Sorts the nodes, so that each kernel is searched for only once. */
static void tally_all(graph_kernels *g) {
    weft_graph_kernel *sorted = malloc((g->count ? g->count : 1) * sizeof *sorted);
    if (!sorted) {
        g->unhandled = true;
        return;
    }
    memcpy(sorted, g->kernels ? g->kernels : sorted, g->count * sizeof *sorted);
    qsort(sorted, g->count, sizeof *sorted, by_kernel);
    for (size_t i = 0, same; i < g->count; i += same) {
        for (same = 1; i + same < g->count && by_kernel(&sorted[i], &sorted[i + same]) == 0;)
            same++;
        tally(g, sorted[i], same);
    }
    free(sorted);
}

/* --- what each executable graph launches ---------------------------------------------------------------- */

static uint64_t key_of(CUgraphExec exec) { return (uint64_t)(uintptr_t)exec; }

static void drop(graph_kernels *g) {
    if (g) {
        free(g->kernels);
        free(g->tally);
    }
    free(g);
}

/* Replaces the facts about an executable graph; NULL removes them. */
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
    if (g) {
        read_graph(graph, g, NULL, 0);
        tally_all(g);
    }
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

/* Callers of the next two functions hold the lock. */
static weft_graph_kernel *kernel_at(graph_kernels *g, CUgraphNode node) {
    size_t i = g->changed, searched = 0; /* programs change their nodes in order */
    while (searched < g->count && g->kernels[i % g->count].node != node)
        i++, searched++;
    if (searched == g->count)
        return NULL;
    g->changed = i % g->count + 1;
    return &g->kernels[i % g->count];
}

static void put(graph_kernels *g, weft_graph_kernel *was, weft_graph_kernel now) {
    now.node = was->node;
    now.child = was->child;
    now.disabled = was->disabled;
    if (!was->disabled) {
        tally(g, *was, (uint64_t)-1);
        tally(g, now, 1);
    }
    *was = now;
}

/* A node of the executable graph now launches another kernel, or the same one with another shape. */
static void change(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    weft_graph_kernel k;
    if (!params || !weft_attach(WEFT_API_CUDA) || !describe(node, params, &k))
        return;
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    weft_graph_kernel *was = g ? kernel_at(g, node) : NULL;
    if (was)
        put(g, was, k);
    pthread_mutex_unlock(&lock);
}

/* A child graph was replaced by another one of the same topology. Its nodes keep their handles. If the driver lists
 * them in another order, weft may attribute a kernel to the wrong node, but still counts correctly how often each
 * kernel runs. */
static void change_child(CUgraphExec exec, CUgraphNode node, CUgraph graph) {
    graph_kernels now = {0};
    size_t used = 0;
    if (!weft_attach(WEFT_API_CUDA))
        return;
    read_graph(graph, &now, node, 1);
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    for (size_t i = 0; g && i < g->count && used < now.count; i++)
        if (g->kernels[i].child == node)
            put(g, &g->kernels[i], now.kernels[used++]);
    if (g)
        g->unhandled |= now.unhandled || used < now.count; /* a child of a child cannot be found by its node */
    pthread_mutex_unlock(&lock);
    free(now.kernels);
}

static void enable(CUgraphExec exec, CUgraphNode node, bool enabled) {
    if (!weft_attach(WEFT_API_CUDA))
        return;
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    weft_graph_kernel *k = g ? kernel_at(g, node) : NULL;
    if (k && k->disabled == enabled) {
        tally(g, *k, enabled ? 1 : (uint64_t)-1);
        k->disabled = !enabled;
    }
    pthread_mutex_unlock(&lock);
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    CUresult result = REAL(cuGraphNodeSetEnabled)(exec, node, enabled);
    if (result == CUDA_SUCCESS)
        enable(exec, node, enabled != 0);
    return result;
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    CUresult result = REAL(cuGraphExecChildGraphNodeSetParams)(exec, node, child);
    if (result == CUDA_SUCCESS && child)
        change_child(exec, node, child);
    return result;
}

/* Version 1 of the structure is the beginning of version 2. */
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
    else if (result == CUDA_SUCCESS && params && params->type == CU_GRAPH_NODE_TYPE_GRAPH)
        change_child(exec, node, (CUgraph)params->kernel.func); /* the graph is the union's first member, like `func` */
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
    if (weft_capturing(stream)) { /* a graph inside a graph is counted when the outer graph runs */
        weft_count(WEFT_COUNT_CAPTURED);
        return result;
    }
    weft_count(WEFT_COUNT_GRAPH_LAUNCHES);
    bool communicates = false;
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    for (size_t i = 0; g && i < g->tallied; i++) {
        const graph_tally *t = &g->tally[i];
        weft_count_launch(weft_cell_at(t->row), t->times, t->shaped);
        communicates |= t->communicates && t->times;
    }
    bool unhandled = !g || g->unhandled;
    pthread_mutex_unlock(&lock);
    if (unhandled)
        weft_count(WEFT_COUNT_UNHANDLED);
    if (communicates)
        weft_comm_launched(&weft_cuda_backend, weft_policy_now(), stream, false);
    return result;
}

static bool trace_graph(weft_trace_op *op, CUgraphExec exec, CUstream stream) {
    if (!weft_attach(WEFT_API_CUDA) || !weft_trace_before(op, WEFT_TRACE_GRAPH, NULL, stream, false))
        return false;
    pthread_mutex_lock(&lock);
    graph_kernels *g = weft_map_find(&executables, key_of(exec), 0);
    if (g)
        weft_trace_graph_of(&g->traced, g->kernels, g->count, op);
    pthread_mutex_unlock(&lock);
    return true;
}

#define GRAPH_LAUNCH(name, per_thread)                                                                                 \
    CUresult name(CUgraphExec exec, CUstream stream) {                                                                 \
        CUstream named = weft_stream(stream, per_thread);                                                              \
        weft_trace_op op;                                                                                              \
        bool traced = UNLIKELY(weft_tracing() == WEFT_TRACE_RECORD) && trace_graph(&op, exec, named);                  \
        CUresult result = REAL(name)(exec, stream);                                                                    \
        if (traced)                                                                                                    \
            weft_trace_after(&op, named, result);                                                                      \
        return launched(result, exec, named);                                                                          \
    }
GRAPH_LAUNCH(cuGraphLaunch, false)
GRAPH_LAUNCH(cuGraphLaunch_ptsz, true)

void weft_forget_graph(void) {
    pthread_mutex_init(&lock, NULL);
    weft_map_clear(&executables);
}
