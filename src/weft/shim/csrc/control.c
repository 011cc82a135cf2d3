/* The job's files. Nothing here runs before the first launch, and no error here affects the program: if a file is not
 * available, launches pass through unchanged. */
#define _GNU_SOURCE
#include "tracer.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

weft_hot_data weft_hot = {.active = &weft_no_policy, .epoch = 1};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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
    if (weft_hot.self)
        atomic_fetch_add_explicit(&weft_hot.self->counters[counter], 1, memory_order_relaxed);
}

static void *map_file(int fd, size_t size, int protection) {
    void *memory = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return NULL;
    weft_shim_guard(memory, size);
    return memory;
}

/* If no folder could be written, `job_path` is a control file in memory. */
static int open_control(const char *job_path) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/control", job_path) >= (int)sizeof path)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd >= 0 || errno != ENOTDIR ? fd : open(job_path, O_RDONLY | O_CLOEXEC);
}

static weft_control *open_job(const char *job_path) {
    int fd = open_control(job_path);
    if (fd < 0)
        return NULL;
    weft_control *control = NULL;
    if (lseek(fd, 0, SEEK_END) >= (off_t)sizeof *control)
        control = map_file(fd, sizeof *control, PROT_READ);
    close(fd);
    if (control && (memcmp(control->magic, WEFT_CONTROL_MAGIC, 8) != 0 || control->version != WEFT_LAYOUT_VERSION ||
                    control->size != sizeof *control)) {
        munmap(control, sizeof *control);
        control = NULL;
    }
    return control;
}

/* --- this process's file ------------------------------------------------------------------------------- */

static char self_path[4096]; /* empty: the counters are not in a file */
static struct stat self_file;

/* Reserves disk blocks before they are used: on a full disk this must fail here, instead of a later store ending the
 * program. A file over the size limit is refused here too, since extending it would raise a signal. */
static bool reserve(int fd, size_t start, size_t size) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < start + size))
        return false;
    return posix_fallocate(fd, (off_t)start, (off_t)size) == 0;
}

static bool reserve_chunk(int fd, uint32_t chunk) {
    return reserve(fd, offsetof(weft_process, chunks) + chunk * sizeof(weft_chunk), sizeof(weft_chunk));
}

static int create_file(const char *folder) {
    char *path = self_path;
    for (int n = 0; n < 1000; n++) { /* a program that execs another one keeps its pid */
        if (snprintf(path, sizeof self_path, "%s/%d.%d", folder, (int)getpid(), n) >= (int)sizeof self_path)
            return -1;
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0 && errno == EEXIST)
            continue;
        if (fd >= 0 && (!reserve(fd, 0, offsetof(weft_process, control.policy)) || !reserve_chunk(fd, 0) ||
                        fstat(fd, &self_file) != 0)) {
            unlink(path);
            close(fd);
            return -1;
        }
        return fd;
    }
    return -1;
}

