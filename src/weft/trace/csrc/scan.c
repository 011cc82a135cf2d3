/* Reads the events array of a profiler trace (Chrome JSON) and keeps the fields that the analysis needs: the interface
   to Python. An event is first bounded by its braces and then taken apart; one that needs Python is recorded by its
   place in the text. */

#include <stdlib.h>

#include "events.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT scan *weft_scan_new(void) {
    scan *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->gpu.width = GPU_WIDTH;
    s->launches.width = LAUNCH_WIDTH;
    s->blocking.width = BLOCKING_WIDTH;
    s->waits.width = WAIT_WIDTH;
    s->later.width = LATER_WIDTH;
    return s;
}

EXPORT void weft_scan_free(scan *s) {
    if (!s)
        return;
    table *tables[] = {&s->gpu, &s->launches, &s->blocking, &s->waits, &s->later};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        free(tables[i]->value);
    weft_intern_free(&s->names);
    weft_intern_free(&s->threads);
    weft_intern_free(&s->calls);
    free(s);
}

/* Reads whole events from buffer[low, high), which begins between two events. Returns the place up to which it was
   read: the end, the start of an event that the text ends in, or, with status CLOSED, behind the bracket that ends the
   array. */
EXPORT int64_t weft_scan_feed(scan *s, const char *buffer, int64_t low, int64_t high) {
    const char *at = buffer + low, *end = buffer + high;
    s->status = FED;
    while (s->status == FED) {
        const char *start = at;
        while (start < end && (*start == ',' || *start == ' ' || *start == '\n' || *start == '\t' || *start == '\r'))
            start++;
        if (start >= end)
            return high;
        if (*start == ']') {
            s->status = CLOSED;
            return start + 1 - buffer;
        }
        if (*start != '{') {
            s->status = MALFORMED;
            return start - buffer;
        }
        const char *stop = weft_object_end(start, end);
        if (!stop)
            return start - buffer;
        s->events++;
        if (!weft_keep(s, start, stop)) {
            const int64_t place[LATER_WIDTH] = {start - buffer, stop - buffer};
            weft_add_row(s, &s->later, place);
        }
        at = stop;
    }
    return at - buffer;
}

EXPORT int32_t weft_scan_status(const scan *s) { return s->status; }
EXPORT int64_t weft_scan_events(const scan *s) { return s->events; }
EXPORT int64_t weft_scan_odd_times(const scan *s) { return s->odd_times; }

EXPORT int64_t weft_scan_rows(const scan *s, int32_t which, const int64_t **values) {
    const table *tables[] = {&s->gpu, &s->launches, &s->blocking, &s->waits, &s->later};
    *values = tables[which]->value;
    return tables[which]->rows;
}

EXPORT int64_t weft_scan_texts(const scan *s, int32_t which, const char **text, const int64_t **offsets) {
    const weft_intern *found = which ? &s->threads : &s->names;
    *text = found->text;
    *offsets = found->offset;
    return found->count;
}
