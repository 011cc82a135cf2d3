/* Fails the n-th call of the driver or of NCCL, for every n, each in a process of its own.
 *
 *   sweep cuda|nccl [STEP]   prints, for every n (or every STEP-th), what a program sees: the result of each of its calls,
 *                            and its launches
 *
 * Whatever a program sees under the shim it must also see without it, for some n: failures of the shim's own calls must
 * stay invisible. */
#define _GNU_SOURCE
#include "cuda_api.h"
#include "nccl_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LAUNCH CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **
extern CUresult cuLaunchKernel(LAUNCH, void **);
extern CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **);
extern CUresult cuLaunchCooperativeKernel(LAUNCH);
extern CUresult cuStreamBeginCapture_v2(CUstream, int);
extern CUresult cuStreamEndCapture(CUstream, CUgraph *);
extern CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
extern CUresult cuGraphLaunch(CUgraphExec, CUstream);
extern CUresult cuGraphExecDestroy(CUgraphExec);
extern CUresult cuFuncSetAttribute(CUfunction, int, int);
extern CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
extern CUresult cuModuleUnload(CUmodule);
extern CUresult cuDevicePrimaryCtxReset_v2(CUdevice);
extern void *fake_kernel(const char *, int, int, int);
extern void fake_finish(void *);
extern void fake_fail_at(long);
extern long fake_calls_so_far(void);
extern int fake_launches(void);

typedef struct {
    char route[40];
    char name[256];
    unsigned grid[3], block[3], shared;
    void *stream;
    int priority, has_priority, cooperative, attributes, captured;
} record;
extern const record *fake_launch(int);

extern ncclResult_t ncclGetUniqueId(ncclUniqueId *);
extern ncclResult_t ncclCommInitRankConfig(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
extern ncclResult_t ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, void *);
extern ncclResult_t ncclSend(const void *, size_t, int, int, ncclComm_t, void *);
extern ncclResult_t ncclGroupStart(void);
extern ncclResult_t ncclGroupEnd(void);
extern ncclResult_t ncclCommDestroy(ncclComm_t);
extern void fake_nccl_fail_at(long);
extern long fake_nccl_calls_so_far(void);

#define SEE(call) printf("%d ", call)
#define PLAIN(f, grid, stream) cuLaunchKernel(f, grid, 1, 1, 128, 1, 1, 0, (CUstream)stream, NULL, NULL)

static void use_cuda(void) {
    CUfunction gemm = fake_kernel("gemm", 32, 0, 0), norm = fake_kernel("norm", 64, 1024, 1), loaded = NULL;
    CUfunction comm = fake_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 96, 36800, 0);
    CUlaunchAttribute cooperative = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    CUlaunchConfig plain = {5000, 1, 1, 256, 1, 1, 0, (CUstream)0x100, NULL, 0};
    CUlaunchConfig whole = {4, 1, 1, 128, 1, 1, 0, (CUstream)0x100, &cooperative, 1};
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    for (int step = 0; step < 2; step++) {
        SEE(PLAIN(gemm, 4000, 0x100));
        SEE(PLAIN(comm, 8, 0x200));
        SEE(PLAIN(gemm, 4000, 0x100));
        SEE(cuLaunchKernelEx(&plain, norm, NULL, NULL));
        SEE(cuLaunchKernelEx(&whole, gemm, NULL, NULL));
        SEE(cuLaunchCooperativeKernel(norm, 2, 1, 1, 128, 1, 1, 0, (CUstream)0x100, NULL));
        fake_finish((void *)0x200);
        SEE(cuFuncSetAttribute(gemm, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100000));
        SEE(cuLaunchKernel(gemm, 4000, 1, 1, 128, 1, 1, 90000, (CUstream)0x100, NULL, NULL));
        SEE(cuStreamBeginCapture_v2((CUstream)0x300, 0));
        SEE(PLAIN(gemm, 3000, 0x300));
        SEE(PLAIN(comm, 8, 0x300));
        int captured = cuStreamEndCapture((CUstream)0x300, &graph);
        SEE(captured);
        int made = captured ? -1 : cuGraphInstantiateWithFlags(&exec, graph, 0);
        SEE(made);
        SEE(made ? -1 : cuGraphLaunch(exec, (CUstream)0x100));
        SEE(made ? -1 : cuGraphExecDestroy(exec));
        if (captured) /* a failed call left it open */
            cuStreamEndCapture((CUstream)0x300, &graph);
        SEE(cuModuleGetFunction(&loaded, NULL, "loaded"));
        SEE(loaded ? PLAIN(loaded, 7000, 0x100) : -1);
        SEE(cuModuleUnload(NULL));
        SEE(cuDevicePrimaryCtxReset_v2(0));
    }
    for (int i = 0; i < fake_launches(); i++) {
        const record *r = fake_launch(i);
        if (strncmp(r->name, "weft_head_start", strlen("weft_head_start")) != 0)
            printf("| %s %u %u %d %d", r->name, r->grid[0], r->block[0], r->cooperative, r->captured);
    }
}

