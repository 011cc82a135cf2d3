/* What weft's Python side and the shim share: two kinds of memory-mapped files in the job's folder.
 *
 *   control   one per job; `weft run`, or weft from outside while the job runs, writes the policy there
 *   PID.N     one per process that launched a kernel: its own policy, if it set one, and its counters
 *
 * src/weft/shim/binding.py mirrors these structures; both sides refuse a file of another version or size. */
#ifndef WEFT_LAYOUT_H
#define WEFT_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#define WEFT_CONTROL_MAGIC "weftctl"
#define WEFT_PROCESS_MAGIC "weftprc"
#define WEFT_LAYOUT_VERSION 3

enum {
    WEFT_PATTERN = 128,
    WEFT_RULES = 64,
    WEFT_COMM_PATTERNS = 64,
    WEFT_NAME = 512,
    WEFT_SHARDS = 16,
    WEFT_CHUNK_ROWS = 16,
    WEFT_CHUNKS = 512,
    WEFT_ROWS = WEFT_CHUNK_ROWS * WEFT_CHUNKS,
    WEFT_PAGE = 4096,
};

/* Rows that are always there: for kernels that have no row of their own. */
enum { WEFT_ROW_OTHER_COMPUTE, WEFT_ROW_OTHER_COMM, WEFT_ROW_UNNAMED, WEFT_FIRST_ROW };

enum { /* weft_policy.flags */
       WEFT_POLICY_SET = 1,
       WEFT_PRIORITY_HIGH = 2,
       WEFT_WHEN_OVERLAP = 4,
       WEFT_TRACK = 8, /* count launches while a collective is in flight, whatever else is asked for */
};

typedef struct {
    char pattern[WEFT_PATTERN];
    uint32_t residency; /* 0: these kernels stay unchanged */
    uint32_t unused;
} weft_rule;

typedef struct {
    uint32_t flags;
    uint32_t residency; /* default for compute kernels; 0: none */
    uint32_t head_start_ns;
    uint32_t rule_count;
    uint32_t comm_count;
    uint32_t unused;
    weft_rule rules[WEFT_RULES];
    char comm[WEFT_COMM_PATTERNS][WEFT_PATTERN]; /* patterns of the kernels that communicate */
} weft_policy;

/* A policy that may be rewritten while it is read: `sequence` is odd during a write, and the checksum
 * tells a torn copy where stores become visible out of order. */
typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t size;
    _Atomic uint64_t sequence;
    uint64_t checksum; /* Adler-32 of `policy` */
    weft_policy policy;
} weft_control;

enum { WEFT_KIND_COMPUTE = 0, WEFT_KIND_COMM = 1, WEFT_KIND_WEFT = 2, WEFT_KIND_UNKNOWN = 3 };
enum { WEFT_API_CUDA = 1, WEFT_API_HIP = 2 };

enum { /* weft_row.reason: why the latest launch was not shaped */
       WEFT_SHAPED = 0,
       WEFT_NOT_ASKED = 1,     /* the policy asks nothing of this kernel */
       WEFT_ALREADY_FEWER = 2, /* no more than N blocks fit as it is */
       WEFT_INFEASIBLE = 3,    /* no size of shared memory gives exactly N */
       WEFT_ONE_WAVE = 4,      /* the whole grid is resident at once and may count on it */
       WEFT_NOT_IN_FLIGHT = 5, /* `when: overlap` and no collective runs */
       WEFT_COOPERATIVE = 6,
       WEFT_REFUSED = 7,  /* the driver refused the shaped launch */
       WEFT_NAMELESS = 8, /* this driver does not tell the kernel's name */
       WEFT_UNLISTED = 9, /* more kernels than the shim keeps facts of */
};

typedef struct {
    char name[WEFT_NAME];
    uint32_t kind;
    uint32_t threads;               /* per block */
    uint32_t shared_bytes;          /* dynamic shared memory that the program asks for */
    uint32_t natural_blocks;        /* blocks per SM as the program launches it; 0: unknown */
    _Atomic uint32_t shaped_blocks; /* blocks per SM as shaped last; 0: never shaped */
    _Atomic uint32_t shaped_bytes;  /* dynamic shared memory as shaped last */
    _Atomic uint32_t reason;
    _Atomic uint32_t grid_blocks; /* of the latest launch; kept for kernels that communicate: their CTAs */
} weft_row;

/* Counters of one row by one thread (the last shard is shared by all further threads). */
typedef struct {
    _Atomic uint64_t launches; /* kernels that run: direct launches and graph replays */
    _Atomic uint64_t shaped;
    _Atomic uint64_t beside; /* launched while a collective was in flight, where that was tracked */
} weft_cell;

enum { /* weft_process.counters */
       WEFT_COUNT_SHAPE_FAILURES,
       WEFT_COUNT_PRIORITISED,
       WEFT_COUNT_PRIORITY_FAILURES,
       WEFT_COUNT_HEAD_STARTS,
       WEFT_COUNT_HEAD_START_FAILURES,
       WEFT_COUNT_COOPERATIVE,
       WEFT_COUNT_CAPTURED,
       WEFT_COUNT_GRAPH_LAUNCHES,
       WEFT_COUNT_UNKNOWN, /* launches of kernels that could not be named */
       WEFT_COUNT_TRACKING_FAILURES,
       WEFT_COUNT_POLICY_CHANGES,
       WEFT_COUNT_ROUTED, /* collectives that went to a sibling of the program's communicator */
       WEFT_COUNT_SPLIT_FAILURES,
       WEFT_COUNT_UNLISTED,   /* launches counted in a shared row, since the kernel has none of its own */
       WEFT_COUNT_UNHANDLED,  /* uses of an interface that the shim passes on and does not account for */
       WEFT_COUNT_COMM_BYTES, /* that collectives and point-to-point calls were asked to move */
       WEFT_COUNTERS = 32,
};

/* Rows and their counters come in chunks, so that a file holds no more than its process needs: the file is extended,
 * and its blocks reserved, before a chunk is used. */
typedef struct {
    weft_row rows[WEFT_CHUNK_ROWS];
    weft_cell cells[WEFT_SHARDS][WEFT_CHUNK_ROWS];
} weft_chunk;

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t size;
    uint32_t pid;
    int32_t rank;
    uint32_t api;
    _Atomic uint32_t rows_used;
    char command[256];
    _Atomic uint64_t counters[WEFT_COUNTERS];
    weft_control control; /* the process's own policy; outranks the job's while WEFT_POLICY_SET. A hole until written */
    _Alignas(WEFT_PAGE) weft_chunk chunks[WEFT_CHUNKS];
} weft_process;

/* The latest collective calls of a process, in a file of their own (calls.PID.N): others may read them. */
enum { WEFT_CALLS = 1 << 12 };

typedef struct {
    _Atomic uint64_t number; /* plus one; 0 while it is written */
    _Atomic uint64_t key, bytes, host_ns;
    _Atomic uint32_t operation, routed;
} weft_call;

typedef struct {
    weft_call ring[WEFT_CALLS];
} weft_calls;

#endif
