/* One thread writes pairs of policies while others launch. Prints how many launches that began after the second write
 * and ended before the next one were made under another policy.
 *
 *   policy_race THREADS WRITES     the job's policy asks for a residency */
#define _GNU_SOURCE
#include "cuda_api.h"
#include "layout.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **, void **);
extern void *fake_kernel(const char *, int, int, int);
extern void fake_logging(int);
extern unsigned fake_last_shared(void);

enum { KERNELS = 4, PAUSES = 300 };
static CUfunction kernels[KERNELS];
static weft_control *control;
static struct {
    weft_policy policy;
    uint64_t checksum;
} forms[2]; /* with and without a residency */
static _Atomic long number = -1; /* of the policy in place; -1: one is being written */
static _Atomic bool over;
static _Atomic long wrong, failed;

static uint64_t adler(const unsigned char *bytes, size_t size) {
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < size; i++) {
        a = (a + bytes[i]) % 65521;
        b = (b + a) % 65521;
    }
    return (uint64_t)b << 16 | a;
}

static void launch_one(int i) {
    long before = number;
    failed += cuLaunchKernel(kernels[i % KERNELS], 100000, 1, 1, 128, 1, 1, 0, (CUstream)0x100, NULL, NULL) != 0;
    bool shaped = fake_last_shared() > 0;
    wrong += before >= 0 && before == number && shaped != (before % 2 == 0);
}

static void *launch_on(void *unused) {
    while (!over)
        for (int i = 0; i < 64; i++)
            launch_one(i);
    return unused;
}

static void write_form(long which) {
    control->sequence++;
    memcpy(&control->policy, &forms[which % 2].policy, sizeof control->policy);
    control->checksum = forms[which % 2].checksum;
    control->sequence++;
}

int main(int argc, char **argv) {
    long threads = argc > 1 ? atol(argv[1]) : 3, writes = argc > 2 ? atol(argv[2]) : 1000;
    char path[4096];
    snprintf(path, sizeof path, "%s/control", getenv("WEFT_JOB"));
    int fd = open(path, O_RDWR);
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || control == MAP_FAILED)
        return 2;
    fake_logging(0);
    for (int i = 0; i < KERNELS; i++)
        kernels[i] = fake_kernel("gemm", 32, 0, 0);
    for (int i = 0; i < 2; i++) {
        memcpy(&forms[i].policy, &control->policy, sizeof control->policy);
        forms[i].policy.residency = i ? 0 : control->policy.residency;
        forms[i].checksum = adler((const unsigned char *)&forms[i].policy, sizeof forms[i].policy);
    }
    pthread_t all[64];
    for (long i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, launch_on, NULL);
    for (long i = 0; i < writes; i++) {
        number = -1;
        write_form(i + 1);
        for (volatile long pause = i * 7 % PAUSES; pause > 0; pause--)
            ;
        write_form(i);
        number = i;
        for (int n = 0; n < 8; n++)
            launch_one(n);
        if (i % 3 == 0)
            usleep(100);
    }
    over = true;
    for (long i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    printf("%ld\n", (long)wrong);
    return failed != 0;
}
