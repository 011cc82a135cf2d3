/* NCCL, stood in front of: its libraries, and every call that makes, uses or ends a communicator.
 *
 * A program reaches NCCL through the linker (torch) or through dlsym (ctypes, plugins), and may have two of them. A
 * function that dlsym gave away belongs to one library, so each library has functions of its own here; the exported
 * ones ask where their caller would have been bound. Whatever is not understood goes straight on. */
#define _GNU_SOURCE
#include "nccl.h"
#include "cuda_shim.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define UNWRAP(...) __VA_ARGS__
enum { CALLERS = 64, PENDING = 64, GROUPED = 16 };

typedef struct {
    weft_comm *c;
    ncclComm_t to; /* what its calls in this group use */
    bool collective;
} grouped;

static _Thread_local struct {
    int depth;  /* of the program's groups */
    int inside; /* the library, or weft itself, is calling */
    int place;  /* of the limit that holds for this group */
    int group_size, pending_count;
    grouped group[GROUPED];
    struct {
        ncclComm_t *where;
        weft_comm *c;
    } pending[PENDING]; /* communicators that are there when the group ends */
    struct {
        void *address;
        weft_nccl *library;
    } callers[CALLERS];
} me;

bool weft_nccl_in_group(void) { return me.depth > 0; }
void weft_nccl_private(bool on) { me.inside += on ? 1 : -1; }

/* --- collectives --------------------------------------------------------------------------------------------------- */

static uint64_t element_size(int type) {
    static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 1;
}

/* What this communicator's calls in the open group use; NULL where there is no room to remember. */
static grouped *in_group(weft_comm *c) {
    for (int i = 0; i < me.group_size; i++)
        if (me.group[i].c == c)
            return &me.group[i];
    if (me.group_size == GROUPED)
        return NULL;
    me.group[me.group_size] = (grouped){.c = c};
    return &me.group[me.group_size++];
}

typedef struct {
    weft_comm *c;
    int place; /* held for this call alone */
} call;

/* The communicator to use. Calls of one group on one communicator stay together: ranks may issue them in different
 * orders, and two kernels on one stream could then wait for each other. */
static ncclComm_t choose(call *k, weft_comm *c, bool collective, bool routable, void *stream) {
    int place = me.place;
    if (me.depth == 0 && collective)
        place = k->place = weft_route_take();
    ncclComm_t to = c->handle;
    if (UNLIKELY(place > 0) && collective && routable && !weft_capturing(weft_stream(stream, false))) {
        ncclComm_t sibling = atomic_load_explicit(&c->sibling[place], memory_order_acquire);
        to = sibling ? sibling : to;
    }
    grouped *g = me.depth > 0 ? in_group(c) : NULL;
    if (g && g->to && g->collective != collective) {
        atomic_store_explicit(&c->mixed, true, memory_order_relaxed);
        return g->to;
    }
    if (g && !g->to) {
        g->to = to;
        g->collective = collective;
    }
    return to;
}

static ncclComm_t enter(call *k, ncclComm_t comm, int operation, size_t count, int type, int op, void *stream) {
    *k = (call){0};
    if (me.inside++ > 0)
        return comm;
    weft_comm *c = k->c = weft_comm_of(comm);
    if (UNLIKELY(!c))
        return comm;
    bool collective = operation < OP_SEND;
    ncclComm_t to = choose(k, c, collective, op < NCCL_BUILT_IN_OPS, stream);
    weft_comm_called(c, operation, count * element_size(type), to != comm);
    return to;
}

static ncclResult_t leave(const call *k, ncclResult_t result) {
    me.inside--;
    if (UNLIKELY(k->place > 0))
        weft_route_give(k->place);
    if (k->c && me.depth == 0)
        weft_comm_boundary();
    return result;
}

/* CALL is the real call, written with `to`. */
#define MAKE(operation, op, CALL)                                                                           \
    call k;                                                                                                 \
    ncclComm_t to = enter(&k, comm, operation, count, type, op, stream);                                    \
    return leave(&k, l->CALL)

#define ON(name, ...) static ncclResult_t on_##name(weft_nccl *l, __VA_ARGS__)

ON(ncclAllReduce, const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm, void *stream) {
    MAKE(OP_ALL_REDUCE, op, ncclAllReduce(send, recv, count, type, op, to, stream));
}

