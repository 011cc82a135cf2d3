/* Counts launches by kernel and thread. Graph nodes with shaped kernels are recognized by their shaped form. */
#include "weft.h"

#include <pthread.h>
#include <string.h>

enum { FORMS = 1 << 16 };

static weft_map forms; /* epoch << 32 | row, by handle and shape */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- shaped forms ------------------------------------------------------------------------------------------ */

static void *form_of(uint32_t row) { return (void *)((uintptr_t)weft_handle_epoch() << 32 | row); }

void weft_add_shaped_form(const weft_kernel *k, uint32_t bytes) {
    uint64_t handle = (uint64_t)(uintptr_t)k->handle, shape = weft_shape_of(k->threads, bytes);
    pthread_mutex_lock(&lock);
    if (forms.live < FORMS || weft_map_find(&forms, handle, shape))
        weft_map_put(&forms, handle, shape, form_of(k->row));
    pthread_mutex_unlock(&lock);
}

/* Checks the name after something was unloaded: the handle may now belong to another kernel. */
static bool still_named(const weft_backend *api, void *handle, uint32_t row) {
    char name[WEFT_NAME];
    return api->name(handle, name, sizeof name) && strcmp(name, weft_row_at(row)->name) == 0;
}

bool weft_shaped_form(const weft_backend *api, void *handle, unsigned threads, unsigned shared, uint32_t *row) {
    pthread_mutex_lock(&lock);
    uintptr_t found = (uintptr_t)weft_map_find(&forms, (uint64_t)(uintptr_t)handle, weft_shape_of(threads, shared));
    pthread_mutex_unlock(&lock);
    *row = (uint32_t)found;
    return *row >= WEFT_FIRST_ROW && (found >> 32 == weft_handle_epoch() || still_named(api, handle, *row));
}

/* --- counters ----------------------------------------------------------------------------------------------- */

static uint32_t shard_of_this_thread(void) {
    static _Atomic uint32_t threads;
    if (UNLIKELY(weft_thread.shard == 0)) {
        uint32_t n = atomic_fetch_add(&threads, 1);
        weft_thread.shard = 1 + (n < WEFT_SHARDS - 1 ? n : WEFT_SHARDS - 1);
    }
    return weft_thread.shard - 1;
}

void weft_note_ctas(const weft_kernel *k, uint64_t blocks) {
    _Atomic uint32_t *noted = &weft_row_at(k->row)->grid_blocks;
    if (UNLIKELY(atomic_load_explicit(noted, memory_order_relaxed) != (uint32_t)blocks)) /* avoid dirtying the line */
        atomic_store_explicit(noted, (uint32_t)blocks, memory_order_relaxed);
}

void weft_count_overlapped(weft_cell *cell) {
    cell += shard_of_this_thread() * WEFT_CHUNK_ROWS;
    atomic_fetch_add_explicit(&cell->beside, 1, memory_order_relaxed);
}

HOT void weft_count_launch(weft_cell *cell, uint64_t times, bool shaped) {
    uint32_t shard = shard_of_this_thread();
    cell += shard * WEFT_CHUNK_ROWS;
    if (LIKELY(shard < WEFT_SHARDS - 1)) { /* only this thread writes here, so no locked instruction is needed */
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

void weft_forget_counts(void) {
    pthread_mutex_init(&lock, NULL);
    weft_map_clear(&forms);
}
