/* Event-driven simulation of the blocks of one GPU.
 *
 * A block's speed is its base rate (what its SM gives it, at most what it reaches alone) times its launch's share of
 * the memory system. The share is the same for all blocks of a launch, so each launch has its own clock, which runs
 * at that share. The blocks of a launch on one SM progress alike, so each (launch, SM) pair, a cell, has a clock in
 * units of work. A block's end is then a fixed mark on its cell's clock, and an event costs one heap operation over
 * the SMs, whatever the number of blocks.
 */
#include "state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- placement ---- */

static void note(sim *s, int32_t sm, int32_t launch, int32_t change) {
    if (s->totals->changes < s->log_room)
        s->log[s->totals->changes] = (sim_change){s->now, sm, launch, change, 0};
    s->totals->changes++;
}

static int fits(const sim *s, const sim_launch *l, int32_t sm) {
    const sm_free *f = &s->sm[sm];
    return sm >= l->first_sm && f->blocks >= 1 && f->warps >= l->warps && f->registers >= l->registers &&
           f->shared >= l->shared;
}

static double next_work(sim *s, const sim_launch *l, progress *p) {
    if (l->kind == KIND_POOL) {
        if (p->units_left <= 0)
            return 0;
        p->units_left--;
        return l->unit_work;
    }
    while (p->left_in_run == 0)
        p->left_in_run = s->run_count[l->first_run + ++p->run];
    p->left_in_run--;
    return s->run_work[l->first_run + p->run];
}

/* Start each channel of a collective once its blocks on all ranks are resident. */
static void complete_channels(sim *s, int32_t group) {
    for (;;) {
        for (int32_t i = group; i >= 0; i = s->peer[i]) {
            active *a = s->at[i].slot >= 0 ? &s->slot[s->at[i].slot] : NULL;
            if (!a || s->at[i].placed <= a->members_placed)
                return;
        }
        for (int32_t i = group; i >= 0; i = s->peer[i]) {
            active *a = &s->slot[s->at[i].slot];
            int32_t sm = a->waiting[a->members_placed++];
            start_running(s, a, sm, next_work(s, &s->launch[i], &s->at[i]));
            retime(s, a, sm);
        }
    }
}

static void place(sim *s, int32_t launch, int32_t sm) {
    const sim_launch *l = &s->launch[launch];
    progress *p = &s->at[launch];
    active *a = &s->slot[p->slot];
    sm_free *f = &s->sm[sm];
    f->blocks--;
    f->warps -= l->warps;
    f->registers -= l->registers;
    f->shared -= l->shared;
    a->cells[sm].resident++;
    if (!p->placed)
        s->span[launch].start = s->now;
    p->placed++;
    p->to_place--;
    note(s, sm, launch, 1);
    if (l->group >= 0) {
        a->waiting[p->placed - 1] = sm;
        complete_channels(s, l->group);
        return;
    }
    start_running(s, a, sm, next_work(s, l, p));
    retime(s, a, sm);
    if (l->sm_rate > 0)
        retime_others(s, a, sm);
}

/* Whether a launch's next block goes to `sm` rather than to `than`, if both have room. */
static int better(const sim *s, int32_t launch, int32_t sm, int32_t than) {
    if (!s->gpu->in_order)
        return s->sm[sm].warps > s->sm[than].warps;
    int32_t n = s->gpu->sms, next = s->at[launch].next_sm;
    return (sm - next + n) % n < (than - next + n) % n;
}

/* Only the first launch, by priority and arrival, may place blocks; the next one follows once all of its blocks are
 * placed. `where`: the SMs that may have gained room since the last call; NULL: any SM may have. */
