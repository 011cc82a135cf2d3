/* A libnccl.so.2 for tests, as unkind as the real one: it keeps a log of calls, lets the environment outrank
 * configurations, refuses a communicator that is busy in the background, writes the result of a background split only
 * when the split is over, lets a split wait for ranks that come late or never, and fails the n-th call overall, or the
 * next calls of one function. If a test gives it a kernel, it launches it where NCCL would launch, and copies where
 * NCCL would copy. Built by the tests, in several versions. */
#define _GNU_SOURCE
#include "nccl_api.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 22800
#endif
#define API __attribute__((visibility("default")))
enum { LOG = 65536, MAGIC = 0x6e63636c, QUEUE = 256, INVALID = 4 };

struct ncclComm {
    int magic, rank, size, max_ctas, min_ctas, blocking, split_share;
    int suspended, revoked;
    const char *net;
    _Atomic ncclResult_t async;
    _Atomic int polls; /* ncclCommGetAsyncError calls until background work is over */
    void *tuner;
    struct ncclComm *older; /* never freed, so that a test can read it */
    int policy;             /* NCCL_CTA_POLICY_* */
    _Atomic int stuck;      /* a collective that never ends is on the GPU, until it is aborted */
};

#include "fake_nccl_tuner.h"

typedef struct {
    char name[32];
    void *comm;
    int ctas, depth, in_order;
    int configured, least, most, nvls, cluster, force, policy; /* from the call's own configuration */
    char algorithm[24];
    fake_plan plan;
} record;

static record records[LOG];
static _Atomic int record_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *newest;
static void after_fork(void) { pthread_mutex_init(&lock, NULL); }
__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, after_fork); }
static bool logging = true;
static _Atomic int hanging;
static _Atomic int late, late_ended; /* whether background splits are held; how many have ended */
static _Atomic long calls, fail_at;
static __thread int depth;
static __thread ncclResult_t group_error; /* error of any call in the group, which then fails */
static __thread struct {
    ncclComm_t *where, comm;
} queue[QUEUE];
static __thread int queued;
static __thread ncclComm_t ending[QUEUE]; /* when the group ends */
static __thread int ended;
static __thread bool to_wait; /* the group's end waits until aborted work has left the GPU */

static struct {
    char api[32];
    int times, code;
} failures[8];

/* --- kernels and copies ------------------------------------------------------------------------------------------- */

typedef int (*launcher)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
enum { WINDOWS = 32 };
static launcher launch;
static void *kernel;
static bool no_windows, no_copies, no_policy;
static struct {
    ncclComm_t comm;
    const char *start, *end;
} windows[WINDOWS];
static __thread int to_launch;

API void fake_launch_with(launcher by, void *function) { launch = by, kernel = function; }
API void fake_without(int of_windows, int of_copies, int of_policy) {
    no_windows = of_windows, no_copies = of_copies, no_policy = of_policy;
}
API int fake_policy(ncclComm_t comm) { return comm->policy; }

static bool in_window(ncclComm_t comm, const void *buffer) {
    bool found = false;
    for (int i = 0; i < WINDOWS; i++)
        found |= windows[i].comm == comm && (const char *)buffer >= windows[i].start && (const char *)buffer < windows[i].end;
    return found;
}

static bool copies(const char *name, ncclComm_t comm, const void *send, const void *recv, const ncclCollConfig_t *config) {
    static const char *const kinds[] = {"ncclAllGather", "ncclAlltoAll", "ncclGather", "ncclScatter"};
    int policy = config && config->CTAPolicy != NCCL_UNDEFINED ? config->CTAPolicy : comm->policy;
    bool kind = false;
    for (int i = 0; i < 4; i++)
        kind |= strncmp(name, kinds[i], strlen(kinds[i])) == 0;
    return FAKE_VERSION >= NCCL_WITH_COPIES && kind && !no_copies && policy & NCCL_CTA_POLICY_ZERO &&
           in_window(comm, recv) && (FAKE_VERSION >= 22900 || in_window(comm, send));
}