ON(ncclBroadcast, const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    MAKE(OP_BROADCAST, 0, ncclBroadcast(send, recv, count, type, root, to, stream));
}

ON(ncclBcast, void *buffer, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    MAKE(OP_BROADCAST, 0, ncclBcast(buffer, count, type, root, to, stream));
}

ON(ncclReduce, const void *send, void *recv, size_t count, int type, int op, int root, ncclComm_t comm, void *stream) {
    MAKE(OP_REDUCE, op, ncclReduce(send, recv, count, type, op, root, to, stream));
}

ON(ncclAllGather, const void *send, void *recv, size_t count, int type, ncclComm_t comm, void *stream) {
    MAKE(OP_ALL_GATHER, 0, ncclAllGather(send, recv, count, type, to, stream));
}

ON(ncclReduceScatter, const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm, void *stream) {
    MAKE(OP_REDUCE_SCATTER, op, ncclReduceScatter(send, recv, count, type, op, to, stream));
}

ON(ncclAlltoAll, const void *send, void *recv, size_t count, int type, ncclComm_t comm, void *stream) {
    MAKE(OP_ALL_TO_ALL, 0, ncclAlltoAll(send, recv, count, type, to, stream));
}

ON(ncclGather, const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    MAKE(OP_GATHER, 0, ncclGather(send, recv, count, type, root, to, stream));
}

ON(ncclScatter, const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    MAKE(OP_SCATTER, 0, ncclScatter(send, recv, count, type, root, to, stream));
}

ON(ncclSend, const void *send, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    MAKE(OP_SEND, 0, ncclSend(send, count, type, peer, to, stream));
}

ON(ncclRecv, void *recv, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    MAKE(OP_RECV, 0, ncclRecv(recv, count, type, peer, to, stream));
}

/* --- groups -------------------------------------------------------------------------------------------------------- */

static ncclResult_t on_ncclGroupStart(weft_nccl *l) {
    ncclResult_t result = l->ncclGroupStart();
    if (me.inside == 0 && result == NCCL_SUCCESS && me.depth++ == 0)
        me.place = weft_route_take();
    return result;
}

static bool went_well(ncclResult_t result) { return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS; }

static void group_over(ncclResult_t result) {
    for (int i = 0; i < me.pending_count; i++)
        weft_comm_add(me.pending[i].c, went_well(result) ? *me.pending[i].where : NULL);
    me.pending_count = me.group_size = 0;
    weft_route_give(me.place);
    me.place = 0;
    weft_comm_boundary();
}

static ncclResult_t group_ended(ncclResult_t result) {
    if (me.inside == 0 && me.depth > 0 && --me.depth == 0)
        group_over(result);
    return result;
}

/* The library works inside its last GroupEnd: what it calls by the linker's way then is not the program's. */
#define END(CALL)                                                                                           \
    me.inside++;                                                                                            \
    ncclResult_t result = l->CALL;                                                                          \
    me.inside--;                                                                                            \
    return group_ended(result)

static ncclResult_t on_ncclGroupEnd(weft_nccl *l) { END(ncclGroupEnd()); }
ON(ncclGroupSimulateEnd, void *info) { END(ncclGroupSimulateEnd(info)); }

/* --- communicators that are made --------------------------------------------------------------------------------- */

/* In a group it is there when the group ends; one that is made in the background may never be seen. */
static ncclResult_t made(ncclResult_t result, ncclComm_t *where, weft_comm *c) {
    if (me.depth > 0 && c && where && went_well(result) && me.pending_count < PENDING) {
        me.pending[me.pending_count].where = where;
        me.pending[me.pending_count++].c = c;
    } else {
        weft_comm_add(c, me.depth == 0 && where && went_well(result) ? *where : NULL);
    }
    return result;
}

static weft_comm *describe(weft_nccl *l, uint64_t key, int rank, int size) {
    weft_comm *c = calloc(1, sizeof *c);
    if (c) {
        c->library = l;
        c->key = key;
        c->rank = rank;
        c->size = size;
        c->device = -1;
    }
    return c;
}

static uint64_t key_of_id(const ncclUniqueId *id, int size) {
    return weft_key((uint64_t)(unsigned)size, id->internal, sizeof id->internal);
}

