/* Which collective a traced kernel belongs to: NCCL launches its kernels inside the call, or inside the GroupEnd, on
 * the same thread and on the call's stream. Several calls of a group may become one kernel. */
#include "tracer.h"

enum { PENDING = 64 };

static _Thread_local struct {
    int count;
    struct {
        uint64_t key, sequence, elements, bytes;
        int rank, size, operation, dtype;
        CUstream stream;
        bool taken;
    } call[PENDING];
} pending;

void weft_trace_call(uint64_t key, uint64_t sequence, int rank, int size, int operation, uint64_t count, int dtype,
                     uint64_t bytes, CUstream stream) {
    if (pending.count == PENDING)
        return;
    pending.call[pending.count++] = (__typeof__(*pending.call)){
        .key = key,
        .sequence = sequence,
        .elements = count,
        .bytes = bytes,
        .rank = rank,
        .size = size,
        .operation = operation,
        .dtype = dtype,
        .stream = stream,
    };
}

void weft_trace_calls_over(void) { pending.count = 0; }

/* The first kernel on a stream takes all calls that were made for it, of the first one's communicator. */
void weft_trace_take_call(weft_trace_span *span, CUstream stream) {
    int first = -1;
    for (int i = 0; i < pending.count; i++) {
        __typeof__(*pending.call) *c = &pending.call[i];
        if (c->taken || c->stream != stream || (first >= 0 && c->key != pending.call[first].key))
            continue;
        c->taken = true;
        span->calls++;
        span->count += c->elements;
        span->bytes += c->bytes;
        if (first >= 0) {
            if (c->operation != span->operation)
                span->operation = -2; /* of several kinds */
            continue;
        }
        first = i;
        span->comm_key = c->key;
        span->comm_sequence = c->sequence;
        span->comm_rank = c->rank;
        span->comm_size = c->size;
        span->operation = c->operation;
        span->dtype = c->dtype;
    }
}