static void launch_now(void *stream) {
    if (launch)
        launch(kernel, 8, 1, 1, 512, 1, 1, 0, stream, NULL, NULL);
}

API int fake_version(void) { return FAKE_VERSION; }
API int fake_comm_bytes(void) { return (int)sizeof(struct ncclComm) + 64; /* as malloc takes it, and its network */ }
API int fake_calls(void) { return record_count; }
API const record *fake_call(int i) { return &records[i]; }
API void fake_logging(int on) { logging = on; }
API void fake_hang(int on) { hanging = on; }
API void fake_late(int on) { late = on; }
API int fake_late_ended(void) { return late_ended; }
API long fake_nccl_calls_so_far(void) { return calls; }
API void fake_nccl_fail_at(long n) {
    calls = 0;
    fail_at = n;
}
/* NCCL waits for its work on the GPU; a wait that would never end is counted instead. */
static _Atomic int endless_waits;
API void fake_stick(ncclComm_t comm) { comm->stuck = 1; }
API int fake_endless_waits(void) { return endless_waits; }

static bool anything_stuck(void) {
    bool stuck = false;
    pthread_mutex_lock(&lock);
    for (struct ncclComm *c = newest; c; c = c->older)
        stuck |= c->stuck;
    pthread_mutex_unlock(&lock);
    return stuck;
}

static void wait_for_gpu(int most_ms) {
    for (int waited_ms = 0; anything_stuck(); waited_ms++) {
        if (waited_ms >= most_ms) {
            endless_waits++;
            return;
        }
        usleep(1000);
    }
}

API void fake_async(ncclComm_t comm, int code) { comm->async = code; }
API int fake_ctas(ncclComm_t comm) { return comm->max_ctas; }
API const char *fake_net(ncclComm_t comm) { return comm->net; }
API int fake_alive(ncclComm_t comm) { return comm->magic == MAGIC; }
API void fake_fail(const char *api, int times, int code) {
    for (int i = 0; i < 8; i++)
        if (!failures[i].times) {
            snprintf(failures[i].api, sizeof failures[i].api, "%s", api);
            failures[i].times = times;
            failures[i].code = code;
            return;
        }
}