static weft_comm *by_id(weft_nccl *l, const ncclUniqueId *id, int rank, int size, const ncclConfig_t *config) {
    weft_comm *c = describe(l, key_of_id(id, size), rank, size);
    if (c)
        weft_comm_configure(c, config, NULL);
    return c;
}

/* CALL is the real call, written with `given`, the configuration with the environment's limits in it. */
#define INIT(inherits, CALL, WITHOUT, c)                                                                    \
    if (me.inside > 0)                                                                                      \
        return l->WITHOUT;                                                                                  \
    nccl_config room;                                                                                       \
    ncclConfig_t *given = (ncclConfig_t *)weft_limits_begin(l, config, inherits, &room);                    \
    weft_comm *new = c;                                                                                     \
    me.inside++;                                                                                            \
    ncclResult_t result = given ? l->CALL : l->WITHOUT;                                                     \
    me.inside--;                                                                                            \
    weft_limits_end();                                                                                      \
    return made(result, made_at, new)

ON(ncclCommInitRank, ncclComm_t *made_at, int size, ncclUniqueId id, int rank) {
    const ncclConfig_t *config = NULL;
    INIT(false, ncclCommInitRankConfig(made_at, size, id, rank, given), ncclCommInitRank(made_at, size, id, rank),
         by_id(l, &id, rank, size, given));
}

ON(ncclCommInitRankConfig, ncclComm_t *made_at, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    INIT(false, ncclCommInitRankConfig(made_at, size, id, rank, given),
         ncclCommInitRankConfig(made_at, size, id, rank, config), by_id(l, &id, rank, size, given));
}

ON(ncclCommInitRankScalable, ncclComm_t *made_at, int size, int rank, int count, ncclUniqueId *ids,
   ncclConfig_t *config) {
    INIT(false, ncclCommInitRankScalable(made_at, size, rank, count, ids, given),
         ncclCommInitRankScalable(made_at, size, rank, count, ids, config),
         count > 0 && ids ? by_id(l, ids, rank, size, given) : NULL);
}

/* All ranks are in this process, so any key will do that no other communicator has. */
ON(ncclCommInitAll, ncclComm_t *made_at, int count, const int *devices) {
    static _Atomic uint32_t number;
    if (me.inside > 0)
        return l->ncclCommInitAll(made_at, count, devices);
    if (getenv("NCCL_MAX_CTAS") || getenv("NCCL_MIN_CTAS"))
        l->limits_fixed = true; /* there is no configuration to put them into */
    me.inside++;
    ncclResult_t result = l->ncclCommInitAll(made_at, count, devices);
    me.inside--;
    struct {
        uint64_t pid, time, number;
    } unique = {(uint64_t)getpid(), (uint64_t)time(NULL), atomic_fetch_add(&number, 1)};
    uint64_t key = weft_key((uint64_t)(unsigned)count, &unique, sizeof unique);
    for (int i = 0; result == NCCL_SUCCESS && made_at && i < count; i++) {
        weft_comm *c = describe(l, key, i, count);
        if (c)
            weft_comm_configure(c, NULL, NULL);
        made(result, &made_at[i], c);
    }
    return result;
}

/* Splits of one communicator happen in the same order on all of its ranks. */
static weft_comm *child(weft_nccl *l, ncclComm_t comm, const void *what, size_t size, const ncclConfig_t *config) {
    weft_comm *parent = weft_comm_of(comm);
    if (!parent)
        return NULL;
    uint32_t number = atomic_fetch_add(&parent->splits, 1);
    uint64_t key = parent->key ? weft_key(weft_key(parent->key, &number, sizeof number), what, size) : 0;
    weft_comm *c = describe(l, key, -1, -1);
    if (c)
        weft_comm_configure(c, config, parent);
    return c;
}

ON(ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *made_at, ncclConfig_t *config) {
    INIT(true, ncclCommSplit(comm, color, key, made_at, given), ncclCommSplit(comm, color, key, made_at, config),
         child(l, comm, &color, sizeof color, given));
}

ON(ncclCommShrink, ncclComm_t comm, int *excluded, int count, ncclComm_t *made_at, ncclConfig_t *config, int flags) {
    INIT(true, ncclCommShrink(comm, excluded, count, made_at, given, flags),
         ncclCommShrink(comm, excluded, count, made_at, config, flags),
         child(l, comm, &count, sizeof count, given));
}

