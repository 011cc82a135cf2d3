/* Collectives, sends, receives and groups: decides which communicator each call of the program uses. */
#include "nccl.h"
#include "tracer.h"

#include <stdlib.h>

/* A send or receive that is deferred to the end of its group. */
typedef struct {
    weft_nccl *l;
    bool send;
    void *buffer;
    size_t count;
    int type, peer;
    ncclComm_t comm;
    void *stream;
} deferred;

_Thread_local weft_nccl_thread weft_nccl_me;
static _Thread_local struct {
    int place; /* of the limit in force for this group */
    size_t waiting, room;
    deferred *calls;
} me;

bool weft_nccl_in_group(void) { return weft_nccl_me.depth > 0; }
void weft_nccl_private(bool on) { weft_nccl_me.inside += on ? 1 : -1; }

/* --- collectives ------------------------------------------------------------------------------------------------- */

static uint64_t element_size(int type) {
    static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 1;
}

typedef struct {
    weft_comm *c;
    int place;       /* held for this call alone; 0: none */
    bool configured; /* the call has a configuration from weft's rules */
    bool refused;    /* NCCL refused that configuration */
    weft_engine_call engine;
} call;

/* The communicator to use. It may depend only on the route in force and the kind of call, because only these are the
 * same on all ranks: ranks may group their calls differently and issue them in different orders. */
static ncclComm_t choose(call *k, weft_comm *c, ncclComm_t comm, bool collective, bool routable, void *stream) {
    int place = me.place;
    if (weft_nccl_me.depth == 0 && collective)
        place = k->place = weft_route_take();
    if (LIKELY(place == 0) || !collective || !routable || weft_capturing(weft_stream(stream, false)))
        return comm;
    ncclComm_t sibling = atomic_load_explicit(&c->sibling[place], memory_order_acquire);
    bool usable = !atomic_load(&c->suspended) && !atomic_load(&c->revoked); /* otherwise NCCL must refuse the call */
    return sibling && usable ? sibling : comm;
}

static ncclComm_t enter(call *k, ncclComm_t comm, int operation, size_t count, int type, int op, void *stream) {
    if (weft_nccl_me.inside++ > 0)
        return comm;
    weft_comm *c = k->c = weft_comm_of(comm);
    if (UNLIKELY(!c))
        return comm;
    if (UNLIKELY(atomic_load_explicit(&c->splitting, memory_order_relaxed)))
        weft_route_settle(c);
    ncclComm_t to = choose(k, c, comm, operation < OP_SEND, op < NCCL_BUILT_IN_OPS, stream);
    if (UNLIKELY(weft_tracing() == WEFT_TRACE_RECORD))
        weft_trace_call(c->key, atomic_load(&c->collectives) + atomic_load(&c->point_to_point), c->rank, c->size,
                        operation, count, type, count * element_size(type), weft_stream(stream, false));
    weft_comm_called(c, operation, count * element_size(type), to != comm || k->configured);
    return to;
}

static ncclResult_t leave(const call *k, ncclResult_t result) {
    weft_nccl_me.inside--;
    if (UNLIKELY(k->place > 0))
        weft_route_give(k->place);
    if (k->c && weft_nccl_me.depth == 0) {
        if (UNLIKELY(weft_tracing()))
            weft_trace_calls_over();
        weft_comm_boundary();
    }
    return result;
}

/* --- calls under rules ------------------------------------------------------------------------------------------- */

/* Whether there are, or ever were, rules. */
static inline bool ruled(void) { return atomic_load_explicit(&weft_call_rules_used, memory_order_relaxed); }

/* The configuration that weft adds to this call; NULL: none. */
static const ncclCollConfig_t *configure(call *k, weft_nccl *l, ncclComm_t comm, int operation, size_t count, int type,
                                         const void *send, const void *recv, void *stream, const ncclCollConfig_t *own,
                                         nccl_call_config *room) {
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    if (!c)
        return NULL;
    bool captured = weft_capturing(weft_stream(stream, false));
    if (weft_nccl_me.depth == 0) {
        weft_nccl_me.rules = weft_call_rules_now();
        weft_nccl_me.captured = false;
    }
    weft_nccl_me.captured |= captured;
    weft_nccl_private(true);
    const weft_call_rules *rules = captured ? weft_call_rules_at_start() : weft_nccl_me.rules;
    if (rules && rules->copies && operation < OP_SEND)
        k->engine = weft_engine_look(l, c, operation, count, send, recv, own);
    const ncclCollConfig_t *given =
        weft_call_config(l, c, operation, count * element_size(type), captured, k->engine.by_call, own, room);
    weft_nccl_private(false);
    if (given)
        weft_count(WEFT_COUNT_PER_CALL);
    k->configured = given != NULL;
    return given;
}

