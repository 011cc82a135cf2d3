/* Launches, copies and waits from many threads while traces begin, end and are read.
 *
 *   tracer_hammer THREADS TRACES      exits with 0 if all launches succeeded and nothing was left in the driver */
#define _GNU_SOURCE
#include "tracer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern void *fake_kernel(const char *, int, int, int);
extern void fake_logging(int);
extern void fake_sync(void);
extern int fake_live_events(void), fake_live_streams(void), fake_unsafe_calls(void);

enum { KERNELS = 4 };
static CUfunction kernels[KERNELS];
static _Atomic int over, failed;

static void *work(void *id) {
    CUstream own = (CUstream)(0x100 + 0x10 * (uintptr_t)id), shared = (CUstream)0x90;
    for (long i = 0; !over; i++) {
        CUlaunchAttribute dependent = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
        dependent.value.cooperative = i % 7 == 0;
        CUlaunchConfig c = {64, 1, 1, 128, 1, 1, 0, i % 5 ? own : shared, &dependent, 1};
        failed |= cuLaunchKernelEx(&c, kernels[i % KERNELS], NULL, NULL);
        failed |= cuLaunchKernel(kernels[0], 8, 1, 1, 64, 1, 1, 0, own, NULL, NULL);
        failed |= cuMemcpyHtoDAsync_v2(0x20000, kernels, 64, own);
        if (i % 64 == 0)
            usleep(100);
    }
    return NULL;
}

int main(int argc, char **argv) {
    long threads = argc > 1 ? atol(argv[1]) : 4, traces = argc > 2 ? atol(argv[2]) : 10, spans = 0;
    pthread_t all[64];
    fake_logging(argc > 3);
    kernels[0] = fake_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 96, 36800, 0);
    for (int i = 1; i < KERNELS; i++)
        kernels[i] = fake_kernel("gemm", 32, 0, 0);
    for (long i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, work, (void *)i);
    usleep(10000);
    for (long i = 0; i < traces; i++) {
        weft_trace_watch();
        usleep(500);
        if (weft_trace_begin() != 0)
            return 2;
        for (int k = 0; k < 4; k++) {
            usleep(1000);
            weft_trace_mark();
        }
        weft_trace_end();
        int64_t count = weft_trace_read(NULL, NULL, 0, 0);
        weft_trace_span *read = calloc((size_t)count + 1, sizeof *read);
        weft_trace_header h;
        weft_trace_read(&h, read, (uint64_t)count, 0.02);
        spans += count;
        free(read);
        weft_trace_free();
    }
    over = 1;
    for (long i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    if (failed || spans < traces || fake_live_events() || fake_live_streams())
        fprintf(stderr, "failed %d, spans %ld, events %d, streams %d\n", failed, spans, fake_live_events(),
                fake_live_streams());
    return failed || spans < traces || fake_live_events() || fake_live_streams();
}
