/* Launches: applies the policy to each kernel.
 *
 * Whatever the policy asks for, the program's launch takes effect exactly once. If the driver refuses a changed launch,
 * that is counted, and the original launch is made. Cooperative launches are only counted. */
#include "tracer.h"

#include <string.h>

enum { MOST_ATTRIBUTES = 32 };

typedef struct {
    const CUlaunchConfig *config; /* the program's own if it called cuLaunchKernelEx */
    CUfunction f;
    void **params, **extra;
    bool per_thread, plain; /* plain: made with cuLaunchKernel */
    weft_variant *v;        /* NULL: unknown */
} launch;

HOT static CUresult make_untraced(const launch *l, const CUlaunchConfig *c) {
    if (l->plain && c->numAttrs == 0)
        return (l->per_thread ? REAL(cuLaunchKernel_ptsz) : REAL(cuLaunchKernel))(
            l->f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
            c->hStream, l->params, l->extra);
    return (l->per_thread ? REAL(cuLaunchKernelEx_ptsz) : REAL(cuLaunchKernelEx))(c, l->f, l->params, l->extra);
}

static void describe(weft_trace_op *op, const launch *l, const CUlaunchConfig *c) {
    weft_trace_span *s = &op->record->span;
    memcpy(s->grid, &c->gridDimX, sizeof s->grid);
    memcpy(s->block, &c->blockDimX, sizeof s->block);
    s->shared = c->sharedMemBytes;
    if (l->v && c->sharedMemBytes != l->config->sharedMemBytes)
        s->blocks_per_sm = weft_row_at(l->v->row)->shaped_blocks;
    if (s->flags & WEFT_SPAN_COMM)
        weft_trace_take_call(s, weft_stream(c->hStream, l->per_thread));
}

static CUresult make_recorded(const launch *l, const CUlaunchConfig *c, weft_trace_op *op) {
    CUlaunchAttribute attributes[MOST_ATTRIBUTES];
    CUlaunchConfig with = *c;
    if (!(op->record->span.flags & WEFT_SPAN_COMM) || c->numAttrs >= MOST_ATTRIBUTES)
        return make_untraced(l, c);
    if (c->numAttrs)
        memcpy(attributes, c->attrs, c->numAttrs * sizeof *attributes);
    with.attrs = attributes;
    if (!weft_trace_completion(op, attributes, &with.numAttrs))
        return make_untraced(l, c);
    CUresult result = make_untraced(l, &with);
    if (result != CUDA_SUCCESS && (result = make_untraced(l, c)) == CUDA_SUCCESS)
        weft_trace_completion_refused(op);
    return result;
}

__attribute__((noinline, cold)) static CUresult make_traced(const launch *l, const CUlaunchConfig *c) {
    CUstream stream = weft_stream(c->hStream, l->per_thread);
    bool programmatic = c->numAttrs && weft_trace_programmatic(c);
    weft_trace_op op;
    if (weft_tracing() == WEFT_TRACE_LEARN)
        weft_trace_learn(l->v, stream, programmatic);
    if (weft_tracing() != WEFT_TRACE_RECORD || !weft_trace_before(&op, WEFT_TRACE_KERNEL, l->v, stream, programmatic))
        return make_untraced(l, c);
    describe(&op, l, c);
    CUresult result = make_recorded(l, c, &op);
    weft_trace_after(&op, stream, result);
    return result;
}

static CUresult make_with(const launch *l, const CUlaunchConfig *c) {
    return UNLIKELY(weft_tracing()) ? make_traced(l, c) : make_untraced(l, c);
}

static CUresult make(const launch *l) { return make_with(l, l->config); }

HOT static void count(const weft_kernel *k, const launch *l, bool shaped) {
    const CUlaunchConfig *c = l->config;
    if (k->kind == WEFT_KIND_COMM)
        weft_note_ctas(k, (uint64_t)c->gridDimX * c->gridDimY * c->gridDimZ);
    if (UNLIKELY(weft_capturing(weft_stream(c->hStream, l->per_thread))))
        weft_count(WEFT_COUNT_CAPTURED); /* it runs only when the graph runs */
    else
        weft_count_launch(k->cell, 1, shaped);
}

