/* The kernels of the graphs that were launched during a trace. */
#define _GNU_SOURCE
#include "tracer_state.h"

#include <sys/mman.h>

enum { GRAPH_ROWS = 1 << 20 };

static uint32_t *graph_rows, graph_row_count;

/* Lists the kernels of a graph once per executable graph and trace; `known` holds the trace and the place. */
void weft_trace_graph_of(_Atomic uint64_t *known, const weft_graph_kernel *kernels, size_t count, weft_trace_op *op) {
    bool communicates = false;
    for (size_t i = 0; i < count; i++)
        communicates |= kernels[i].communicates;
    weft_trace_lock();
    uint64_t place = atomic_load(known), epoch = weft_trace_epoch();
    if (place >> 32 != epoch) {
        size_t room = GRAPH_ROWS - graph_row_count, taken = count < room ? count : room;
        place = epoch << 32 | graph_row_count;
        for (size_t i = 0; graph_rows && i < taken; i++)
            graph_rows[graph_row_count + i] = kernels[i].row;
        graph_row_count += graph_rows ? (uint32_t)taken : 0;
        atomic_store(known, place);
    }
    weft_trace_unlock();
    op->record->span.graph = (uint32_t)place;
    op->record->span.graph_kernels = (uint32_t)count;
    op->record->span.flags |= communicates ? WEFT_SPAN_COMM : 0;
}

uint64_t weft_trace_graph_rows(uint32_t **rows) { return *rows = graph_rows, graph_row_count; }

bool weft_trace_graphs_reserve(void) {
    graph_rows = weft_trace_reserve(GRAPH_ROWS * sizeof *graph_rows);
    return graph_rows;
}

void weft_trace_graphs_clear(void) { graph_row_count = 0; }

void weft_trace_graphs_over(void) {
    if (graph_rows)
        munmap(graph_rows, GRAPH_ROWS * sizeof *graph_rows);
    graph_rows = NULL;
}
