/* Interface of the simulated block scheduler of one GPU: its inputs from Python and its results. Times in seconds. */
#ifndef WEFT_SIM_H
#define WEFT_SIM_H

#include <stdint.h>

enum { KIND_GRID = 0, KIND_POOL = 1, KIND_DELAY = 2, KIND_ENGINE = 3 };
enum { SIM_OK = 0, SIM_NEVER_FITS = 1, SIM_STUCK = 2, SIM_NO_MEMORY = 3, SIM_TOO_MANY = 4 };

typedef struct {
    int32_t sms, warps, blocks;
    int32_t in_order; /* 1: a launch takes the SMs in turn, from the first; 0: it takes the emptiest SM */
    int64_t registers, shared;
    double latency;   /* of memory without load */
    double bandwidth; /* of the shared cache, bytes per second */
    double memory;    /* of device memory, bytes per second */
    double sharpness; /* how sharply throughput saturates where demand meets bandwidth; large: a corner */
} sim_gpu;

/* One launch. Work is counted in bytes through the shared cache. */
typedef struct {
    int32_t kind, priority;
    int32_t first_run, runs; /* blocks in launch order, run-length encoded: (count, work) */
    int32_t first_dep, deps; /* launches that must end first, each with the latency from its end to this start */
    int32_t warps, group;    /* group: first launch of the collective that this launch is part of, or -1 */
    int32_t first_sm, pad;   /* the launch does not use SMs below this index */
    int64_t registers, shared;
    int64_t units;     /* KIND_POOL: units of work that the resident blocks take */
    double unit_work;  /* KIND_POOL: work of one unit */
    double sm_rate;    /* work per second that an SM divides among its compute blocks; 0: takes no share */
    double block_rate; /* work per second that one block reaches alone */
    double window;     /* bytes that a block keeps in flight: by Little's law its rate is window / latency */
    double miss;       /* fraction of the work that goes on to device memory */
    double weight;     /* cache bandwidth that one byte uses, in bytes: above 1 for short requests */
    double spare;      /* factor by which memory may slow down before it slows the block; 1: no slack */
    double start_work; /* time to start a block, as work at the rate that the block reaches alone */
    double delay;      /* KIND_DELAY, KIND_ENGINE: duration in seconds */
} sim_launch;

typedef struct {
    double start, end; /* first block placed, last block ended */
} sim_span;

typedef struct {
    double time;
    int32_t sm, launch, change, pad; /* change: blocks of this launch that this SM gained or lost */
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
