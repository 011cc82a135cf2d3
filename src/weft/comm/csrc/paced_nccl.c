/* NCCL's C API for one rank of a node that is not present: collectives become paced kernels (comm/paced.py).
 *
 * The functions have NCCL's names, so that code for NCCL works with them: the shim recognizes communicators and calls,
 * and passes its rules in the configuration of each call. The calls of a group are collected until the group ends and
 * handed over together. As in NCCL, copy engines serve a collective if its communicator or call asks for zero CTAs and
 * its output lies in a symmetric window. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NCCL_MAGIC 0xcafebeefu

enum { SUCCESS = 0, UNHANDLED = 1, INTERNAL = 3, INVALID_ARGUMENT = 4 };
enum { WITH_CTA_POLICY = 22700, ZERO_CTAS = 2, SYMMETRIC_WINDOW = 1 };
enum { VERSION = 23203, UNDEFINED = INT_MIN, FIRST_CALLS = 32, CONFIG_BYTES = 256 };
enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };

typedef struct {
    char internal[128];
} unique_id;

typedef struct { /* ncclConfig_t as of 2.27; older versions end after split_share */
    size_t size;
    unsigned magic, version;
    int blocking, cluster, min_ctas, max_ctas;
    const char *network;
    int split_share;
    int traffic_class;
    const char *name;
    int collnet, cta_policy;
} comm_config;

typedef struct { /* ncclCollConfig_t as of 2.31 */
    size_t size;
    unsigned magic, version;
    void *ext;
    int min_ctas, max_ctas, nvls_ctas, cluster;
    const char *algorithm;
    int force_algorithm, cta_policy;
    uint64_t tag;
} call_config;

typedef struct window {
    uintptr_t start, end;
    struct window *next;
} window;

typedef struct {
    int rank, size, device, max_ctas, cluster;
    int stride; /* GPUs from one rank to the next */
    bool zero_ctas;
    window *windows;
} communicator;

typedef struct { /* mirrored in comm/paced.py, which caches launches by the bytes of the calls */
    const void *send;
    void *recv;
    uint64_t count;
    communicator *comm;
    void *stream;
    const char *algorithm; /* NULL: NCCL's choice */
    int32_t operation, type, reduction, peer, max_ctas, cluster, rank, size, copies, stride;
} paced_call;

typedef int (*launch_calls)(const paced_call *calls, int count);

static launch_calls launch;
static int (*current_device)(int *);
static int (*memory)(void **, size_t); /* allocates `size` bytes; frees if size is 0 */
static char last_error[512];
static _Thread_local struct {
    int depth, count, room;
    paced_call *calls;
} group;

/* For Python: set the functions that launch calls, return the current device, and allocate or free memory. */
EXPORT void weft_paced_serve(launch_calls how, int (*device)(int *), int (*allocate)(void **, size_t)) {
    launch = how;
    current_device = device;
    memory = allocate;
}

EXPORT void weft_paced_failed(const char *why) { snprintf(last_error, sizeof last_error, "%s", why); }

EXPORT int ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

EXPORT const char *ncclGetErrorString(int result) {
    return result == SUCCESS            ? "no error"
           : result == INVALID_ARGUMENT ? "invalid argument"
           : result == UNHANDLED        ? "a paced collective could not be launched"
                                        : "internal error";
}

EXPORT const char *ncclGetLastError(const communicator *comm) {
    (void)comm;
    return last_error;
}

EXPORT int ncclGetUniqueId(unique_id *id) {
    static _Atomic unsigned number;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "weft %ld %ld.%09ld %u", (long)getpid(), (long)now.tv_sec, now.tv_nsec,
             number++);
    return SUCCESS;
}

/* --- communicators ------------------------------------------------------------------------------------------------- */

static int limit_of(const char *variable, int configured) {
    const char *text = getenv(variable); /* takes precedence over the configuration, as in NCCL */
    int given = text ? atoi(text) : 0;
    return given > 0 ? given : configured > 0 ? configured : 0;
}

/* The environment takes precedence over the configuration. */
static bool asks_for_zero_ctas(const comm_config *config) {
    const char *text = getenv("NCCL_CTA_POLICY");
    if (text && *text)
        return atoi(text) == ZERO_CTAS || strcasestr(text, "zero");
    bool has = config && config->version >= WITH_CTA_POLICY && config->size >= sizeof *config;
    return has && config->cta_policy != UNDEFINED && config->cta_policy & ZERO_CTAS;
}

