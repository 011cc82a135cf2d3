/* The parts of the shim and what each offers the others. */
#ifndef WEFT_H
#define WEFT_H

#include "layout.h"
#include "map.h"

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* What every launch runs and reads is kept together. A program that launches from Python has filled the caches since
 * its last launch: then each further line and page costs more than all instructions of the shim. */
#define HOT __attribute__((hot))

/* --- control.c, policy.c: the job's files, and the policy in force ------------------------------------------ */

/* A policy as taken from a control block; immutable once published, so readers need no lock. */
typedef struct {
    _Atomic uint32_t id; /* equal policies have equal ids, so that a plan made for one can be kept */
    bool shapes;         /* some rule or default asks for a residency */
    bool neutral;
    weft_policy data;
} weft_rules;

bool weft_enabled(void); /* was this process started by `weft run`? */
weft_process *weft_attach(uint32_t api);
void weft_count(int counter);
void *weft_shared_file(const char *name, size_t size);
void weft_policy_of(weft_control *control); /* of the job; before the process is attached */
const weft_rules *weft_refresh(void);

/* What every launch reads, in one line. */
typedef struct {
    _Alignas(64) weft_process *self; /* NULL until the first launch */
    _Atomic(const weft_rules *) active;
    _Atomic uint64_t *job_sequence;
    _Atomic uint64_t seen_job, seen_self;
    _Atomic int attached; /* 0 not tried, 1 attached, -1 cannot or must not */
    _Atomic int captures; /* that are open, those that are not listed included */
    _Atomic int tracing;
    _Atomic uint32_t epoch; /* see weft_handle_epoch */
    _Atomic bool neutral;   /* the active policy changes no launch; false: none was read yet */
} weft_hot_data;
_Static_assert(sizeof(weft_hot_data) == 64, "one line");
extern weft_hot_data weft_hot;
extern const weft_rules weft_no_policy; /* active until a whole one was read; changes nothing */

static inline void weft_add(int counter, uint64_t amount) {
    if (weft_hot.self)
        atomic_fetch_add_explicit(&weft_hot.self->counters[counter], amount, memory_order_relaxed);
}

/* Whether the active policy is that of the job's files. */
static inline bool weft_policy_current(void) {
    uint64_t job = atomic_load_explicit(weft_hot.job_sequence, memory_order_relaxed);
    uint64_t self = atomic_load_explicit(&weft_hot.self->control.sequence, memory_order_relaxed);
    return LIKELY(job == atomic_load_explicit(&weft_hot.seen_job, memory_order_acquire) &&
                  self == atomic_load_explicit(&weft_hot.seen_self, memory_order_acquire));
}

/* The policy in force now. Costs two loads while nothing changes. */
static inline const weft_rules *weft_policy_now(void) {
    return weft_policy_current() ? atomic_load_explicit(&weft_hot.active, memory_order_acquire) : weft_refresh();
}

bool weft_chunk_ready(uint32_t chunk); /* reserve the file's blocks for a chunk of rows; false: there are none */

/* What each part forgets in a child that was forked: the driver's handles, and locks that other threads held. */
/* clang-format off */
#define WEFT_FORGETS(X) \
    X(policy) X(kernels) X(counts) X(shape) X(flight) X(driver) X(limits) X(names) X(headstart) X(placed) X(cublas) X(tracer) X(output) X(stamps) X(events) \
    X(graph) X(captures) X(comms) X(route) X(split) X(config) X(environment) X(calls) X(call_rules) X(windows) X(engine) X(tuner) X(library)
/* clang-format on */
#define X(part) void weft_forget_##part(void);
WEFT_FORGETS(X)
#undef X

/* --- guard.c ---------------------------------------------------------------------------------------- */

EXPORT void weft_shim_guard(void *memory, size_t size); /* of a file that may be truncated while it is in use */

/* --- kernels.c: what is known about each kernel --------------------------------------------------- */

enum { WEFT_PLANS = 4 };
enum { WEFT_KIND_REFUSED = WEFT_KIND_UNKNOWN + 1 }; /* over the program's limit of shared memory */

/* A kernel as launched with one block size and one amount of shared memory. Its memory is only ever used again for
 * another variant, and a reader compares handle, shape and epoch after reading the rest. */
