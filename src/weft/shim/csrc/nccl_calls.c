/* Collectives, sends and receives, and the groups they come in: which communicator a call of the program uses. */
#include "nccl.h"
#include "tracer.h"

enum { GROUPED = 16 };

typedef struct {
    weft_comm *c;
    ncclComm_t to; /* what its calls in this group use */
    bool collective;
} grouped;

_Thread_local weft_nccl_thread weft_nccl_me;
static _Thread_local struct {
    int place; /* of the limit that holds for this group */
    int group_size;
    grouped group[GROUPED];
} me;

bool weft_nccl_in_group(void) { return weft_nccl_me.depth > 0; }
void weft_nccl_private(bool on) { weft_nccl_me.inside += on ? 1 : -1; }

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
    if (weft_nccl_me.depth == 0 && collective)
        place = k->place = weft_route_take();
    ncclComm_t to = c->handle;
    if (UNLIKELY(place > 0) && collective && routable && !weft_capturing(weft_stream(stream, false))) {
        ncclComm_t sibling = atomic_load_explicit(&c->sibling[place], memory_order_acquire);
        to = sibling ? sibling : to;
    }
    grouped *g = weft_nccl_me.depth > 0 ? in_group(c) : NULL;
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
    if (weft_nccl_me.inside++ > 0)
        return comm;
    weft_comm *c = k->c = weft_comm_of(comm);
    if (UNLIKELY(!c))
        return comm;
    bool collective = operation < OP_SEND;
    ncclComm_t to = choose(k, c, collective, op < NCCL_BUILT_IN_OPS, stream);
    if (UNLIKELY(weft_tracing() == WEFT_TRACE_RECORD))
        weft_trace_call(c->key, atomic_load(&c->collectives) + atomic_load(&c->point_to_point), c->rank, c->size,
                        operation, count, type, count * element_size(type), weft_stream(stream, false));
    weft_comm_called(c, operation, count * element_size(type), to != comm);
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

/* CALL is the real call, written with `to`. */
#define MAKE(operation, op, CALL)                                                                           \
    call k;                                                                                                 \
    ncclComm_t to = enter(&k, comm, operation, count, type, op, stream);                                    \
    return leave(&k, l->CALL)

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

ncclResult_t weft_on_ncclGroupStart(weft_nccl *l) {
    ncclResult_t result = l->ncclGroupStart();
    if (weft_nccl_me.inside == 0 && result == NCCL_SUCCESS && weft_nccl_me.depth++ == 0)
        me.place = weft_route_take();
    return result;
}

static void group_over(ncclResult_t result) {
    weft_comms_made(result);
    me.group_size = 0;
    weft_route_give(me.place);
    me.place = 0;
    if (UNLIKELY(weft_tracing()))
        weft_trace_calls_over();
    weft_comm_boundary();
}

static ncclResult_t group_ended(ncclResult_t result) {
    if (weft_nccl_me.inside == 0 && weft_nccl_me.depth > 0 && --weft_nccl_me.depth == 0)
        group_over(result);
    return result;
}

/* The library works inside its last GroupEnd: what it calls by the linker's way then is not the program's. */
#define END(CALL)                                                                                           \
    weft_nccl_me.inside++;                                                                                            \
    ncclResult_t result = l->CALL;                                                                          \
    weft_nccl_me.inside--;                                                                                            \
    return group_ended(result)

ncclResult_t weft_on_ncclGroupEnd(weft_nccl *l) { END(ncclGroupEnd()); }
ON(ncclGroupSimulateEnd, void *info) { END(ncclGroupSimulateEnd(info)); }
