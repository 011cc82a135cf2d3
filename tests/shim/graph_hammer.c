/* Replays a graph of many kernels, to count instructions.
 *
 *   graph_hammer NODES LAUNCHES */
#include "cuda_api.h"

#include <stdlib.h>

extern void *fake_kernel(const char *, int, int, int);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);

__attribute__((noinline)) int replay(CUgraphExec graph, CUstream stream, int launches) {
    int failed = 0;
    for (int i = 0; i < launches; i++)
        failed |= cuGraphLaunch(graph, stream);
    return failed;
}

int main(int argc, char **argv) {
    int nodes = argc > 1 ? atoi(argv[1]) : 1, launches = argc > 2 ? atoi(argv[2]) : 1;
    CUstream stream = (CUstream)0x300;
    CUfunction kernels[] = {fake_kernel("gemm", 32, 0, 0), fake_kernel("norm", 32, 0, 0)};
    CUgraph graph;
    CUgraphExec made;
    int failed = cuStreamBeginCapture_v2(stream, 0);
    for (int i = 0; i < nodes; i++)
        failed |= cuLaunchKernel(kernels[i % 2], 100, 1, 1, 128, 1, 1, 0, stream, NULL, NULL);
    failed |= cuStreamEndCapture(stream, &graph) | cuGraphInstantiateWithFlags(&made, graph, 0);
    failed |= replay(made, stream, 1); /* the first replay makes the shim's lookups */
    return failed || replay(made, stream, launches);
}
