/* The memory-mapped files in the job's folder that weft's Python side and the shim share. There are two kinds:
 *
 *   control   one per job; `weft run`, or another weft while the job runs, writes the policy there
 *   PID.N     one per process that launched a kernel: its own policy, if it set one, and its counters
 *
 * src/weft/shim/layout.py mirrors these structures; both sides refuse a file of another version or size. */
#ifndef WEFT_LAYOUT_H
#define WEFT_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#define WEFT_CONTROL_MAGIC "weftctl"
#define WEFT_PROCESS_MAGIC "weftprc"
#define WEFT_LAYOUT_VERSION 4

enum {
    WEFT_PATTERN = 128,
    WEFT_RULES = 64,
    WEFT_COMM_PATTERNS = 64,
    WEFT_COMM_RULES = 32,
    WEFT_NAME = 512,
    WEFT_SHARDS = 16,
    WEFT_CHUNK_ROWS = 16,
    WEFT_CHUNKS = 512,
    WEFT_ROWS = WEFT_CHUNK_ROWS * WEFT_CHUNKS,
    WEFT_PAGE = 4096,
};

/* Fixed rows, for kernels that have no row of their own. */
enum { WEFT_ROW_OTHER_COMPUTE, WEFT_ROW_OTHER_COMM, WEFT_ROW_UNNAMED, WEFT_FIRST_ROW };

enum { /* weft_policy.flags */
       WEFT_POLICY_SET = 1,
       WEFT_PRIORITY_HIGH = 2,
       WEFT_WHEN_OVERLAP = 4,
       WEFT_TRACK = 8,              /* count launches made while a collective is in flight, whatever else is set */
       WEFT_HEAD_START_PLACED = 16, /* compute waits for the collective's placement, for head_start_ns at most */
       WEFT_ENGINE_DMA = 32,        /* copy engines move the bytes of collectives where NCCL supports it */
};

typedef struct {
    char pattern[WEFT_PATTERN];
    uint32_t residency; /* 0: these kernels stay unchanged */
    uint32_t unused;
} weft_rule;

/* A rule for collectives of some kinds and sizes. 0 in a field: NCCL's own choice. */
typedef struct {
    uint64_t min_bytes, max_bytes; /* inclusive; as NCCL's tuner plugin counts bytes */
    uint32_t operations;           /* one bit per operation of nccl.h */
    uint32_t ctas;
    uint32_t cluster;    /* CTAs per cluster, plus one */
    uint32_t algorithm;  /* NCCL's number, plus one */
    uint32_t protocol;   /* NCCL's number, plus one */
    uint32_t cta_policy; /* NCCL_CTA_POLICY_* */
    uint64_t chunk;      /* bytes */
} weft_comm_rule;

typedef struct {
    uint32_t flags;
    uint32_t residency; /* default for compute kernels; 0: none */
    uint32_t head_start_ns;
    uint32_t rule_count;
    uint32_t comm_count;
    uint32_t sm_reserve; /* SMs that GEMMs leave free while a collective is in flight; 0: none */
    weft_rule rules[WEFT_RULES];
    char comm[WEFT_COMM_PATTERNS][WEFT_PATTERN]; /* name patterns of communication kernels */
    uint32_t comm_rule_count;
    uint32_t comm_ctas; /* maximum CTAs of collectives that no rule names; 0: unlimited */
    weft_comm_rule comm_rules[WEFT_COMM_RULES];
} weft_policy;

/* A policy that may be rewritten while it is read. `sequence` is odd during a write, and the checksum
 * reveals a torn copy if stores become visible out of order. */
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
       WEFT_NOT_ASKED = 1,     /* the policy sets no residency for this kernel */
       WEFT_ALREADY_FEWER = 2, /* at most N blocks fit without shaping */
       WEFT_INFEASIBLE = 3,    /* no amount of shared memory gives exactly N blocks */
       WEFT_ONE_WAVE = 4,      /* the whole grid is resident at once, and the kernel may rely on that */
       WEFT_NOT_IN_FLIGHT = 5, /* `when: overlap`, and no collective was running */
       WEFT_COOPERATIVE = 6,
       WEFT_REFUSED = 7,  /* the driver refused the shaped launch */
       WEFT_NAMELESS = 8, /* this driver does not return kernel names */
       WEFT_UNLISTED = 9, /* the program has more kernels than the shim keeps facts about */
};

typedef struct {
    char name[WEFT_NAME];
    uint32_t kind;
    uint32_t threads;               /* per block */
    uint32_t shared_bytes;          /* dynamic shared memory that the program requests */
    uint32_t natural_blocks;        /* blocks per SM without shaping; 0: unknown */
    _Atomic uint32_t shaped_blocks; /* blocks per SM in the latest shaped launch; 0: never shaped */
    _Atomic uint32_t shaped_bytes;  /* dynamic shared memory in the latest shaped launch */
    _Atomic uint32_t reason;
    _Atomic uint32_t grid_blocks; /* of the latest launch: the CTAs; recorded for communication kernels only */
} weft_row;

/* Counters of one row by one thread (the last shard is shared by all further threads). */
typedef struct {
    _Atomic uint64_t launches; /* kernels that ran, from direct launches and graph replays */
    _Atomic uint64_t shaped;
    _Atomic uint64_t beside; /* launches while a collective was in flight, if that was tracked */
} weft_cell;