/* The descriptor is not kept open, since programs close descriptors that they do not know. */
bool weft_chunk_ready(uint32_t chunk) {
    if (chunk == 0 || !self_path[0])
        return chunk < WEFT_CHUNKS;
    int fd = chunk < WEFT_CHUNKS ? open(self_path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : -1;
    if (fd < 0)
        return false;
    struct stat now;
    bool ready = fstat(fd, &now) == 0 && now.st_ino == self_file.st_ino && now.st_dev == self_file.st_dev &&
                 reserve_chunk(fd, chunk);
    close(fd);
    return ready;
}

/* Zeroed memory that other processes can read as NAME.PID.N in the job's folder; NULL on failure. */
void *weft_shared_file(const char *name, size_t size) {
    const char *last = strrchr(self_path, '/');
    char path[sizeof self_path + 16];
    if (!last)
        return NULL;
    snprintf(path, sizeof path, "%.*s/%s.%s", (int)(last - self_path), self_path, name, last + 1);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return NULL;
    void *memory = reserve(fd, 0, size) ? map_file(fd, size, PROT_READ | PROT_WRITE) : NULL;
    if (!memory)
        unlink(path);
    close(fd);
    return memory;
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
    static const struct {
        const char *name;
        uint32_t kind, reason;
    } shared[WEFT_FIRST_ROW] = {
        [WEFT_ROW_OTHER_COMPUTE] = {"(other compute kernels)", WEFT_KIND_COMPUTE, WEFT_UNLISTED},
        [WEFT_ROW_OTHER_COMM] = {"(other collectives)", WEFT_KIND_COMM, WEFT_UNLISTED},
        [WEFT_ROW_UNNAMED] = {"(kernels without a name)", WEFT_KIND_UNKNOWN, WEFT_NAMELESS},
    };
    for (int i = 0; i < WEFT_FIRST_ROW; i++) {
        weft_row *row = &self->chunks[0].rows[i];
        strncpy(row->name, shared[i].name, sizeof row->name - 1);
        row->kind = shared[i].kind;
        row->reason = shared[i].reason;
    }
    self->rows_used = WEFT_FIRST_ROW;
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
        self_path[0] = '\0'; /* the controls still work; only the counts are lost */
        void *memory = mmap(NULL, sizeof *self, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        self = memory == MAP_FAILED ? NULL : memory;
    }
    return self;
}

/* A forked child must not write to its parent's counters, and none of the parent's handles are valid in it. It attaches
 * again when it first needs to. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    weft_hot.self = NULL;
    self_path[0] = '\0';
    atomic_store(&weft_hot.attached, 0);
#define X(part) weft_forget_##part();
    WEFT_FORGETS(X)
#undef X
}

/* glibc links pthread_atfork statically, and musl lacks the function that it calls, so the running libc decides which
 * name is used. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern void *__dso_handle;

static void on_fork(void (*child)(void)) {
    if (__register_atfork) {
        __register_atfork(NULL, NULL, child, __dso_handle);
        return;
    }
    int (*atfork)(void (*)(void), void (*)(void), void (*)(void)) =
        (int (*)(void (*)(void), void (*)(void), void (*)(void)))weft_next_symbol("pthread_atfork");
    if (atfork)
        atfork(NULL, NULL, child);
}

static void attach_locked(uint32_t api) {
    static bool registered;
    const char *job_path = getenv("WEFT_JOB");
    weft_process *self = NULL;
    weft_control *job = job_path ? open_job(job_path) : NULL;
    if (job)
        self = create_process(job_path);
    if (!registered) { /* even after a failure: a child may succeed where this process did not */
        on_fork(after_fork_in_child);
        registered = true;
    }
    if (!self) {
        atomic_store(&weft_hot.attached, -1);
        return;
    }
    describe(self, api);
    weft_policy_of(job);
    __atomic_store_n(&weft_hot.self, self, __ATOMIC_RELEASE);
    atomic_store(&weft_hot.attached, 1);
}

HOT weft_process *weft_attach(uint32_t api) {
    int state = atomic_load_explicit(&weft_hot.attached, memory_order_acquire);
    if (LIKELY(state == 1))
        return weft_hot.self;
    if (state < 0 || !weft_enabled())
        return NULL;
    int error = errno;
    pthread_mutex_lock(&lock);
    if (atomic_load(&weft_hot.attached) == 0)
        attach_locked(api);
    pthread_mutex_unlock(&lock);
    errno = error;
    if (atomic_load(&weft_hot.attached) != 1)
        return NULL;
    weft_refresh();
    weft_trace_attached();
    return weft_hot.self;
}

/* For Python in this process: the file that holds this process's own policy and counters, or NULL. */
EXPORT const char *weft_shim_attach(void) { return weft_attach(WEFT_API_CUDA) && self_path[0] ? self_path : NULL; }

/* For Python: the bytes copied from host to device so far. Live tuning asks at each step. */
EXPORT uint64_t weft_shim_copied_bytes(void) {
    weft_process *self = weft_hot.self;
    return self ? atomic_load_explicit(&self->counters[WEFT_COUNT_COPIED_BYTES], memory_order_relaxed) : 0;
}
