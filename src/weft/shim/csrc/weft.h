/* The internal interfaces of the shim, by source file. */
#ifndef WEFT_H
#define WEFT_H

#include "layout.h"
#include "map.h"

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Marks the code that every launch runs, to keep it together. A program that launches from Python evicts the caches
 * between launches, so each additional cache line and page costs more than all instructions of the shim. */
#define HOT __attribute__((hot))

/* --- control.c, policy.c: the job's files, and the policy in force ------------------------------------------ */

/* A policy copied from a control block. It is immutable once published, so readers need no lock. */
typedef struct {
    _Atomic uint32_t id; /* equal policies have equal ids, so plans made for a policy stay valid */
    bool shapes;         /* a rule or the default sets a residency */
    bool neutral;
    weft_policy data;
} weft_rules;

bool weft_enabled(void); /* whether `weft run` started this process */
weft_process *weft_attach(uint32_t api);
void weft_count(int counter);
void *weft_shared_file(const char *name, size_t size);
void weft_policy_of(weft_control *control); /* sets the job's control block; call before the process is attached */
const weft_rules *weft_refresh(void);

/* The data that every launch reads, in one cache line. */
typedef struct {
    _Alignas(64) weft_process *self; /* NULL until the first launch */
    _Atomic(const weft_rules *) active;
    _Atomic uint64_t *job_sequence;
    _Atomic uint64_t seen_job, seen_self;
    _Atomic int attached; /* 0: not tried; 1: attached; -1: failed or not allowed */
    _Atomic int captures; /* number of open captures, including those that do not fit into the list */
    _Atomic int tracing;
    _Atomic uint32_t epoch; /* see weft_handle_epoch */
    _Atomic bool neutral;   /* the active policy changes no launch; false until a policy was read */
} weft_hot_data;
_Static_assert(sizeof(weft_hot_data) == 64, "one line");
extern weft_hot_data weft_hot;
extern const weft_rules weft_no_policy; /* changes nothing; active until a complete policy was read */

static inline void weft_add(int counter, uint64_t amount) {
    if (weft_hot.self)
        atomic_fetch_add_explicit(&weft_hot.self->counters[counter], amount, memory_order_relaxed);
}

/* Whether the active policy is up to date with the job's files. */
static inline bool weft_policy_current(void) {
    uint64_t job = atomic_load_explicit(weft_hot.job_sequence, memory_order_relaxed);
    uint64_t self = atomic_load_explicit(&weft_hot.self->control.sequence, memory_order_relaxed);
    return LIKELY(job == atomic_load_explicit(&weft_hot.seen_job, memory_order_acquire) &&
                  self == atomic_load_explicit(&weft_hot.seen_self, memory_order_acquire));
}

/* The policy in force now. Costs only a few loads while nothing changes. */
static inline const weft_rules *weft_policy_now(void) {
    return weft_policy_current() ? atomic_load_explicit(&weft_hot.active, memory_order_acquire) : weft_refresh();
}

bool weft_chunk_ready(uint32_t chunk); /* reserves disk blocks for a chunk of rows; false: not possible */

/* Each part's function that resets it in a forked child: driver handles are invalid there, and other threads may have
 * held its locks. */
/* clang-format off */
#define WEFT_FORGETS(X) \
    X(policy) X(kernels) X(counts) X(shape) X(flight) X(driver) X(limits) X(names) X(headstart) X(placed) X(cublas) \
    X(tracer) X(output) X(stamps) X(events) X(graph) X(captures) X(comms) X(route) X(split) X(config) X(environment) \
    X(calls) X(call_rules) X(windows) X(engine) X(tuner) X(library)
/* clang-format on */
#define X(part) void weft_forget_##part(void);
WEFT_FORGETS(X)
#undef X

/* --- guard.c ---------------------------------------------------------------------------------------- */

EXPORT void weft_shim_guard(void *memory, size_t size); /* for a mapped file that may be truncated while in use */

/* --- kernels.c: facts about each kernel ------------------------------------------------------------ */

enum { WEFT_PLANS = 4 };
enum { WEFT_KIND_REFUSED = WEFT_KIND_UNKNOWN + 1 }; /* over the program's own shared-memory limit */

/* A kernel as launched with one block size and one amount of shared memory. Its memory is never freed, only reused for
 * another variant, so a reader compares handle, shape and epoch after reading the other fields. */
