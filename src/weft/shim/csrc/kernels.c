/* What is known about each kernel: its name, whether it communicates, and its row of counters.
 *
 * Looking a kernel up takes no lock. Handles live in an open-addressed table that only grows; a handle is
 * published after everything it leads to. Writers take a mutex, once per kernel and launch shape. */
#define _GNU_SOURCE
#include "weft.h"

#include <ctype.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 1 << 15, FULL = SLOTS - SLOTS / 4 };

typedef struct {
    _Atomic(void *) handle;
    _Atomic(weft_variant *) first; /* newest variant first; older ones stay reachable for readers */
    _Atomic uint32_t epoch;
} slot;

static slot table[SLOTS];
static uint32_t used;
static _Atomic uint32_t epoch = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint32_t hash_of(void *handle) {
    uint64_t x = (uint64_t)(uintptr_t)handle;
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    return (uint32_t)(x >> 40) & (SLOTS - 1);
}

/* Case-insensitive; `*` any run, `?` one character. Linear in practice: one point to come back to. */
bool weft_glob(const char *pattern, const char *name) {
    const char *star = NULL, *resume = NULL;
    while (*name) {
        if (*pattern == '*') {
            star = ++pattern;
            resume = name;
        } else if (*pattern && (*pattern == '?' || tolower((unsigned char)*pattern) ==
                                                       tolower((unsigned char)*name))) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star;
            name = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

static uint32_t classify(const char *name) {
    if (strcmp(name, "weft_head_start") == 0)
        return WEFT_KIND_WEFT;
    const weft_rules *rules = weft_policy_now();
    for (uint32_t i = 0; i < rules->data.comm_count; i++)
        if (weft_glob(rules->data.comm[i], name))
            return WEFT_KIND_COMM;
    return WEFT_KIND_COMPUTE;
}

/* One row for a kernel, its block size, its shared memory and the blocks that fit: also for the same kernel
 * from a module that was loaded again. */
static bool find_row(const char *name, unsigned threads, unsigned shared, uint32_t blocks, uint32_t *row) {
    uint32_t count = atomic_load(&weft_self->rows_used);
    for (*row = 0; *row < count; ++*row) {
        weft_row *r = &weft_self->rows[*row];
        if (r->threads == threads && r->shared_bytes == shared && r->natural_blocks == blocks &&
            strcmp(r->name, name) == 0)
            return true;
    }
    return false;
}

static bool make_row(const char *name, unsigned threads, unsigned shared, uint32_t blocks, uint32_t *row) {
    if (find_row(name, threads, shared, blocks, row))
        return true;
    if (*row == WEFT_ROWS)
        return false;
    weft_row *r = &weft_self->rows[*row];
    memcpy(r->name, name, strnlen(name, WEFT_NAME - 1));
    r->threads = threads;
    r->shared_bytes = shared;
    r->natural_blocks = blocks;
    r->reason = WEFT_NOT_ASKED;
    atomic_store_explicit(&weft_self->rows_used, *row + 1, memory_order_release);
    return true;
}

static weft_variant *make_variant(const weft_backend *api, void *handle, unsigned threads, unsigned shared) {
    char name[WEFT_NAME];
    uint32_t row;
    if (!api->name(handle, name, sizeof name))
        return NULL;
    int blocks = api->blocks_per_sm(handle, threads, shared);
    if (!make_row(name, threads, shared, (uint32_t)blocks, &row))
        return NULL;
    weft_variant *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->handle = handle;
    v->shape = (uint64_t)threads << 32 | shared;
    v->row = row;
    v->kind = classify(name);
    v->natural_blocks = blocks;
    v->sms = api->sm_count();
    weft_self->rows[row].kind = v->kind;
    return v;
}

/* The slot of a handle, or the free one where it belongs. */
static slot *slot_of(void *handle) {
    for (uint32_t i = hash_of(handle);; i = (i + 1) & (SLOTS - 1)) {
        void *there = atomic_load_explicit(&table[i].handle, memory_order_acquire);
        if (there == handle || !there)
            return &table[i];
    }
}

static weft_variant *find_variant(slot *s, uint64_t shape) {
    weft_variant *v = atomic_load_explicit(&s->first, memory_order_acquire);
    while (v && v->shape != shape)
        v = v->next;
    return v;
}

static weft_variant *add_variant(const weft_backend *api, void *handle, unsigned threads, unsigned shared) {
    pthread_mutex_lock(&lock);
    slot *s = slot_of(handle);
    uint32_t now = atomic_load(&epoch);
    bool current = atomic_load(&s->handle) == handle && atomic_load(&s->epoch) == now;
    weft_variant *v = current ? find_variant(s, (uint64_t)threads << 32 | shared) : NULL;
    if (!v && (atomic_load(&s->handle) || used < FULL)) {
        v = make_variant(api, handle, threads, shared);
        if (v) {
            v->next = current ? atomic_load(&s->first) : NULL;
            atomic_store_explicit(&s->first, v, memory_order_release);
            atomic_store_explicit(&s->epoch, now, memory_order_release);
            used += atomic_load(&s->handle) == NULL;
            atomic_store_explicit(&s->handle, handle, memory_order_release);
        }
    }
    pthread_mutex_unlock(&lock);
    return v;
}

weft_variant *weft_lookup(const weft_backend *api, void *handle, unsigned threads, unsigned shared) {
    slot *s = slot_of(handle);
    if (LIKELY(atomic_load_explicit(&s->handle, memory_order_acquire) &&
               atomic_load_explicit(&s->epoch, memory_order_acquire) ==
                   atomic_load_explicit(&epoch, memory_order_relaxed))) {
        weft_variant *v = find_variant(s, (uint64_t)threads << 32 | shared);
        if (LIKELY(v != NULL))
            return v;
    }
    weft_variant *v = add_variant(api, handle, threads, shared);
    if (!v)
        weft_count(WEFT_COUNT_UNKNOWN);
    return v;
}

void weft_forget_handles(void) {
    atomic_fetch_add(&epoch, 1);
}

static uint32_t shard_of_this_thread(void) {
    static _Atomic uint32_t threads;
    static _Thread_local uint32_t mine; /* 0: not chosen yet */
    if (UNLIKELY(mine == 0)) {
        uint32_t n = atomic_fetch_add(&threads, 1);
        mine = 1 + (n < WEFT_SHARDS - 1 ? n : WEFT_SHARDS - 1);
    }
    return mine - 1;
}

void weft_note_ctas(const weft_variant *v, uint64_t blocks) {
    _Atomic uint32_t *noted = &weft_self->rows[v->row].grid_blocks;
    if (UNLIKELY(atomic_load_explicit(noted, memory_order_relaxed) != (uint32_t)blocks)) /* spare the cache line */
        atomic_store_explicit(noted, (uint32_t)blocks, memory_order_relaxed);
}

void weft_count_beside(const weft_variant *v) {
    atomic_fetch_add_explicit(&weft_self->cells[shard_of_this_thread()][v->row].beside, 1, memory_order_relaxed);
}

void weft_count_launch(weft_variant *v, uint64_t times, bool shaped) {
    weft_variant *origin = atomic_load_explicit(&v->shaped_from, memory_order_relaxed);
    if (UNLIKELY(origin != NULL)) { /* a graph node: it was shaped when it was captured */
        v = origin;
        shaped = true;
    }
    uint32_t shard = shard_of_this_thread();
    weft_cell *cell = &weft_self->cells[shard][v->row];
    if (LIKELY(shard < WEFT_SHARDS - 1)) { /* this thread alone writes here: no locked instruction */
        uint64_t n = atomic_load_explicit(&cell->launches, memory_order_relaxed);
        atomic_store_explicit(&cell->launches, n + times, memory_order_relaxed);
        if (shaped) {
            n = atomic_load_explicit(&cell->shaped, memory_order_relaxed);
            atomic_store_explicit(&cell->shaped, n + times, memory_order_relaxed);
        }
        return;
    }
    atomic_fetch_add_explicit(&cell->launches, times, memory_order_relaxed);
    if (shaped)
        atomic_fetch_add_explicit(&cell->shaped, times, memory_order_relaxed);
}
