/* A long run: many threads launch, a module is unloaded now and then and its kernels come back at other addresses, and
 * forked children launch, too.
 *
 *   soak THREADS LAUNCHES     prints: launches of this process and its children, failed ones, growth in KiB */
#define _GNU_SOURCE
#include "cuda_api.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **);
extern CUresult cuModuleUnload(CUmodule);
extern CUresult cuFuncSetAttribute(CUfunction, int, int);
extern void *fake_kernel(const char *, int, int, int);
extern void fake_logging(int);

enum { KERNELS = 512, POOL = 1 << 15, CHURN = 1 << 16, FORK = 1 << 22, CHILD = 1000 };
static CUfunction pool[POOL];
static _Atomic(CUfunction) kernels[KERNELS];
static long each;
static _Atomic long failed, of_children;

static long resident_kib(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*d %ld", &pages) != 1)
        return -1;
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static CUresult one(uint64_t random, CUstream stream) {
    unsigned which = (unsigned)(random >> 33) % KERNELS;
    unsigned shared = random & 0x700 ? 0 : (unsigned)(random >> 50) % 64 * 16;
    return cuLaunchKernel(kernels[which], 4096, 8, 1, 128, 1, 1, shared, stream, NULL, NULL);
}

static void fork_one(uint64_t random) {
    pid_t pid = fork();
    if (pid == 0) {
        int bad = 0;
        for (int i = 0; i < CHILD; i++)
            bad |= one(random * (uint64_t)(2 * i + 1), (CUstream)0x100) != 0;
        _exit(bad);
    }
    int status = 1;
    if (pid > 0)
        waitpid(pid, &status, 0);
    of_children += CHILD;
    failed += pid < 0 || status != 0;
}

static void *work(void *number) {
    long id = (long)number, bad = 0;
    uint64_t random = 88172645463325252u + (uint64_t)id * 7919;
    CUstream stream = (CUstream)(0x100 + 0x10 * (uintptr_t)id);
    for (long i = 0; i < each; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        bad += one(random, stream) != 0;
        if (i % CHURN == CHURN - 1 && id == i / CHURN % 4) {
            kernels[1 + random % (KERNELS - 1)] = pool[random % POOL];
            cuModuleUnload((CUmodule)1);
            cuFuncSetAttribute(kernels[1 + random % (KERNELS - 1)], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000);
        }
        if (i % FORK == FORK - 1 && id == 0)
            fork_one(random);
    }
    failed += bad;
    return NULL;
}

int main(int argc, char **argv) {
    long threads = argc > 1 ? atol(argv[1]) : 4, launches = argc > 2 ? atol(argv[2]) : 100000;
    fake_logging(0);
    for (int i = 0; i < POOL; i++) {
        char name[32];
        snprintf(name, sizeof name, i % 64 ? "gemm_%d" : "ncclDevKernel_%d", i % 3000);
        pool[i] = fake_kernel(name, 32, 0, i % 2);
        if (i < KERNELS)
            kernels[i] = pool[i];
    }
    pthread_t all[64];
    long before = 0;
    for (int part = 0; part < 2; part++) { /* the first tenth fills caches and tables that fill once */
        each = launches / threads / 10 * (part ? 9 : 1);
        for (long i = 0; i < threads; i++)
            pthread_create(&all[i], NULL, work, (void *)i);
        for (long i = 0; i < threads; i++)
            pthread_join(all[i], NULL);
        if (!part)
            before = resident_kib();
    }
    fork_one(12345);
    printf("%ld %ld %ld\n", launches / threads / 10 * 10 * threads + of_children, (long)failed, resident_kib() - before);
    return failed != 0;
}