/* Ranks that join and ranks that were there have nothing in common to make a key of. */
ON(ncclCommGrow, ncclComm_t comm, int size, const ncclUniqueId *id, int rank, ncclComm_t *made_at,
   ncclConfig_t *config) {
    INIT(comm != NULL, ncclCommGrow(comm, size, id, rank, made_at, given), ncclCommGrow(comm, size, id, rank, made_at, config),
         describe(l, 0, rank, size));
}

/* --- communicators that end, with their siblings ------------------------------------------------------------------ */

/* CALL is made for every sibling with `it`, and then for the program's own. In one group where asked: all are told
 * before any is waited for, since freeing the memory of one waits for whatever still runs on the GPU. */
#define WITH_SIBLINGS(as_group, gone, CALL)                                                                 \
    weft_comm *c = me.inside == 0 ? weft_comm_of(comm) : NULL;                                              \
    bool grouped_ = as_group && c && has_siblings(c) && l->ncclGroupStart() == NCCL_SUCCESS;                \
    me.inside++;                                                                                            \
    for (int i = 1; c && i < NCCL_LIMITS; i++) {                                                            \
        ncclComm_t it = gone ? atomic_exchange(&c->sibling[i], NULL) : atomic_load(&c->sibling[i]);         \
        if (it)                                                                                             \
            l->CALL;                                                                                        \
    }                                                                                                       \
    if (c && gone)                                                                                          \
        weft_comm_gone(c);                                                                                  \
    ncclComm_t it = comm;                                                                                   \
    ncclResult_t result = l->CALL;                                                                          \
    if (grouped_) {                                                                                         \
        ncclResult_t ended = l->ncclGroupEnd();                                                             \
        result = result ? result : ended;                                                                   \
    }                                                                                                       \
    me.inside--;                                                                                            \
    return result

static bool has_siblings(weft_comm *c) {
    for (int i = 1; i < NCCL_LIMITS; i++)
        if (atomic_load(&c->sibling[i]))
            return true;
    return false;
}

ON(ncclCommFinalize, ncclComm_t comm) { WITH_SIBLINGS(false, false, ncclCommFinalize(it)); }
ON(ncclCommDestroy, ncclComm_t comm) { WITH_SIBLINGS(false, true, ncclCommDestroy(it)); }
ON(ncclCommAbort, ncclComm_t comm) { WITH_SIBLINGS(true, true, ncclCommAbort(it)); }
ON(ncclCommRevoke, ncclComm_t comm, int flags) { WITH_SIBLINGS(false, false, ncclCommRevoke(it, flags)); }

static ncclResult_t error_of_sibling(weft_nccl *l, weft_comm *c, int place) {
    ncclResult_t error = NCCL_SUCCESS;
    weft_route_hold(place); /* a watchdog may ask while another thread releases it */
    ncclComm_t sibling = atomic_load(&c->sibling[place]);
    if (sibling && l->ncclCommGetAsyncError(sibling, &error) != NCCL_SUCCESS)
        error = NCCL_SUCCESS;
    weft_route_give(place);
    return error;
}

/* A sibling's error is its communicator's; so is that a sibling is not ready yet. */
ON(ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *error) {
    ncclResult_t result = l->ncclCommGetAsyncError(comm, error);
    weft_comm *c = me.inside == 0 && result == NCCL_SUCCESS && error && *error == NCCL_SUCCESS ? weft_comm_of(comm) : NULL;
    for (int i = 1; c && i < NCCL_LIMITS && *error == NCCL_SUCCESS; i++)
        if (atomic_load(&c->sibling[i]))
            *error = error_of_sibling(l, c, i);
    return result;
}

/* --- memory that is registered with one communicator -------------------------------------------------------------- */

static ncclResult_t registered(ncclComm_t comm, ncclResult_t result) {
    weft_comm *c = me.inside == 0 && result == NCCL_SUCCESS ? weft_comm_of(comm) : NULL;
    if (c)
        atomic_store(&c->registered, true);
    return result;
}

ON(ncclCommRegister, ncclComm_t comm, void *buffer, size_t size, void **handle) {
    return registered(comm, l->ncclCommRegister(comm, buffer, size, handle));
}

