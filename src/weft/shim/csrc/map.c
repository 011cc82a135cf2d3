#include "map.h"

#include <stdlib.h>

enum { SMALLEST = 1 << 8 };

static weft_entry *place_of(weft_table *t, uint64_t a, uint64_t b) {
    for (uint64_t i = weft_map_hash(a, b) & t->mask;; i = (i + 1) & t->mask) {
        weft_entry *e = &t->entries[i];
        uint64_t there = atomic_load_explicit(&e->a, memory_order_relaxed);
        if (!there || (there == a && atomic_load_explicit(&e->b, memory_order_relaxed) == b))
            return e;
    }
}

static void fill(weft_table *t, weft_entry *e, uint64_t a, uint64_t b, void *value) {
    t->used += atomic_load_explicit(&e->a, memory_order_relaxed) == 0;
    atomic_store_explicit(&e->value, value, memory_order_relaxed);
    atomic_store_explicit(&e->b, b, memory_order_relaxed);
    atomic_store_explicit(&e->a, a, memory_order_release);
}

static void empty(weft_table *t) {
    t->used = 0;
    for (uint64_t i = 0; i <= t->mask; i++) {
        atomic_store_explicit(&t->entries[i].a, 0, memory_order_relaxed);
        atomic_store_explicit(&t->entries[i].value, NULL, memory_order_relaxed);
    }
}

static weft_table *new_table(weft_map *m, uint64_t size) {
    weft_table *t = m->spare;
    if (t && t->mask == size - 1) {
        m->spare = NULL;
        empty(t);
        return t;
    }
    weft_table *larger = calloc(1, sizeof *larger + size * sizeof *larger->entries);
    if (larger)
        larger->mask = size - 1;
    if (larger && t) {
        t->older = m->outgrown;
        m->outgrown = t;
        m->spare = NULL;
    }
    return larger;
}

/* The old table is kept, since readers may still be in it. All outgrown tables together are smaller than the newest. */
static weft_table *replace(weft_map *m, weft_table *old) {
    uint64_t size = SMALLEST;
    while (size < 4 * (uint64_t)(m->live + 1))
        size *= 2;
    weft_table *t = new_table(m, size);
    if (!t)
        return NULL;
    for (uint64_t i = 0; old && i <= old->mask; i++) {
        weft_entry *e = &old->entries[i];
        void *value = atomic_load_explicit(&e->value, memory_order_relaxed);
        uint64_t a = atomic_load_explicit(&e->a, memory_order_relaxed),
                 b = atomic_load_explicit(&e->b, memory_order_relaxed);
        if (a && value)
            fill(t, place_of(t, a, b), a, b, value);
    }
    atomic_store_explicit(&m->table, t, memory_order_release);
    m->spare = old;
    return t;
}

bool weft_map_put(weft_map *m, uint64_t a, uint64_t b, void *value) {
    weft_table *t = atomic_load_explicit(&m->table, memory_order_relaxed);
    if (!t || t->used * 2 > t->mask) {
        weft_table *newer = replace(m, t);
        if (!newer && (!t || t->used >= t->mask)) /* one entry must stay free, since it ends every search */
            return false;
        t = newer ? newer : t;
    }
    weft_entry *e = place_of(t, a, b);
    bool there =
        atomic_load_explicit(&e->a, memory_order_relaxed) && atomic_load_explicit(&e->value, memory_order_relaxed);
    m->live += !there;
    if (atomic_load_explicit(&e->a, memory_order_relaxed))
        atomic_store_explicit(&e->value, value, memory_order_release);
    else
        fill(t, e, a, b, value);
    return true;
}

void weft_map_remove(weft_map *m, uint64_t a, uint64_t b) {
    weft_table *t = atomic_load_explicit(&m->table, memory_order_relaxed);
    weft_entry *e = t ? place_of(t, a, b) : NULL;
    if (!e || !atomic_load_explicit(&e->a, memory_order_relaxed) ||
        !atomic_load_explicit(&e->value, memory_order_relaxed))
        return;
    atomic_store_explicit(&e->value, NULL, memory_order_release);
    m->live--;
}

void weft_map_clear(weft_map *m) {
    atomic_store_explicit(&m->table, NULL, memory_order_release);
    m->spare = m->outgrown = NULL;
    m->live = 0;
}
