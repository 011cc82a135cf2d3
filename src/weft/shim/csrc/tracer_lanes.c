/* The tracer's lanes: its state for each stream of the program. */
#define _GNU_SOURCE
#include "tracer_state.h"

#include <sys/syscall.h>
#include <unistd.h>

enum { LANES = 1024, NON_BLOCKING = 1 };

static weft_trace_lane lanes[LANES];
static uint32_t lane_count;
static _Atomic bool blocking_streams;

uint32_t weft_trace_thread(void) {
    static _Thread_local uint32_t id;
    if (UNLIKELY(!id))
        id = (uint32_t)syscall(SYS_gettid);
    return id;
}

static bool is_lane(const weft_trace_lane *l, CUstream stream, const weft_trace_context *c) {
    return l->stream == stream && l->context == c &&
           (stream != CU_STREAM_PER_THREAD || l->thread == weft_trace_thread());
}

/* The legacy stream waits for blocking streams, and they wait for it, without any call that the tracer could see. */
static void describe(weft_trace_lane *l) {
    const weft_cuda_calls *cu = weft_cuda();
    unsigned flags = 0;
    unsigned long long id;
    int mode = weft_capture_relax();
    bool legacy = l->stream == CU_STREAM_LEGACY;
    bool blocking = !legacy && (!cu->cuStreamGetFlags || cu->cuStreamGetFlags(l->stream, &flags) != CUDA_SUCCESS ||
                                !(flags & NON_BLOCKING));
    l->implicit = legacy || blocking;
    if (blocking)
        atomic_store(&blocking_streams, true);
    bool known = cu->cuStreamGetId && cu->cuStreamGetId(l->stream, &id) == CUDA_SUCCESS;
    l->id = known ? id : (uint64_t)(uintptr_t)l->stream;
    if (cu->cuStreamGetPriority && cu->cuStreamGetPriority(l->stream, &l->priority) != CUDA_SUCCESS)
        l->priority = 0;
    weft_capture_restore(mode);
}

/* Called with the lock. A linear search is enough, since a program has few streams. */
weft_trace_lane *weft_trace_lane_of(CUstream stream, weft_trace_context *c, bool make) {
    for (uint32_t i = 0; i < lane_count; i++)
        if (is_lane(&lanes[i], stream, c))
            return &lanes[i];
    if (!make || lane_count == LANES)
        return NULL;
    weft_trace_lane *l = &lanes[lane_count];
    *l = (weft_trace_lane){.stream = stream, .context = c, .thread = weft_trace_thread(), .number = lane_count++};
    describe(l);
    return l;
}

void weft_trace_disturbed(CUstream stream) {
    weft_trace_context *c = weft_trace_use_begins();
    if (c) {
        weft_trace_lock();
        weft_trace_lane *l = weft_trace_lane_of(stream, c, false);
        if (l)
            l->disturbed = true;
        weft_trace_unlock();
    }
    weft_trace_use_ends();
}

/* Closes the stream's open kernel now, since its handle must not be used later. A lane's stream is never NULL while the
 * stream exists. */
void weft_trace_stream_gone(CUstream stream) {
    if (LIKELY(weft_trace_state() != 1) || !stream)
        return;
    weft_trace_record *open = NULL;
    weft_trace_use_begins(); /* the result does not matter: any context may be current */
    weft_trace_lock();
    for (uint32_t i = 0; i < lane_count; i++)
        if (lanes[i].stream == stream) {
            open = atomic_load(&lanes[i].context->gone) ? NULL : lanes[i].open;
            lanes[i].stream = NULL;
            lanes[i].open = NULL;
        }
    weft_trace_unlock();
    if (open && !weft_capturing(stream))
        weft_trace_close(open, stream);
    weft_trace_use_ends();
}

bool weft_trace_blocking_streams(void) { return atomic_load(&blocking_streams); }

void weft_trace_lanes_clear(void) {
    lane_count = 0;
    atomic_store(&blocking_streams, false);
}

void weft_trace_lanes_close(void) {
    for (uint32_t i = 0; i < lane_count; i++) {
        CUcontext before;
        if (lanes[i].open && weft_trace_enter(lanes[i].context, &before)) {
            bool reachable = lanes[i].stream != CU_STREAM_PER_THREAD || lanes[i].thread == weft_trace_thread();
            if (reachable && !weft_capturing(lanes[i].stream)) /* our event must not enter a capture */
                weft_trace_close(lanes[i].open, lanes[i].stream);
            weft_trace_leave(before);
        }
        lanes[i].open = NULL;
    }
}

void weft_trace_lanes_over(void) {
    for (uint32_t i = 0; i < lane_count; i++) {
        CUcontext before;
        if (lanes[i].side && weft_trace_enter(lanes[i].context, &before)) {
            weft_trace_side_over(lanes[i].side);
            weft_trace_leave(before);
        }
    }
}
