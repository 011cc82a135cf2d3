/* The block scheduler of one GPU: what Python hands over, and what it gets back. Times in seconds. */
#ifndef WEFT_SIM_H
#define WEFT_SIM_H

#include <stdint.h>

enum { KIND_GRID = 0, KIND_POOL = 1, KIND_DELAY = 2, KIND_ENGINE = 3 };
enum { SIM_OK = 0, SIM_NEVER_FITS = 1, SIM_STUCK = 2, SIM_NO_MEMORY = 3, SIM_TOO_MANY = 4 };

typedef struct {
    int32_t sms, warps, blocks;
    int32_t in_order; /* 1: a launch takes the SMs in turn, from the first one; 0: the emptiest SM first */
    int64_t registers, shared;
    double latency;   /* of memory without load */
    double bandwidth; /* of the shared cache, bytes per second */
    double memory;    /* of device memory, bytes per second */
    double sharpness; /* of the bend where demand meets bandwidth; large: a corner */
} sim_gpu;

/* One launch. Work is counted in bytes through the shared cache. */
typedef struct {
    int32_t kind, priority;
    int32_t first_run, runs; /* blocks in launch order, run-length coded: (count, work) */
    int32_t first_dep, deps; /* launches that must end first, each with the latency after it */
    int32_t warps, group;    /* group: first launch of the collective that this is a rank of, or -1 */
    int32_t first_sm, pad;   /* SMs below this one are not for this launch */
    int64_t registers, shared;
    int64_t units;     /* KIND_POOL: pieces of work that the resident blocks share out */
    double unit_work;  /* KIND_POOL: work of one piece */
    double sm_rate;    /* work per second that one SM gives to all such blocks on it */
    double block_rate; /* most that one block reaches alone */
    double window;     /* bytes that a block keeps in flight: by Little's law its rate is window / latency */
    double miss;       /* share of the work that goes on to device memory */
    double weight;     /* bandwidth of the cache that a byte takes, in bytes: above 1 for short requests */
    double spare;      /* how many times longer memory may take before it slows the block; 1: no slack */
    double start_work; /* starting a block costs as much as this work */
    double delay;      /* KIND_DELAY, KIND_ENGINE: seconds */
} sim_launch;

typedef struct {
    double start, end; /* first block placed, last block ended */
} sim_span;

typedef struct {
    double time;
    int32_t sm, launch, change, pad; /* change: blocks more (or fewer) of this launch on this SM */
} sim_change;

typedef struct {
    int64_t block_events, changes;
    int32_t stuck_launch, pad;
    double end;
} sim_totals;

__attribute__((visibility("default"))) int weft_simulate(const sim_gpu *gpu, int32_t launches, const sim_launch *launch,
                                                         const int64_t *run_count, const double *run_work,
                                                         const int32_t *dep, const double *dep_latency, sim_span *span,
                                                         sim_change *log, int64_t log_room, sim_totals *totals);

#endif
