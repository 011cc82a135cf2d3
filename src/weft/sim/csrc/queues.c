/* Event queues: a heap of launches by the time they become ready, and one heap per launch of SMs by the time
 * their next block ends. */
#include "state.h"

void queue_push(sim *s, double time, int32_t launch) {
    int32_t i = s->queue_size++;
    while (i > 0) {
        int32_t up = (i - 1) / 2;
        arrival *p = &s->queue[up];
        if (p->time < time || (p->time == time && p->launch < launch))
            break;
        s->queue[i] = *p;
        i = up;
    }
    s->queue[i] = (arrival){time, launch};
}

arrival queue_pop(sim *s) {
    arrival top = s->queue[0], last = s->queue[--s->queue_size];
    int32_t i = 0, n = s->queue_size;
    for (;;) {
        int32_t c = 2 * i + 1;
        if (c >= n)
            break;
        if (c + 1 < n && (s->queue[c + 1].time < s->queue[c].time ||
                          (s->queue[c + 1].time == s->queue[c].time && s->queue[c + 1].launch < s->queue[c].launch)))
            c++;
        if (last.time < s->queue[c].time || (last.time == s->queue[c].time && last.launch < s->queue[c].launch))
            break;
        s->queue[i] = s->queue[c];
        i = c;
    }
    if (n > 0)
        s->queue[i] = last;
    return top;
}

static int before(const active *a, int32_t x, int32_t y) {
    return a->key[x] < a->key[y] || (a->key[x] == a->key[y] && x < y);
}

void heap_move(active *a, int32_t i, int32_t sm) {
    while (i > 0 && before(a, sm, a->heap[(i - 1) / 2])) {
        a->heap[i] = a->heap[(i - 1) / 2];
        a->cells[a->heap[i]].place = i;
        i = (i - 1) / 2;
    }
    for (;;) {
        int32_t c = 2 * i + 1;
        if (c >= a->heap_size)
            break;
        if (c + 1 < a->heap_size && before(a, a->heap[c + 1], a->heap[c]))
            c++;
        if (!before(a, a->heap[c], sm))
            break;
        a->heap[i] = a->heap[c];
        a->cells[a->heap[i]].place = i;
        i = c;
    }
    a->heap[i] = sm;
    a->cells[sm].place = i;
}

void heap_remove(active *a, int32_t sm) {
    int32_t i = a->cells[sm].place, last = a->heap[--a->heap_size];
    a->cells[sm].place = -1;
    if (last != sm)
        heap_move(a, i, last);
}
