/* An NCCL for tests that launches its kernels where NCCL does: inside the call, or inside the last GroupEnd, where the
 * calls of one communicator become one kernel. */
#include "cuda_api.h"
#include "nccl_api.h"

#include <stdlib.h>

#define API __attribute__((visibility("default")))
enum { CALLS = 256 };

struct ncclComm {
    int rank, size;
};

typedef CUresult (*launcher)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                             void **, void **);
static launcher launch;
static CUfunction kernel;
static __thread int depth, waiting;
static __thread struct {
    ncclComm_t comm;
    CUstream stream;
} calls[CALLS];

API void fake_launch_with(launcher by, CUfunction f) { launch = by, kernel = f; }

static void run(CUstream stream) { launch(kernel, 8, 1, 1, 512, 1, 1, 0, stream, NULL, NULL); }

static ncclResult_t collective(ncclComm_t comm, void *stream) {
    if (depth == 0) {
        run(stream);
    } else {
        calls[waiting].comm = comm;
        calls[waiting++].stream = stream;
    }
    return 0;
}

API ncclResult_t ncclGetVersion(int *version) { return *version = 22800, 0; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return id->internal[0] = 1, 0; }
API ncclResult_t ncclCommCount(ncclComm_t comm, int *count) { return *count = comm->size, 0; }
API ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { return *rank = comm->rank, 0; }
API ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) { return (void)comm, *device = 0, 0; }
API ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
    (void)id;
    *made = malloc(sizeof **made);
    **made = (struct ncclComm){rank, size};
    return 0;
}

API ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, int t, int op, ncclComm_t comm, void *stream) {
    return (void)s, (void)r, (void)n, (void)t, (void)op, collective(comm, stream);
}
API ncclResult_t ncclAllGather(const void *s, void *r, size_t n, int t, ncclComm_t comm, void *stream) {
    return (void)s, (void)r, (void)n, (void)t, collective(comm, stream);
}
API ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, ncclComm_t comm, void *stream) {
    return (void)s, (void)r, (void)n, (void)t, (void)op, collective(comm, stream);
}

API ncclResult_t ncclGroupStart(void) { return depth++, 0; }
API ncclResult_t ncclGroupEnd(void) {
    if (--depth == 0) {
        for (int i = 0; i < waiting; i++) {
            int first = 1;
            for (int j = 0; j < i; j++)
                first &= calls[j].comm != calls[i].comm;
            if (first)
                run(calls[i].stream);
        }
        waiting = 0;
    }
    return 0;
}