static int failing(const char *api) {
    int code = 0;
    if (fail_at && ++calls == fail_at)
        return 3;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 8 && !code; i++)
        if (failures[i].times && strcmp(failures[i].api, api) == 0) {
            failures[i].times--;
            code = failures[i].code;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

static ncclResult_t in_group(ncclResult_t result) {
    if (depth > 0 && result && result != NCCL_IN_PROGRESS)
        group_error = result;
    return result;
}

static int note(const char *name, ncclComm_t comm) {
    if (comm && comm->magic != MAGIC)
        return in_group(INVALID);
    if (!logging)
        return 0;
    int i = record_count++;
    if (i < LOG) {
        snprintf(records[i].name, sizeof records[i].name, "%s", name);
        records[i].comm = comm;
        records[i].ctas = comm ? comm->max_ctas : 0;
        records[i].depth = depth;
    }
    return in_group(failing(name));
}

/* --- making communicators ----------------------------------------------------------------------------------------- */

/* Like NCCL: read once, and only set what the environment does not. */
static void read_file_of_settings(void) {
    static bool read;
    const char *path = getenv("NCCL_CONF_FILE");
    FILE *file = read || !path ? NULL : fopen(path, "r");
    char name[256], value[256];
    read = true;
    while (file && fscanf(file, "%255[^=]=%255s\n", name, value) == 2)
        setenv(name, value, 0);
    if (file)
        fclose(file);
}

static int environment(const char *name, int *cache) {
    read_file_of_settings();
    if (!*cache) {
        const char *text = getenv(name);
        *cache = text && atoi(text) > 0 ? atoi(text) : -1;
    }
    return *cache;
}

static void (*while_making)(void);
API void fake_while_making(void (*callback)(void)) { while_making = callback; }

static ncclComm_t make(int rank, int size, const ncclConfig_t *config, ncclComm_t parent) {
    static int most, least; /* read once, as NCCL does */
    if (while_making)
        while_making();
    ncclConfig_t own;
    memset(&own, 0, sizeof own);
    own.blocking = own.minCTAs = own.maxCTAs = own.splitShare = own.CTAPolicy = NCCL_UNDEFINED;
    if (config) {
        if (config->magic != NCCL_MAGIC)
            return NULL;
        memcpy(&own, config, config->size < sizeof own ? config->size : sizeof own);
        if (own.version < NCCL_WITH_CTAS)
            own.minCTAs = own.maxCTAs = NCCL_UNDEFINED;
        if (own.version < NCCL_WITH_CTA_POLICY)
            own.CTAPolicy = NCCL_UNDEFINED;
        bool odd = own.version >= NCCL_WITH_CTA_POLICY && (own.collnetEnable != NCCL_UNDEFINED || own.commName);
        if ((no_policy && own.CTAPolicy != NCCL_UNDEFINED) || odd)
            return NULL;
    }
    ncclComm_t c = calloc(1, sizeof *c);
    *c = (struct ncclComm){MAGIC, rank, size, own.maxCTAs, own.minCTAs, own.blocking, own.splitShare, 0, 0, NULL, 0, 0, NULL, NULL,
                           own.CTAPolicy == NCCL_UNDEFINED ? 0 : own.CTAPolicy, 0};
    if (!config && parent)
        *c = *parent;
    c->tuner = NULL;
    if (config && own.version >= NCCL_WITH_CTAS && own.netName)
        c->net = strdup(own.netName);
    if (environment("NCCL_MAX_CTAS", &most) > 0)
        c->max_ctas = most;
    if (environment("NCCL_MIN_CTAS", &least) > 0)
        c->min_ctas = least;
    if (c->max_ctas == NCCL_UNDEFINED)
        c->max_ctas = 64;
    if (c->min_ctas > c->max_ctas)
        c->min_ctas = c->max_ctas;
    pthread_mutex_lock(&lock);
    c->older = newest;
    newest = c;
    pthread_mutex_unlock(&lock);
    if (c->blocking == 0) {
        c->async = NCCL_IN_PROGRESS;
        c->polls = 3;
    }
    if (start_plugin(c))
        return NULL;
    return c;
}

static ncclResult_t give(ncclComm_t *where, ncclComm_t comm) {
    if (!comm)
        return in_group(INVALID);
    *where = comm;
    return comm->async;
}

API ncclResult_t ncclGetVersion(int *version) { return *version = FAKE_VERSION, 0; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d.%d", (int)getpid(), number++);
    return 0;
}
API const char *ncclGetErrorString(ncclResult_t code) { return code == 5 ? "invalid usage" : "some error"; }
API const char *ncclGetLastError(ncclComm_t comm) { return (void)comm, "as the test asked"; }
API ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    ncclResult_t result = failing("ncclCommCount");
    return result ? result : (*count = comm->size, 0);
}
API ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { return *rank = comm->rank, 0; }
API ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) { return (void)comm, *device = 0, 0; }

API ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
    (void)id;
    ncclResult_t result = note("ncclCommInitRank", NULL);
    return result ? result : give(made, make(rank, size, NULL, NULL));
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    (void)id;
    ncclResult_t result = note("ncclCommInitRankConfig", NULL);
    return result ? result : give(made, make(rank, size, config, NULL));
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int size, int rank, int count, ncclUniqueId *ids,
                                          ncclConfig_t *config) {
    (void)ids, (void)count;
    ncclResult_t result = note("ncclCommInitRankScalable", NULL);
    return result ? result : give(made, make(rank, size, config, NULL));
}