static void place_pending(sim *s, const int32_t *where, int32_t count) {
    while (s->pending_count) {
        int32_t launch = s->pending[0];
        const sim_launch *l = &s->launch[launch];
        while (s->at[launch].to_place) {
            int32_t best = -1, n = where ? count : s->gpu->sms;
            for (int32_t i = 0; i < n; i++) {
                int32_t sm = where ? where[i] : i;
                if (fits(s, l, sm) && (best < 0 || better(s, launch, sm, best)))
                    best = sm;
            }
            if (best < 0)
                return;
            place(s, launch, best);
            s->at[launch].next_sm = (best + 1) % s->gpu->sms;
        }
        s->pending_count--;
        memmove(s->pending, s->pending + 1, (size_t)s->pending_count * sizeof(int32_t));
        where = NULL; /* an SM without room for the first launch may have room for the next one */
    }
}

/* ---- launches ---- */

static void end_launch(sim *s, int32_t launch) {
    progress *p = &s->at[launch];
    p->state = 2;
    s->span[launch].end = s->now;
    if (s->now > s->totals->end)
        s->totals->end = s->now;
    if (p->slot >= 0) {
        for (int32_t i = 0; i < s->active_count; i++)
            if (s->used[i] == p->slot) {
                memmove(&s->used[i], &s->used[i + 1], (size_t)(s->active_count - i - 1) * sizeof(int32_t));
                s->active_count--;
                break;
            }
        s->slot[p->slot].launch = -1;
    }
    for (int32_t e = s->next_first[launch]; e >= 0; e = s->next[e]) {
        progress *q = &s->at[s->next_launch[e]];
        double ready = s->now + s->next_latency[e];
        q->ready = ready > q->ready ? ready : q->ready;
        if (--q->deps_left == 0)
            queue_push(s, q->ready, s->next_launch[e]);
    }
}

static int open_slot(sim *s, int32_t launch) {
    int32_t k = 0;
    while (k < MAX_ACTIVE && s->slot[k].launch >= 0)
        k++;
    if (k == MAX_ACTIVE)
        return -1;
    active *a = &s->slot[k];
    size_t sms = (size_t)s->gpu->sms;
    if (!a->cells) {
        a->cells = malloc(sms * sizeof(cell));
        a->key = malloc(sms * sizeof(double));
        a->heap = malloc(sms * sizeof(int32_t));
    }
    int32_t room = s->launch[launch].group >= 0 ? (int32_t)s->at[launch].to_place : 0;
    if (room > a->waiting_room) {
        free(a->waiting);
        a->waiting = malloc((size_t)room * sizeof(int32_t));
        a->waiting_room = a->waiting ? room : 0;
    }
    if (!a->cells || !a->key || !a->heap || (room && !a->waiting))
        return -2;
    double rate = base_rate(s, &s->launch[launch], 1);
    for (size_t i = 0; i < sms; i++) {
        cell *c = &a->cells[i];
        c->clock = c->since = 0;
        c->rate = rate;
        c->resident = c->running = c->marks = 0;
        c->place = -1;
    }
    a->launch = launch;
    a->heap_size = a->members_placed = 0;
    a->clock = a->base = 0;
    a->share = 1;
    a->running = 0;
    s->used[s->active_count++] = k;
    return k;
}

static void arrive(sim *s, int32_t launch) {
    const sim_launch *l = &s->launch[launch];
    progress *p = &s->at[launch];
    if (p->state == 1) { /* a delay or a copy ends */
        end_launch(s, launch);
        return;
    }
    p->state = 1;
    if (l->kind >= KIND_DELAY) {
        s->span[launch].start = s->now;
        queue_push(s, s->now + l->delay, launch);
        return;
    }
    p->slot = open_slot(s, launch);
    if (p->slot < 0) {
        s->failed = p->slot == -1 ? SIM_TOO_MANY : SIM_NO_MEMORY;
        s->totals->stuck_launch = launch;
        return;
    }
    int32_t i = s->pending_count++;
    while (i > 0 && s->launch[s->pending[i - 1]].priority < l->priority) {
        s->pending[i] = s->pending[i - 1];
        i--;
    }
    s->pending[i] = launch;
    if (i == 0)
        place_pending(s, NULL, 0);
}

