/* Reads the events array of a profiler trace (Chrome JSON) and keeps the fields that the analysis needs.

   An event is first bounded by its braces, 64 bytes at a time, without looking inside. Its category then
   decides: most events are dropped right there. What this file does not understand to the letter (other
   types, escapes in keys, numbers with exponents, collectives that describe themselves) is not guessed at:
   the event's place is recorded, and the Python reader decodes it. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "intern.h"

#define EXPORT __attribute__((visibility("default")))

enum { KERNEL, MEMCPY, MEMSET, RUNTIME, ANNOTATION, OPERATOR, SYNC, MODULE, OTHER };
enum { GPU_WIDTH = 15, LAUNCH_WIDTH = 7, BLOCKING_WIDTH = 2, WAIT_WIDTH = 5, LATER_WIDTH = 2 };
enum { LAUNCHES = 1, BLOCKS = 2, NEITHER = 3 };
enum { FED = 0, CLOSED = 1, MALFORMED = 2, NO_MEMORY = 3 };

static const int64_t MAX_NS = (int64_t)1 << 60;
static const int64_t MAX_US = ((int64_t)1 << 62) / 1000; /* 146 years: sums of two still fit 64 bits */

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

typedef struct {
    const char *at;
    int64_t length;
} text;

typedef struct {
    text cat, name, ts, dur, pid, tid, args;
} event;

static int64_t *row_of(table *rows) {
    if (rows->rows == rows->room) {
        int64_t room = rows->room ? rows->room * 2 : 1024;
        int64_t *value = realloc(rows->value, (size_t)(room * rows->width) * sizeof *value);
        if (!value)
            return NULL;
        rows->value = value;
        rows->room = room;
    }
    return rows->value + rows->width * rows->rows++;
}

/* Bounding an event --------------------------------------------------------------------------------- */

typedef struct {
    uint64_t quotes, escapes, open, close;
} marks;

static marks marks_of(const char *at) {
    marks found = {0, 0, 0, 0};
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), escape = _mm_set1_epi8('\\');
    const __m128i open = _mm_set1_epi8('{'), close = _mm_set1_epi8('}');
    for (int i = 0; i < 4; i++) {
        __m128i text = _mm_loadu_si128((const __m128i *)(at + 16 * i));
        found.quotes |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(text, quote)) << (16 * i);
        found.escapes |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(text, escape)) << (16 * i);
        found.open |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(text, open)) << (16 * i);
        found.close |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(text, close)) << (16 * i);
    }
#else
    for (int i = 0; i < 64; i++) {
        uint64_t bit = (uint64_t)1 << i;
        if (at[i] == '"')
            found.quotes |= bit;
        if (at[i] == '\\')
            found.escapes |= bit;
        if (at[i] == '{')
            found.open |= bit;
        if (at[i] == '}')
            found.close |= bit;
    }
#endif
    return found;
}

/* Where text is inside of strings: every bit after an odd number of quotes. */
static uint64_t inside_of(uint64_t quotes, uint64_t in_string) {
    for (int shift = 1; shift < 64; shift *= 2)
        quotes ^= quotes << shift;
    return quotes ^ in_string;
}

/* The end of the object that starts at `at`, or NULL where the text ends in it. */
static const char *object_end(const char *at, const char *end) {
    uint64_t in_string = 0; /* all bits or none */
    int64_t depth = 0;
    int escaped = 0;
    while (at < end) {
        if (!escaped && end - at >= 64) {
            marks found = marks_of(at);
            if (!found.escapes) {
                uint64_t inside = inside_of(found.quotes, in_string);
                uint64_t braces = (found.open | found.close) & ~inside;
                while (braces) {
                    int bit = __builtin_ctzll(braces);
                    depth += (found.open >> bit & 1) ? 1 : -1;
                    if (depth == 0)
                        return at + bit + 1;
                    braces &= braces - 1;
                }
                in_string = (uint64_t)((int64_t)inside >> 63);
                at += 64;
                continue;
            }
        }
        const char *stop = end - at > 64 ? at + 64 : end;
        for (; at < stop; at++) { /* escapes, or the last bytes: one by one */
            char c = *at;
            if (escaped) {
                escaped = 0;
            } else if (in_string) {
                if (c == '\\')
                    escaped = 1;
                if (c == '"')
                    in_string = 0;
            } else if (c == '"') {
                in_string = ~(uint64_t)0;
            } else if (c == '{') {
                depth++;
            } else if (c == '}' && --depth == 0) {
                return at + 1;
            }
        }
    }
    return NULL;
}