API ncclResult_t ncclCommInitAll(ncclComm_t *made, int count, const int *devices) {
    (void)devices;
    note("ncclCommInitAll", NULL);
    for (int i = 0; i < count; i++)
        made[i] = make(i, count, NULL, NULL);
    return 0;
}

#ifndef FAKE_NO_SPLIT
struct late_split {
    ncclComm_t *made, child, parent;
};

/* On a background thread: writes the communicator's pointer when the split is over. */
static void *split_late(void *argument) {
    struct late_split *l = argument;
    while (late)
        usleep(1000);
    *l->made = l->child;
    l->parent->polls = 0;
    l->parent->async = 0;
    free(l);
    late_ended++;
    return NULL;
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    ncclResult_t result = note("ncclCommSplit", comm);
    *made = NULL;
    if (result)
        return result;
    while (hanging)
        usleep(1000);
    if (comm->magic != MAGIC)
        return 2;
    if (color == NCCL_NO_COLOR)
        return 0;
    ncclComm_t child = make(key, comm->size, config, comm);
    if (!child)
        return INVALID;
    child->rank = key;
    if (comm->blocking == 0 && late) {
        pthread_t thread;
        struct late_split *l = malloc(sizeof *l);
        *l = (struct late_split){made, child, comm};
        child->async = 0;
        comm->async = NCCL_IN_PROGRESS;
        comm->polls = 1 << 30;
        pthread_create(&thread, NULL, split_late, l);
        pthread_detach(thread);
        return NCCL_IN_PROGRESS;
    }
    if (depth == 0)
        return give(made, child);
    queue[queued].where = made;
    queue[queued++].comm = child;
    return 0;
}
#endif

#if FAKE_VERSION >= 22700
API ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *made, ncclConfig_t *config, int flags) {
    (void)excluded;
    ncclResult_t result = note("ncclCommShrink", comm);
    *made = NULL;
    if (flags & NCCL_SHRINK_ABORT) {
        comm->stuck = 0;
        wait_for_gpu(20000); /* another thread may abort the others */
    }
    return result ? result : give(made, make(comm->rank, comm->size - count, config, comm));
}
#endif

#if FAKE_VERSION >= 22900
API ncclResult_t ncclCommGrow(ncclComm_t comm, int size, const ncclUniqueId *id, int rank, ncclComm_t *made,
                              ncclConfig_t *config) {
    (void)id;
    ncclResult_t result = note("ncclCommGrow", comm);
    *made = NULL;
    return result ? result : give(made, make(comm ? comm->rank : rank, size, config, comm));
}

/* Like NCCL: possible once; later calls on the communicator fail. */
API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    ncclResult_t result = note("ncclCommRevoke", comm);
    if (result || flags || comm->revoked)
        return result ? result : INVALID;
    comm->stuck = 0;
    to_wait = true;
    if (depth == 0)
        wait_for_gpu(0);
    return comm->revoked = 1, 0;
}
#endif

API ncclResult_t ncclGroupStart(void) {
    ncclResult_t result = failing("ncclGroupStart");
    depth += !result;
    return result;
}
API ncclResult_t ncclGroupEnd(void) {
    if (depth == 0)
        return 5;
    ncclResult_t result = failing("ncclGroupEnd");
    if (--depth == 0) {
        if (to_launch)
            launch_now(NULL);
        to_launch = 0;
        for (int i = 0; i < queued; i++) {
            *queue[i].where = queue[i].comm;
            result = result ? result : queue[i].comm->async;
        }
        queued = 0;
        for (int i = 0; i < ended; i++) {
            ending[i]->magic = 0;
            end_plugin(ending[i]);
        }
        ended = 0;
        if (to_wait)
            wait_for_gpu(0);
        to_wait = false;
        result = result ? result : group_error;
        group_error = 0;
    }
    return result;
}