ON(ncclCommWindowRegister, ncclComm_t comm, void *buffer, size_t size, void **window, int flags) {
    return registered(comm, l->ncclCommWindowRegister(comm, buffer, size, window, flags));
}

/* --- the functions that stand in front, once for the linker and once for each library ----------------------------- */

static weft_nccl *of_caller(void *address);

#define FOR_LIBRARY(n, name, args, ...)                                                                     \
    static ncclResult_t name##_##n(__VA_ARGS__) { return on_##name(&weft_nccl_libraries[n] UNWRAP args); }
#define HOOK(name, args, ...)                                                                               \
    FOR_LIBRARY(0, name, args, __VA_ARGS__)                                                                 \
    FOR_LIBRARY(1, name, args, __VA_ARGS__)                                                                 \
    FOR_LIBRARY(2, name, args, __VA_ARGS__)                                                                 \
    FOR_LIBRARY(3, name, args, __VA_ARGS__)                                                                 \
    EXPORT ncclResult_t name(__VA_ARGS__);                                                                  \
    ncclResult_t name(__VA_ARGS__) {                                                                        \
        weft_nccl *l = of_caller(__builtin_return_address(0));                                              \
        return LIKELY(l && l->name) ? on_##name(l UNWRAP args) : NCCL_INTERNAL_ERROR;                       \
    }
#include "nccl_hooks.def"

static const struct {
    const char *name;
    void *ours, *of_library[NCCL_LIBRARIES];
    size_t place; /* of the library's own */
} hooks[] = {
#define HOOK(name, args, ...)                                                                               \
    {#name, (void *)name, {(void *)name##_0, (void *)name##_1, (void *)name##_2, (void *)name##_3}, offsetof(weft_nccl, name)},
#include "nccl_hooks.def"
};
enum { HOOKS = sizeof hooks / sizeof *hooks };

static int index_of(const char *name) {
    for (int i = 0; i < HOOKS; i++)
        if (strcmp(hooks[i].name, name) == 0)
            return i;
    return -1;
}

/* --- which library ---------------------------------------------------------------------------------------------------- */

void weft_nccl_fill(weft_nccl *l, void *handle) {
    for (int i = 0; i < HOOKS; i++) {
        void *real = weft_real_symbol(handle, hooks[i].name);
        *(void **)((char *)l + hooks[i].place) = real == hooks[i].ours ? NULL : real;
    }
#define FIND(name) l->name = (__typeof__(l->name))weft_real_symbol(handle, #name)
    FIND(ncclGetVersion);
    FIND(ncclGetErrorString);
    FIND(ncclGetLastError);
    FIND(ncclCommCount);
    FIND(ncclCommUserRank);
    FIND(ncclCommCuDevice);
    if (l->ncclGetVersion)
        l->ncclGetVersion(&l->version);
}

/* Every place in the program that calls NCCL is looked up once per thread: a search may cost microseconds. */
static weft_nccl *of_caller(void *address) {
    unsigned start = (unsigned)(((uintptr_t)address * 0x9e3779b97f4a7c15u) >> 58), at = start; /* CALLERS is 2^6 */
    for (int tries = 0; tries < CALLERS; tries++, at = (at + 1) % CALLERS) {
        if (LIKELY(me.callers[at].address == address))
            return me.callers[at].library;
        if (!me.callers[at].address)
            break;
    }
    weft_nccl *l = me.inside > 0 ? weft_nccl_at(address) : NULL; /* a library that calls itself */
    if (!l)
        l = weft_nccl_for(address);
    if (l) {
        at = me.callers[at].address ? start : at;
        me.callers[at].address = address;
        me.callers[at].library = l;
    }
    return l;
}

/* --- dlsym ------------------------------------------------------------------------------------------------------------ */

bool weft_nccl_own(const char *name, void **ours) {
    int i = index_of(name);
    *ours = i < 0 ? NULL : hooks[i].ours;
    return i >= 0;
}

bool weft_nccl_library(const char *name) {
    if (weft_real_symbol(RTLD_NEXT, name))
        return true;
    weft_nccl *l = weft_nccl_anywhere();
    return l && *(void **)((char *)l + hooks[index_of(name)].place);
}

void *weft_nccl_substitute(const char *name, void *real) {
    weft_nccl *l = weft_nccl_with(real);
    return l ? hooks[index_of(name)].of_library[l - weft_nccl_libraries] : NULL;
}