/* Taking an event apart ----------------------------------------------------------------------------- */

static const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

/* The end of a string that starts at its quote, or NULL. */
static const char *string_end(const char *at, const char *end) {
    for (at++; at < end; at++) {
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (!quote)
            return NULL;
        const char *back = quote;
        while (back > at && back[-1] == '\\')
            back--;
        if ((quote - back) % 2 == 0)
            return quote + 1;
        at = quote;
    }
    return NULL;
}

static const char *value_end(const char *at, const char *end) {
    if (at >= end)
        return NULL;
    if (*at == '"')
        return string_end(at, end);
    if (*at == '{')
        return object_end(at, end);
    if (*at == '[') {
        int64_t depth = 0;
        for (; at < end; at++) {
            if (*at == '"') {
                at = string_end(at, end);
                if (!at)
                    return NULL;
                at--;
            } else if (*at == '[' || *at == '{') {
                depth++;
            } else if ((*at == ']' || *at == '}') && --depth == 0) {
                return at + 1;
            }
        }
        return NULL;
    }
    const char *start = at;
    while (at < end && *at != ',' && *at != '}' && *at != ']' && (unsigned char)*at > ' ')
        at++;
    return at > start ? at : NULL;
}

/* Steps to the next key of an object. 1: found, 0: the object ended, -1: not what is expected here. */
static int next_pair(const char **at, const char *end, text *key, text *value) {
    const char *p = skip_space(*at, end);
    if (p < end && *p == ',')
        p = skip_space(p + 1, end);
    if (p < end && *p == '}')
        return 0;
    if (p >= end || *p != '"')
        return -1;
    const char *after = string_end(p, end);
    if (!after)
        return -1;
    *key = (text){p + 1, after - p - 2};
    if (memchr(key->at, '\\', (size_t)key->length))
        return -1;
    p = skip_space(after, end);
    if (p >= end || *p != ':')
        return -1;
    p = skip_space(p + 1, end);
    const char *stop = value_end(p, end);
    if (!stop)
        return -1;
    *value = (text){p, stop - p};
    *at = stop;
    return 1;
}

static int is(text key, const char *name) {
    size_t length = strlen(name);
    return (size_t)key.length == length && !memcmp(key.at, name, length);
}

/* A whole number to the end of the text. */
static int whole(text value, int64_t *out) {
    const char *at = value.at, *end = at + value.length;
    int negative = at < end && *at == '-';
    at += negative;
    if (at >= end || end - at > 18)
        return 0;
    int64_t number = 0;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9')
            return 0;
        number = number * 10 + (*at - '0');
    }
    *out = negative ? -number : number;
    return 1;
}

/* Decimal microseconds in nanoseconds, rounded half up. */
static int nanoseconds(text value, int64_t *out) {
    const char *at = value.at, *end = at + value.length;
    int negative = at < end && *at == '-';
    at += negative;
    int64_t number = 0;
    const char *start = at;
    for (; at < end && *at >= '0' && *at <= '9'; at++)
        number = number * 10 + (*at - '0');
    if (at == start || at - start > 16 || number >= MAX_US)
        return 0;
    int places = 0, half = 0;
    if (at < end && *at == '.') {
        for (at++; at < end && *at >= '0' && *at <= '9'; at++, places++) {
            if (places < 3)
                number = number * 10 + (*at - '0');
            else if (places == 3)
                half = *at >= '5';
        }
        if (!places)
            return 0;
    }
    if (at != end)
        return 0;
    for (; places < 3; places++)
        number *= 10;
    number += half;
    *out = negative ? -number : number;
    return 1;
}