/* End the blocks at the first mark of a cell; blocks of a pool take the next unit of work instead, if any is left. */
static void finish(sim *s, active *a, int32_t sm) {
    int32_t launch = a->launch;
    const sim_launch *l = &s->launch[launch];
    progress *p = &s->at[launch];
    cell *c = &a->cells[sm];
    int32_t count = c->ends[0].count;
    c->clock = c->ends[0].at;
    c->since = a->clock;
    c->marks--;
    memmove(&c->ends[0], &c->ends[1], (size_t)c->marks * sizeof(mark));
    c->running -= count;
    a->running -= count;
    a->base -= count * c->rate;
    s->totals->block_events += count;
    if (l->sm_rate > 0)
        s->sm[sm].compute_running -= count;
    int32_t again = 0;
    while (l->kind == KIND_POOL && p->units_left > 0 && again < count) {
        p->units_left--;
        start_running(s, a, sm, l->unit_work - l->start_work);
        again++;
    }
    count -= again;
    c->resident -= count;
    p->to_end -= count;
    if (!c->running)
        c->clock = 0; /* keeps the marks of long launches exact */
    if (!a->running)
        a->base = 0;
    retime(s, a, sm);
    if (l->sm_rate > 0)
        retime_others(s, a, sm);
    if (!count)
        return;
    sm_free *f = &s->sm[sm];
    f->blocks += count;
    f->warps += count * l->warps;
    f->registers += count * l->registers;
    f->shared += count * l->shared;
    note(s, sm, launch, -count);
    if (!p->to_end)
        end_launch(s, launch);
}

/* ---- the loop ---- */

static int run(sim *s) {
    for (;;) {
        double next = s->queue_size ? s->queue[0].time : INFINITY;
        active *who = NULL;
        share_memory(s);
        for (int32_t i = 0; i < s->active_count; i++) {
            active *a = &s->slot[s->used[i]];
            if (!a->heap_size)
                continue;
            double left = (a->key[a->heap[0]] - a->clock) / a->share;
            double time = s->now + (left > 0 ? left : 0);
            if (time < next) {
                next = time;
                who = a;
            }
        }
        if (next == INFINITY)
            break;
        double step = next - s->now;
        s->now = next;
        if (step > 0)
            for (int32_t i = 0; i < s->active_count; i++)
                s->slot[s->used[i]].clock += step * s->slot[s->used[i]].share;
        if (!who) {
            arrive(s, queue_pop(s).launch);
            if (s->failed)
                return s->failed;
            continue;
        }
        /* End all blocks that end now before placing any: otherwise the first SM to free up would get them all. */
        int32_t freed = 0;
        double until = who->key[who->heap[0]];
        if (who->clock < until)
            who->clock = until;
        until += SAME_TIME * who->share;
        while (who->launch >= 0 && who->heap_size && who->key[who->heap[0]] <= until) {
            int32_t sm = who->heap[0];
            if (who->clock < who->key[sm])
                who->clock = who->key[sm];
            s->freed[freed++] = sm;
            finish(s, who, sm);
            if (freed == s->gpu->sms)
                break;
        }
        if (s->pending_count)
            place_pending(s, s->freed, freed);
    }
    for (int32_t i = 0; i < s->launches; i++)
        if (s->at[i].state == 1) {
            s->totals->stuck_launch = i;
            return SIM_STUCK;
        }
    return SIM_OK;
}

