/* The parts of the shim and what each offers the others. */
#ifndef WEFT_H
#define WEFT_H

#include "layout.h"

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* --- control.c: the job's files and the policy in force ------------------------------------------ */

/* A policy as taken from a control block; immutable once published, so readers need no lock. */
typedef struct {
    uint32_t id; /* equal policies have equal ids, so that what was worked out for one can be kept */
    bool shapes; /* some rule or default asks for a residency */
    bool neutral;
    weft_policy data;
} weft_rules;

bool weft_enabled(void); /* was this process started by `weft run`? */
weft_process *weft_attach(uint32_t api);
void weft_count(int counter);
const weft_rules *weft_refresh(void);

extern weft_process *weft_self; /* NULL until the first launch */
extern _Atomic(const weft_rules *) weft_active;
extern _Atomic uint64_t *weft_job_sequence;
extern _Atomic uint64_t weft_seen_job, weft_seen_self;

/* The policy in force now. Costs two loads while nothing changes. */
static inline const weft_rules *weft_policy_now(void) {
    uint64_t job = atomic_load_explicit(weft_job_sequence, memory_order_relaxed);
    uint64_t self = atomic_load_explicit(&weft_self->control.sequence, memory_order_relaxed);
    if (UNLIKELY(job != atomic_load_explicit(&weft_seen_job, memory_order_relaxed) ||
                 self != atomic_load_explicit(&weft_seen_self, memory_order_relaxed)))
        return weft_refresh();
    return atomic_load_explicit(&weft_active, memory_order_acquire);
}

/* --- kernels.c: what is known about each kernel --------------------------------------------------- */

enum { WEFT_PLANS = 4 };

/* A kernel as launched with one block size and one amount of shared memory. */
typedef struct weft_variant {
    struct weft_variant *next;
    void *handle;
    uint64_t shape;  /* threads per block << 32 | dynamic shared bytes */
    uint32_t row;
    uint32_t kind;
    uint32_t sms;
    int natural_blocks;                 /* 0: unknown */
    _Atomic(struct weft_variant *) shaped_from; /* set where this is another variant's shaped form, seen in a graph */
    _Atomic uint64_t plans[WEFT_PLANS]; /* by policy id: see plan_* in shape.c */
    _Atomic uint32_t refusals;
    _Atomic uint32_t registers, static_shared; /* registers plus one; 0: not asked yet */
    _Atomic uint64_t idle_launches;            /* in the trace of the upper half's number, on an idle stream */
    _Atomic bool before_programmatic; /* a programmatic dependent launch was seen to follow it */
} weft_variant;

/* What a GPU API must answer about its kernels. Every call may fail: false, and the kernel is left alone. */
typedef struct {
    uint32_t api;
    bool (*name)(void *handle, char *out, size_t size);
    int (*blocks_per_sm)(void *handle, unsigned threads, size_t dynamic_bytes); /* 0: unknown */
    uint32_t (*sm_count)(void);
    /* Dynamic shared memory that makes exactly `blocks` blocks fit; false where there is none. */
    bool (*pin)(void *handle, unsigned threads, size_t dynamic_bytes, unsigned blocks, uint32_t *bytes);
    /* Host memory that the GPU can write, and a write to it in stream order. */
    bool (*host_words)(uint32_t count, volatile uint32_t **host, uint64_t *device);
    bool (*write_word)(void *stream, uint64_t device, uint32_t value);
} weft_backend;

weft_variant *weft_lookup(const weft_backend *api, void *handle, unsigned threads, unsigned shared);
void weft_forget_handles(void); /* a module or context went away: its handles may be used again */
bool weft_glob(const char *pattern, const char *name);
void weft_count_launch(weft_variant *v, uint64_t times, bool shaped);
void weft_note_ctas(const weft_variant *v, uint64_t blocks); /* of a kernel that communicates */
void weft_count_beside(const weft_variant *v); /* launched while a collective was in flight */

/* --- shape.c: residency --------------------------------------------------------------------------- */

/* Dynamic shared memory for this launch, or `shared` itself where it is left alone (the reason is noted). */
uint32_t weft_shape(const weft_backend *api, const weft_rules *rules, weft_variant *v, unsigned shared,
                    uint64_t grid_blocks, bool in_flight);

/* The least size from `low` to `high` bytes with which exactly `blocks` blocks fit, as `fit` answers. */
bool weft_pin_size(int (*fit)(void *handle, unsigned threads, size_t bytes), void *handle, unsigned threads, size_t low,
                   size_t high, unsigned blocks, uint32_t *bytes);
void weft_shape_refused(weft_variant *v, const weft_rules *rules);

/* --- flight.c: collectives in flight ---------------------------------------------------------------- */

void weft_comm_launched(const weft_backend *api, const weft_rules *rules, void *stream, bool capturing);
void weft_comm_capture_over(void);
bool weft_comm_in_flight(void *stream, bool capturing); /* on another stream than this one */
uint64_t weft_comm_count(void);
void *weft_comm_latest(void); /* the stream of the latest collective */

/* --- interpose.c ----------------------------------------------------------------------------------- */

void *weft_real_symbol(void *handle, const char *name); /* the libc's own dlsym */

/* --- hip.c ------------------------------------------------------------------------------------------ */

void *weft_hip_own(const char *name);              /* our function of that name, or NULL */
bool weft_hip_driver(const char *name);            /* is a library loaded that has it? */
void weft_hip_found(const char *name, void *real); /* the program found the real one: keep it */

/* --- nccl.c ----------------------------------------------------------------------------------------- */

void *weft_nccl_substitute(const char *name, void *real); /* ours for the library that has `real`, or NULL */
bool weft_nccl_own(const char *name, void **ours);        /* is it one that we stand in front of? */
bool weft_nccl_library(const char *name);                 /* is an NCCL loaded that has it? */

#endif