/* NCCL checks a configuration before it enqueues anything, so after a refusal the program's own call can still be made.
 * It also checks before the call joins a group (ncclParseCollConfig in 2.31); a later error would fail the whole group,
 * as an impossible algorithm does, but weft's configurations never force one. If the error is about the program's own
 * arguments, its own call returns it again. */
static bool refused(call *k, ncclResult_t result) {
    if (LIKELY(result != NCCL_INVALID_ARGUMENT) || !k->c)
        return false;
    weft_count(WEFT_COUNT_CONFIG_REFUSED);
    return k->refused = true;
}

static ncclResult_t leave_ruled(const call *k, ncclResult_t result) {
    if (k->refused && result != NCCL_INVALID_ARGUMENT)
        atomic_store(&k->c->library->config_refused, true);  /* the configuration was at fault: use no more of them */
    if (weft_nccl_me.depth == 0 && weft_nccl_me.inside == 1) /* otherwise NCCL itself made the call */
        weft_engine_end(result);
    leave(k, result);
    if (weft_nccl_me.depth == 0 && weft_nccl_me.inside == 0)
        weft_nccl_me.rules = NULL;
    return result;
}

/* --- collectives ------------------------------------------------------------------------------------------------- */

#define UNWRAP(...) __VA_ARGS__

/* `args` are the arguments of the real call, with `to` as the communicator; `given` is the configuration to use. The
 * program's own settings stay unchanged, and if there is nothing to add, its own call is made. */
#define MAKE_RULED(operation, op, name, with_config, args, config_args)                                                \
    call k = {0};                                                                                                      \
    nccl_call_config room;                                                                                             \
    l = weft_nccl_of(l, comm);                                                                                         \
    const ncclCollConfig_t *given = configure(&k, l, comm, operation, count, type, send, recv, stream, config, &room); \
    ncclComm_t to = enter(&k, comm, operation, count, type, op, stream);                                               \
    weft_engine_called(&k.engine, to == comm);                                                                         \
    if (given && l->with_config) {                                                                                     \
        ncclResult_t result = l->with_config(UNWRAP config_args, given);                                               \
        if (!refused(&k, result))                                                                                      \
            return leave_ruled(&k, result);                                                                            \
    }                                                                                                                  \
    return leave_ruled(&k, config ? l->with_config(UNWRAP config_args, config) : l->name(UNWRAP args))

#define MAKE(operation, op, CALL)                                                                                      \
    call k = {0};                                                                                                      \
    ncclComm_t to = enter(&k, comm, operation, count, type, op, stream);                                               \
    return leave(&k, (LIKELY(k.c != NULL) ? k.c->library : l)->CALL)

#define SLOW static __attribute__((noinline)) ncclResult_t