static int make(communicator **made, int size, int rank, const comm_config *config) {
    if (!made || size < 1 || rank < 0 || rank >= size || (config && config->magic != NCCL_MAGIC))
        return INVALID_ARGUMENT;
    communicator *c = calloc(1, sizeof *c);
    if (!c)
        return INTERNAL;
    c->rank = rank;
    c->size = size;
    c->stride = 1;
    c->max_ctas = limit_of("NCCL_MAX_CTAS", config ? config->max_ctas : 0);
    c->cluster = config && config->cluster >= 0 ? config->cluster : -1;
    c->zero_ctas = asks_for_zero_ctas(config);
    if (current_device)
        current_device(&c->device);
    *made = c;
    return SUCCESS;
}

EXPORT int ncclCommInitRankConfig(communicator **made, int size, unique_id id, int rank, comm_config *config) {
    (void)id;
    return make(made, size, rank, config);
}

EXPORT int ncclCommInitRank(communicator **made, int size, unique_id id, int rank) {
    (void)id;
    return make(made, size, rank, NULL);
}

/* The new communicator has the same ranks: weft's shim splits one to change its CTA limit. Groups with fewer ranks are
 * created by their own rendezvous, not by a split. */
EXPORT int ncclCommSplit(communicator *comm, int color, int key, communicator **made, comm_config *config) {
    (void)key;
    if (!comm || color < 0)
        return INVALID_ARGUMENT;
    int result = make(made, comm->size, comm->rank, config);
    if (!result)
        (*made)->stride = comm->stride;
    if (!result && !config) { /* inherit the parent's configuration */
        (*made)->max_ctas = comm->max_ctas;
        (*made)->cluster = comm->cluster;
        (*made)->zero_ctas = comm->zero_ctas;
    }
    return result;
}

/* For Python: set the distance in GPUs between the ranks of a communicator. */
EXPORT int weft_paced_spread(communicator *comm, int stride) {
    comm->stride = stride;
    return SUCCESS;
}

EXPORT int ncclCommFinalize(communicator *comm) { return comm ? SUCCESS : INVALID_ARGUMENT; }

EXPORT int ncclCommDestroy(communicator *comm) {
    for (window *next, *w = comm ? comm->windows : NULL; w; w = next) {
        next = w->next;
        free(w);
    }
    free(comm);
    return SUCCESS;
}

EXPORT int ncclCommAbort(communicator *comm) { return ncclCommDestroy(comm); }

