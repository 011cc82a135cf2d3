/* The lifetime of communicators and their siblings: the calls that make, suspend, revoke and end them. */
#include "nccl.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static _Thread_local struct {
    size_t count, room;
    struct {
        ncclComm_t *where;
        weft_comm *c;
    } *made;
} pending; /* communicators that exist only when the group ends */

static bool went_well(ncclResult_t result) { return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS; }

/* A split in the background writes its communicator later, to memory of the program, so weft never learns of it. */
static void add(weft_comm *c, ncclComm_t handle, ncclResult_t result) {
    if (!handle && result == NCCL_IN_PROGRESS)
        weft_count(WEFT_COUNT_UNHANDLED);
    weft_comm_add(c, handle);
}

void weft_comms_made(ncclResult_t result) {
    for (size_t i = 0; i < pending.count; i++)
        add(pending.made[i].c, went_well(result) ? *pending.made[i].where : NULL, result);
    free(pending.made);
    pending.made = NULL;
    pending.count = pending.room = 0;
}

/* --- communicators that are made --------------------------------------------------------------------------------- */

static bool await_group(ncclComm_t *where, weft_comm *c) {
    if (pending.count == pending.room) {
        size_t room = pending.room ? 2 * pending.room : 16;
        void *grown = realloc(pending.made, room * sizeof *pending.made);
        if (!grown)
            return false;
        pending.made = grown;
        pending.room = room;
    }
    pending.made[pending.count].where = where;
    pending.made[pending.count++].c = c;
    return true;
}

/* In a group the communicator exists only when the group ends. */
static ncclResult_t made(ncclResult_t result, ncclComm_t *where, weft_comm *c) {
    bool usable = c && where && went_well(result);
    if (weft_nccl_me.depth > 0 && usable && await_group(where, c))
        return result;
    add(c, weft_nccl_me.depth == 0 && usable ? *where : NULL,
        usable && weft_nccl_me.depth == 0 ? result : NCCL_SUCCESS);
    return result;
}