static int prepare(sim *s, const int32_t *dep, const double *dep_latency) {
    int32_t edges = 0;
    for (int32_t i = 0; i < s->launches; i++) {
        const sim_launch *l = &s->launch[i];
        progress *p = &s->at[i];
        p->run = -1;
        p->slot = -1;
        p->deps_left = l->deps;
        for (int32_t r = 0; r < l->runs; r++)
            p->to_place += s->run_count[l->first_run + r];
        p->to_end = p->to_place;
        p->units_left = l->units;
        s->next_first[i] = s->peer[i] = -1;
        if (l->group >= 0 && l->group < i) { /* append to the list of peers */
            int32_t last = l->group;
            while (s->peer[last] >= 0)
                last = s->peer[last];
            s->peer[last] = i;
        }
        if (l->kind < KIND_DELAY) {
            const sim_gpu *g = s->gpu;
            if (!p->to_place || l->warps > g->warps || l->registers > g->registers || l->shared > g->shared ||
                g->blocks < 1 || l->first_sm >= g->sms) {
                s->totals->stuck_launch = i;
                return SIM_NEVER_FITS;
            }
        }
    }
    for (int32_t i = 0; i < s->launches; i++) {
        const sim_launch *l = &s->launch[i];
        for (int32_t d = 0; d < l->deps; d++, edges++) {
            int32_t on = dep[l->first_dep + d];
            s->next_launch[edges] = i;
            s->next_latency[edges] = dep_latency[l->first_dep + d];
            s->next[edges] = s->next_first[on];
            s->next_first[on] = edges;
        }
        if (!l->deps)
            queue_push(s, 0, i);
    }
    for (int32_t i = 0; i < s->gpu->sms; i++)
        s->sm[i] = (sm_free){s->gpu->warps, s->gpu->blocks, 0, s->gpu->registers, s->gpu->shared};
    for (int32_t k = 0; k < MAX_ACTIVE; k++)
        s->slot[k].launch = -1;
    return SIM_OK;
}

int weft_simulate(const sim_gpu *gpu, int32_t launches, const sim_launch *launch, const int64_t *run_count,
                  const double *run_work, const int32_t *dep, const double *dep_latency, sim_span *span,
                  sim_change *log, int64_t log_room, sim_totals *totals) {
    size_t n = (size_t)launches, edges = 0;
    for (size_t i = 0; i < n; i++)
        edges += (size_t)launch[i].deps;
    sim *s = calloc(1, sizeof(sim));
    if (!s)
        return SIM_NO_MEMORY;
    *s = (sim){.gpu = gpu,
               .launch = launch,
               .run_count = run_count,
               .run_work = run_work,
               .launches = launches,
               .span = span,
               .log = log,
               .log_room = log_room,
               .totals = totals};
    memset(totals, 0, sizeof *totals);
    totals->stuck_launch = -1;
    s->at = calloc(n, sizeof(progress));
    s->sm = calloc((size_t)gpu->sms, sizeof(sm_free));
    s->freed = calloc((size_t)gpu->sms, sizeof(int32_t));
    s->pending = calloc(n + 1, sizeof(int32_t));
    s->queue = calloc(n + 1, sizeof(arrival));
    s->next_first = calloc(n, sizeof(int32_t));
    s->peer = calloc(n, sizeof(int32_t));
    s->next = calloc(edges + 1, sizeof(int32_t));
    s->next_launch = calloc(edges + 1, sizeof(int32_t));
    s->next_latency = calloc(edges + 1, sizeof(double));
    int status = SIM_NO_MEMORY;
    if (s->at && s->sm && s->freed && s->peer && s->pending && s->queue && s->next_first && s->next && s->next_launch &&
        s->next_latency) {
        status = prepare(s, dep, dep_latency);
        if (status == SIM_OK)
            status = run(s);
    }
    for (int32_t k = 0; k < MAX_ACTIVE; k++) {
        free(s->slot[k].cells);
        free(s->slot[k].key);
        free(s->slot[k].heap);
        free(s->slot[k].waiting);
    }
    free(s->at), free(s->sm), free(s->pending), free(s->queue), free(s->peer), free(s->freed);
    free(s->next_first), free(s->next), free(s->next_launch), free(s->next_latency);
    free(s);
    return status;
}
