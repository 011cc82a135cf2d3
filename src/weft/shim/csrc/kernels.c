/* The facts about each kernel: its name, whether it communicates, and its row of counters.
 *
 * A lookup takes no lock. The driver is called before the lock is taken, since it may wait for the GPU. The tables are
 * bounded: beyond VARIANTS combinations of kernel and launch shape, only the kind of a kernel is known, and beyond the
 * last row, launches are counted together. */
#define _GNU_SOURCE
#include "weft.h"

#include <ctype.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { VARIANTS = 1 << 18, BATCH = 256, SPILL = 256, LOOK_AGAIN = 256, TRIES = 4, LATELY = 4096 };

static weft_map variants;

/* A small cache of recently launched variants, since the map of many kernels spans many pages. Entries found here are
 * compared with the key, like those found in the map. */
static _Atomic(weft_variant *) lately[LATELY][2];
static weft_variant *unused;
static struct batch {
    struct batch *next;
    weft_variant variants[BATCH];
} *batches;                       /* never freed */
static _Atomic uint32_t made;     /* variants in use */
static _Atomic uint32_t swept_at; /* the epoch of the latest sweep */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Case-insensitive; `*` matches any run, `?` one character. One backtracking point suffices. */
bool weft_glob(const char *pattern, const char *name) {
    const char *star = NULL, *resume = NULL;
    while (*name) {
        if (*pattern == '*') {
            star = ++pattern;
            resume = name;
        } else if (*pattern && (*pattern == '?' || tolower((unsigned char)*pattern) == tolower((unsigned char)*name))) {
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
    if (strncmp(name, "weft_head_start", strlen("weft_head_start")) == 0)
        return WEFT_KIND_WEFT;
    const weft_rules *rules = weft_policy_now();
    for (uint32_t i = 0; i < rules->data.comm_count; i++)
        if (weft_glob(rules->data.comm[i], name))
            return WEFT_KIND_COMM;
    return WEFT_KIND_COMPUTE;
}

/* --- rows ------------------------------------------------------------------------------------------------- */

enum { ROW_INDEX = WEFT_ROWS * 2 };
static uint16_t *row_index; /* hash table of rows, see row_hash and is_row; 0: free */

weft_row *weft_row_at(uint32_t row) {
    return &weft_hot.self->chunks[row / WEFT_CHUNK_ROWS].rows[row % WEFT_CHUNK_ROWS];
}
weft_cell *weft_cell_at(uint32_t row) {
    return &weft_hot.self->chunks[row / WEFT_CHUNK_ROWS].cells[0][row % WEFT_CHUNK_ROWS];
}

/* What the driver reports about a kernel. */
typedef struct {
    char name[WEFT_NAME];
    bool named;
    uint32_t kind, sms, natural_blocks;
} facts;

static uint32_t row_hash(const facts *f, uint64_t shape) {
    uint64_t h = 0xcbf29ce484222325u ^ shape ^ (uint64_t)f->natural_blocks << 16;
    for (const char *c = f->name; *c; c++)
        h = (h ^ (unsigned char)*c) * 0x100000001b3u;
    return (uint32_t)((h ^ h >> 32) % ROW_INDEX);
}

static bool is_row(const weft_row *r, const facts *f, uint64_t shape) {
    return r->threads == (uint32_t)(shape >> 32) && r->shared_bytes == (uint32_t)shape &&
           r->natural_blocks == f->natural_blocks && strcmp(r->name, f->name) == 0;
}

static uint32_t shared_row(uint32_t kind) {
    return kind == WEFT_KIND_COMM      ? WEFT_ROW_OTHER_COMM
           : kind == WEFT_KIND_UNKNOWN ? WEFT_ROW_UNNAMED
                                       : WEFT_ROW_OTHER_COMPUTE;
}

/* The row for a kernel, its block size, its shared memory and the blocks that fit. The same kernel from a reloaded
 * module gets the same row. */
static uint32_t row_for(const facts *f, uint64_t shape) {
    if (!row_index)
        row_index = calloc(ROW_INDEX, sizeof *row_index);
    if (!f->named || !row_index)
        return shared_row(f->kind);
    uint32_t at = row_hash(f, shape), row;
    for (; (row = row_index[at]); at = (at + 1) % ROW_INDEX)
        if (is_row(weft_row_at(row), f, shape))
            return row;
    row = atomic_load(&weft_hot.self->rows_used);
    if (row == WEFT_ROWS || (row % WEFT_CHUNK_ROWS == 0 && !weft_chunk_ready(row / WEFT_CHUNK_ROWS)))
        return shared_row(f->kind);
    weft_row *r = weft_row_at(row);
    memcpy(r->name, f->name, strnlen(f->name, WEFT_NAME - 1));
    r->kind = f->kind;
    r->threads = (uint32_t)(shape >> 32);
    r->shared_bytes = (uint32_t)shape;
    r->natural_blocks = f->natural_blocks;
    r->reason = WEFT_NOT_ASKED;
    row_index[at] = (uint16_t)row;
    atomic_store_explicit(&weft_hot.self->rows_used, row + 1, memory_order_release);
    return row;
}

/* --- variants --------------------------------------------------------------------------------------------- */

/* `before`: the row that this handle's kernel had until something was unloaded; most likely it is still correct. The
 * policy defines which kernels communicate, so until one was read, kernels are treated as unnamed. */
static void ask(const weft_backend *api, void *handle, unsigned threads, unsigned shared, uint32_t before, facts *f) {
    f->named = weft_policy_now() != &weft_no_policy && api->name(handle, f->name, sizeof f->name);
    bool same = f->named && before >= WEFT_FIRST_ROW && strcmp(weft_row_at(before)->name, f->name) == 0;
    f->kind = !f->named ? WEFT_KIND_UNKNOWN : same ? weft_row_at(before)->kind : classify(f->name);
    int blocks = f->named ? api->blocks_per_sm(handle, threads, shared) : 0;
    f->natural_blocks = blocks > 0 ? (uint32_t)blocks : 0;
    f->sms = f->named ? api->sm_count() : 0;
}

/* Reclaims the memory of variants that were not launched since a module or context was destroyed. */
static void sweep(void) {
    uint32_t now = atomic_load(&weft_hot.epoch);
    weft_table *t = atomic_load(&variants.table);
    if (swept_at == now)
        return; /* all remaining variants are in use */
    swept_at = now;
    for (uint64_t i = 0; t && i <= t->mask; i++) {
        weft_variant *v = atomic_load(&t->entries[i].value);
        if (!v || atomic_load(&v->epoch) == now)
            continue;
        weft_map_remove(&variants, atomic_load(&v->handle), atomic_load(&v->shape));
        atomic_store(&v->epoch, 0);
        v->next = unused;
        unused = v;
        made--;
    }
}

static weft_variant *new_variant(void) {
    if (made >= VARIANTS)
        sweep();
    if (made >= VARIANTS)
        return NULL;
    if (!unused) {
        struct batch *more = aligned_alloc(64, sizeof *more);
        if (!more)
            return NULL;
        memset(more, 0, sizeof *more);
        more->next = batches;
        batches = more;
        for (int i = 0; i < BATCH; i++) {
            more->variants[i].next = unused;
            unused = &more->variants[i];
        }
    }
    weft_variant *v = unused;
    unused = v->next;
    atomic_store(&v->looks, 0);
    made++;
    return v;
}

#define PUT(field, value) atomic_store_explicit(&v->field, value, memory_order_relaxed)
#define GET(field) atomic_load_explicit(&v->field, memory_order_relaxed)

static void fill(weft_variant *v, void *handle, uint64_t shape, const facts *f, uint32_t now) {
    uint32_t row = row_for(f, shape);
    PUT(epoch, 0);
    atomic_thread_fence(memory_order_release);
    PUT(handle, (uint64_t)(uintptr_t)handle);
    PUT(shape, shape);
    atomic_store_explicit(&v->row, row, memory_order_release); /* see look_up_slowly */
    PUT(kind, f->kind);
    PUT(sms, f->sms);
    PUT(natural_blocks, f->natural_blocks);
    PUT(cell, weft_cell_at(row));
    PUT(refusals, 0);
    PUT(noted, UINT32_MAX);
    PUT(registers, 0);
    PUT(idle_launches, 0);
    PUT(before_programmatic, false);
    for (int i = 0; i < WEFT_PLANS; i++)
        PUT(plans[i], 0);
    atomic_store_explicit(&v->epoch, now, memory_order_release);
}

static weft_variant *add_variant(void *handle, uint64_t shape, const facts *f, uint32_t asked_at) {
    pthread_mutex_lock(&lock);
    uint64_t key = (uint64_t)(uintptr_t)handle;
    weft_variant *v = weft_map_find(&variants, key, shape);
    bool current = v && atomic_load(&v->epoch) == asked_at && GET(kind) != WEFT_KIND_UNKNOWN;
    if (!v && (v = new_variant()) && !weft_map_put(&variants, key, shape, v)) {
        v->next = unused;
        unused = v;
        made--;
        v = NULL;
    }
    if (v && !current)
        fill(v, handle, shape, f, asked_at);
    pthread_mutex_unlock(&lock);
    return v;
}

/* Copies the variant's facts; false if they were rewritten meanwhile or are out of date. */
static inline bool copy(weft_variant *v, uint64_t handle, uint64_t shape, weft_kernel *out) {
    uint32_t now = atomic_load_explicit(&weft_hot.epoch, memory_order_relaxed);
    if (UNLIKELY(atomic_load_explicit(&v->epoch, memory_order_acquire) != now))
        return false;
    out->v = v;
    out->cell = GET(cell);
    out->row = GET(row);
    out->kind = GET(kind);
    out->sms = GET(sms);
    out->natural_blocks = GET(natural_blocks);
    atomic_thread_fence(memory_order_acquire);
    return LIKELY(GET(handle) == handle && GET(shape) == shape && GET(epoch) == now);
}

/* Used when no variant is left: only the kernel's kind is needed, and each thread caches a few. */
static void spill(void *handle, const facts *f, uint32_t asked_at, weft_kernel *out) {
    static _Thread_local struct {
        void *handle;
        uint32_t epoch, kind;
    } known[SPILL];
    uint64_t at = weft_map_hash((uint64_t)(uintptr_t)handle, 0) % SPILL;
    if (f) {
        known[at].handle = handle;
        known[at].epoch = asked_at;
        known[at].kind = f->kind;
    }
    bool there = known[at].handle == handle && known[at].epoch == asked_at;
    out->v = NULL;
    out->kind = there ? known[at].kind : WEFT_KIND_UNKNOWN;
    out->row = shared_row(out->kind);
    out->cell = there ? weft_cell_at(out->row) : NULL;
    out->sms = out->natural_blocks = 0;
}

static void look_up_slowly(const weft_backend *api, void *handle, uint64_t shape, weft_kernel *out) {
    uint32_t now = atomic_load(&weft_hot.epoch);
    facts f;
    if (UNLIKELY(atomic_load(&made) >= VARIANTS && atomic_load(&swept_at) == now)) {
        spill(handle, NULL, now, out);
        if (out->cell)
            return;
    }
    weft_variant *v = NULL;
    for (int tries = 0; tries < TRIES; tries++) { /* another thread may be unloading something right now */
        now = atomic_load(&weft_hot.epoch);
        v = weft_map_find(&variants, (uint64_t)(uintptr_t)handle, shape);
        uint32_t before = v ? atomic_load_explicit(&v->row, memory_order_acquire) : 0; /* `ask` reads its name */
        if (UNLIKELY(api->exceeds_limit && api->exceeds_limit(handle, (unsigned)shape))) {
            *out = (weft_kernel){NULL,
                                 weft_cell_at(WEFT_ROW_OTHER_COMPUTE),
                                 handle,
                                 out->threads,
                                 out->shared,
                                 WEFT_ROW_OTHER_COMPUTE,
                                 WEFT_KIND_REFUSED,
                                 0,
                                 0};
            return;
        }
        ask(api, handle, (unsigned)(shape >> 32), (unsigned)shape, before, &f);
        v = add_variant(handle, shape, &f, now);
        if (!v)
            break;
        if (copy(v, (uint64_t)(uintptr_t)handle, shape, out))
            return;
    }
    spill(handle, &f, now, out);
}

/* The driver may return a name that it refused before, so weft asks again: often at first, later every LOOK_AGAIN. */
static bool worth_another_look(weft_variant *v) {
    if (LIKELY(GET(kind) != WEFT_KIND_UNKNOWN))
        return false;
    uint32_t looks = atomic_fetch_add_explicit(&v->looks, 1, memory_order_relaxed);
    return (looks & (looks - 1)) == 0 || looks % LOOK_AGAIN == 0 ||
           atomic_load_explicit(&weft_hot.active, memory_order_relaxed) == &weft_no_policy; /* see `ask` */
}

static weft_variant *find_and_keep(_Atomic(weft_variant *) *place, uint64_t key, uint64_t shape) {
    weft_variant *v = atomic_load_explicit(&place[1], memory_order_acquire);
    if (v && GET(handle) == key && GET(shape) == shape)
        return v;
    v = weft_map_find(&variants, key, shape);
    if (v) {
        atomic_store_explicit(&place[1], atomic_load_explicit(&place[0], memory_order_relaxed), memory_order_release);
        atomic_store_explicit(&place[0], v, memory_order_release);
    }
    return v;
}

_Thread_local struct weft_thread weft_thread;

static inline weft_variant *expected(uint64_t key, uint64_t shape) {
    weft_variant *v = weft_after_latest();
    return v && GET(handle) == key && GET(shape) == shape ? v : NULL;
}

static inline void remember(weft_variant *v) {
    weft_variant *before = weft_thread.latest;
    if (UNLIKELY(!v))
        return;
    if (before && atomic_load_explicit(&before->after, memory_order_relaxed) != v)
        atomic_store_explicit(&before->after, v, memory_order_release);
    weft_launched(v);
}

static weft_variant *find(uint64_t key, uint64_t shape) {
    _Atomic(weft_variant *) *place = lately[weft_map_hash(key, shape) % LATELY];
    weft_variant *v = atomic_load_explicit(&place[0], memory_order_acquire);
    return v && GET(handle) == key && GET(shape) == shape ? v : find_and_keep(place, key, shape);
}

HOT void weft_lookup(const weft_backend *api, void *handle, unsigned threads, unsigned shared, weft_kernel *out) {
    uint64_t key = (uint64_t)(uintptr_t)handle, shape = weft_shape_of(threads, shared);
    out->handle = handle;
    out->threads = threads;
    out->shared = shared;
    weft_variant *v = expected(key, shape);
    if (!v)
        v = find(key, shape);
    if (UNLIKELY(!v || worth_another_look(v) || !copy(v, key, shape, out)))
        look_up_slowly(api, handle, shape, out);
    remember(out->v);
    if (UNLIKELY(out->row < WEFT_FIRST_ROW) && out->kind != WEFT_KIND_REFUSED)
        weft_count(out->row == WEFT_ROW_UNNAMED ? WEFT_COUNT_UNKNOWN : WEFT_COUNT_UNLISTED);
}

uint32_t weft_handle_epoch(void) { return atomic_load(&weft_hot.epoch); }

void weft_forget_handles(void) {
    if (atomic_fetch_add(&weft_hot.epoch, 1) == UINT32_MAX)
        atomic_store(&weft_hot.epoch, 1);
}

void weft_forget_larger(void *handle, uint32_t shared) {
    pthread_mutex_lock(&lock);
    weft_table *t = atomic_load(&variants.table);
    for (uint64_t i = 0; t && i <= t->mask; i++) {
        weft_variant *v = atomic_load(&t->entries[i].value);
        if (v && GET(handle) == (uint64_t)(uintptr_t)handle && (uint32_t)GET(shape) > shared)
            PUT(epoch, 0);
    }
    pthread_mutex_unlock(&lock);
}

void weft_forget_kernels(void) {
    pthread_mutex_init(&lock, NULL);
    weft_map_clear(&variants);
    memset(lately, 0, sizeof lately);
    row_index = NULL; /* the parent's memory is not touched: a write would copy its pages into every child */
    unused = NULL;
    made = 0;
    batches = NULL;
    weft_forget_handles();
}