typedef struct weft_variant {
    _Alignas(64) _Atomic uint64_t handle;
    _Atomic uint64_t shape; /* threads per block << 32 | dynamic shared bytes */
    _Atomic uint32_t epoch; /* 0: being written */
    _Atomic uint32_t row, kind, sms, natural_blocks;
    _Atomic bool before_programmatic;     /* a programmatic dependent launch was seen to follow it */
    _Atomic(weft_cell *) cell;            /* of the first shard */
    _Atomic(struct weft_variant *) after; /* what the same thread launched next the last time; may be out of date */
    _Atomic uint32_t refusals, looks;
    _Atomic uint32_t noted;                    /* what its row says of the latest launch: reason << 8 | blocks */
    _Atomic uint64_t plans[WEFT_PLANS];        /* by policy id: see plan_* in shape.c */
    struct weft_variant *next;                 /* where it is kept for use again */
    _Atomic uint32_t registers, static_shared; /* registers plus one; 0: not asked yet */
    _Atomic uint64_t idle_launches;            /* in the trace of the upper half's number, on an idle stream */
} weft_variant;
_Static_assert(sizeof(weft_variant) == 128, "a program may have very many");

/* What a launch needs of a variant: a private copy. */
typedef struct {
    weft_variant *v; /* NULL: no facts are kept of it */
    weft_cell *cell;
    void *handle;
    uint32_t threads, shared, row, kind, sms, natural_blocks;
} weft_kernel;

/* What a GPU API must answer about its kernels. Every call may fail: false, and the kernel stays unchanged. */
typedef struct {
    uint32_t api;
    bool (*name)(void *handle, char *out, size_t size);
    int (*blocks_per_sm)(void *handle, unsigned threads, size_t dynamic_bytes); /* 0: unknown */
    uint32_t (*sm_count)(void);
    /* Dynamic shared memory that makes exactly `blocks` blocks fit; false where there is none. */
    bool (*pin)(void *handle, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes);
    /* Is this more than the program allowed this kernel? NULL: there is no such limit. */
    bool (*exceeds_limit)(void *handle, size_t dynamic_bytes);
    /* Let the GPU write to our memory, in the current context, and to where; and a write to it in stream order. */
    bool (*share)(void *memory, size_t size, uint64_t *device);
    bool (*write_word)(void *stream, uint64_t device, uint32_t value);
} weft_backend;

void weft_lookup(const weft_backend *api, void *handle, unsigned threads, unsigned shared, weft_kernel *out);
void weft_forget_handles(void); /* a module or context went away: its handles may be used again */
void weft_forget_larger(void *handle, uint32_t shared); /* variants with more shared memory: look them up again */
uint32_t weft_handle_epoch(void);
bool weft_glob(const char *pattern, const char *name);
weft_row *weft_row_at(uint32_t row);
weft_cell *weft_cell_at(uint32_t row); /* of the first shard */

static inline uint64_t weft_shape_of(unsigned threads, unsigned shared) { return (uint64_t)threads << 32 | shared; }

/* A program repeats its launches. What followed the latest one the last time most likely follows it again, and has been
 * fetched since: the maps and the variants of many kernels do not fit into the caches near the core. */
extern _Thread_local struct weft_thread {
    weft_variant *latest; /* NULL: none yet */
    uint32_t shard;       /* where this thread counts, plus one; 0: not chosen yet */
} weft_thread;

static inline weft_variant *weft_after_latest(void) {
    return weft_thread.latest ? atomic_load_explicit(&weft_thread.latest->after, memory_order_acquire) : NULL;
}

static inline void weft_launched(weft_variant *v) {
    weft_thread.latest = v;
    __builtin_prefetch(atomic_load_explicit(&v->after, memory_order_relaxed));
}

/* --- counts.c: launches ------------------------------------------------------------------------------------------ */

/* This thread will count a launch there: fetch it while the driver makes the launch. */
static inline void weft_count_soon(const weft_cell *cell) {
    if (LIKELY(weft_thread.shard))
        __builtin_prefetch(cell + (weft_thread.shard - 1) * WEFT_CHUNK_ROWS, 1);
}

/* The usual launch: of a kernel that is known, has a row and does not communicate, and that followed the latest launch
 * before. Its variant, and where this thread, which has a shard of its own, counts it. NULL: look it up. */
static inline weft_variant *weft_usual(void *handle, uint64_t shape, _Atomic uint64_t **counter) {
    weft_variant *v = weft_after_latest();
    uint32_t now = atomic_load_explicit(&weft_hot.epoch, memory_order_relaxed), shard = weft_thread.shard - 1;
    if (!v || shard >= WEFT_SHARDS - 1 || atomic_load_explicit(&v->epoch, memory_order_acquire) != now ||
        atomic_load_explicit(&v->kind, memory_order_relaxed) != WEFT_KIND_COMPUTE ||
        atomic_load_explicit(&v->row, memory_order_relaxed) < WEFT_FIRST_ROW)
        return NULL;
    *counter = &(atomic_load_explicit(&v->cell, memory_order_relaxed) + shard * WEFT_CHUNK_ROWS)->launches;
    atomic_thread_fence(memory_order_acquire); /* as where a variant is copied */
    return atomic_load_explicit(&v->handle, memory_order_relaxed) == (uint64_t)(uintptr_t)handle &&
                   atomic_load_explicit(&v->shape, memory_order_relaxed) == shape &&
                   atomic_load_explicit(&v->epoch, memory_order_relaxed) == now
               ? v
               : NULL;
}

