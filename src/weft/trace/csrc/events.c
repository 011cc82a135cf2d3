/* Takes one event apart. Its category decides: most events are dropped right there. What is not understood to the
   letter (other types, escapes in keys, numbers with exponents, collectives that describe themselves) is not guessed
   at: the Python reader decodes it. */

#include "events.h"

#include <stdlib.h>

#include "numbers.h"
#include "roles.h"

static const int64_t MAX_NS = (int64_t)1 << 60;

typedef struct {
    text name, ts, dur, tid, args;
    int role; /* -1: without a category */
} event;

void weft_add_row(scan *s, table *rows, const int64_t *values) {
    if (rows->rows == rows->room) {
        int64_t room = rows->room ? rows->room * 2 : 1024;
        int64_t *value = realloc(rows->value, (size_t)(room * rows->width) * sizeof *value);
        if (!value) {
            s->status = NO_MEMORY;
            return;
        }
        rows->value = value;
        rows->room = room;
    }
    memcpy(rows->value + rows->width * rows->rows++, values, (size_t)rows->width * sizeof *values);
}

/* Arguments ----------------------------------------------------------------------------------------- */

typedef int reader(text value, int64_t *out);

typedef struct {
    const char *name;
    size_t length;
    reader *read; /* NULL: an event with this argument is for Python */
} field;

#define FIELD(name, read) {name, sizeof(name) - 1, read}

/* Reads the known arguments of an event into `values`, in the order of `fields`; -1 where one is not there. */
static int arguments(text args, const field *fields, int count, int64_t *values) {
    for (int i = 0; i < count; i++)
        values[i] = -1;
    if (!args.at)
        return 0;
    const char *at = args.at + 1, *end = args.at + args.length;
    text key, value;
    int more;
    while ((more = next_pair(&at, end, &key, &value)) == 1) {
        for (int i = 0; i < count; i++) {
            if (!is(key, fields[i].name, fields[i].length))
                continue;
            if (!fields[i].read || !fields[i].read(value, &values[i]))
                return 0;
            break;
        }
    }
    return more == 0;
}

/* 1: times are good, 0: known but not usable (counted), -1: for Python. */
static int times(scan *s, const event *e, int64_t *start, int64_t *end) {
    int64_t duration;
    if (!e->ts.at || !e->dur.at || !weft_nanoseconds(e->ts, start) || !weft_nanoseconds(e->dur, &duration))
        return -1;
    if (*start <= -MAX_NS || duration < 0 || duration >= MAX_NS) {
        s->odd_times++;
        return 0;
    }
    *end = *start + duration;
    return 1;
}

/* The number of a text, or -1 with the status set. */
static int64_t number_of(scan *s, weft_intern *texts, text value) {
    int fresh;
    int64_t number = weft_intern_of(texts, value.at, value.length, &fresh);
    if (number < 0)
        s->status = NO_MEMORY;
    return number;
}

/* Events -------------------------------------------------------------------------------------------- */

static int keep_gpu(scan *s, const event *e) {
    enum { DEVICE, STREAM, CORRELATION, EXTERNAL, REGISTERS, SHARED, BYTES, SEQUENCE, GRID, BLOCK, COUNT };
    static const field fields[] = {
        FIELD("device", weft_whole),
        FIELD("stream", weft_whole),
        FIELD("correlation", weft_whole),
        FIELD("External id", weft_whole),
        FIELD("registers per thread", weft_whole),
        FIELD("shared memory", weft_whole),
        FIELD("bytes", weft_whole),
        FIELD("Seq", weft_whole),
        FIELD("grid", weft_size),
        FIELD("block", weft_size),
        FIELD("dtype", NULL),
        FIELD("Collective name", NULL),
        FIELD("Process Group Name", NULL),
    };
    int64_t known[sizeof fields / sizeof *fields], row[GPU_WIDTH];
    if (!e->name.at || !arguments(e->args, fields, sizeof fields / sizeof *fields, known))
        return 0;
    if (known[DEVICE] < 0 || known[STREAM] < 0) /* the process or the thread may tell */
        return 0;
    int found = times(s, e, &row[0], &row[1]);
    if (found <= 0)
        return found == 0;
    row[2] = number_of(s, &s->names, e->name);
    row[3] = e->role;
    memcpy(row + 4, known, COUNT * sizeof *known);
    row[4 + COUNT] = 0; /* no message */
    if (s->status != NO_MEMORY)
        weft_add_row(s, &s->gpu, row);
    return 1;
}

