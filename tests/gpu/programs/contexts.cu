/* Contexts that come and go: cudaDeviceReset between rounds, and two contexts, one of which is destroyed while the
 * other keeps running. A kernel with the name of a collective keeps something in flight. Prints a digest of all
 * results. */
#include <cuda.h>
#include <cuda_runtime.h>

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

enum { N = 1 << 12, ROUNDS = 20, STEPS = 200 };

extern "C" __global__ void ncclDevKernel_LikeACollective(uint32_t *x, long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles)
        ;
    x[threadIdx.x] += 3;
}

__global__ void advance(uint32_t *x, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N)
        x[i] = x[i] * 1664525u + by;
}

static uint64_t h = 0xcbf29ce484222325u;

static void add(const uint32_t *device) {
    uint32_t host[N];
    CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        h = (h ^ host[i]) * 0x100000001b3u;
}

typedef struct {
    uint32_t *x, *y;
    cudaStream_t compute, comm;
} work;

static work begin(void) {
    work w;
    CHECK(cudaMalloc(&w.x, N * sizeof *w.x));
    CHECK(cudaMalloc(&w.y, 1024 * sizeof *w.y));
    CHECK(cudaMemset(w.x, 1, N * sizeof *w.x));
    CHECK(cudaMemset(w.y, 1, 1024 * sizeof *w.y));
    CHECK(cudaStreamCreateWithFlags(&w.compute, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&w.comm, cudaStreamNonBlocking));
    return w;
}

static void go_on(work *w) {
    for (uint32_t i = 0; i < STEPS; i++) {
        if (i % 20 == 0)
            ncclDevKernel_LikeACollective<<<2, 256, 0, w->comm>>>(w->y, 20000);
        advance<<<N / 128, 128, 0, w->compute>>>(w->x, i);
    }
    CHECK(cudaGetLastError());
}

static void finish(work *w) {
    CHECK(cudaDeviceSynchronize());
    add(w->x);
}

static CUcontext new_context(void) {
    CUcontext made;
#if CUDA_VERSION >= 13000
    CHECK(cuCtxCreate(&made, NULL, 0, 0));
#else
    CHECK(cuCtxCreate(&made, 0, 0));
#endif
    return made;
}

int main(void) {
    for (int round = 0; round < ROUNDS; round++) {
        work w = begin();
        go_on(&w);
        finish(&w);
        go_on(&w); /* still in flight when its context is destroyed */
        CHECK(cudaDeviceReset());
    }
    CHECK(cuInit(0));
    CUcontext first = new_context();
    work one = begin();
    CUcontext second = new_context();
    work two = begin();
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(cuCtxSetCurrent(first));
        go_on(&one);
        CHECK(cuCtxSetCurrent(second));
        go_on(&two);
        finish(&two);
    }
    CHECK(cuCtxSetCurrent(first));
    finish(&one);
    CHECK(cuCtxDestroy(first));
    CHECK(cuCtxSetCurrent(second));
    go_on(&two);
    finish(&two);
    printf("%016llx\n", (unsigned long long)h);
    return 0;
}