static weft_comm *describe(weft_nccl *l, uint64_t key, int rank, int size) {
    weft_comm *c = weft_comm_new();
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

/* CALL is the real call with the configuration `given`, which contains the environment's limits and, if the policy asks
 * for copy engines, the request for zero CTAs. If NCCL refuses that, the call is repeated without the request.
 * `ranks`: -1 if unknown. */
#define INIT(inherits, ranks, CALL, WITHOUT, c)                                                                        \
    if (weft_nccl_me.inside > 0)                                                                                       \
        return l->WITHOUT;                                                                                             \
    nccl_config room, zero;                                                                                            \
    ncclConfig_t *limited = (ncclConfig_t *)weft_limits_begin(l, config, inherits, &room);                             \
    ncclConfig_t *given = (ncclConfig_t *)weft_engine_config(l, limited, inherits, ranks, &zero);                      \
    weft_comm *new = c;                                                                                                \
    weft_nccl_me.inside++;                                                                                             \
    ncclResult_t result = given ? l->CALL : l->WITHOUT;                                                                \
    if (UNLIKELY(given != limited && result == NCCL_INVALID_ARGUMENT)) {                                               \
        weft_count(WEFT_COUNT_ENGINE_REFUSED);                                                                         \
        given = limited;                                                                                               \
        if (new)                                                                                                       \
            weft_comm_configure(new, given, NULL);                                                                     \
        result = given ? l->CALL : l->WITHOUT;                                                                         \
    }                                                                                                                  \
    weft_nccl_me.inside--;                                                                                             \
    weft_limits_end();                                                                                                 \
    return made(result, made_at, new)

ON(ncclCommInitRank, ncclComm_t *made_at, int size, ncclUniqueId id, int rank) {
    const ncclConfig_t *config = NULL;
    INIT(false, size, ncclCommInitRankConfig(made_at, size, id, rank, given), ncclCommInitRank(made_at, size, id, rank),
         by_id(l, &id, rank, size, given));
}

ON(ncclCommInitRankConfig, ncclComm_t *made_at, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    INIT(false, size, ncclCommInitRankConfig(made_at, size, id, rank, given),
         ncclCommInitRankConfig(made_at, size, id, rank, config), by_id(l, &id, rank, size, given));
}

ON(ncclCommInitRankScalable, ncclComm_t *made_at, int size, int rank, int count, ncclUniqueId *ids,
   ncclConfig_t *config) {
    INIT(false, size, ncclCommInitRankScalable(made_at, size, rank, count, ids, given),
         ncclCommInitRankScalable(made_at, size, rank, count, ids, config),
         count > 0 && ids ? by_id(l, ids, rank, size, given) : NULL);
}

/* All ranks are in this process, so any unique key will do. */
ON(ncclCommInitAll, ncclComm_t *made_at, int count, const int *devices) {
    static _Atomic uint32_t number;
    if (weft_nccl_me.inside > 0)
        return l->ncclCommInitAll(made_at, count, devices);
    weft_limits_fix(l); /* there is no configuration that could carry the limits */
    weft_nccl_me.inside++;
    ncclResult_t result = l->ncclCommInitAll(made_at, count, devices);
    weft_nccl_me.inside--;
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
    l = weft_nccl_of(l, comm);
    INIT(true, -1, ncclCommSplit(comm, color, key, made_at, given), ncclCommSplit(comm, color, key, made_at, config),
         child(l, comm, &color, sizeof color, given));
}

ON(ncclCommShrink, ncclComm_t comm, int *excluded, int count, ncclComm_t *made_at, ncclConfig_t *config, int flags) {
    l = weft_nccl_of(l, comm);
    if (flags & NCCL_SHRINK_ABORT && weft_nccl_me.inside == 0)
        weft_abort_siblings(weft_comm_of(comm));
    INIT(true, -1, ncclCommShrink(comm, excluded, count, made_at, given, flags),
         ncclCommShrink(comm, excluded, count, made_at, config, flags), child(l, comm, &count, sizeof count, given));
}

/* Joining ranks and existing ranks have nothing in common from which to make a key. */
ON(ncclCommGrow, ncclComm_t comm, int size, const ncclUniqueId *id, int rank, ncclComm_t *made_at,
   ncclConfig_t *config) {
    l = weft_nccl_of(l, comm);
    INIT(comm != NULL, size, ncclCommGrow(comm, size, id, rank, made_at, given),
         ncclCommGrow(comm, size, id, rank, made_at, config), describe(l, 0, rank, size));
}

/* --- communicators that end, with their siblings ------------------------------------------------------------------ */

/* Makes CALL for every sibling, as `it`, and then for the program's own communicator. With `as_group`, all calls are in
 * one group, so that all are issued before any is waited for: freeing the memory of one waits for everything that still
 * runs on the GPU. */
#define WITH_SIBLINGS(as_group, gone, CALL)                                                                            \
    weft_calls_before_end(comm);                                                                                       \
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;                                               \
    l = c ? c->library : l;                                                                                            \
    bool grouped_ = as_group && c && has_siblings(c) && l->ncclGroupStart() == NCCL_SUCCESS;                           \
    weft_nccl_me.inside++;                                                                                             \
    for (int i = 1; c && i < NCCL_LIMITS; i++) {                                                                       \
        ncclComm_t it = gone ? atomic_exchange(&c->sibling[i], NULL) : atomic_load(&c->sibling[i]);                    \
        if (it)                                                                                                        \
            l->CALL;                                                                                                   \
    }                                                                                                                  \
    if (c && gone)                                                                                                     \
        weft_comm_gone(c);                                                                                             \
    ncclComm_t it = comm;                                                                                              \
    ncclResult_t result = l->CALL;                                                                                     \
    if (grouped_) {                                                                                                    \
        ncclResult_t ended = l->ncclGroupEnd();                                                                        \
        result = result ? result : ended;                                                                              \
    }                                                                                                                  \
    weft_nccl_me.inside--;                                                                                             \
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

/* NCCL must refuse later calls on a revoked communicator, so its siblings are no longer used, whether or not NCCL
 * revoked them too. All ranks revoke it, and a late rank sees its peers' calls on either communicator as aborted. NCCL
 * waits for the work of a revoked communicator on its stream, which may be queued behind a hanging collective of
 * another sibling; that is why all are revoked in one group. */
static ncclResult_t revoke(weft_nccl *l, ncclComm_t comm, int flags) {
    WITH_SIBLINGS(true, false, ncclCommRevoke(it, flags));
}

ON(ncclCommRevoke, ncclComm_t comm, int flags) {
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    ncclResult_t result = revoke(l, comm, flags);
    if (c && went_well(result))
        atomic_store(&c->revoked, true);
    return result;
}

/* Siblings free their memory when the communicator does and get it back with it. NCCL waits for all ranks in both
 * calls, and all ranks have the same siblings. The program's own communicator goes first, since NCCL may refuse it. */
ON(ncclCommSuspend, ncclComm_t comm, int flags) {
    l = weft_nccl_of(l, comm);
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    weft_nccl_me.inside++;
    ncclResult_t result = l->ncclCommSuspend(comm, flags);
    if (c && (flags & NCCL_SUSPEND_MEMORY) && went_well(result)) {
        atomic_store(&c->suspended, true);
        for (int i = 1; i < NCCL_LIMITS; i++) {
            ncclComm_t sibling = atomic_load(&c->sibling[i]);
            if (sibling && went_well(l->ncclCommSuspend(sibling, flags))) /* otherwise it keeps its memory */
                atomic_fetch_or(&c->suspended_siblings, 1u << i);
        }
    }
    weft_nccl_me.inside--;
    return result;
}

/* A sibling that does not get its memory back is unusable, which is reported as an error of its communicator. */
ON(ncclCommResume, ncclComm_t comm) {
    l = weft_nccl_of(l, comm);
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    weft_nccl_me.inside++;
    ncclResult_t result = l->ncclCommResume(comm);
    if (c && went_well(result)) {
        uint32_t suspended = atomic_exchange(&c->suspended_siblings, 0);
        for (int i = 1; i < NCCL_LIMITS; i++) {
            ncclComm_t sibling = suspended >> i & 1 ? atomic_load(&c->sibling[i]) : NULL;
            ncclResult_t resumed = sibling ? l->ncclCommResume(sibling) : NCCL_SUCCESS;
            result = went_well(result) && !went_well(resumed) ? resumed : result;
        }
        atomic_store(&c->suspended, false);
    }
    weft_nccl_me.inside--;
    return result;
}

static ncclResult_t error_of_sibling(weft_nccl *l, weft_comm *c, int place) {
    ncclResult_t error = NCCL_SUCCESS;
    weft_route_hold(place); /* a watchdog may ask while another thread releases the sibling */
    ncclComm_t sibling = atomic_load(&c->sibling[place]);
    if (sibling && l->ncclCommGetAsyncError(sibling, &error) != NCCL_SUCCESS)
        error = NCCL_SUCCESS;
    weft_route_give(place);
    return error;
}

/* A sibling's error, or that it is not ready yet, is reported for its communicator. */
ON(ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *error) {
    l = weft_nccl_of(l, comm);
    ncclResult_t result = l->ncclCommGetAsyncError(comm, error);
    weft_comm *c = weft_nccl_me.inside == 0 && result == NCCL_SUCCESS && error && *error == NCCL_SUCCESS
                       ? weft_comm_of(comm)
                       : NULL;
    for (int i = 1; c && i < NCCL_LIMITS && *error == NCCL_SUCCESS; i++)
        if (atomic_load(&c->sibling[i]))
            *error = error_of_sibling(l, c, i);
    return result;
}

/* --- memory registered with one communicator ---------------------------------------------------------------------- */

static ncclResult_t registered(ncclComm_t comm, ncclResult_t result) {
    weft_comm *c = weft_nccl_me.inside == 0 && result == NCCL_SUCCESS ? weft_comm_of(comm) : NULL;
    if (c)
        atomic_store(&c->registered, true);
    return result;
}

ON(ncclCommRegister, ncclComm_t comm, void *buffer, size_t size, void **handle) {
    l = weft_nccl_of(l, comm);
    return registered(comm, l->ncclCommRegister(comm, buffer, size, handle));
}

ON(ncclCommWindowRegister, ncclComm_t comm, void *buffer, size_t size, void **window, int flags) {
    l = weft_nccl_of(l, comm);
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    ncclResult_t result = registered(comm, l->ncclCommWindowRegister(comm, buffer, size, window, flags));
    if (c)
        weft_window_add(c, buffer, size, window, flags, result);
    return result;
}

ON(ncclCommWindowDeregister, ncclComm_t comm, void *window) {
    l = weft_nccl_of(l, comm);
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    if (c)
        weft_window_remove(c, window);
    return l->ncclCommWindowDeregister(comm, window);
}
