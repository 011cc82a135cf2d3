/* Block speeds: the clocks of launches and SMs, and the memory system that all blocks share. */
#include "state.h"

#include <math.h>
#include <string.h>

/* ---- clocks ---- */

static void rekey(active *a, int32_t sm) {
    cell *c = &a->cells[sm];
    if (!c->marks) {
        if (c->place >= 0)
            heap_remove(a, sm);
        return;
    }
    a->key[sm] = c->since + (c->ends[0].at - c->clock) / c->rate;
    heap_move(a, c->place >= 0 ? c->place : a->heap_size++, sm);
}

double base_rate(const sim *s, const sim_launch *l, int32_t sharing) {
    double rate = l->block_rate, window = l->window / s->gpu->latency;
    double share = l->sm_rate > 0 ? l->sm_rate / (sharing > 0 ? sharing : 1) : rate;
    rate = share < rate ? share : rate;
    return window < rate ? window : rate;
}

/* Bring a cell's clock up to date and set the rate that its SM now allows. */
void retime(sim *s, active *a, int32_t sm) {
    cell *c = &a->cells[sm];
    double rate = base_rate(s, &s->launch[a->launch], s->sm[sm].compute_running);
    if (c->rate == rate && c->running) {
        rekey(a, sm);
        return;
    }
    c->clock += c->rate * (a->clock - c->since);
    c->since = a->clock;
    a->base += c->running * (rate - c->rate);
    c->rate = rate;
    rekey(a, sm);
}

void retime_others(sim *s, active *changed, int32_t sm) {
    for (int32_t i = 0; i < s->active_count; i++) {
        active *a = &s->slot[s->used[i]];
        if (a != changed && a->cells[sm].running && s->launch[a->launch].sm_rate > 0)
            retime(s, a, sm);
    }
}

void start_running(sim *s, active *a, int32_t sm, double work) {
    const sim_launch *l = &s->launch[a->launch];
    cell *c = &a->cells[sm];
    c->clock += c->rate * (a->clock - c->since);
    c->since = a->clock;
    double at = c->clock + work + l->start_work;
    int32_t i = c->marks;
    while (i > 0 && c->ends[i - 1].at > at)
        i--;
    if (i > 0 && c->ends[i - 1].at >= at * (1 - 1e-12)) {
        c->ends[i - 1].count++;
    } else {
        memmove(&c->ends[i + 1], &c->ends[i], (size_t)(c->marks - i) * sizeof(mark));
        c->ends[i] = (mark){at, 1};
        c->marks++;
    }
    c->running++;
    a->running++;
    a->base += c->rate;
    if (l->sm_rate > 0)
        s->sm[sm].compute_running++;
}

/* ---- the memory system ---- */

/* Slowdown at a given load (demand over limit): queues build up before the limit is reached. With a sharpness of 4
 * it is 1.19 where demand equals the limit. */
static double stretch(const sim *s, double load) {
    double p = s->gpu->sharpness;
    if (load < 0.2)
        return 1;
    if (p == 4)
        return sqrt(sqrt(1 + load * load * load * load));
    return load > 1 ? load * pow(1 + pow(1 / load, p), 1 / p) : pow(1 + pow(load, p), 1 / p);
}

/* Little's law: blocks keep their windows in flight, so beyond saturation the latency grows until the rates
 * window / latency add up to the bandwidth. Returns this latency relative to the unloaded one, or demand over
 * bandwidth (at most 1) where the demand can be met. The larger a launch's window relative to its rate, the higher
 * the latency at which it begins to slow down. */
static double cache_load(const sim *s, int32_t n, const double *base, const double *windows, const double *limit) {
    double demand = 0, held = 0, latency = s->gpu->latency;
    int32_t order[MAX_ACTIVE];
    for (int32_t i = 0; i < n; i++) {
        int32_t j = i;
        while (j > 0 && limit[order[j - 1]] > limit[i]) {
            order[j] = order[j - 1];
            j--;
        }
        order[j] = i;
        demand += base[i];
    }
    if (demand <= s->gpu->bandwidth)
        return demand / s->gpu->bandwidth;
    for (int32_t i = 0; i < n; i++) {
        demand -= base[order[i]];
        held += windows[order[i]];
        double room = s->gpu->bandwidth - demand;
        if (room <= 0)
            continue;
        latency = held / room;
        if (i + 1 == n || latency <= limit[order[i + 1]])
            break;
    }
    return latency / s->gpu->latency;
}

void share_memory(sim *s) {
    double base[MAX_ACTIVE], windows[MAX_ACTIVE], limit[MAX_ACTIVE];
    active *of[MAX_ACTIVE];
    int32_t n = 0;
    for (int32_t i = 0; i < s->active_count; i++) {
        active *a = &s->slot[s->used[i]];
        a->share = 1;
        if (!a->running)
            continue;
        of[n] = a;
        base[n] = a->base * s->launch[a->launch].weight;
        windows[n] = (double)a->running * s->launch[a->launch].window * s->launch[a->launch].weight;
        limit[n] = windows[n] / base[n];
        n++;
    }
    if (!n)
        return;
    double latency = s->gpu->latency * stretch(s, cache_load(s, n, base, windows, limit)), misses = 0;
    for (int32_t i = 0; i < n; i++) {
        if (limit[i] < latency)
            of[i]->share = limit[i] / latency;
        misses += of[i]->base * of[i]->share * s->launch[of[i]->launch].miss;
    }
    double left = 1 / stretch(s, misses / s->gpu->memory);
    for (int32_t i = 0; left < 1 && i < n; i++) { /* launches that mostly hit the cache hardly slow down */
        double concerned = 2 * s->launch[of[i]->launch].miss;
        double kept = (1 - (1 - left) * (concerned < 1 ? concerned : 1)) * s->launch[of[i]->launch].spare;
        of[i]->share *= kept < 1 ? kept : 1;
    }
}
