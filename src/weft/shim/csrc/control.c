/* The job's files and the policy in force. Nothing here runs before the first launch, and nothing here can
 * fail the program: where a file cannot be had, launches pass through untouched. */
#define _GNU_SOURCE
#include "tracer.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MAX_POLICIES = 4096 };

weft_process *weft_self;
_Atomic(const weft_rules *) weft_active;
_Atomic uint64_t *weft_job_sequence;
_Atomic uint64_t weft_seen_job, weft_seen_self;

static weft_control *job;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static weft_rules *known[MAX_POLICIES];
static uint32_t known_count;
static _Atomic int attach_state; /* 0 not tried, 1 attached, -1 cannot or must not */

bool weft_enabled(void) {
    static _Atomic int state;
    int known_state = atomic_load_explicit(&state, memory_order_relaxed);
    if (known_state == 0) {
        const char *folder = getenv("WEFT_JOB");
        known_state = folder && *folder ? 1 : -1;
        atomic_store_explicit(&state, known_state, memory_order_relaxed);
    }
    return known_state > 0;
}

void weft_count(int counter) {
    if (weft_self)
        atomic_fetch_add_explicit(&weft_self->counters[counter], 1, memory_order_relaxed);
}

static void *map_file(int fd, size_t size, int protection) {
    void *memory = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static weft_control *open_job(const char *folder) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/control", folder) >= (int)sizeof path)
        return NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    weft_control *control = NULL;
    if (lseek(fd, 0, SEEK_END) >= (off_t)sizeof *control)
        control = map_file(fd, sizeof *control, PROT_READ);
    close(fd);
    if (control && (memcmp(control->magic, WEFT_CONTROL_MAGIC, 8) != 0 ||
                    control->version != WEFT_LAYOUT_VERSION || control->size != sizeof *control)) {
        munmap(control, sizeof *control);
        control = NULL;
    }
    return control;
}

static char self_path[4096]; /* empty: the counters are in no file */

/* A file over the limit would end the program by a signal. */
static bool may_write(size_t size) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= size);
}

static int create_file(const char *folder) {
    char *path = self_path;
    if (!may_write(sizeof(weft_process)))
        return -1;
    for (int n = 0; n < 1000; n++) { /* a program that execs another keeps its pid */
        if (snprintf(path, sizeof self_path, "%s/%d.%d", folder, (int)getpid(), n) >= (int)sizeof self_path)
            return -1;
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0 && access(path, F_OK) == 0)
            continue;
        /* Reserved now: a full disk must refuse us here, not kill the program on a later store. */
        if (fd >= 0 && posix_fallocate(fd, 0, sizeof(weft_process)) != 0) {
            unlink(path);
            close(fd);
            return -1;
        }
        return fd;
    }
    return -1;
}

