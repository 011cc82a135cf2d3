/* A long run on one GPU: LAUNCHES small kernels, and after every 1000 of them an all-reduce of two ranks that overlaps
 * with the next. Prints a digest of all results, which does not depend on timing.
 *
 *   soak LAUNCHES NCCL     NCCL: a library of 2.30 or newer, which places two ranks on one GPU */
#include <cuda_runtime.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        int code_ = (int)(call);                                                                             \
        if (code_) {                                                                                         \
            fprintf(stderr, "%s: %d\n", #call, code_);                                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

enum { N = 1 << 14, RANKS = 2, UINT32 = 3, SUM = 0 };
typedef struct {
    char internal[128];
} unique_id;

__global__ void advance(uint32_t *x, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N)
        x[i] = x[i] * 1664525u + by;
}

__global__ void through_shared(uint32_t *x, uint32_t by) {
    extern __shared__ uint32_t held[];
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    held[threadIdx.x] = i < N ? x[i] : 0;
    __syncthreads();
    if (i < N)
        x[i] = held[threadIdx.x ^ 1] ^ by;
}

static uint64_t digest(const uint32_t *device) {
    static uint32_t host[N];
    uint64_t h = 0xcbf29ce484222325u;
    CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        h = (h ^ host[i]) * 0x100000001b3u;
    return h;
}

int main(int argc, char **argv) {
    long launches = argc > 1 ? atol(argv[1]) : 100000;
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    void *nccl = dlopen(argc > 2 ? argv[2] : "libnccl.so.2", RTLD_NOW);
    if (!nccl) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int (*start)(void) = (int (*)(void))dlsym(nccl, "ncclGroupStart"), (*end)(void) = (int (*)(void))dlsym(nccl, "ncclGroupEnd");
    int (*id_of)(unique_id *) = (int (*)(unique_id *))dlsym(nccl, "ncclGetUniqueId");
    int (*init)(void **, int, unique_id, int) = (int (*)(void **, int, unique_id, int))dlsym(nccl, "ncclCommInitRank");
    int (*reduce)(const void *, void *, size_t, int, int, void *, cudaStream_t) =
        (int (*)(const void *, void *, size_t, int, int, void *, cudaStream_t))dlsym(nccl, "ncclAllReduce");
    uint32_t *x, *sums[RANKS];
    cudaStream_t compute, streams[RANKS];
    cudaEvent_t ready, done[RANKS];
    void *comms[RANKS];
    unique_id id;
    CHECK(cudaMalloc(&x, N * sizeof *x));
    CHECK(cudaMemset(x, 1, N * sizeof *x));
    CHECK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    CHECK(id_of(&id));
    CHECK(start());
    for (int r = 0; r < RANKS; r++) {
        CHECK(cudaMalloc(&sums[r], N * sizeof *x));
        CHECK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&done[r], cudaEventDisableTiming));
        CHECK(init(&comms[r], RANKS, id, r));
    }
    CHECK(end());
    for (long i = 0; i < launches; i++) {
        if (i % 16 == 15)
            through_shared<<<N / 256, 256, 256 * sizeof(uint32_t), compute>>>(x, (uint32_t)i);
        else
            advance<<<N / 256, 256, 0, compute>>>(x, (uint32_t)i);
        if (i % 1000)
            continue;
        for (int r = 0; r < RANKS; r++) /* what the last all-reduce read must not change under it */
            CHECK(cudaStreamWaitEvent(compute, done[r], 0));
        for (int r = 0; r < RANKS; r++)
            CHECK(cudaMemcpyAsync(sums[r], x, N * sizeof *x, cudaMemcpyDeviceToDevice, compute));
        CHECK(cudaEventRecord(ready, compute));
        CHECK(start());
        for (int r = 0; r < RANKS; r++) {
            CHECK(cudaStreamWaitEvent(streams[r], ready, 0));
            CHECK(reduce(sums[r], sums[r], N, UINT32, SUM, comms[r], streams[r]));
        }
        CHECK(end());
        for (int r = 0; r < RANKS; r++)
            CHECK(cudaEventRecord(done[r], streams[r]));
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGetLastError());
    printf("%016llx %016llx %016llx\n", (unsigned long long)digest(x), (unsigned long long)digest(sums[0]),
           (unsigned long long)digest(sums[1]));
    return 0;
}
