/* Finds the collective that a traced kernel belongs to. NCCL launches its kernels inside the call or inside GroupEnd,
 * on the same thread and on the call's stream. Several calls of a group may become one kernel. */
#include "tracer_state.h"

enum { PENDING = 64 };

/* The calls of one communicator on one stream. */
typedef struct {
    uint64_t key, sequence, elements, bytes;
    int rank, size, operation, dtype, calls;
    CUstream stream;
    bool taken;
} waiting_calls;

static _Thread_local struct {
    uint32_t epoch; /* a trace may end between a call and the end of its group */
    int count;
    waiting_calls call[PENDING];
} pending;

static waiting_calls *waiting(uint64_t key, CUstream stream) {
    for (int i = 0; i < pending.count; i++)
        if (!pending.call[i].taken && pending.call[i].key == key && pending.call[i].stream == stream)
            return &pending.call[i];
    return NULL;
}

void weft_trace_call(uint64_t key, uint64_t sequence, int rank, int size, int operation, uint64_t count, int dtype,
                     uint64_t bytes, CUstream stream) {
    uint32_t epoch = weft_trace_epoch();
    if (pending.epoch != epoch)
        pending.count = 0;
    pending.epoch = epoch;
    waiting_calls *c = waiting(key, stream);
    if (c) {
        c->elements += count;
        c->bytes += bytes;
        c->calls++;
        c->operation = c->operation == operation ? operation : -2; /* -2: several kinds */
        return;
    }
    if (pending.count < PENDING)
        pending.call[pending.count++] = (waiting_calls){
            .key = key,
            .sequence = sequence,
            .elements = count,
            .bytes = bytes,
            .rank = rank,
            .size = size,
            .operation = operation,
            .dtype = dtype,
            .calls = 1,
            .stream = stream,
        };
}

void weft_trace_calls_over(void) { pending.count = 0; }

/* A kernel takes the calls of the first communicator that still has pending calls on its stream. */
void weft_trace_take_call(weft_trace_span *span, CUstream stream) {
    waiting_calls *c = pending.call, *end = c + (pending.epoch == weft_trace_epoch() ? pending.count : 0);
    while (c < end && (c->taken || c->stream != stream))
        c++;
    if (c == end)
        return;
    c->taken = true;
    span->calls = c->calls;
    span->count = c->elements;
    span->bytes = c->bytes;
    span->comm_key = c->key;
    span->comm_sequence = c->sequence;
    span->comm_rank = c->rank;
    span->comm_size = c->size;
    span->operation = c->operation;
    span->dtype = c->dtype;
}
