/* Collectives from many threads at once, through symbols that the linker bound, while the main thread prepares,
 * routes and releases.
 *
 *   hammer THREADS CALLS          every thread makes all-reduces, some in groups, CALLS of them after many
 *                                changes; exits with 0 on success
 *   hammer THREADS CALLS time     prints the nanoseconds of one all-reduce, the least of several rounds
 *   hammer THREADS CALLS time plan     the same with NCCL asking its tuner plugin */
#define _GNU_SOURCE
#include "nccl_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

extern ncclResult_t ncclGetUniqueId(ncclUniqueId *);
extern ncclResult_t ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int);
extern ncclResult_t ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, void *);
extern ncclResult_t ncclGroupStart(void);
extern ncclResult_t ncclGroupEnd(void);
extern ncclResult_t ncclCommDestroy(ncclComm_t);
extern void fake_logging(int);
extern void fake_plan_always(int);

enum { ROUNDS = 9, CHANGES = 30 };
static ncclComm_t comms[64];
static long calls;
static int timing;
static _Atomic int running, changes;

static ncclResult_t one(ncclComm_t comm, long i) {
    if (timing || i % 3)
        return ncclAllReduce(NULL, NULL, 64, 7, 0, comm, NULL);
    ncclResult_t result = ncclGroupStart();
    result |= ncclAllReduce(NULL, NULL, 64, 7, 0, comm, NULL);
    return result | ncclGroupEnd();
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *work(void *id) {
    ncclComm_t comm = comms[(long)id];
    double best = 1e30;
    long failed = 0;
    for (int round = 0; round < (timing ? ROUNDS : 1); round++) {
        for (long i = 0; !timing && changes < CHANGES; i++)
            failed += one(comm, i) != 0;
        double start = now_ns();
        for (long i = 0; i < calls; i++)
            failed += one(comm, i) != 0;
        double each = (now_ns() - start) / (double)calls;
        best = each < best ? each : best;
    }
    running--;
    double *result = malloc(sizeof *result);
    *result = failed ? -1 : best;
    return result;
}

static int change_routes(void) {
    int (*prepare)(int, double, char *, size_t) = (int (*)(int, double, char *, size_t))dlsym(RTLD_DEFAULT, "weft_nccl_prepare");
    int (*route)(int, char *, size_t) = (int (*)(int, char *, size_t))dlsym(RTLD_DEFAULT, "weft_nccl_route");
    int (*release)(char *, size_t) = (int (*)(char *, size_t))dlsym(RTLD_DEFAULT, "weft_nccl_release");
    char why[256] = "";
    if (!prepare || !route || !release)
        return 1;
    int bad = 0;
    while (!bad && running > 0) {
        int limit = 4 + changes % 3;
        bad = prepare(limit, 20, why, sizeof why) || route(limit, why, sizeof why) || release(why, sizeof why);
        changes += bad ? CHANGES : 1;
    }
    if (bad)
        fprintf(stderr, "%s\n", why);
    return bad;
}

int main(int argc, char **argv) {
    long threads = argc > 1 ? atol(argv[1]) : 1;
    calls = argc > 2 ? atol(argv[2]) : 1000;
    timing = argc > 3;
    fake_logging(0);
    fake_plan_always(argc > 4);
    for (long i = 0; i < threads; i++) {
        ncclUniqueId id;
        if (ncclGetUniqueId(&id) || ncclCommInitRank(&comms[i], 2, id, 0) ||
            ncclAllReduce(NULL, NULL, 64, 7, 0, comms[i], NULL))
            return 2;
    }
    running = (int)threads;
    pthread_t all[64];
    for (long i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, work, (void *)i);
    int bad = timing ? 0 : change_routes();
    double worst = 0;
    for (long i = 0; i < threads; i++) {
        double *result;
        pthread_join(all[i], (void **)&result);
        bad |= *result < 0;
        worst = *result > worst ? *result : worst;
        free(result);
    }
    for (long i = 0; i < threads; i++)
        bad |= ncclCommDestroy(comms[i]);
    if (timing)
        printf("%.2f\n", worst);
    return bad;
}