static int rank_of_this_process(void) {
    static const char *const names[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", NULL};
    for (int i = 0; names[i]; i++) {
        const char *value = getenv(names[i]);
        if (value && *value)
            return atoi(value);
    }
    return -1;
}

static void describe(weft_process *self, uint32_t api) {
    memcpy(self->magic, WEFT_PROCESS_MAGIC, 8);
    self->version = WEFT_LAYOUT_VERSION;
    self->size = sizeof *self;
    self->pid = (uint32_t)getpid();
    self->rank = rank_of_this_process();
    self->api = api;
    memcpy(self->control.magic, WEFT_CONTROL_MAGIC, 8);
    self->control.version = WEFT_LAYOUT_VERSION;
    self->control.size = sizeof self->control;
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t length = read(fd, self->command, sizeof self->command - 1);
    close(fd);
    for (ssize_t i = 0; i + 1 < length; i++)
        if (self->command[i] == '\0')
            self->command[i] = ' ';
}

static weft_process *create_process(const char *folder) {
    int fd = create_file(folder);
    weft_process *self = NULL;
    if (fd >= 0) {
        self = map_file(fd, sizeof *self, PROT_READ | PROT_WRITE);
        close(fd);
    }
    if (!self) {
        self_path[0] = '\0'; /* the controls still work; only what was counted is lost */
        void *memory = mmap(NULL, sizeof *self, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        self = memory == MAP_FAILED ? NULL : memory;
    }
    return self;
}

/* CUDA does not survive a fork; the child must not write into its parent's counters. */
static void after_fork_in_child(void) {
    if (atomic_load(&attach_state) == 1)
        atomic_store(&attach_state, -1);
    pthread_mutex_init(&lock, NULL);
}

static void attach_locked(uint32_t api) {
    const char *folder = getenv("WEFT_JOB");
    weft_process *self = NULL;
    job = folder ? open_job(folder) : NULL;
    if (job)
        self = create_process(folder);
    if (!self) {
        atomic_store(&attach_state, -1);
        return;
    }
    describe(self, api);
    weft_job_sequence = &job->sequence;
    weft_seen_job = weft_seen_self = UINT64_MAX; /* so that the first launch reads the policy */
    pthread_atfork(NULL, NULL, after_fork_in_child);
    __atomic_store_n(&weft_self, self, __ATOMIC_RELEASE);
    atomic_store(&attach_state, 1);
}

weft_process *weft_attach(uint32_t api) {
    int state = atomic_load_explicit(&attach_state, memory_order_acquire);
    if (LIKELY(state == 1))
        return weft_self;
    if (state < 0 || !weft_enabled())
        return NULL;
    pthread_mutex_lock(&lock);
    if (atomic_load(&attach_state) == 0)
        attach_locked(api);
    pthread_mutex_unlock(&lock);
    if (atomic_load(&attach_state) != 1)
        return NULL;
    weft_refresh();
    weft_trace_attached();
    return weft_self;
}

static uint64_t checksum(const void *data, size_t size) { /* Adler-32, which zlib has too */
    const unsigned char *bytes = data;
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < size; i++) {
        a = (a + bytes[i]) % 65521;
        b = (b + a) % 65521;
    }
    return (uint64_t)b << 16 | a;
}

/* Copy a policy that may be changing; false where no whole one could be had this time. */
static bool take(const weft_control *from, weft_policy *into, uint64_t *sequence) {
    *sequence = atomic_load_explicit(&((weft_control *)from)->sequence, memory_order_acquire);
    if (*sequence & 1)
        return false;
    uint64_t expected = from->checksum;
    memcpy(into, &from->policy, sizeof *into);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&((weft_control *)from)->sequence, memory_order_relaxed) != *sequence)
        return false;
    if (*sequence == 0) { /* never written */
        memset(into, 0, sizeof *into);
        return true;
    }
    if (checksum(into, sizeof *into) != expected || into->rule_count > WEFT_RULES ||
        into->comm_count > WEFT_COMM_PATTERNS)
        return false;
    for (uint32_t i = 0; i < WEFT_RULES; i++)
        into->rules[i].pattern[WEFT_PATTERN - 1] = '\0';
    for (uint32_t i = 0; i < WEFT_COMM_PATTERNS; i++)
        into->comm[i][WEFT_PATTERN - 1] = '\0';
    return true;
}

/* The published form of a policy; equal policies share one, so going back and forth costs nothing. */
static const weft_rules *publish(const weft_policy *policy) {
    for (uint32_t i = 0; i < known_count; i++)
        if (memcmp(&known[i]->data, policy, sizeof *policy) == 0)
            return known[i];
    weft_rules *rules = known_count < MAX_POLICIES ? calloc(1, sizeof *rules) : NULL;
    if (!rules)
        return atomic_load(&weft_active); /* keep what is in force */
    rules->id = known_count + 1;
    rules->data = *policy;
    rules->shapes = policy->residency > 0;
    for (uint32_t i = 0; i < policy->rule_count; i++)
        rules->shapes |= policy->rules[i].residency > 0;
    rules->neutral =
        !rules->shapes && !(policy->flags & (WEFT_PRIORITY_HIGH | WEFT_TRACK)) && policy->head_start_ns == 0;
    known[known_count++] = rules;
    return rules;
}

const weft_rules *weft_refresh(void) {
    static weft_policy mine, theirs; /* large; guarded by the lock */
    pthread_mutex_lock(&lock);
    uint64_t job_sequence, self_sequence;
    if (take(job, &theirs, &job_sequence) && take(&weft_self->control, &mine, &self_sequence)) {
        bool own = mine.flags & WEFT_POLICY_SET;
        if (own && mine.comm_count == 0) { /* which kernels communicate is the job's to say */
            mine.comm_count = theirs.comm_count;
            memcpy(mine.comm, theirs.comm, sizeof mine.comm);
        }
        theirs.flags |= mine.flags & WEFT_TRACK;
        const weft_rules *rules = publish(own ? &mine : &theirs);
        if (rules && rules != atomic_load(&weft_active)) {
            if (atomic_load(&weft_active))
                weft_count(WEFT_COUNT_POLICY_CHANGES);
            atomic_store_explicit(&weft_active, rules, memory_order_release);
        }
        weft_seen_job = job_sequence;
        weft_seen_self = self_sequence;
    }
    const weft_rules *now = atomic_load(&weft_active);
    if (!now) { /* nothing whole was read yet: do nothing until it is */
        static const weft_rules nothing = {.neutral = true};
        now = &nothing;
    }
    pthread_mutex_unlock(&lock);
    return now;
}

/* For Python in this process: the file that holds this process's own policy and counters, or NULL. */
EXPORT const char *weft_shim_attach(void) {
    return weft_attach(WEFT_API_CUDA) && self_path[0] ? self_path : NULL;
}