static int highest_priority(void) {
    static _Atomic int known; /* the range is the same on every device; 0: unknown, or no priorities here */
    int greatest = atomic_load_explicit(&known, memory_order_relaxed), least;
    if (greatest == 0 && weft_cuda()->cuCtxGetStreamPriorityRange &&
        weft_cuda()->cuCtxGetStreamPriorityRange(&least, &greatest) == CUDA_SUCCESS)
        atomic_store_explicit(&known, greatest, memory_order_relaxed);
    return greatest;
}

static CUresult launch_prioritised(const launch *l) {
    const CUlaunchConfig *c = l->config;
    CUlaunchAttribute attributes[MOST_ATTRIBUTES];
    int priority = highest_priority();
    bool possible = priority != 0 && c->numAttrs < MOST_ATTRIBUTES;
    for (unsigned i = 0; possible && i < c->numAttrs; i++) {
        attributes[i] = c->attrs[i];
        possible = c->attrs[i].id != CU_LAUNCH_ATTRIBUTE_PRIORITY; /* the program has set a priority itself */
    }
    if (!possible)
        return make(l);
    memset(&attributes[c->numAttrs], 0, sizeof *attributes);
    attributes[c->numAttrs].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
    attributes[c->numAttrs].value.priority = priority;
    CUlaunchConfig changed = *c;
    changed.attrs = attributes;
    changed.numAttrs++;
    CUresult result = make_with(l, &changed);
    if (result == CUDA_SUCCESS) {
        weft_count(WEFT_COUNT_PRIORITISED);
        return result;
    }
    weft_count(WEFT_COUNT_PRIORITY_FAILURES);
    return make(l);
}

static CUresult make_comm(const weft_rules *rules, const launch *l) {
    return rules->data.flags & WEFT_PRIORITY_HIGH ? launch_prioritised(l) : make(l);
}

/* Launches a collective with a launch-completion event, for the exact head start. */
static CUresult launch_marked(const weft_rules *rules, const launch *l, CUstream stream) {
    const CUlaunchConfig *c = l->config;
    CUlaunchAttribute attributes[MOST_ATTRIBUTES];
    weft_placed_mark mark;
    if (c->numAttrs + 1 >= MOST_ATTRIBUTES || !weft_placed_begin(c, stream, &mark))
        return make_comm(rules, l);
    launch with = *l;
    CUlaunchConfig changed = *c;
    if (mark.own) {
        if (c->numAttrs)
            memcpy(attributes, c->attrs, c->numAttrs * sizeof *attributes);
        memset(&attributes[c->numAttrs], 0, sizeof *attributes);
        attributes[c->numAttrs].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
        attributes[c->numAttrs].value.launchCompletionEvent.event = mark.event;
        changed.attrs = attributes;
        changed.numAttrs++;
        with.config = &changed;
    }
    CUresult result = make_comm(rules, &with);
    weft_placed_end(&mark, result == CUDA_SUCCESS);
    if (result != CUDA_SUCCESS && mark.own && (result = make_comm(rules, l)) == CUDA_SUCCESS)
        weft_placed_refused();
    return result;
}

static CUresult launch_comm(const weft_rules *rules, const weft_kernel *k, const launch *l) {
    CUstream stream = weft_stream(l->config->hStream, l->per_thread);
    bool placed = rules->data.flags & WEFT_HEAD_START_PLACED;
    if (UNLIKELY(placed && weft_capturing(stream))) {
        weft_count(WEFT_COUNT_PLACED_CAPTURED);
        placed = false;
    }
    CUresult result = placed ? launch_marked(rules, l, stream) : make_comm(rules, l);
    if (result != CUDA_SUCCESS)
        return result;
    weft_comm_launched(&weft_cuda_backend, rules, stream, weft_capturing(stream));
    count(k, l, false);
    return result;
}

/* The program may have lowered the limit that the shaped size needs, so raise it and try once more. */
static CUresult make_shaped(const launch *l, const weft_kernel *k, uint32_t shared) {
    CUlaunchConfig shaped = *l->config;
    shaped.sharedMemBytes = shared;
    CUresult result = make_with(l, &shaped);
    uint32_t bytes;
    if (UNLIKELY(result != CUDA_SUCCESS) &&
        weft_cuda_backend.pin(k->handle, k->threads, k->shared, weft_row_at(k->row)->shaped_blocks, &bytes))
        result = make_with(l, &shaped);
    return result;
}

static bool sets_programmatic_event(const CUlaunchConfig *c) {
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
            return true;
    return false;
}