/* x times y times z of `[x, y, z]`; -1 where these are not three positive numbers. */
static int size_of(text value, int64_t *out) {
    const char *at = value.at, *end = at + value.length;
    if (at >= end || *at != '[')
        return 0;
    int64_t total = 1;
    int count = 0;
    at = skip_space(at + 1, end);
    while (at < end && *at != ']') {
        const char *start = at;
        while (at < end && *at >= '0' && *at <= '9')
            at++;
        int64_t number;
        if (!whole((text){start, at - start}, &number) || number > (int64_t)1 << 31)
            return 0;
        if (number < 1)
            total = -1;
        if (total > 0 && __builtin_mul_overflow(total, number, &total))
            return 0;
        count++;
        at = skip_space(at, end);
        if (at < end && *at == ',')
            at = skip_space(at + 1, end);
    }
    if (at + 1 != end)
        return 0;
    *out = count == 3 && total < (int64_t)1 << 62 ? total : -1;
    return 1;
}

static int category(text cat) {
    static const struct {
        const char *name;
        int role;
    } known[] = {
        {"cpu_op", OPERATOR},        {"cuda_runtime", RUNTIME},
        {"kernel", KERNEL},          {"gpu_memcpy", MEMCPY},
        {"gpu_memset", MEMSET},      {"user_annotation", ANNOTATION},
        {"cuda_driver", RUNTIME},    {"cuda_sync", SYNC},
        {"hip_runtime", RUNTIME},    {"hip_driver", RUNTIME},
        {"Kernel", KERNEL},          {"Memcpy", MEMCPY},
        {"memcpy", MEMCPY},          {"Memset", MEMSET},
        {"memset", MEMSET},          {"runtime", RUNTIME},
        {"Runtime", RUNTIME},        {"driver", RUNTIME},
        {"Driver", RUNTIME},         {"UserAnnotation", ANNOTATION},
        {"Operator", ANNOTATION},    {"operator", ANNOTATION},
        {"python_function", MODULE},
    };
    if (cat.length < 2 || cat.at[0] != '"')
        return OTHER;
    text name = {cat.at + 1, cat.length - 2};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].name[0] == name.at[0] && is(name, known[i].name))
            return known[i].role;
    return OTHER;
}

static int contains(const char *at, int64_t length, const char *word) {
    int64_t size = (int64_t)strlen(word);
    for (int64_t i = 0; i + size <= length; i++)
        if (!strncasecmp(at + i, word, (size_t)size))
            return 1;
    return 0;
}

static int starts(text name, const char *word) {
    int64_t length = (int64_t)strlen(word);
    return name.length >= length && !memcmp(name.at, word, (size_t)length);
}

static int is_mark(text name) {
    return starts(name, "\"ProfilerStep#") || starts(name, "\"record_param_comms") || starts(name, "\"nccl:");
}

static int is_module(text name) { return starts(name, "\"nn.Module: "); }

static int call_role(scan *s, text name) {
    static const char *launching[] = {"launch", "memcpy", "memset", "graph"};
    static const char *blocking[] = {
        "DeviceSynchronize",
        "StreamSynchronize",
        "EventSynchronize",
        "CtxSynchronize",
    };
    int fresh;
    int64_t at = weft_intern_of(&s->calls, name.at, name.length, &fresh);
    if (at < 0)
        return 0;
    if (fresh) {
        int32_t role = NEITHER;
        for (size_t i = 0; i < sizeof blocking / sizeof *blocking; i++)
            if (contains(name.at, name.length, blocking[i]))
                role = BLOCKS;
        for (size_t i = 0; i < sizeof launching / sizeof *launching; i++)
            if (contains(name.at, name.length, launching[i]))
                role = LAUNCHES;
        s->calls.tag[at] = role;
    }
    return s->calls.tag[at];
}

/* 1: times are good, 0: known but not usable (counted), -1: for Python. */
static int times(scan *s, const event *e, int64_t *start, int64_t *end) {
    int64_t duration;
    if (!e->ts.at || !e->dur.at || !nanoseconds(e->ts, start) || !nanoseconds(e->dur, &duration))
        return -1;
    if (*start <= -MAX_NS || duration < 0 || duration >= MAX_NS) {
        s->odd_times++;
        return 0;
    }
    *end = *start + duration;
    return 1;
}

