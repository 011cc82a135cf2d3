/* The state of a simulation, shared by queues.c (event queues), speed.c (block speeds) and sim.c (placement of
 * blocks, and the event loop). */
#ifndef WEFT_SIM_STATE_H
#define WEFT_SIM_STATE_H

#include "sim.h"

#define MAX_ACTIVE 48
#define SAME_TIME 1e-12 /* seconds; ends closer together than this are one event */
#define MAX_MARKS 64    /* blocks of one launch on one SM; no GPU holds more than 32 */

typedef struct {
    double at;
    int32_t count;
} mark;

typedef struct {
    double clock, since, rate; /* work done per block; launch clock at the last update; work per launch-clock second */
    int32_t resident, running, marks, place; /* place in the heap, -1: not in it */
    mark ends[MAX_MARKS];
} cell;

typedef struct {
    int32_t launch, heap_size, members_placed;
    double clock, share, base; /* base: sum of the base rates of running blocks, work per second */
    int64_t running;
    double *key;
    int32_t *heap;
    cell *cells;
    int32_t *waiting; /* collectives: SM of each placed block, in order of placement */
    int32_t waiting_room;
} active;

typedef struct {
    int32_t run;
    int64_t left_in_run, to_place, to_end, units_left, placed;
    int32_t deps_left, slot, next_sm;
    double ready;
    int state; /* 0 waiting, 1 arrived, 2 ended */
} progress;

typedef struct {
    int32_t warps, blocks, compute_running;
    int64_t registers, shared;
} sm_free;

typedef struct {
    double time;
    int32_t launch;
} arrival;

typedef struct {
    const sim_gpu *gpu;
    const sim_launch *launch;
    const int64_t *run_count;
    const double *run_work;
    int32_t launches;
    progress *at;
    sm_free *sm;
    active slot[MAX_ACTIVE];
    int32_t used[MAX_ACTIVE], active_count; /* slots in use */
    int32_t *pending, pending_count;        /* launches with blocks to place, by priority, then arrival */
    arrival *queue;
    int32_t queue_size;
    int32_t *next_first, *next; /* linked lists of the dependents of each launch */
    double *next_latency;
    int32_t *next_launch;
    int32_t *peer; /* the next launch of the same collective, -1 after the last */
    sim_span *span;
    sim_change *log;
    int64_t log_room;
    sim_totals *totals;
    int32_t *freed;
    double now;
    int failed;
} sim;

/* --- queues.c --- */

void queue_push(sim *s, double time, int32_t launch);
arrival queue_pop(sim *s);
void heap_move(active *a, int32_t i, int32_t sm);
void heap_remove(active *a, int32_t sm);

/* --- speed.c --- */

double base_rate(const sim *s, const sim_launch *l, int32_t sharing);
void retime(sim *s, active *a, int32_t sm);
void retime_others(sim *s, active *changed, int32_t sm);
void start_running(sim *s, active *a, int32_t sm, double work);
void share_memory(sim *s);

#endif
