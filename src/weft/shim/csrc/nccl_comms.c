/* The program's communicators: the key that all ranks share, the traffic of each, and the latest calls.
 *
 * A lookup takes no lock. A handle may be reused for another communicator after the first was destroyed. */
#define _GNU_SOURCE
#include "cuda_shim.h"
#include "nccl.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CALLS = WEFT_CALLS, RESTING = 256 };

static weft_map table;
static uint32_t made;
static _Atomic(weft_comm *) first;
static weft_comm *last;
static weft_comm *oldest_unused, *newest_unused; /* records of ended communicators, oldest first */
static uint32_t unused;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static weft_calls private_calls;
static weft_call *ring = private_calls.ring; /* set before the first call can arrive */
static _Atomic uint64_t calls;

/* --- keys -------------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
}

uint64_t weft_key(uint64_t seed, const void *data, size_t size) {
    const unsigned char *bytes = data;
    uint64_t key = mix(seed + 0x9e3779b97f4a7c15u);
    for (size_t i = 0; i < size; i++)
        key = mix(key ^ bytes[i]);
    return key ? key : 1;
}

/* --- the table --------------------------------------------------------------------------------------------------- */

weft_comm *weft_comm_of(ncclComm_t handle) {
    if (UNLIKELY(!handle))
        return NULL;
    weft_comm *c = weft_map_find(&table, (uint64_t)(uintptr_t)handle, 0);
    return LIKELY(c && atomic_load_explicit(&c->handle, memory_order_relaxed) == handle) ? c : NULL;
}

/* The communicator's own library is more reliable than the return address: after a tail call, that belongs to another
 * function. */
weft_nccl *weft_nccl_of(weft_nccl *l, ncclComm_t comm) {
    weft_comm *c = weft_nccl_me.inside == 0 ? weft_comm_of(comm) : NULL;
    return c ? c->library : l;
}

weft_comm *weft_comm_first(void) { return atomic_load(&first); }
weft_comm *weft_comm_next(weft_comm *c) { return __atomic_load_n(&c->next, __ATOMIC_ACQUIRE); }

/* A record is reused only after RESTING others have ended; by then no thread reads it any more. */
weft_comm *weft_comm_new(void) {
    weft_comm *c = NULL;
    pthread_mutex_lock(&lock);
    if (unused > RESTING) {
        c = oldest_unused;
        oldest_unused = c->next_unused;
        unused--;
    }
    pthread_mutex_unlock(&lock);
    if (!c)
        return calloc(1, sizeof *c);
    memset(c, 0, sizeof *c);
    return c;
}

static bool alone(uint64_t key) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c))
        if (c->key == key && !atomic_load(&c->dead))
            return false;
    return true;
}

static void append(weft_comm *c) {
    c->order = made++;
    c->leads = !c->key || alone(c->key);
    if (last)
        __atomic_store_n(&last->next, c, __ATOMIC_RELEASE);
    else
        atomic_store(&first, c);
    last = c;
}

/* The record keeps its `next`, so that a reader at this record still finds the following one. */
static void unlink_comm(weft_comm *c) {
    weft_comm *before = NULL;
    for (weft_comm *at = weft_comm_first(); at && at != c; at = weft_comm_next(at))
        before = at;
    weft_comm *after = weft_comm_next(c);
    if (before)
        __atomic_store_n(&before->next, after, __ATOMIC_RELEASE);
    else
        atomic_store(&first, after);
    if (last == c)
        last = before;
}

static void rest(weft_comm *c) {
    c->next_unused = NULL;
    if (unused++)
        newest_unused->next_unused = c;
    else
        oldest_unused = c;
    newest_unused = c;
}

void weft_comm_add(weft_comm *c, ncclComm_t handle) {
    if (!c)
        return;
    bool known = handle && weft_attach(WEFT_API_CUDA);
    pthread_mutex_lock(&lock);
    if (known) {
        atomic_store(&c->handle, handle);
        known = weft_map_put(&table, (uint64_t)(uintptr_t)handle, 0, c);
    }
    if (known) {
        if (!made) {
            weft_calls *shared = weft_shared_file("calls", sizeof *shared);
            ring = (shared ? shared : &private_calls)->ring;
        }
        append(c);
    } else
        rest(c);
    pthread_mutex_unlock(&lock);
    if (known)
        weft_path_note(c->library);
}