static int keep_gpu(scan *s, const event *e, int role) {
    int64_t start, end, device = -1, blocks = -1, threads = -1;
    int64_t stream = -1, correlation = -1, external = -1, registers = -1, shared = -1, bytes = -1, sequence = -1;
    if (!e->name.at || !e->args.at)
        return 0;
    const char *at = e->args.at + 1, *stop = e->args.at + e->args.length;
    text key, value;
    int more;
    while ((more = next_pair(&at, stop, &key, &value)) == 1) {
        int good = 1;
        switch (key.length) {
        case 3:
            if (is(key, "Seq"))
                good = whole(value, &sequence);
            break;
        case 4:
            if (is(key, "grid"))
                good = size_of(value, &blocks);
            break;
        case 5:
            if (is(key, "block"))
                good = size_of(value, &threads);
            else if (is(key, "bytes"))
                good = whole(value, &bytes);
            else if (is(key, "dtype"))
                good = 0;
            break;
        case 6:
            if (is(key, "device"))
                good = whole(value, &device);
            else if (is(key, "stream"))
                good = whole(value, &stream);
            break;
        case 11:
            if (is(key, "correlation"))
                good = whole(value, &correlation);
            else if (is(key, "External id"))
                good = whole(value, &external);
            break;
        case 13:
            if (is(key, "shared memory"))
                good = whole(value, &shared);
            break;
        case 15:
            if (is(key, "Collective name"))
                good = 0;
            break;
        case 18:
            if (is(key, "Process Group Name"))
                good = 0;
            break;
        case 20:
            if (is(key, "registers per thread"))
                good = whole(value, &registers);
            break;
        default:
            break;
        }
        if (!good)
            return 0;
    }
    if (more < 0 || device < 0)
        return 0;
    int found = times(s, e, &start, &end), fresh;
    if (found <= 0)
        return found == 0;
    int64_t name = weft_intern_of(&s->names, e->name.at, e->name.length, &fresh);
    int64_t *row = name < 0 ? NULL : row_of(&s->gpu);
    if (!row) {
        s->status = NO_MEMORY;
        return 1;
    }
    const int64_t values[GPU_WIDTH] = {
        start,     end,    name,  role,     device, stream,  correlation, external,
        registers, shared, bytes, sequence, blocks, threads, 0,
    };
    memcpy(row, values, sizeof values);
    return 1;
}

static int keep_launch(scan *s, const event *e) {
    int64_t start, end, correlation = -1, blocks = -1, threads = -1, shared = -1;
    if (!e->tid.at || !e->args.at)
        return 0;
    const char *at = e->args.at + 1, *stop = e->args.at + e->args.length;
    text key, value;
    int more;
    while ((more = next_pair(&at, stop, &key, &value)) == 1) {
        int good = 1;
        if (is(key, "correlation"))
            good = whole(value, &correlation);
        else if (is(key, "grid"))
            good = size_of(value, &blocks);
        else if (is(key, "block"))
            good = size_of(value, &threads);
        else if (is(key, "shared memory"))
            good = whole(value, &shared);
        if (!good)
            return 0;
    }
    if (more < 0)
        return 0;
    int found = times(s, e, &start, &end), fresh;
    if (found <= 0)
        return found == 0;
    int64_t thread = weft_intern_of(&s->threads, e->tid.at, e->tid.length, &fresh);
    int64_t *row = thread < 0 ? NULL : row_of(&s->launches);
    if (!row) {
        s->status = NO_MEMORY;
        return 1;
    }
    const int64_t values[LAUNCH_WIDTH] = {start, end, correlation, thread, blocks, threads, shared};
    memcpy(row, values, sizeof values);
    return 1;
}

static int keep_blocking(scan *s, const event *e) {
    int64_t start, end;
    int found = times(s, e, &start, &end);
    if (found <= 0)
        return found == 0;
    int64_t *row = row_of(&s->blocking);
    if (!row)
        s->status = NO_MEMORY;
    else
        row[0] = start, row[1] = end;
    return 1;
}