/* Like NCCL: asks the plugin to plan an all-reduce, here of 1 KiB on the newest communicator; launches nothing. */
static _Atomic int simulation_held, simulations;
API void fake_hold_simulation(int on) { simulation_held = on; }
API int fake_simulations(void) { return simulations; }
API ncclResult_t ncclGroupSimulateEnd(void *info) {
    fake_plan plan;
    (void)info;
    if (depth == 0)
        return 5;
    depth--;
    simulations++;
    while (simulation_held)
        usleep(1000);
    return make_plan(newest, 4, 1024, true, &plan);
}

/* --- using and ending communicators ------------------------------------------------------------------------------- */

static _Atomic int refusing, planning;
API void fake_refuse(int on) { refusing = on; }
API void fake_plan_always(int on) { planning = on; } /* plan calls that are not logged, too */

/* Like NCCL: checks a configuration before anything else. */
static ncclResult_t check_config(const ncclCollConfig_t *config) {
    if (!config)
        return 0;
    return refusing || config->size < sizeof *config || config->magic != NCCL_MAGIC || config->forceAlgSelection < 0 ||
                   config->forceAlgSelection > 1
               ? INVALID
               : 0;
}

static ncclResult_t collective(const char *name, int function, size_t bytes, ncclComm_t comm, const void *send,
                               const void *recv, void *stream, const ncclCollConfig_t *config) {
    ncclResult_t result = check_config(config);
    if (result || (result = note(name, comm)))
        return result;
    if (comm->suspended || comm->revoked)
        return in_group(INVALID);
    if (!copies(name, comm, send, recv, config)) {
        to_launch += depth > 0;
        if (depth == 0)
            launch_now(stream);
    }
    int i = record_count - 1;
    record unlogged, *r = logging && i < LOG ? &records[i] : &unlogged;
    if (config && FAKE_VERSION >= NCCL_WITH_CALL_CONFIG) {
        r->configured = 1;
        r->least = config->minCTAs, r->most = config->maxCTAs, r->nvls = config->nvlsCTAs;
        r->cluster = config->cgaClusterSize, r->force = config->forceAlgSelection, r->policy = config->CTAPolicy;
        snprintf(r->algorithm, sizeof r->algorithm, "%s", config->algSelection ? config->algSelection : "");
    }
    return function < 0 || (!logging && !planning) ? 0 : make_plan(comm, function, bytes, false, &r->plan);
}

#if FAKE_VERSION >= 23100
#define WITH_CONFIG(name, function, bytes, ...)                                                                        \
    API ncclResult_t name##Config(__VA_ARGS__, const ncclCollConfig_t *config) {                                       \
        return collective(#name "Config", function, bytes, comm, send, recv, stream, config);                                              \
    }