static int keep_launch(scan *s, const event *e) {
    static const field fields[] = {
        FIELD("correlation", weft_whole),
        FIELD("grid", weft_size),
        FIELD("block", weft_size),
        FIELD("shared memory", weft_whole),
    };
    int64_t known[4], row[LAUNCH_WIDTH];
    if (!e->tid.at || !arguments(e->args, fields, 4, known))
        return 0;
    int found = times(s, e, &row[0], &row[1]);
    if (found <= 0)
        return found == 0;
    row[2] = known[0];
    row[3] = number_of(s, &s->threads, e->tid);
    memcpy(row + 4, known + 1, 3 * sizeof *known);
    if (s->status != NO_MEMORY)
        weft_add_row(s, &s->launches, row);
    return 1;
}

static int keep_blocking(scan *s, const event *e) {
    int64_t row[BLOCKING_WIDTH];
    int found = times(s, e, &row[0], &row[1]);
    if (found <= 0)
        return found == 0;
    weft_add_row(s, &s->blocking, row);
    return 1;
}

static int keep_runtime(scan *s, const event *e) {
    if (!e->name.at)
        return 0;
    switch (weft_call_role(&s->calls, e->name)) {
    case LAUNCHES:
        return keep_launch(s, e);
    case BLOCKS:
        return keep_blocking(s, e);
    case NEITHER:
        return 1;
    default:
        s->status = NO_MEMORY;
        return 1;
    }
}

static int keep_wait(scan *s, const event *e) {
    static const field fields[] = {
        FIELD("stream", weft_whole),
        FIELD("wait_on_cuda_event_record_corr_id", weft_whole),
        FIELD("wait_on_stream", weft_whole),
    };
    int64_t row[WAIT_WIDTH], end;
    if (!arguments(e->args, fields, 3, row + 2))
        return 0;
    int found = times(s, e, &row[0], &end);
    if (found <= 0)
        return found == 0;
    row[1] = row[0];
    weft_add_row(s, &s->waits, row);
    return 1;
}

/* Whether an event of this role and name can be dropped at once. */
static int is_dropped(int role, text name) {
    return role == OTHER || ((role == OPERATOR || role == ANNOTATION) && name.at && !is_mark(name)) ||
           (role == MODULE && name.at && !is_module(name));
}

/* Reads the pairs of an event. 1: all of them, 0: it can be dropped, -1: for Python. */
static int pairs_of(event *e, const char *at, const char *end) {
    text key, value;
    int more;
    while ((more = next_pair(&at, end, &key, &value)) == 1) {
        if (IS(key, "ts")) {
            e->ts = value;
        } else if (IS(key, "cat")) {
            if (*value.at != '"' && !IS(value, "null"))
                return -1;
            e->role = weft_category(value);
            if (is_dropped(e->role, e->name))
                return 0;
        } else if (IS(key, "name")) {
            e->name = value;
            if (is_dropped(e->role, value))
                return 0;
        } else if (IS(key, "dur")) {
            e->dur = value;
        } else if (IS(key, "tid")) {
            e->tid = value;
        } else if (IS(key, "args")) {
            e->args = value;
        }
    }
    return more == 0 ? 1 : -1;
}

int weft_keep(scan *s, const char *at, const char *end) {
    event e;
    memset(&e, 0, sizeof e);
    e.role = -1;
    int found = pairs_of(&e, at + 1, end);
    if (found <= 0)
        return found == 0;
    if (e.role < 0)
        return 1;
    if (e.args.at && *e.args.at != '{')
        return 0;
    switch (e.role) {
    case KERNEL:
    case MEMCPY:
    case MEMSET:
        return keep_gpu(s, &e);
    case RUNTIME:
        return keep_runtime(s, &e);
    case SYNC:
        return keep_wait(s, &e);
    default: /* marks and modules are few and rich: Python's */
        return !e.name.at;
    }
}