void weft_count_launch(weft_cell *cell, uint64_t times, bool shaped);
void weft_count_overlapped(weft_cell *cell);                /* launched while a collective was in flight */
void weft_note_ctas(const weft_kernel *k, uint64_t blocks); /* of a kernel that communicates */

/* The row of the kernel whose shaped form has this handle and shape, as nodes of a graph have it; false: none. */
bool weft_shaped_form(const weft_backend *api, void *handle, unsigned threads, unsigned shared, uint32_t *row);
void weft_add_shaped_form(const weft_kernel *k, uint32_t bytes);

/* --- shape.c: residency --------------------------------------------------------------------------- */

/* Dynamic shared memory for this launch, or what it has where it stays unchanged (the reason is noted). */
uint32_t weft_shape(const weft_backend *api, const weft_rules *rules, const weft_kernel *k, uint64_t grid_blocks,
                    bool in_flight);

/* The least size from `low` to `high` bytes with which exactly `blocks` blocks fit, as `fit` answers. */
bool weft_pin_size(int (*fit)(void *handle, unsigned threads, size_t bytes), void *handle, unsigned threads, size_t low,
                   size_t high, unsigned blocks, uint32_t *bytes);
void weft_shape_refused(const weft_kernel *k, const weft_rules *rules);
void weft_sms_partitioned(void); /* streams may own fewer SMs than the device has */

/* --- flight.c: collectives in flight ---------------------------------------------------------------- */

/* Does the policy need to know which collectives are in flight? */
static inline bool weft_comm_tracked(const weft_rules *rules) {
    return rules->data.flags & (WEFT_WHEN_OVERLAP | WEFT_TRACK) || rules->data.sm_reserve;
}

void weft_comm_launched(const weft_backend *api, const weft_rules *rules, void *stream, bool capturing);
void weft_comm_capture_over(void);
bool weft_comm_in_flight(void *stream, bool capturing); /* on another stream than this one */
void weft_flight_context_gone(void);                    /* what it had in flight will never be reported */
uint64_t weft_comm_count(void);
extern _Thread_local uint64_t weft_comm_launches_here; /* kernels of collectives that this thread launched */
void *weft_comm_latest(void);                          /* the stream of the latest collective */

/* Words of host memory that the GPU writes to, for other uses: WEFT_SPARE_WORDS from here. NULL: cannot be had. */
enum { WEFT_SPARE_WORDS = 512 };
_Atomic uint32_t *weft_spare_words(const weft_backend *api, uint64_t *device);
_Atomic uint32_t *weft_spare_words_known(void); /* the same without a call of the driver; NULL: not made yet */

/* --- interpose.c ----------------------------------------------------------------------------------- */

void *weft_real_symbol(void *handle, const char *name); /* as the next dlsym answers: another tool's, or the libc's */
void *weft_next_symbol(const char *name); /* after the shim in the program's order, another tool's first */
void weft_pin_library(void *function);    /* the library that has it is never unloaded */

/* The loaded libraries with one of these words in the names of their files; the last word is NULL. */
typedef struct {
    char paths[8][1024];
    int count;
} weft_files;
void weft_loaded_files(const char *const *words, weft_files *found);

/* --- elf.c ------------------------------------------------------------------------------------------- */

void *weft_elf_symbol(const char *name); /* the libc's own, where the loader cannot be asked for it */

/* --- hip.c ------------------------------------------------------------------------------------------ */

void *weft_hip_own(const char *name);              /* our function of that name, or NULL */
bool weft_hip_driver(const char *name);            /* is a library loaded that has it? */
void weft_hip_found(const char *name, void *real); /* the program found the real one: keep it */

/* --- nccl.c ----------------------------------------------------------------------------------------- */

void *weft_nccl_substitute(const char *name, void *real); /* ours for the library that has `real`, or NULL */
bool weft_nccl_own(const char *name, void **ours);        /* do we intercept it? */
bool weft_nccl_library(const char *name);                 /* is an NCCL loaded that has it? */

#endif