#else
#define WITH_CONFIG(...)
#endif
#define COLLECTIVE(name, function, bytes, ...)                                                                         \
    API ncclResult_t name(__VA_ARGS__) { return collective(#name, function, bytes, comm, send, recv, stream, NULL); }                      \
    WITH_CONFIG(name, function, bytes, __VA_ARGS__)

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
static size_t width(int type) { return type == 7 ? 4 : 1; }

API ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm, void *stream) {
    ncclResult_t result = collective("ncclAllReduce", 4, count * width(type), comm, send, recv, stream, NULL);
    if (!result && comm->polls > 1000)
        return INVALID; /* busy in the background */
    if (!result && send && recv && type == 1)
        memmove(recv, send, count);
    return result;
}
WITH_CONFIG(ncclAllReduce, 4, count * width(type), const void *send, void *recv, size_t count, int type, int op,
            ncclComm_t comm, void *stream)
COLLECTIVE(ncclBroadcast, 0, count * width(type), const void *send, void *recv, size_t count, int type, int root,
           ncclComm_t comm, void *stream)
COLLECTIVE(ncclReduce, 1, count * width(type), const void *send, void *recv, size_t count, int type, int op, int root,
           ncclComm_t comm, void *stream)
COLLECTIVE(ncclAllGather, 2, count * width(type) * (size_t)comm->size, const void *send, void *recv, size_t count, int type,
           ncclComm_t comm, void *stream)
COLLECTIVE(ncclReduceScatter, 3, count * width(type) * (size_t)comm->size, const void *send, void *recv, size_t count,
           int type, int op, ncclComm_t comm, void *stream)
COLLECTIVE(ncclAlltoAll, -1, count, const void *send, void *recv, size_t count, int type, ncclComm_t comm, void *stream)
COLLECTIVE(ncclGather, -1, count, const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm,
           void *stream)
COLLECTIVE(ncclScatter, -1, count, const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm,
           void *stream)
#pragma GCC diagnostic pop

/* Like NCCL: calls through the linker, which may find another ncclBroadcast first. */
API ncclResult_t ncclBcast(void *buffer, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API ncclResult_t ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    (void)send, (void)count, (void)type, (void)peer, (void)stream;
    return note("ncclSend", comm);
}

API ncclResult_t ncclRecv(void *recv, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    (void)recv, (void)count, (void)type, (void)peer, (void)stream;
    return note("ncclRecv", comm);
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (comm->async == NCCL_IN_PROGRESS && comm->polls-- <= 0)
        comm->async = 0;
    return *error = comm->async, 0;
}

static ncclResult_t end(const char *name, ncclComm_t comm) {
    ncclResult_t result = note(name, comm);
    if (!result && depth > 0 && ended < QUEUE)
        return ending[ended++] = comm, 0; /* like NCCL: when the group ends */
    if (!result)
        comm->magic = 0;
    return result ? result : end_plugin(comm);
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm) { return note("ncclCommFinalize", comm); }
API ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end("ncclCommDestroy", comm); }
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
    hanging = 0;
    if (comm->magic == MAGIC)
        comm->stuck = 0;
    return end("ncclCommAbort", comm);
}
static ncclResult_t set_suspended(const char *name, ncclComm_t comm, int to) {
    ncclResult_t result = note(name, comm);
    if (result || comm->suspended == to)
        return result ? result : 5;
    return comm->suspended = to, 0;
}
API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
    return flags & NCCL_SUSPEND_MEMORY ? set_suspended("ncclCommSuspend", comm, 1) : 0;
}
API ncclResult_t ncclCommResume(ncclComm_t comm) { return set_suspended("ncclCommResume", comm, 0); }
API ncclResult_t ncclCommRegister(ncclComm_t comm, void *buffer, size_t size, void **handle) {
    (void)buffer, (void)size;
    *handle = comm;
    return note("ncclCommRegister", comm);
}
API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t size, void **window, int flags) {
    ncclResult_t result = note("ncclCommWindowRegister", comm);
    *window = NULL;
    int i = 0;
    while (i < WINDOWS && windows[i].comm)
        i++;
    if (result || no_windows || i == WINDOWS)
        return result; /* like NCCL: without support it succeeds and returns no window */
    *window = &windows[i];
    if (flags & NCCL_WIN_COLL_SYMMETRIC) {
        windows[i].comm = comm;
        windows[i].start = buffer, windows[i].end = (const char *)buffer + size;
    }
    return 0;
}
API ncclResult_t ncclMemAlloc(void **memory, size_t size) {
    ncclResult_t result = note("ncclCommMemAlloc", NULL);
    return result ? result : (*memory = malloc(size), 0);
}
API ncclResult_t ncclMemFree(void *memory) {
    free(memory);
    return note("ncclCommMemFree", NULL);
}
API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, void *window) {
    for (int i = 0; i < WINDOWS; i++)
        if (window == &windows[i] && windows[i].comm == comm)
            windows[i].comm = NULL;
    return note("ncclCommWindowDeregister", comm);
}
