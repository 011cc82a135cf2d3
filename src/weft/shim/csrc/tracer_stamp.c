/* The tracer's own kernels: stamps, which show when a collective was placed, and calibration of the events' cost.
 *
 * A launch-completion event orders a kernel of another stream after the collective in the queue for SMs, while a timed
 * event needs no SM and waits for nothing. So the side stream waits for the completion event and then launches a stamp:
 * an empty kernel as large as one CTA (or cluster) of the collective, with the same priority, which cannot be placed
 * where the collective could not. The event after it fires a known time after the stamp was placed. Nothing in the
 * program waits for the side stream. */
#include "tracer.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { CONTEXTS = 32, NCCL_REGISTERS = 96, HELD_REGISTERS = 86, MOST_REGISTERS = 65536, WARP = 32 };
enum { HOLD_NS = 80000, SPIN_NS = 6000, CALIBRATION_WAIT_NS = 20000000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    CUcontext context;
    CUfunction stamp[STAMPS];
} known[CONTEXTS];
static int known_count;

/* The branch that is never taken forces the registers to be allocated: all of its values are live at its end. */
static const char *stamp_ptx(void) {
    static char text[8192];
    char *at = text, *end = text + sizeof text;
    at += snprintf(at, (size_t)(end - at),
                   ".version 6.0\n.target sm_50\n.address_size 64\n"
                   ".visible .entry weft_stamp(.param .u64 unused)\n{\n  ret;\n}\n"
                   ".visible .entry weft_stamp_wide(.param .u64 sink)\n{\n"
                   "  .reg .pred %%p<2>;\n  .reg .u64 %%s<2>;\n  .reg .b32 %%v<%d>;\n"
                   "  ld.param.u64 %%s1, [sink];\n  setp.eq.u64 %%p1, %%s1, 0;\n  @%%p1 bra OVER;\n",
                   HELD_REGISTERS + 1);
    for (int i = 0; i < HELD_REGISTERS; i++)
        at += snprintf(at, (size_t)(end - at), "  mov.u32 %%v%d, %%clock;\n", i);
    for (int i = HELD_REGISTERS - 2; i >= 0; i--)
        at += snprintf(at, (size_t)(end - at), "  mad.lo.u32 %%v%d, %%v%d, %%v%d, 1;\n", HELD_REGISTERS - 1,
                       HELD_REGISTERS - 1, i);
    snprintf(at, (size_t)(end - at), "  st.global.u32 [%%s1], %%v%d;\nOVER:\n  ret;\n}\n", HELD_REGISTERS - 1);
    return text;
}

static void load(CUfunction stamp[STAMPS]) {
    static const char *const names[STAMPS] = {"weft_stamp", "weft_stamp_wide"};
    const weft_cuda_calls *cu = weft_cuda();
    CUmodule module;
    if (!cu->cuModuleLoadData || !cu->cuModuleGetFunction || !cu->cuFuncSetAttribute ||
        cu->cuModuleLoadData(&module, stamp_ptx()) != CUDA_SUCCESS)
        return;
    int most = weft_cuda_device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    for (int i = 0; i < STAMPS; i++)
        if (cu->cuModuleGetFunction(&stamp[i], module, names[i]) != CUDA_SUCCESS ||
            (most > 0 &&
             cu->cuFuncSetAttribute(stamp[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most) != CUDA_SUCCESS))
            stamp[i] = NULL;
}

void weft_trace_stamps_load(weft_trace_context *c) {
    weft_waits waits = weft_wait_kernels();
    c->wait = waits.timed;
    c->mhz = waits.mhz;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < known_count && known[i].context != c->context)
        i++;
    if (i == known_count && known_count < CONTEXTS) {
        known[i].context = c->context;
        memset(known[i].stamp, 0, sizeof known[i].stamp);
        load(known[i].stamp);
        known_count++;
    }
    if (i < known_count)
        memcpy(c->stamp, known[i].stamp, sizeof c->stamp);
    pthread_mutex_unlock(&lock);
}

void weft_trace_stamps_forget(void) {
    pthread_mutex_lock(&lock);
    known_count = 0; /* kernels are loaded again when needed */
    pthread_mutex_unlock(&lock);
}

static CUresult launch_stamp(CUfunction f, CUlaunchConfig *c, const unsigned cluster[3], int priority) {
    CUlaunchAttribute attributes[2];
    uint64_t sink = 0;
    void *params[] = {&sink};
    memset(attributes, 0, sizeof attributes);
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
    attributes[0].value.priority = priority;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    memcpy(attributes[1].value.cluster, cluster, sizeof attributes[1].value.cluster);
    c->attrs = attributes;
    c->numAttrs = cluster[0] > 0 ? 2 : 1;
    return REAL(cuLaunchKernelEx)(c, f, params, NULL);
}