/* A dependent launch (PDL) may start before its predecessor on the stream ends, so no wait is put between them. */
static void head_start(const weft_rules *rules, const launch *l, CUstream stream) {
    const CUlaunchConfig *c = l->config;
    if (UNLIKELY(c->numAttrs && (weft_trace_programmatic(c) || sets_programmatic_event(c)))) {
        weft_count(WEFT_COUNT_UNHANDLED);
        return;
    }
    weft_head_start(rules, stream);
    if (UNLIKELY(weft_tracing()))
        weft_trace_disturbed(stream);
}

static CUresult launch_compute(const weft_rules *rules, const weft_kernel *k, const launch *l) {
    const CUlaunchConfig *c = l->config;
    CUstream stream = weft_stream(c->hStream, l->per_thread);
    if (rules->data.head_start_ns)
        head_start(rules, l, stream);
    bool track = rules->data.flags & WEFT_TRACK, reserve = rules->data.sm_reserve && !weft_cublas_inside();
    bool in_flight = (track || reserve || (rules->shapes && (rules->data.flags & WEFT_WHEN_OVERLAP))) &&
                     weft_comm_in_flight(stream, weft_capturing(stream));
    if (UNLIKELY(track && in_flight) && !weft_capturing(stream))
        weft_count_overlapped(k->cell);
    if (UNLIKELY(reserve && in_flight))
        weft_count(WEFT_COUNT_SM_OTHERS);
    if (rules->shapes) {
        uint64_t blocks = (uint64_t)c->gridDimX * c->gridDimY * c->gridDimZ;
        uint32_t shared = weft_shape(&weft_cuda_backend, rules, k, blocks, in_flight);
        if (shared != c->sharedMemBytes) {
            if (make_shaped(l, k, shared) == CUDA_SUCCESS) {
                count(k, l, true);
                return CUDA_SUCCESS;
            }
            weft_shape_refused(k, rules);
        }
    }
    CUresult result = make(l);
    if (result == CUDA_SUCCESS)
        count(k, l, false);
    return result;
}

__attribute__((noinline, cold)) static CUresult refused(CUresult result) {
    weft_limit_restore();
    return result;
}

static CUresult launch_cooperative(const launch *l, const weft_kernel *k, CUresult result) {
    weft_count(WEFT_COUNT_COOPERATIVE);
    if (k->row >= WEFT_FIRST_ROW) {
        weft_row_at(k->row)->reason = WEFT_COOPERATIVE;
        atomic_store_explicit(&k->v->noted, UINT32_MAX, memory_order_relaxed);
    }
    if (result != CUDA_SUCCESS)
        return refused(result);
    count(k, l, false);
    return result;
}

static bool is_cooperative(const CUlaunchConfig *c) {
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && c->attrs[i].value.cooperative)
            return true;
    return false;
}

static inline unsigned threads_of(const CUlaunchConfig *c) { return c->blockDimX * c->blockDimY * c->blockDimZ; }

static inline bool find_kernel(const launch *l, weft_kernel *k) {
    if (UNLIKELY(!weft_attach(WEFT_API_CUDA) || !l->f))
        return false;
    weft_lookup(&weft_cuda_backend, l->f, threads_of(l->config), l->config->sharedMemBytes, k);
    return true;
}

/* --- the launches ------------------------------------------------------------------------------------------ */

HOT static CUresult route(launch *l) {
    weft_kernel k;
    if (UNLIKELY(!find_kernel(l, &k)))
        return make(l);
    l->v = k.v;
    weft_count_soon(k.cell);
    if (UNLIKELY(l->config->numAttrs && is_cooperative(l->config)))
        return launch_cooperative(l, &k, make(l));
    const weft_rules *rules = weft_policy_now();
    if (rules->neutral || k.kind >= WEFT_KIND_WEFT) {
        CUresult result = make(l);
        if (UNLIKELY(result != CUDA_SUCCESS))
            return refused(result);
        count(&k, l, false);
        return CUDA_SUCCESS;
    }
    return k.kind == WEFT_KIND_COMM ? launch_comm(rules, &k, l) : launch_compute(rules, &k, l);
}

/* Whether no policy changes launches, no trace is on and no capture is open, which is the usual case. */
static inline bool quiet(void) {
    return atomic_load_explicit(&weft_hot.neutral, memory_order_relaxed) && !weft_tracing() &&
           atomic_load_explicit(&weft_hot.captures, memory_order_relaxed) <= 0;
}