enum { /* weft_process.nccl_path: how rules for collectives are applied */
       WEFT_PATH_NONE,
       WEFT_PATH_CONFIG,  /* by a configuration per call (NCCL 2.31 and newer); protocol and chunk by the plugin */
       WEFT_PATH_TUNER,   /* NCCL asks weft's tuner plugin (2.24 and newer) */
       WEFT_PATH_REFUSED, /* NCCL refused calls with a configuration: weft makes plain calls */
};

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
       WEFT_COUNT_ROUTED, /* collectives routed to a sibling of the program's communicator */
       WEFT_COUNT_SPLIT_FAILURES,
       WEFT_COUNT_UNLISTED,        /* launches counted in a shared row, since the kernel has no row of its own */
       WEFT_COUNT_UNHANDLED,       /* uses of an interface that the shim forwards but does not account for */
       WEFT_COUNT_PLACED_EVENTS,   /* collectives whose launch carries an event for the exact head start */
       WEFT_COUNT_PLACED_READY,    /* head starts that needed no wait: the collective was already placed */
       WEFT_COUNT_PLACED_TIMEOUTS, /* head starts that timed out */
       WEFT_COUNT_PLACED_CAPTURED, /* no head start: the launch was captured */
       WEFT_COUNT_PLACED_BUSY,     /* no head start: too many collectives or threads used the stream */
       WEFT_COUNT_PLACED_FAILURES, /* no head start: the driver has no such event or refused it */
       WEFT_COUNT_SM_RESERVED,     /* cuBLAS GEMMs that left SMs free */
       WEFT_COUNT_SM_OWN,          /* no SMs left free: the program set a number of SMs itself */
       WEFT_COUNT_SM_DETERMINISM,  /* no SMs left free: the program asks for reproducible results */
       WEFT_COUNT_SM_FAILURES,     /* no SMs left free: cuBLAS does not support it or refused it */
       WEFT_COUNT_SM_OTHERS,       /* compute launches during a collective that are no GEMM within weft's reach */
       WEFT_COUNT_PER_CALL,        /* collectives called with a configuration of their own */
       WEFT_COUNT_CONFIG_REFUSED,  /* of these, configurations that NCCL refused: the plain call was made */
       WEFT_COUNT_TUNED,           /* NCCL's questions that weft's tuner plugin answered from a rule */
       WEFT_COUNT_TUNER_FAILURES,  /* errors of the user's own tuner plugin; NCCL's default was used */
       WEFT_COUNT_RULES_UNAPPLIED, /* collectives that match a rule that cannot be applied here */
       WEFT_COUNT_COMM_BYTES,      /* bytes that collectives and point-to-point calls were asked to move */
       WEFT_COUNT_PLACED_BEHIND,   /* no head start: other collectives had to be placed first */
       WEFT_COUNT_ENGINE_COPIED,   /* under comm.engine dma: collectives that launched no kernel */
       WEFT_COUNT_ENGINE_KERNELS,  /* collectives that could have been copied but launched kernels */
       WEFT_COUNT_ENGINE_UNSURE,   /* collectives that could be copied, whose launches cannot be told apart */
       WEFT_COUNT_ENGINE_WINDOW,   /* not copied: a buffer is in no symmetric window of the communicator */
       WEFT_COUNT_ENGINE_KIND,     /* not copied: NCCL copies only all-gather, all-to-all, gather and scatter */
       WEFT_COUNT_ENGINE_OLD,      /* not copied: this NCCL is older than 2.28, or is RCCL */
       WEFT_COUNT_ENGINE_TWO,      /* not copied: between two ranks the first copy can hang before NCCL 2.31.2 */
       WEFT_COUNT_ENGINE_POLICY,   /* not copied: the communicator or the call does not ask for zero CTAs */
       WEFT_COUNT_ENGINE_NODES,    /* not copied: the ranks are on several nodes, and NCCL launched kernels */
       WEFT_COUNT_ENGINE_REFUSED,  /* communicators made without zero CTAs, because NCCL refused that setting */
       WEFT_COUNT_COPIED_BYTES,    /* bytes copied from the host to the device */
       WEFT_COUNTERS_USED,
       WEFT_COUNTERS = 64,
};

/* Rows and their counters come in chunks, so that a file is no larger than its process needs. Before a chunk is used,
 * the file is extended and the chunk's disk blocks are reserved. */
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
    _Atomic uint32_t nccl_version; /* of the library that made the latest communicator; 0: none yet */
    _Atomic uint32_t nccl_path;    /* WEFT_PATH_* of that library */
    _Atomic uint32_t nccl_tuner;   /* version of the tuner plugin interface by which NCCL asks weft; 0: it does not */
    _Atomic uint32_t nccl_user_tuner; /* interface version of the user's own plugin; 0: none */
    _Atomic uint64_t counters[WEFT_COUNTERS];
    weft_control control; /* the process's own policy; outranks the job's if WEFT_POLICY_SET. A hole until written */
    _Alignas(WEFT_PAGE) weft_chunk chunks[WEFT_CHUNKS];
} weft_process;

/* The latest collective calls of a process, in a separate file (calls.PID.N) that other processes may read. */
enum { WEFT_CALLS = 1 << 12 };

typedef struct {
    _Atomic uint64_t number; /* the call's number plus one; 0 during a write */
    _Atomic uint64_t key, bytes, host_ns;
    _Atomic uint32_t operation, routed;
} weft_call;

typedef struct {
    weft_call ring[WEFT_CALLS];
} weft_calls;

#endif