bool weft_trace_stamp(weft_trace_context *c, const weft_trace_op *op, CUstream side) {
    const weft_trace_span *s = &op->record->span;
    unsigned threads = s->block[0] * s->block[1] * s->block[2];
    bool wide =
        s->registers >= NCCL_REGISTERS / 2 && (threads + WARP - 1) / WARP * WARP * NCCL_REGISTERS <= MOST_REGISTERS;
    CUfunction f = wide && c->stamp[1] ? c->stamp[1] : c->stamp[0];
    static const unsigned none[3];
    const unsigned *cluster = op->cluster;
    CUlaunchConfig config = {.gridDimX = 1,
                             .gridDimY = 1,
                             .gridDimZ = 1,
                             .blockDimX = s->block[0],
                             .blockDimY = s->block[1],
                             .blockDimZ = s->block[2],
                             .sharedMemBytes = s->shared + s->static_shared,
                             .hStream = side};
    if (cluster[0] > 0) {
        config.gridDimX = cluster[0];
        config.gridDimY = cluster[1];
        config.gridDimZ = cluster[2];
    }
    bool launched = f && (launch_stamp(f, &config, cluster, op->priority) == CUDA_SUCCESS ||
                          (cluster[0] > 0 && launch_stamp(f, &config, none, op->priority) == CUDA_SUCCESS));
    weft_trace_count(launched ? WEFT_TRACED_STAMPS : WEFT_TRACED_STAMP_FAILURES, 1);
    return launched;
}

bool weft_trace_probe(const weft_trace_context *c, CUstream stream) {
    CUlaunchConfig one = {1, 1, 1, 1, 1, 1, 0, stream, NULL, 0};
    uint64_t sink = 0;
    void *params[] = {&sink};
    if (!c->stamp[0] || REAL(cuLaunchKernelEx)(&one, c->stamp[0], params, NULL) != CUDA_SUCCESS)
        return false;
    weft_trace_count(WEFT_TRACED_PROBES, 1);
    return true;
}

/* --- the cost of events --------------------------------------------------------------------------------------- */

static bool between(weft_trace_context *c, int what) {
    static const unsigned none[3];
    CUlaunchConfig one = {1, 1, 1, 1, 1, 1, 0, c->own, NULL, 0};
    switch (what) {
    case WEFT_CALIBRATED_SPIN:
        return weft_wait_launch(c->wait, c->mhz, SPIN_NS, c->own) == CUDA_SUCCESS;
    case WEFT_CALIBRATED_SPIN_TWICE:
        return weft_wait_launch(c->wait, c->mhz, 2 * SPIN_NS, c->own) == CUDA_SUCCESS;
    case WEFT_CALIBRATED_STAMP:
        return c->stamp[0] && launch_stamp(c->stamp[0], &one, none, 0) == CUDA_SUCCESS;
    default:
        return true;
    }
}

/* Measures on our own stream, held back until all is queued. Nothing waits here; the results are read with the
 * trace. */
void weft_trace_calibrate(weft_trace_context *c) {
    const weft_cuda_calls *cu = weft_cuda();
    if (!c->wait || !c->own || atomic_load(&c->gone))
        return;
    for (int i = 0; i < CALIBRATION_ROUNDS; i++) {
        if (weft_wait_launch(c->wait, c->mhz, HOLD_NS, c->own) != CUDA_SUCCESS)
            return;
        for (int k = 0; k < WEFT_CALIBRATIONS; k++) {
            CUevent before = weft_trace_event(c, true), after = weft_trace_event(c, true);
            if (before && after && cu->cuEventRecord(before, c->own) == CUDA_SUCCESS && between(c, k) &&
                cu->cuEventRecord(after, c->own) == CUDA_SUCCESS) {
                c->calibration[i][k].before = before;
                c->calibration[i][k].after = after;
            }
        }
    }
}

void weft_trace_calibrations(weft_trace_header *h) {
    int count;
    weft_trace_context *all = weft_trace_contexts(&count);
    uint64_t limit_ns = weft_trace_now() + CALIBRATION_WAIT_NS;
    CUcontext before;
    for (int k = 0; k < WEFT_CALIBRATIONS; k++)
        h->calibrated_ns[k] = -1;
    for (int i = 0; i < count; i++) {
        if (!weft_trace_enter(&all[i], &before))
            continue;
        for (int round = 0; round < CALIBRATION_ROUNDS; round++)
            for (int k = 0; k < WEFT_CALIBRATIONS; k++) {
                int64_t start = weft_trace_time(&all[i], all[i].calibration[round][k].before, limit_ns);
                int64_t end = weft_trace_time(&all[i], all[i].calibration[round][k].after, limit_ns);
                int64_t *least = &h->calibrated_ns[k];
                if (start >= 0 && end >= start && (*least < 0 || end - start < *least))
                    *least = end - start;
            }
        weft_trace_leave(before);
    }
}

void weft_forget_stamps(void) {
    pthread_mutex_init(&lock, NULL);
    known_count = 0;
}
