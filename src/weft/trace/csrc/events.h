/* Columns of the events that the analysis needs. */

#ifndef WEFT_EVENTS_H
#define WEFT_EVENTS_H

#include "intern.h"
#include "text.h"

/* Columns of each table: see `weft.trace.events.Collector`. The last one has the places of events for Python. */
enum { GPU_WIDTH = 15, LAUNCH_WIDTH = 7, BLOCKING_WIDTH = 2, WAIT_WIDTH = 5, LATER_WIDTH = 2 };
enum { FED = 0, CLOSED = 1, MALFORMED = 2, NO_MEMORY = 3 };

typedef struct {
    int64_t *value;
    int64_t rows, room;
    int32_t width, pad;
} table;

typedef struct {
    table gpu, launches, blocking, waits, later;
    weft_intern names, threads, calls;
    int64_t events, odd_times;
    int32_t status, pad;
} scan;

/* Adds a row of as many values as the table has columns; sets the status where there is no memory for it. */
void weft_add_row(scan *s, table *rows, const int64_t *values);

/* Keeps what is needed of the event at [at, end). 0: not understood, Python decodes it. */
int weft_keep(scan *s, const char *at, const char *end);

#endif