static int keep_wait(scan *s, const event *e) {
    int64_t start, end, stream = -1, record = -1, other = -1;
    if (!e->args.at)
        return 0;
    const char *at = e->args.at + 1, *stop = e->args.at + e->args.length;
    text key, value;
    int more;
    while ((more = next_pair(&at, stop, &key, &value)) == 1) {
        int good = 1;
        if (is(key, "stream"))
            good = whole(value, &stream);
        else if (is(key, "wait_on_stream"))
            good = whole(value, &other);
        else if (is(key, "wait_on_cuda_event_record_corr_id"))
            good = whole(value, &record);
        if (!good)
            return 0;
    }
    if (more < 0)
        return 0;
    int found = times(s, e, &start, &end);
    if (found <= 0)
        return found == 0;
    int64_t *row = row_of(&s->waits);
    if (!row)
        s->status = NO_MEMORY;
    else
        row[0] = start, row[1] = start, row[2] = stream, row[3] = record, row[4] = other;
    return 1;
}

/* Keeps what is needed of one event. 0: not understood. */
static int keep(scan *s, const char *at, const char *end) {
    event e;
    memset(&e, 0, sizeof e);
    text key, value;
    int role = -1, more;
    at++;
    while ((more = next_pair(&at, end, &key, &value)) == 1) {
        switch (key.length) {
        case 2:
            if (is(key, "ts"))
                e.ts = value;
            break;
        case 3:
            if (is(key, "cat")) {
                e.cat = value;
                if (*value.at != '"' && !is(value, "null"))
                    return 0;
                role = category(value);
                if (role == OTHER)
                    return 1;
            } else if (is(key, "dur"))
                e.dur = value;
            else if (is(key, "tid"))
                e.tid = value;
            else if (is(key, "pid"))
                e.pid = value;
            break;
        case 4:
            if (is(key, "name")) {
                e.name = value;
                if (role == OPERATOR && !is_mark(value))
                    return 1;
                if (role == ANNOTATION && !is_mark(value))
                    return 1;
                if (role == MODULE && !is_module(value))
                    return 1;
            } else if (is(key, "args"))
                e.args = value;
            break;
        default:
            break;
        }
    }
    if (more < 0)
        return 0;
    if (role < 0)
        return e.cat.at == NULL; /* no category: dropped; one that is no string: Python's */
    if (e.args.at && *e.args.at != '{')
        return 0;
    switch (role) {
    case KERNEL:
    case MEMCPY:
    case MEMSET:
        return keep_gpu(s, &e, role);
    case RUNTIME: {
        if (!e.name.at)
            return 0;
        int call = call_role(s, e.name);
        if (!call)
            s->status = NO_MEMORY;
        return call == LAUNCHES ? keep_launch(s, &e) : call == BLOCKS ? keep_blocking(s, &e) : 1;
    }
    case SYNC:
        return keep_wait(s, &e);
    default: /* marks and modules are few and rich: Python's */
        return !e.name.at || !(is_mark(e.name) || (role == MODULE && is_module(e.name)));
    }
}

/* The interface ------------------------------------------------------------------------------------- */

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

/* Reads whole events from text that begins between two events. Returns how much was read: to the end, to the
   start of an event that the text ends in, or, with status CLOSED, behind the bracket that ends the array. */
EXPORT int64_t weft_scan_feed(scan *s, const char *buffer, int64_t length) {
    const char *at = buffer, *end = buffer + length;
    s->status = FED;
    while (s->status == FED) {
        const char *start = at;
        while (start < end && (*start == ',' || *start == ' ' || *start == '\n' || *start == '\t' || *start == '\r'))
            start++;
        if (start >= end)
            return length;
        if (*start == ']') {
            s->status = CLOSED;
            return start + 1 - buffer;
        }
        if (*start != '{') {
            s->status = MALFORMED;
            return start - buffer;
        }
        const char *stop = object_end(start, end);
        if (!stop)
            return start - buffer;
        s->events++;
        if (!keep(s, start, stop)) {
            int64_t *row = row_of(&s->later);
            if (!row)
                s->status = NO_MEMORY;
            else
                row[0] = start - buffer, row[1] = stop - buffer;
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