void weft_comm_gone(weft_comm *c) {
    weft_windows_drop(c);
    pthread_mutex_lock(&lock);
    if (!atomic_exchange(&c->dead, true)) {
        uint64_t key = (uint64_t)(uintptr_t)atomic_load(&c->handle);
        if (weft_map_find(&table, key, 0) == c)
            weft_map_remove(&table, key, 0);
        unlink_comm(c);
        rest(c);
    }
    pthread_mutex_unlock(&lock);
}

/* --- whether it can have siblings ------------------------------------------------------------------------------- */

const char *weft_comm_why_not(weft_comm *c) {
    if (c->library->version < NCCL_WITH_SPLIT || !c->library->ncclCommSplit)
        return "this NCCL cannot split a communicator (2.18 and newer can)";
    if (c->library->limits_fixed)
        return "NCCL_MAX_CTAS or NCCL_MIN_CTAS is in the environment or in nccl.conf and outranks every other limit: "
               "unset it, or set WEFT_LIVE=1 when the job is started";
    if (!c->key)
        return "its ranks share no key (ncclCommGrow)";
    if (c->rank < 0 || c->size < 0)
        return "it is not ready";
    if (c->size == 1)
        return "it has one rank";
    if (c->cut)
        return "its configuration is larger than weft knows (a later NCCL)";
    if (c->shares)
        return "its splits share its channels (splitShare, NCCL_COMM_SPLIT_SHARE_RESOURCES)";
    if (atomic_load(&c->registered))
        return "memory is registered with it";
    if (atomic_load(&c->suspended))
        return "the program has suspended it (ncclCommSuspend)";
    if (atomic_load(&c->revoked))
        return "the program has revoked it (ncclCommRevoke)";
    if (atomic_load(&c->splitting))
        return "an earlier split of it has not finished";
    return NULL;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#define PUT(field, value) atomic_store_explicit(&call->field, value, memory_order_relaxed)
#define GET(field) atomic_load_explicit(&ring[i].field, memory_order_relaxed)

void weft_comm_called(weft_comm *c, int operation, uint64_t bytes, bool routed) {
    /* NCCL allows one thread at a time on a communicator, so no locked addition is needed. */
    uint64_t before = atomic_load_explicit(&c->bytes[operation], memory_order_relaxed);
    atomic_store_explicit(&c->bytes[operation], before + bytes, memory_order_relaxed);
    /* A communicator is known only if the process is attached, so `self` is not NULL. */
    atomic_fetch_add_explicit(&weft_hot.self->counters[WEFT_COUNT_COMM_BYTES], bytes, memory_order_relaxed);
    if (operation >= OP_SEND) {
        atomic_fetch_add_explicit(&c->point_to_point, 1, memory_order_relaxed);
        return;
    }
    atomic_fetch_add_explicit(&c->collectives, 1, memory_order_relaxed);
    if (routed)
        weft_count(WEFT_COUNT_ROUTED);
    if (!c->leads)
        return;
    uint64_t number = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    weft_call *call = &ring[number % CALLS];
    PUT(number, 0);
    atomic_thread_fence(memory_order_release);
    PUT(key, c->key);
    PUT(bytes, bytes);
    PUT(host_ns, now_ns());
    PUT(operation, (uint32_t)operation);
    PUT(routed, routed);
    atomic_store_explicit(&call->number, number + 1, memory_order_release);
}

EXPORT int weft_nccl_calls(weft_nccl_call *out, int room) {
    uint64_t end = atomic_load(&calls), start = end > CALLS ? end - CALLS : 0;
    int count = 0;
    for (uint64_t n = start; n < end && count < room; n++) {
        uint64_t i = n % CALLS;
        if (atomic_load_explicit(&ring[i].number, memory_order_acquire) != n + 1)
            continue;
        out[count] = (weft_nccl_call){n, GET(key), GET(bytes), GET(host_ns), GET(operation), GET(routed)};
        atomic_thread_fence(memory_order_acquire);
        count += GET(number) == n + 1; /* otherwise it was overwritten meanwhile */
    }
    return count;
}

/* --- a callback between two collectives -------------------------------------------------------------------------- */

static _Atomic bool listening;
static struct {
    void (*run)(uint64_t, uint64_t);
    uint64_t key, every, done;
    weft_comm *c;
} listener;
static pthread_mutex_t listener_lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void weft_nccl_on_call(void *run, uint64_t key, uint64_t every) {
    pthread_mutex_lock(&listener_lock);
    listener.run = (void (*)(uint64_t, uint64_t))run;
    listener.key = key;
    listener.every = every ? every : 1;
    listener.c = NULL;
    atomic_store(&listening, run != NULL);
    pthread_mutex_unlock(&listener_lock);
}

/* With ghost ranks, several communicators have the same key; the first of them is the clock. */
static weft_comm *listened_to(void) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c))
        if (!atomic_load(&c->dead) && c->key && (!listener.key || c->key == listener.key) &&
            (listener.key || atomic_load(&c->collectives)))
            return c;
    return NULL;
}