#define COLLECTIVE(operation, op, name, params, args, ...)                                                             \
    SLOW ruled_##name(weft_nccl *l, const ncclCollConfig_t *config, __VA_ARGS__) {                                     \
        MAKE_RULED(operation, op, name, name##Config, args, args);                                                     \
    }                                                                                                                  \
    ON(name, __VA_ARGS__) {                                                                                            \
        if (UNLIKELY(ruled()))                                                                                         \
            return ruled_##name(l, NULL, UNWRAP params);                                                               \
        MAKE(operation, op, name(UNWRAP args));                                                                        \
    }                                                                                                                  \
    ON(name##Config, __VA_ARGS__, const ncclCollConfig_t *config) {                                                    \
        if (UNLIKELY(ruled()))                                                                                         \
            return ruled_##name(l, config, UNWRAP params);                                                             \
        MAKE(operation, op, name##Config(UNWRAP args, config));                                                        \
    }

COLLECTIVE(OP_ALL_REDUCE, op, ncclAllReduce, (send, recv, count, type, op, comm, stream),
           (send, recv, count, type, op, to, stream), const void *send, void *recv, size_t count, int type, int op,
           ncclComm_t comm, void *stream)
COLLECTIVE(OP_BROADCAST, 0, ncclBroadcast, (send, recv, count, type, root, comm, stream),
           (send, recv, count, type, root, to, stream), const void *send, void *recv, size_t count, int type, int root,
           ncclComm_t comm, void *stream)
COLLECTIVE(OP_REDUCE, op, ncclReduce, (send, recv, count, type, op, root, comm, stream),
           (send, recv, count, type, op, root, to, stream), const void *send, void *recv, size_t count, int type,
           int op, int root, ncclComm_t comm, void *stream)
COLLECTIVE(OP_ALL_GATHER, 0, ncclAllGather, (send, recv, count, type, comm, stream),
           (send, recv, count, type, to, stream), const void *send, void *recv, size_t count, int type, ncclComm_t comm,
           void *stream)
COLLECTIVE(OP_REDUCE_SCATTER, op, ncclReduceScatter, (send, recv, count, type, op, comm, stream),
           (send, recv, count, type, op, to, stream), const void *send, void *recv, size_t count, int type, int op,
           ncclComm_t comm, void *stream)
COLLECTIVE(OP_ALL_TO_ALL, 0, ncclAlltoAll, (send, recv, count, type, comm, stream),
           (send, recv, count, type, to, stream), const void *send, void *recv, size_t count, int type, ncclComm_t comm,
           void *stream)
COLLECTIVE(OP_GATHER, 0, ncclGather, (send, recv, count, type, root, comm, stream),
           (send, recv, count, type, root, to, stream), const void *send, void *recv, size_t count, int type, int root,
           ncclComm_t comm, void *stream)
COLLECTIVE(OP_SCATTER, 0, ncclScatter, (send, recv, count, type, root, comm, stream),
           (send, recv, count, type, root, to, stream), const void *send, void *recv, size_t count, int type, int root,
           ncclComm_t comm, void *stream)

/* ncclBcast has no variant with a configuration, so ncclBroadcastConfig is used, with the buffer on both sides. */
SLOW ruled_ncclBcast(weft_nccl *l, void *buffer, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    const ncclCollConfig_t *config = NULL;
    const void *send = buffer, *recv = buffer;
    MAKE_RULED(OP_BROADCAST, 0, ncclBcast, ncclBroadcastConfig, (buffer, count, type, root, to, stream),
               (buffer, buffer, count, type, root, to, stream));
}

ON(ncclBcast, void *buffer, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    if (UNLIKELY(ruled()))
        return ruled_ncclBcast(l, buffer, count, type, root, comm, stream);
    MAKE(OP_BROADCAST, 0, ncclBcast(buffer, count, type, root, to, stream));
}

/* Two communicators in one group launch two kernels on one stream. Within a communicator, NCCL launches the collectives
 * of a group before its sends and receives. If the collectives moved to a sibling, weft keeps that order on every rank;
 * otherwise one rank's collective could wait for a receive whose send waits for the same collective. */
static bool defer(deferred d) {
    weft_comm *c = me.place > 0 && weft_nccl_me.depth > 0 && weft_nccl_me.inside == 0 ? weft_comm_of(d.comm) : NULL;
    if (LIKELY(!c) || !atomic_load(&c->sibling[me.place]))
        return false;
    if (me.waiting == me.room) {
        size_t room = me.room ? 2 * me.room : 64;
        deferred *grown = realloc(me.calls, room * sizeof *grown);
        if (!grown)
            return false;
        me.calls = grown;
        me.room = room;
    }
    me.calls[me.waiting++] = d;
    return true;
}

/* The channels of sends and receives are fixed when a communicator is made, so a later rule is counted as unapplied. */
static void note_unapplied(weft_nccl *l, ncclComm_t comm, int operation, size_t count, int type) {
    call k = {0};
    if (UNLIKELY(ruled())) {
        configure(&k, l, comm, operation, count, type, NULL, NULL, NULL, NULL, NULL);
        weft_engine_other();
    }
}

static ncclResult_t send_now(weft_nccl *l, const void *send, size_t count, int type, int peer, ncclComm_t comm,
                             void *stream) {
    note_unapplied(l, comm, OP_SEND, count, type);
    MAKE(OP_SEND, 0, ncclSend(send, count, type, peer, to, stream));
}

static ncclResult_t receive_now(weft_nccl *l, void *recv, size_t count, int type, int peer, ncclComm_t comm,
                                void *stream) {
    note_unapplied(l, comm, OP_RECV, count, type);
    MAKE(OP_RECV, 0, ncclRecv(recv, count, type, peer, to, stream));
}

ON(ncclSend, const void *send, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    if (defer((deferred){l, true, (void *)send, count, type, peer, comm, stream}))
        return NCCL_SUCCESS;
    return send_now(l, send, count, type, peer, comm, stream);
}

ON(ncclRecv, void *recv, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    if (defer((deferred){l, false, recv, count, type, peer, comm, stream}))
        return NCCL_SUCCESS;
    return receive_now(l, recv, count, type, peer, comm, stream);
}

/* Issues the deferred calls of one communicator, or all if `only` is NULL. An error concerns the group: NCCL reports it
 * again when the group ends. */
static ncclResult_t issue_deferred(ncclComm_t only) {
    ncclResult_t worst = NCCL_SUCCESS;
    size_t kept = 0;
    for (size_t i = 0; i < me.waiting; i++) {
        const deferred *d = &me.calls[i];
        if (only && d->comm != only) {
            me.calls[kept++] = *d;
            continue;
        }
        ncclResult_t result = (d->send ? send_now(d->l, d->buffer, d->count, d->type, d->peer, d->comm, d->stream)
                                       : receive_now(d->l, d->buffer, d->count, d->type, d->peer, d->comm, d->stream));
        worst = worst ? worst : result;
    }
    me.waiting = kept;
    if (kept == 0) {
        free(me.calls);
        me.calls = NULL;
        me.room = 0;
    }
    return worst;
}

void weft_calls_before_end(ncclComm_t comm) {
    if (UNLIKELY(me.waiting) && weft_nccl_me.inside == 0 && comm)
        issue_deferred(comm);
}

/* --- groups ------------------------------------------------------------------------------------------------------ */

ncclResult_t weft_on_ncclGroupStart(weft_nccl *l) {
    ncclResult_t result = l->ncclGroupStart();
    if (weft_nccl_me.inside == 0 && result == NCCL_SUCCESS && weft_nccl_me.depth++ == 0) {
        me.place = weft_route_take();
        weft_nccl_me.rules = weft_call_rules_now();
        weft_nccl_me.cluster = -1;
        weft_nccl_me.captured = false;
    }
    return result;
}

static void group_over(ncclResult_t result) {
    weft_comms_made(result);
    weft_windows_settle(result == NCCL_SUCCESS);
    if (UNLIKELY(ruled()))
        weft_engine_end(result);
    weft_route_give(me.place);
    me.place = 0;
    weft_nccl_me.rules = NULL;
    if (UNLIKELY(weft_tracing()))
        weft_trace_calls_over();
    weft_comm_boundary();
}

static ncclResult_t group_ended(ncclResult_t result) {
    if (weft_nccl_me.inside == 0 && weft_nccl_me.depth > 0 && --weft_nccl_me.depth == 0)
        group_over(result);
    return result;
}

/* The library does its work inside the outermost GroupEnd. Its calls through the linker then are not the program's. */
#define END(CALL)                                                                                                      \
    ncclResult_t late =                                                                                                \
        weft_nccl_me.inside == 0 && weft_nccl_me.depth == 1 && me.waiting ? issue_deferred(NULL) : NCCL_SUCCESS;       \
    weft_nccl_me.inside++;                                                                                             \
    ncclResult_t result = l->CALL;                                                                                     \
    weft_nccl_me.inside--;                                                                                             \
    return group_ended(result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS ? (late ? late : result) : result)

ncclResult_t weft_on_ncclGroupEnd(weft_nccl *l) { END(ncclGroupEnd()); }

static ncclResult_t simulate_end(weft_nccl *l, void *info) { END(ncclGroupSimulateEnd(info)); }

ON(ncclGroupSimulateEnd, void *info) {
    weft_engine_end(NCCL_INTERNAL_ERROR); /* nothing is launched, and nothing was copied */
    weft_nccl_me.simulating = true;
    ncclResult_t result = simulate_end(l, info);
    weft_nccl_me.simulating = false;
    return result;
}

void weft_forget_calls(void) {
    weft_nccl_me = (weft_nccl_thread){0};
    me.place = 0;
    me.waiting = 0;
    weft_comms_made(NCCL_INTERNAL_ERROR);
}