typedef struct weft_variant {
    _Alignas(64) _Atomic uint64_t handle;
    _Atomic uint64_t shape; /* threads per block << 32 | dynamic shared bytes */
    _Atomic uint32_t epoch; /* 0: being written */
    _Atomic uint32_t row, kind, sms, natural_blocks;
    _Atomic bool before_programmatic;     /* a programmatic dependent launch was seen to follow it */
    _Atomic(weft_cell *) cell;            /* of the first shard */
    _Atomic(struct weft_variant *) after; /* what the same thread launched after it last time; may be out of date */
    _Atomic uint32_t refusals, looks;
    _Atomic uint32_t noted;                    /* what its row records of the latest launch: reason << 8 | blocks */
    _Atomic uint64_t plans[WEFT_PLANS];        /* by policy id: see plan_* in shape.c */
    struct weft_variant *next;                 /* in the list of unused variants */
    _Atomic uint32_t registers, static_shared; /* registers plus one; 0: driver not asked yet */
    _Atomic uint64_t idle_launches;            /* trace number << 32 | launches on an idle stream in that trace */
} weft_variant;
_Static_assert(sizeof(weft_variant) == 128, "a program may have very many");

/* A private copy of the facts that a launch needs. */
typedef struct {
    weft_variant *v; /* NULL: the shim keeps no facts about this kernel */
    weft_cell *cell;
    void *handle;
    uint32_t threads, shared, row, kind, sms, natural_blocks;
} weft_kernel;

/* The functions that a GPU API must provide. Each may fail and return false; the kernel then stays unchanged. */
typedef struct {
    uint32_t api;
    bool (*name)(void *handle, char *out, size_t size);
    int (*blocks_per_sm)(void *handle, unsigned threads, size_t dynamic_bytes); /* 0: unknown */
    uint32_t (*sm_count)(void);
    /* Finds the dynamic shared memory with which exactly `blocks` blocks fit; false if no amount does that. */
    bool (*pin)(void *handle, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes);
    /* Whether this exceeds the limit that the program set for this kernel. NULL: the API has no such limit. */
    bool (*exceeds_limit)(void *handle, size_t dynamic_bytes);
    /* Lets the GPU write to our memory in the current context, and returns its device address. */
    bool (*share)(void *memory, size_t size, uint64_t *device);
    /* Writes to that memory in stream order. */
    bool (*write_word)(void *stream, uint64_t device, uint32_t value);
} weft_backend;

void weft_lookup(const weft_backend *api, void *handle, unsigned threads, unsigned shared, weft_kernel *out);
void weft_forget_handles(void); /* a module or context was destroyed: its handles may be reused */
void weft_forget_larger(void *handle, uint32_t shared); /* look up variants with more shared memory again */
uint32_t weft_handle_epoch(void);
bool weft_glob(const char *pattern, const char *name);
weft_row *weft_row_at(uint32_t row);
weft_cell *weft_cell_at(uint32_t row); /* of the first shard */

static inline uint64_t weft_shape_of(unsigned threads, unsigned shared) { return (uint64_t)threads << 32 | shared; }

/* Programs repeat their launches: the variant that followed the latest one last time most likely follows it again, so
 * it is prefetched. The maps and variants of many kernels do not fit into the caches near the core. */
extern _Thread_local struct weft_thread {
    weft_variant *latest; /* NULL: none yet */
    uint32_t shard;       /* the shard in which this thread counts, plus one; 0: not chosen yet */
} weft_thread;

static inline weft_variant *weft_after_latest(void) {
    return weft_thread.latest ? atomic_load_explicit(&weft_thread.latest->after, memory_order_acquire) : NULL;
}

static inline void weft_launched(weft_variant *v) {
    weft_thread.latest = v;
    __builtin_prefetch(atomic_load_explicit(&v->after, memory_order_relaxed));
}

/* --- counts.c: launches ------------------------------------------------------------------------------------------ */

/* Prefetches the counter of a launch while the driver makes the launch. */
static inline void weft_count_soon(const weft_cell *cell) {
    if (LIKELY(weft_thread.shard))
        __builtin_prefetch(cell + (weft_thread.shard - 1) * WEFT_CHUNK_ROWS, 1);
}

/* The fast path for the usual launch: a known compute kernel with its own row, which also followed the latest launch
 * last time, on a thread with its own shard. Returns its variant and this thread's counter. NULL: look it up. */
