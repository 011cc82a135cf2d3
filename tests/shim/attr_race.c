/* Two threads start with the same kernels. One asks for 100 KiB of shared memory (cuFuncSetAttribute) and launches with
 * it; the other launches the same kernel without any. Prints how many of the first one's launches failed. */
#define _GNU_SOURCE
#include "cuda_api.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>

extern CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **);
extern CUresult cuFuncSetAttribute(CUfunction, int, int);
extern void *fake_kernel(const char *, int, int, int);
extern void fake_logging(int);

enum { KERNELS = 600, BYTES = 102400 };
static CUfunction kernels[KERNELS];
static _Atomic int arrived;

static void meet(int round) {
    arrived++;
    while (arrived < 2 * round)
        sched_yield(); /* if both share a CPU, neither waits for the other's time slice */
}

static void *other(void *unused) {
    for (int i = 0; i < KERNELS; i++) {
        meet(2 * i + 1);
        if (cuLaunchKernel(kernels[i], 100000, 1, 1, 256, 1, 1, 0, (CUstream)0x100, NULL, NULL))
            puts("the other thread's launch failed");
        meet(2 * i + 2);
    }
    return unused;
}

int main(void) {
    fake_logging(0);
    for (int i = 0; i < KERNELS; i++) {
        char name[32];
        snprintf(name, sizeof name, "gemm%d", i);
        kernels[i] = fake_kernel(name, 32, 0, 0);
    }
    pthread_t thread;
    int failed = 0;
    pthread_create(&thread, NULL, other, NULL);
    for (int i = 0; i < KERNELS; i++) {
        meet(2 * i + 1);
        for (volatile int delay = 0; delay < i * 60; delay++)
            ;
        cuFuncSetAttribute(kernels[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, BYTES);
        for (volatile int delay = 0; delay < 2000; delay++)
            ;
        failed += cuLaunchKernel(kernels[i], 100000, 1, 1, 128, 1, 1, BYTES, (CUstream)0x200, NULL, NULL) != 0;
        meet(2 * i + 2);
    }
    pthread_join(thread, NULL);
    printf("%d\n", failed);
    return 0;
}