EXPORT int ncclCommGetAsyncError(communicator *comm, int *error) {
    *error = SUCCESS;
    return comm ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT int ncclCommCount(const communicator *comm, int *count) {
    *count = comm->size;
    return SUCCESS;
}

EXPORT int ncclCommUserRank(const communicator *comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}

EXPORT int ncclCommCuDevice(const communicator *comm, int *device) {
    *device = comm->device;
    return SUCCESS;
}

/* --- memory in windows --------------------------------------------------------------------------------------------- */

EXPORT int ncclMemAlloc(void **made, size_t size) {
    return made && size && memory ? memory(made, size) : INVALID_ARGUMENT;
}

EXPORT int ncclMemFree(void *made) { return memory ? memory(&made, 0) : INVALID_ARGUMENT; }

EXPORT int ncclCommWindowRegister(communicator *comm, void *buffer, size_t size, void **made, int flags) {
    if (!comm || !buffer || !made)
        return INVALID_ARGUMENT;
    *made = NULL; /* as in NCCL, success without a window if none can be made */
    window *w = flags & SYMMETRIC_WINDOW ? malloc(sizeof *w) : NULL;
    if (w) {
        *w = (window){(uintptr_t)buffer, (uintptr_t)buffer + size, comm->windows};
        comm->windows = *made = w;
    }
    return SUCCESS;
}

EXPORT int ncclCommWindowDeregister(communicator *comm, void *made) {
    if (!comm)
        return INVALID_ARGUMENT;
    for (window **at = &comm->windows; *at; at = &(*at)->next)
        if (*at == made) {
            *at = ((window *)made)->next;
            free(made);
            return SUCCESS;
        }
    return INVALID_ARGUMENT;
}

static bool in_window(const communicator *comm, const void *buffer) {
    uintptr_t at = (uintptr_t)buffer;
    for (const window *w = comm->windows; w; w = w->next)
        if (at >= w->start && at < w->end)
            return true;
    return false;
}

static bool copied_kind(int operation) {
    return operation == ALL_GATHER || operation == ALL_TO_ALL || operation == GATHER || operation == SCATTER;
}

/* --- calls --------------------------------------------------------------------------------------------------------- */

static int hand_over(const paced_call *calls, int count) { return launch ? launch(calls, count) : INTERNAL; }

static int take(paced_call call, const call_config *config) {
    if (!call.comm)
        return INVALID_ARGUMENT;
    call.rank = call.comm->rank;
    call.size = call.comm->size;
    call.stride = call.comm->stride;
    call.max_ctas = call.comm->max_ctas;
    call.cluster = call.comm->cluster;
    bool zero_ctas = call.comm->zero_ctas;
    if (config) {
        if (config->magic != NCCL_MAGIC || config->size < sizeof *config || config->size > CONFIG_BYTES)
            return INVALID_ARGUMENT;
        if (config->max_ctas > 0 && (!call.max_ctas || config->max_ctas < call.max_ctas))
            call.max_ctas = config->max_ctas;
        if (config->cluster >= 0)
            call.cluster = config->cluster;
        call.algorithm = config->algorithm;
        if (config->cta_policy != UNDEFINED)
            zero_ctas = config->cta_policy & ZERO_CTAS;
    }
    call.copies = zero_ctas && copied_kind(call.operation) && in_window(call.comm, call.recv);
    if (!group.depth)
        return hand_over(&call, 1);
    if (group.count == group.room) { /* an all-to-all of sends and receives has two calls per rank */
        int room = group.room ? 2 * group.room : FIRST_CALLS;
        paced_call *more = realloc(group.calls, room * sizeof *more);
        if (!more)
            return INTERNAL;
        group.calls = more;
        group.room = room;
    }
    group.calls[group.count++] = call;
    return SUCCESS;
}

EXPORT int ncclGroupStart(void) {
    group.depth++;
    return SUCCESS;
}

EXPORT int ncclGroupEnd(void) {
    if (!group.depth)
        return INVALID_ARGUMENT;
    if (--group.depth || !group.count)
        return SUCCESS;
    int count = group.count;
    group.count = 0;
    return hand_over(group.calls, count);
}

#define CALL(name, ...)                                                                                                \
    (paced_call) {                                                                                                     \
        .operation = name, .send = send, .recv = recv, .count = count, .type = type, .comm = comm, .stream = stream,   \
        __VA_ARGS__                                                                                                    \
    }
#define COLLECTIVE(function, name, parameters, ...)                                                                    \
    EXPORT int function(const void *send, void *recv, uint64_t count, int type, UNWRAP parameters communicator *comm,  \
                        void *stream) {                                                                                \
        return take(CALL(name, __VA_ARGS__), NULL);                                                                    \
    }                                                                                                                  \
    EXPORT int function##Config(const void *send, void *recv, uint64_t count, int type,                                \
                                UNWRAP parameters communicator *comm, void *stream, const call_config *config) {       \
        return take(CALL(name, __VA_ARGS__), config);                                                                  \
    }
#define UNWRAP(...) __VA_ARGS__

COLLECTIVE(ncclAllReduce, ALL_REDUCE, (int reduction, ), .reduction = reduction)
COLLECTIVE(ncclBroadcast, BROADCAST, (int root, ), .peer = root)
COLLECTIVE(ncclReduce, REDUCE, (int reduction, int root, ), .reduction = reduction, .peer = root)
COLLECTIVE(ncclAllGather, ALL_GATHER, (), .peer = 0)
COLLECTIVE(ncclReduceScatter, REDUCE_SCATTER, (int reduction, ), .reduction = reduction)
COLLECTIVE(ncclAlltoAll, ALL_TO_ALL, (), .peer = 0)
COLLECTIVE(ncclGather, GATHER, (int root, ), .peer = root)
COLLECTIVE(ncclScatter, SCATTER, (int root, ), .peer = root)

EXPORT int ncclSend(const void *send, uint64_t count, int type, int peer, communicator *comm, void *stream) {
    void *recv = NULL;
    return take(CALL(SEND, .peer = peer), NULL);
}

EXPORT int ncclRecv(void *recv, uint64_t count, int type, int peer, communicator *comm, void *stream) {
    const void *send = NULL;
    return take(CALL(RECV, .peer = peer), NULL);
}