static inline weft_variant *weft_usual(void *handle, uint64_t shape, _Atomic uint64_t **counter) {
    weft_variant *v = weft_after_latest();
    uint32_t now = atomic_load_explicit(&weft_hot.epoch, memory_order_relaxed), shard = weft_thread.shard - 1;
    if (!v || shard >= WEFT_SHARDS - 1 || atomic_load_explicit(&v->epoch, memory_order_acquire) != now ||
        atomic_load_explicit(&v->kind, memory_order_relaxed) != WEFT_KIND_COMPUTE ||
        atomic_load_explicit(&v->row, memory_order_relaxed) < WEFT_FIRST_ROW)
        return NULL;
    *counter = &(atomic_load_explicit(&v->cell, memory_order_relaxed) + shard * WEFT_CHUNK_ROWS)->launches;
    atomic_thread_fence(memory_order_acquire); /* see copy() in kernels.c */
    return atomic_load_explicit(&v->handle, memory_order_relaxed) == (uint64_t)(uintptr_t)handle &&
                   atomic_load_explicit(&v->shape, memory_order_relaxed) == shape &&
                   atomic_load_explicit(&v->epoch, memory_order_relaxed) == now
               ? v
               : NULL;
}

void weft_count_launch(weft_cell *cell, uint64_t times, bool shaped);
void weft_count_overlapped(weft_cell *cell);                /* a launch while a collective was in flight */
void weft_note_ctas(const weft_kernel *k, uint64_t blocks); /* for a communication kernel */

/* Finds the row of the kernel whose shaped form has this handle and shape, as graph nodes do; false: none. */
bool weft_shaped_form(const weft_backend *api, void *handle, unsigned threads, unsigned shared, uint32_t *row);
void weft_add_shaped_form(const weft_kernel *k, uint32_t bytes);

/* --- shape.c: residency --------------------------------------------------------------------------- */

/* The dynamic shared memory for this launch; the program's own amount if the launch stays unchanged (the row records
 * the reason). */
uint32_t weft_shape(const weft_backend *api, const weft_rules *rules, const weft_kernel *k, uint64_t grid_blocks,
                    bool in_flight);

/* Finds the smallest size from `low` to `high` bytes with which, according to `fit`, exactly `blocks` blocks fit. */
bool weft_pin_size(int (*fit)(void *handle, unsigned threads, size_t bytes), void *handle, unsigned threads, size_t low,
                   size_t high, unsigned blocks, uint32_t *bytes);
void weft_shape_refused(const weft_kernel *k, const weft_rules *rules);
void weft_sms_partitioned(void); /* from now on, streams may own fewer SMs than the device has */

/* --- flight.c: collectives in flight ---------------------------------------------------------------- */

/* Whether the policy needs to know which collectives are in flight. */
static inline bool weft_comm_tracked(const weft_rules *rules) {
    return rules->data.flags & (WEFT_WHEN_OVERLAP | WEFT_TRACK) || rules->data.sm_reserve;
}

void weft_comm_launched(const weft_backend *api, const weft_rules *rules, void *stream, bool capturing);
void weft_comm_capture_over(void);
bool weft_comm_in_flight(void *stream, bool capturing); /* on any stream other than this one */
void weft_flight_context_gone(void);                    /* the GPU will never report what the context had in flight */
uint64_t weft_comm_count(void);
extern _Thread_local uint64_t weft_comm_launches_here; /* collective kernels that this thread launched */
void *weft_comm_latest(void);                          /* the stream of the latest collective */

/* WEFT_SPARE_WORDS words of GPU-writable host memory for other parts of the shim. NULL: not available. */
enum { WEFT_SPARE_WORDS = 512 };
_Atomic uint32_t *weft_spare_words(const weft_backend *api, uint64_t *device);
_Atomic uint32_t *weft_spare_words_known(void); /* the same, without calling the driver; NULL: not made yet */

/* --- interpose.c ----------------------------------------------------------------------------------- */

void *weft_real_symbol(void *handle, const char *name); /* asks the next dlsym: another tool's, or the libc's */
void *weft_next_symbol(const char *name); /* the next definition after the shim, which may be another tool's */
void weft_pin_library(void *function);    /* prevents the library of `function` from being unloaded */

/* The loaded libraries whose file name contains one of these words; the last word is NULL. */
typedef struct {
    char paths[8][1024];
    int count;
} weft_files;
void weft_loaded_files(const char *const *words, weft_files *found);

/* --- elf.c ------------------------------------------------------------------------------------------- */

void *weft_elf_symbol(const char *name); /* the libc's own symbol, if the loader cannot provide it */

/* --- hip.c ------------------------------------------------------------------------------------------ */

void *weft_hip_own(const char *name);              /* our function of that name, or NULL */
bool weft_hip_driver(const char *name);            /* whether a loaded library has this function */
void weft_hip_found(const char *name, void *real); /* remember the real function that the program found */

/* --- nccl.c ----------------------------------------------------------------------------------------- */

void *weft_nccl_substitute(const char *name, void *real); /* our function for the library that has `real`, or NULL */
bool weft_nccl_own(const char *name, void **ours);        /* whether we intercept this function */
bool weft_nccl_library(const char *name);                 /* whether a loaded NCCL has this function */

#endif
