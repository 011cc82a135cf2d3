/* Modules that come and go: every step launches many kernels and unloads a module; kernels of the last module may come
 * back at other addresses. Prints how many KiB the process grew by after the first steps.
 *
 *   churn STEPS KERNELS [new]     new: other handles in every step */
#define _GNU_SOURCE
#include "cuda_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **);
extern CUresult cuModuleUnload(CUmodule);
extern void *fake_kernel(const char *, int, int, int);
extern void fake_logging(int);

static long resident_kib(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*d %ld", &pages) != 1)
        return -1;
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(int argc, char **argv) {
    long steps = argc > 1 ? atol(argv[1]) : 100, count = argc > 2 ? atol(argv[2]) : 500, before = 0;
    int fresh = argc > 3, failed = 0;
    CUfunction *kernels = calloc((size_t)count, sizeof *kernels);
    fake_logging(0);
    for (long step = 0; step < steps; step++) {
        if (step == steps / 4)
            before = resident_kib();
        for (long i = 0; i < count; i++) {
            char name[64];
            snprintf(name, sizeof name, "void at::native::some_kernel_%ld", i);
            if (step == 0 || fresh)
                kernels[i] = fake_kernel(name, 32, 0, 0);
            failed += cuLaunchKernel(kernels[i], 1000, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL) != 0;
        }
        cuModuleUnload((CUmodule)1);
    }
    printf("%ld\n", resident_kib() - before);
    free(kernels);
    return failed != 0;
}