static void ring_listener(void) {
    static _Thread_local bool ringing;
    void (*run)(uint64_t, uint64_t) = NULL;
    uint64_t key = 0, count = 0;
    if (ringing || weft_capture_open())
        return;
    pthread_mutex_lock(&listener_lock);
    if (listener.c && atomic_load(&listener.c->dead))
        listener.c = NULL;
    if (!listener.c && (listener.c = listened_to())) {
        count = atomic_load(&listener.c->collectives);
        listener.done = count ? count - 1 : 0;
    }
    if (listener.c && atomic_load(&listening)) {
        count = atomic_load(&listener.c->collectives);
        if (count / listener.every != listener.done / listener.every) {
            run = listener.run;
            key = listener.c->key;
        }
        listener.done = count;
    }
    pthread_mutex_unlock(&listener_lock);
    if (run) {
        ringing = true;
        run(key, count);
        ringing = false;
    }
}

void weft_comm_boundary(void) {
    if (UNLIKELY(atomic_load_explicit(&listening, memory_order_relaxed)))
        ring_listener();
}

/* --- for Python -------------------------------------------------------------------------------------------------- */

EXPORT int weft_nccl_seen(void) { return weft_comm_first() != NULL; }

static void ask(weft_comm *c, _Atomic int *what, ncclResult_t (*question)(ncclComm_t, int *)) {
    int answer;
    if (atomic_load(what) < 0 && question && question(c->handle, &answer) == NCCL_SUCCESS)
        atomic_store(what, answer);
}

void weft_comm_complete(weft_comm *c) {
    weft_nccl *l = c->library;
    ncclResult_t state = NCCL_SUCCESS;
    if (l->ncclCommGetAsyncError &&
        (l->ncclCommGetAsyncError(c->handle, &state) != NCCL_SUCCESS || state != NCCL_SUCCESS))
        return;
    ask(c, &c->rank, l->ncclCommUserRank);
    ask(c, &c->size, l->ncclCommCount);
    ask(c, &c->device, l->ncclCommCuDevice);
}

static void inform(weft_comm *c, weft_nccl_info *info) {
    weft_comm_complete(c);
    memset(info, 0, sizeof *info);
    info->key = c->key;
    info->collectives = atomic_load(&c->collectives);
    info->point_to_point = atomic_load(&c->point_to_point);
    for (int i = 0; i < NCCL_OPERATIONS; i++)
        info->bytes[i] = atomic_load(&c->bytes[i]);
    info->rank = c->rank;
    info->size = c->size;
    info->device = c->device;
    info->max_ctas = c->max_ctas;
    info->order = c->order;
    for (int i = 1; i < NCCL_LIMITS; i++)
        info->prepared[i] = atomic_load(&c->sibling[i]) ? weft_route_limit(i) : 0;
    const weft_call_rules *rules = weft_call_rules_now();
    info->routed_to = weft_route_now() ? info->prepared[weft_route_now()] : rules ? (int32_t)rules->limit : 0;
    info->path = weft_nccl_path(c->library);
    info->version = c->library->version;
    info->tuner = atomic_load(&c->library->tuner);
    const char *why = weft_limits_comm(c, 1) ? NULL : weft_comm_why_not(c);
    if (why)
        strncpy(info->why_not, why, sizeof info->why_not - 1);
}

EXPORT int weft_nccl_list(weft_nccl_info *out, int room) {
    int count = 0;
    for (weft_comm *c = weft_comm_first(); c && count < room; c = weft_comm_next(c))
        if (!atomic_load(&c->dead))
            inform(c, &out[count++]);
    return count;
}

void weft_forget_comms(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&listener_lock, NULL);
    weft_map_clear(&table);
    atomic_store(&first, NULL);
    last = oldest_unused = newest_unused = NULL;
    made = 0;
    ring = private_calls.ring; /* the parent's file is not ours to write */
    unused = 0;
    atomic_store(&listening, false);
    listener.c = NULL;
}
