/* Launches from many threads at once, through symbols that the linker bound.
 *
 *   hammer THREADS LAUNCHES                   every thread makes LAUNCHES launches; exits with 0 if all succeeded
 *   hammer THREADS LAUNCHES time              prints the nanoseconds of one launch, the least of several rounds
 *   hammer THREADS LAUNCHES run|time ALL HOT  launches ALL kernels once, then only HOT of them
 *   hammer THREADS LAUNCHES cold ALL HOT      like time; before each launch the thread writes more than its core's
 *                                             caches hold, as a Python program does
 *   hammer THREADS LAUNCHES turns N           first N turns of some launches, untraced and traced; after each turn it
 *                                             waits for a line, so that a test can change the policy */
#define _GNU_SOURCE
#include "cuda_api.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **);
extern CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **);
extern void *fake_kernel(const char *, int, int, int);
extern void fake_logging(int);
extern void fake_finish(void *);

extern int weft_trace_begin(void) __attribute__((weak));
extern void weft_trace_end(void) __attribute__((weak));
extern void weft_trace_free(void) __attribute__((weak));

enum { KERNELS = 8, ROUNDS = 9, IN_A_TURN = 64, WRITTEN = 3 << 20, LINE = 64 };
static CUfunction *kernels;
static long hot = KERNELS;
static long launches;
static int timing, cold;
static pthread_barrier_t barrier;

static CUresult one(long i, CUstream stream) {
    CUfunction f = kernels[i % hot];
    if (i % 2) {
        CUlaunchConfig c = {4096, 8, 1, 128, 1, 1, 0, stream, NULL, 0};
        return cuLaunchKernelEx(&c, f, NULL, NULL);
    }
    return cuLaunchKernel(f, 4096, 8, 1, 128, 1, 1, 0, stream, NULL, NULL);
}

static double now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* CPU time of a launch, without the time that other threads held the core. */
static double each_of_many(CUstream stream, long *failed) {
    double start = now_ns(CLOCK_THREAD_CPUTIME_ID);
    for (long i = 0; i < launches; i++)
        *failed += one(i, stream) != 0;
    return (now_ns(CLOCK_THREAD_CPUTIME_ID) - start) / (double)launches;
}

static double each_when_cold(CUstream stream, long *failed) {
    static _Thread_local volatile char written[WRITTEN];
    double sum = 0;
    for (long i = 0; i < launches; i++) {
        for (int at = 0; at < WRITTEN; at += LINE)
            written[at]++;
        double start = now_ns(CLOCK_MONOTONIC); /* the CPU-time clock would need a system call */
        *failed += one(i, stream) != 0;
        sum += now_ns(CLOCK_MONOTONIC) - start;
    }
    return sum / (double)launches;
}

static void *work(void *id) {
    CUstream stream = (CUstream)(0x100 + 0x10 * (uintptr_t)id);
    long failed = 0;
    double best = 1e30;
    for (int round = 0; round < (timing ? ROUNDS : 1); round++) {
        pthread_barrier_wait(&barrier);
        double each = cold ? each_when_cold(stream, &failed) : each_of_many(stream, &failed);
        best = each < best ? each : best;
    }
    if (failed)
        fprintf(stderr, "%ld launches failed\n", failed);
    double *result = malloc(sizeof *result);
    *result = failed ? -1 : best;
    return result;
}

static long some_launches(void) {
    long failed = 0;
    for (long i = 0; i < IN_A_TURN; i++)
        failed += one(i, (CUstream)(uintptr_t)(i % hot ? 0x100 : 0x110)) != 0;
    return failed;
}

static int take_turns(long turns) {
    while (turns--) {
        long failed = some_launches();
        if (weft_trace_begin && weft_trace_begin() == 0) {
            failed += some_launches();
            weft_trace_end();
            weft_trace_free();
        }
        puts("ready");
        fflush(stdout);
        if (failed || getchar() != '\n')
            return 4;
    }
    return 0;
}

int main(int argc, char **argv) {
    long threads = argc > 1 ? atol(argv[1]) : 1;
    launches = argc > 2 ? atol(argv[2]) : 1000;
    cold = argc > 3 && strcmp(argv[3], "cold") == 0;
    timing = cold || (argc > 3 && strcmp(argv[3], "time") == 0);
    long all_kernels = argc > 5 ? atol(argv[4]) : KERNELS;
    hot = argc > 5 ? atol(argv[5]) : KERNELS;
    kernels = calloc((size_t)all_kernels, sizeof *kernels);
    fake_logging(0);
    kernels[0] = fake_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 96, 36800, 0);
    for (long i = 1; i < all_kernels; i++) {
        char name[32];
        snprintf(name, sizeof name, "gemm_%ld", i);
        kernels[i] = fake_kernel(name, 32, 0, i % 2);
    }
    for (long i = 0; argc > 5 && i < all_kernels; i++)
        if (cuLaunchKernel(kernels[i], 4096, 8, 1, 128, 1, 1, 0, (CUstream)0x100, NULL, NULL))
            return 3;
    if (argc == 5 && take_turns(atol(argv[4])))
        return 4;
    pthread_t all[64];
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (long i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, work, (void *)i);
    double worst = 0;
    int bad = 0;
    for (long i = 0; i < threads; i++) {
        double *result;
        pthread_join(all[i], (void **)&result);
        bad |= *result < 0;
        worst = *result > worst ? *result : worst;
        free(result);
    }
    if (timing)
        printf("%.2f\n", worst);
    free(kernels);
    return bad;
}
