/* Reads and writes a trace after it has ended. Under `weft run --trace`, also starts and ends a trace by time in
 * programs whose steps are unknown. */
#define _GNU_SOURCE
#include "tracer.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_WAIT_S = 20, EXIT_WAIT_S = 5 };
const char *weft_shim_attach(void);

/* --- reading ------------------------------------------------------------------------------------------------------ */

static int number_in(const char *const *names) {
    for (int i = 0; names[i]; i++) {
        const char *value = getenv(names[i]);
        if (value && *value)
            return atoi(value);
    }
    return -1;
}

static void fill_header(weft_trace_header *h) {
    static const char *const worlds[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", NULL};
    const uint64_t *marks;
    uint32_t *rows;
    weft_trace_record *records;
    struct timespec real;
    memset(h, 0, sizeof *h);
    memcpy(h->magic, WEFT_TRACE_MAGIC, 8);
    h->version = WEFT_TRACE_VERSION;
    h->span_size = sizeof(weft_trace_span);
    h->spans = weft_trace_records(&records);
    h->marks = weft_trace_marks(&marks);
    h->graph_rows = weft_trace_graph_rows(&rows);
    clock_gettime(CLOCK_REALTIME, &real);
    h->realtime_offset_ns = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec - (int64_t)weft_trace_now();
    h->rank = weft_hot.self ? weft_hot.self->rank : -1;
    h->world = number_in(worlds);
    h->pid = (int32_t)getpid();
    const char *path = weft_shim_attach(), *name = path ? strrchr(path, '/') : NULL;
    snprintf(h->process_file, sizeof h->process_file, "%s", name ? name + 1 : "");
    h->begin_ns = weft_trace_period()[0];
    h->end_ns = weft_trace_period()[1];
    weft_trace_calibrations(h);
    weft_trace_devices(h);
}

static void read_times(uint64_t deadline_ns) {
    weft_trace_record *records;
    uint64_t count = weft_trace_records(&records);
    weft_trace_context *entered = NULL;
    CUcontext before = NULL;
    for (uint64_t i = 0; i < count; i++) {
        weft_trace_record *r = &records[i];
        if (r->context != entered) {
            if (entered)
                weft_trace_leave(before);
            entered = weft_trace_enter(r->context, &before) ? r->context : NULL;
        }
        bool failed = r->span.flags & (WEFT_SPAN_FAILED | WEFT_SPAN_UNTIMED);
        bool open = r->span.flags & WEFT_SPAN_OPEN;
        r->span.after_ns = entered && !failed && !open ? weft_trace_time(r->context, r->after, deadline_ns) : -1;
        r->span.before_ns = entered ? weft_trace_time(r->context, r->before, deadline_ns) : -1;
        r->span.again_ns = entered ? weft_trace_time(r->context, r->again, deadline_ns) : -1;
        r->span.placed_ns = entered ? weft_trace_time(r->context, r->placed, deadline_ns) : -1;
        if (r->span.after_ns < 0 && !open && !failed)
            weft_trace_count(WEFT_TRACED_UNFINISHED, 1);
    }
    if (entered)
        weft_trace_leave(before);
}

/* Reads an ended trace into `spans`; returns the number of spans, or -1. Can be called repeatedly. */
int64_t weft_trace_read(weft_trace_header *h, weft_trace_span *spans, uint64_t room, double timeout_s) {
    weft_trace_record *records;
    if (weft_trace_state() != 2)
        return -1;
    uint64_t count = weft_trace_records(&records);
    int mode = weft_capture_relax();
    if (spans)
        read_times(weft_trace_now() + (uint64_t)(timeout_s * 1e9));
    for (uint64_t i = 0; spans && i < count && i < room; i++)
        spans[i] = records[i].span;
    if (h)
        fill_header(h);
    weft_capture_restore(mode);
    return (int64_t)count;
}

int64_t weft_trace_read_marks(uint64_t *out, uint64_t room) {
    const uint64_t *marks;
    uint64_t count = weft_trace_marks(&marks);
    if (out)
        memcpy(out, marks, (count < room ? count : room) * sizeof *out);
    return (int64_t)count;
}

int64_t weft_trace_read_graph_rows(uint32_t *out, uint64_t room) {
    uint32_t *rows;
    uint64_t count = weft_trace_graph_rows(&rows);
    if (out && rows)
        memcpy(out, rows, (count < room ? count : room) * sizeof *out);
    return (int64_t)count;
}

/* --- a file in the job's folder, which `weft run` turns into a trace --------------------------------------------- */

static bool by_steps;

static bool write_all(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size > 0) {
        ssize_t n = write(fd, at, size);
        if (n <= 0)
            return false;
        at += n;
        size -= (size_t)n;
    }
    return true;
}

