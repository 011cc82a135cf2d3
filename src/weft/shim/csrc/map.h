/* A map from two words to a pointer, with lock-free readers.
 *
 * Writers must hold a lock of their own. A table that is half full is replaced by a new one without the removed
 * entries. Replaced tables are never freed, and the latest one is reused. A slow reader may therefore see an entry that
 * is being rewritten, so each value must contain its own key, and readers must compare it. */
#ifndef WEFT_MAP_H
#define WEFT_MAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    _Atomic uint64_t a, b; /* a == 0: free */
    _Atomic(void *) value; /* NULL: removed */
} weft_entry;

typedef struct weft_table {
    struct weft_table *older; /* in the list of outgrown tables */
    uint64_t mask;
    uint32_t used;
    weft_entry entries[];
} weft_table;

typedef struct {
    _Atomic(weft_table *) table;
    weft_table *spare, *outgrown; /* replaced tables: the latest, and those that are too small to reuse */
    uint32_t live;
} weft_map;

static inline uint64_t weft_map_hash(uint64_t a, uint64_t b) {
    return ((a ^ (b << 29 | b >> 35)) * 0xff51afd7ed558ccdu) >> 40;
}

static inline void *weft_map_find(weft_map *m, uint64_t a, uint64_t b) {
    weft_table *t = atomic_load_explicit(&m->table, memory_order_acquire);
    if (__builtin_expect(!t, 0))
        return NULL;
    for (uint64_t i = weft_map_hash(a, b) & t->mask;; i = (i + 1) & t->mask) {
        uint64_t there = atomic_load_explicit(&t->entries[i].a, memory_order_acquire);
        if (__builtin_expect(there == a, 1) && atomic_load_explicit(&t->entries[i].b, memory_order_relaxed) == b)
            return atomic_load_explicit(&t->entries[i].value, memory_order_acquire);
        if (!there)
            return NULL;
    }
}

bool weft_map_put(weft_map *m, uint64_t a, uint64_t b, void *value); /* false: out of memory */
void weft_map_remove(weft_map *m, uint64_t a, uint64_t b);
void weft_map_clear(weft_map *m); /* empties the map in a forked child, without touching the parent's memory */

#endif