static void ask_weft(const char *name, int ctas) {
    char why[256];
    void *f = dlsym(RTLD_DEFAULT, name);
    if (f && strcmp(name, "weft_nccl_prepare") == 0)
        ((int (*)(int, double, char *, size_t))f)(ctas, 1, why, sizeof why);
    else if (f && strcmp(name, "weft_nccl_route") == 0)
        ((int (*)(int, char *, size_t))f)(ctas, why, sizeof why);
    else if (f)
        ((int (*)(char *, size_t))f)(why, sizeof why);
}

static void use_nccl(void) {
    ncclUniqueId id;
    ncclComm_t comms[2] = {NULL, NULL};
    char sent[16] = "what it carries", received[16] = "";
    SEE(ncclGetUniqueId(&id));
    for (int i = 0; i < 2; i++)
        SEE(ncclCommInitRankConfig(&comms[i], 2, id, i, NULL));
    for (int step = 0; step < 3 && comms[0] && comms[1]; step++) {
        SEE(ncclAllReduce(sent, received, sizeof sent, 1, 0, comms[0], NULL));
        int opened = ncclGroupStart();
        SEE(opened);
        SEE(ncclSend(NULL, 1, 1, 1, comms[1], NULL));
        SEE(ncclAllReduce(NULL, NULL, 4, 1, 0, comms[1], NULL));
        SEE(opened ? -1 : ncclGroupEnd());
        if (step == 0) {
            ask_weft("weft_nccl_prepare", 4);
            ask_weft("weft_nccl_route", 4);
        } else if (step == 1) {
            ask_weft("weft_nccl_route", 0);
            ask_weft("weft_nccl_release", 0);
        }
    }
    printf("| %s ", received);
    for (int i = 0; i < 2; i++)
        SEE(comms[i] ? ncclCommDestroy(comms[i]) : -1);
}

int main(int argc, char **argv) {
    int cuda = argc < 2 || strcmp(argv[1], "cuda") == 0, more = 1;
    long step = argc > 2 ? atol(argv[2]) : 1;
    for (long n = 1; more; n += step) {
        int ends[2], status;
        fflush(stdout);
        if (pipe(ends))
            return 2;
        pid_t pid = fork();
        if (pid == 0) {
            cuda ? fake_fail_at(n) : fake_nccl_fail_at(n);
            cuda ? use_cuda() : use_nccl();
            puts("");
            fflush(stdout);
            char reached = (cuda ? fake_calls_so_far() : fake_nccl_calls_so_far()) >= n;
            _exit(write(ends[1], &reached, 1) != 1);
        }
        close(ends[1]);
        char reached = 0;
        if (read(ends[0], &reached, 1) != 1)
            fprintf(stderr, "nothing came back of n = %ld\n", n);
        close(ends[0]);
        waitpid(pid, &status, 0);
        if (status) {
            fprintf(stderr, "n = %ld ended with %d\n", n, status);
            return 1;
        }
        more = reached;
    }
    return 0;
}