static bool write_parts(int fd, const weft_trace_header *h) {
    weft_trace_record *records;
    const uint64_t *marks;
    uint32_t *rows;
    uint64_t count = weft_trace_records(&records);
    bool good = write_all(fd, h, sizeof *h);
    for (uint64_t i = 0; good && i < count; i++)
        good = write_all(fd, &records[i].span, sizeof(weft_trace_span));
    uint64_t steps = weft_trace_marks(&marks), listed = weft_trace_graph_rows(&rows);
    return good && write_all(fd, marks, steps * sizeof *marks) && write_all(fd, rows, listed * sizeof *rows);
}

static int write_trace(void) {
    const char *path = weft_shim_attach(), *name = path ? strrchr(path, '/') : NULL;
    char partial[4200], whole[4200];
    weft_trace_header h;
    if (!name)
        return -1;
    snprintf(whole, sizeof whole, "%.*s/trace.%s", (int)(name - path), path, name + 1);
    snprintf(partial, sizeof partial, "%.*s/.trace.%s", (int)(name - path), path, name + 1);
    fill_header(&h);
    h.by_steps = by_steps;
    int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool good = fd >= 0 && write_parts(fd, &h);
    if (fd >= 0)
        close(fd);
    return good && rename(partial, whole) == 0 ? 0 : -1;
}

static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;

int weft_trace_finish(double timeout_s) {
    int result = -1;
    pthread_mutex_lock(&once);
    if (weft_trace_state() == 1)
        weft_trace_end();
    if (weft_trace_state() == 2) {
        int mode = weft_capture_relax();
        read_times(weft_trace_now() + (uint64_t)(timeout_s * 1e9));
        weft_capture_restore(mode);
        result = write_trace();
        weft_trace_free();
    }
    pthread_mutex_unlock(&once);
    return result;
}

/* --- tracing by time, without steps ----------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool steps_come, steps_known, by_time;
static double after_s, for_s, patience_s;

void weft_trace_steps_come(void) {
    pthread_mutex_lock(&lock);
    steps_come = true;
    pthread_mutex_unlock(&lock);
}

int weft_trace_steps_known(void) {
    pthread_mutex_lock(&lock);
    int late = by_time ? -1 : 0;
    steps_known = by_steps = !by_time;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return late;
}

/* Waits for this time; false if steps were found meanwhile. */
static bool wait_until(double seconds) {
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += (time_t)seconds;
    limit.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (limit.tv_nsec >= 1000000000) {
        limit.tv_nsec -= 1000000000;
        limit.tv_sec++;
    }
    while (!steps_known)
        if (pthread_cond_timedwait(&changed, &lock, &limit) != 0)
            break;
    return !steps_known;
}

static void sleep_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static void *trace_by_time(void *context) {
    pthread_mutex_lock(&lock);
    bool alone = wait_until(after_s);
    if (alone && steps_come && patience_s > after_s)
        alone = wait_until(patience_s - after_s);
    by_time = alone;
    pthread_mutex_unlock(&lock);
    if (!alone)
        return NULL;
    if (context && weft_cuda()->cuCtxSetCurrent)
        weft_cuda()->cuCtxSetCurrent(context);
    if (weft_trace_begin() == 0) {
        sleep_for(for_s);
        weft_trace_finish(LONGEST_WAIT_S);
    }
    return NULL;
}

/* If a child is forked while a trace is being written, no thread in it would unlock these. It would hang at exit, when
 * it finishes its own trace. */
void weft_forget_output(void) {
    pthread_mutex_init(&once, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
}

static void at_exit(void) { weft_trace_finish(EXIT_WAIT_S); }

/* WEFT_TRACE is "AFTER LENGTH PATIENCE", in seconds: when to begin, how long to record, and how long to wait for steps
 * if they may still be found. */
void weft_trace_attached(void) {
    static _Atomic bool planned;
    const char *plan = getenv("WEFT_TRACE");
    pthread_t thread;
    CUcontext context = NULL;
    if (!plan || atomic_exchange(&planned, true) || sscanf(plan, "%lf %lf %lf", &after_s, &for_s, &patience_s) != 3)
        return;
    atexit(at_exit);
    if (weft_cuda()->cuCtxGetCurrent)
        weft_cuda()->cuCtxGetCurrent(&context);
    if (context) { /* load now, while the GPU is idle: see weft_trace_warm */
        weft_trace_context kernels = {.context = context};
        int mode = weft_capture_relax();
        weft_trace_stamps_load(&kernels);
        weft_capture_restore(mode);
    }
    if (pthread_create(&thread, NULL, trace_by_time, context) == 0)
        pthread_detach(thread);
}
