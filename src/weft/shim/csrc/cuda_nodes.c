/* Kernel nodes that the program itself adds to a graph or changes. If a node has more shared memory than the program's
 * own limit for the kernel, the driver must refuse it, even if weft has raised the limit (cuda_limits.c). */
#include "cuda_shim.h"

/* Version 1 of the structure is the beginning of version 2, without `kern`. */
static bool withheld(const CUDA_KERNEL_NODE_PARAMS *p, bool first_version) {
    void *kernel = !p ? NULL : p->func ? (void *)p->func : first_version ? NULL : (void *)p->kern;
    return kernel && weft_limit_withheld(kernel, p->sharedMemBytes);
}

static const CUDA_KERNEL_NODE_PARAMS *kernel_of(const CUgraphNodeParams *p) {
    return p && p->type == CU_GRAPH_NODE_TYPE_KERNEL ? &p->kernel : NULL;
}

#define UNDER_OWN_LIMIT(kernel, first_version, CALL)                                                                   \
    bool over = withheld(kernel, first_version);                                                                       \
    CUresult result = CALL;                                                                                            \
    if (over)                                                                                                          \
        weft_limit_restore();                                                                                          \
    return result

#define KERNEL_NODES(version, first_version)                                                                           \
    CUresult cuGraphAddKernelNode##version(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies,          \
                                           size_t count, const CUDA_KERNEL_NODE_PARAMS *params) {                      \
        UNDER_OWN_LIMIT(params, first_version,                                                                         \
                        REAL(cuGraphAddKernelNode##version)(made, graph, dependencies, count, params));                \
    }                                                                                                                  \
    CUresult cuGraphKernelNodeSetParams##version(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {            \
        UNDER_OWN_LIMIT(params, first_version, REAL(cuGraphKernelNodeSetParams##version)(node, params));               \
    }
KERNEL_NODES(, true)
KERNEL_NODES(_v2, false)

CUresult cuGraphAddNode(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                        CUgraphNodeParams *params) {
    UNDER_OWN_LIMIT(kernel_of(params), false, REAL(cuGraphAddNode)(made, graph, dependencies, count, params));
}

#define ADD_NODE(version)                                                                                              \
    CUresult cuGraphAddNode##version(CUgraphNode *made, CUgraph graph, const CUgraphNode *dependencies,                \
                                     const void *data, size_t count, CUgraphNodeParams *params) {                      \
        UNDER_OWN_LIMIT(kernel_of(params), false,                                                                      \
                        REAL(cuGraphAddNode##version)(made, graph, dependencies, data, count, params));                \
    }
ADD_NODE(_v2)
ADD_NODE(_v3)

#define SET_PARAMS(version)                                                                                            \
    CUresult cuGraphNodeSetParams##version(CUgraphNode node, CUgraphNodeParams *params) {                              \
        UNDER_OWN_LIMIT(kernel_of(params), false, REAL(cuGraphNodeSetParams##version)(node, params));                  \
    }
SET_PARAMS()
SET_PARAMS(_v2)