/* Whether a launch with attributes needs more than counting. The pointers of an invalid launch may point anywhere, so
 * those launches are left to the driver to refuse. */
static bool needs_care(const CUlaunchConfig *c, CUfunction f) { return !f || !c->attrs || is_cooperative(c); }

/* The counter of a launch that only needs to be counted. NULL: use `route`. */
HOT static _Atomic uint64_t *only_counted(CUfunction f, unsigned threads, unsigned shared) {
    _Atomic uint64_t *counter;
    weft_variant *v = weft_usual(f, weft_shape_of(threads, shared), &counter);
    if (UNLIKELY(!v || !weft_policy_current() || !atomic_load_explicit(&weft_hot.neutral, memory_order_relaxed)))
        return NULL;
    weft_launched(v);
    __builtin_prefetch(counter, 1); /* while the driver makes the launch */
    return counter;
}

HOT static inline CUresult counted(_Atomic uint64_t *counter, CUresult result) {
    if (UNLIKELY(result != CUDA_SUCCESS))
        return refused(result);
    uint64_t n = atomic_load_explicit(counter, memory_order_relaxed); /* only this thread writes here */
    atomic_store_explicit(counter, n + 1, memory_order_relaxed);
    return result;
}

/* Declares `l`, a launch with the arguments of cuLaunchKernel. */
#define PLAIN(per_thread, extra)                                                                                       \
    CUlaunchConfig config = {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0};                                         \
    launch l = {&config, f, params, extra, per_thread, true, NULL}

#define LAUNCHES(suffix, per_thread)                                                                                   \
    HOT CUresult cuLaunchKernel##suffix(LAUNCH_ARGS, void **extra) {                                                   \
        _Atomic uint64_t *counter = quiet() ? only_counted(f, bx * by * bz, shared) : NULL;                            \
        if (counter)                                                                                                   \
            return counted(counter,                                                                                    \
                           REAL(cuLaunchKernel##suffix)(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra));    \
        PLAIN(per_thread, extra);                                                                                      \
        return route(&l);                                                                                              \
    }                                                                                                                  \
    HOT CUresult cuLaunchKernelEx##suffix(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {   \
        if (UNLIKELY(!config)) /* left to the driver to refuse */                                                      \
            return REAL(cuLaunchKernelEx##suffix)(config, f, params, extra);                                           \
        _Atomic uint64_t *counter = quiet() && !(config->numAttrs && needs_care(config, f))                            \
                                        ? only_counted(f, threads_of(config), config->sharedMemBytes)                  \
                                        : NULL;                                                                        \
        if (counter)                                                                                                   \
            return counted(counter, REAL(cuLaunchKernelEx##suffix)(config, f, params, extra));                         \
        if (UNLIKELY(config->numAttrs && !config->attrs)) /* likewise */                                               \
            return REAL(cuLaunchKernelEx##suffix)(config, f, params, extra);                                           \
        launch l = {config, f, params, extra, per_thread, false, NULL};                                                \
        return route(&l);                                                                                              \
    }
LAUNCHES(, false)
LAUNCHES(_ptsz, true)

#define COOPERATIVE(name, per_thread)                                                                                  \
    CUresult name(LAUNCH_ARGS) {                                                                                       \
        PLAIN(per_thread, NULL);                                                                                       \
        weft_kernel k;                                                                                                 \
        weft_trace_op op;                                                                                              \
        bool known = find_kernel(&l, &k);                                                                              \
        l.v = known ? k.v : NULL;                                                                                      \
        bool traced = UNLIKELY(weft_tracing() == WEFT_TRACE_RECORD) &&                                                 \
                      weft_trace_before(&op, WEFT_TRACE_KERNEL, l.v, weft_stream(stream, per_thread), false);          \
        if (traced)                                                                                                    \
            describe(&op, &l, &config);                                                                                \
        CUresult result = REAL(name)(f, gx, gy, gz, bx, by, bz, shared, stream, params);                               \
        if (traced)                                                                                                    \
            weft_trace_after(&op, weft_stream(stream, per_thread), result);                                            \
        return known ? launch_cooperative(&l, &k, result) : result;                                                    \
    }
COOPERATIVE(cuLaunchCooperativeKernel, false)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)
