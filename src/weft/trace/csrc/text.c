/* Where objects and values end. Objects are bounded by their braces, 64 bytes at a time, without looking inside. */

#include "text.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* One bit for each of 64 bytes. */
typedef struct {
    uint64_t quotes, escapes, open, close;
} marks;

#ifdef __SSE2__
static inline uint64_t equal(const __m128i bytes[4], char wanted) {
    const __m128i all = _mm_set1_epi8(wanted);
    uint64_t found = 0;
    for (int i = 0; i < 4; i++)
        found |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes[i], all)) << (16 * i);
    return found;
}

static inline marks marks_of(const char *at) {
    __m128i bytes[4];
    for (int i = 0; i < 4; i++)
        bytes[i] = _mm_loadu_si128((const __m128i *)(at + 16 * i));
    return (marks){equal(bytes, '"'), equal(bytes, '\\'), equal(bytes, '{'), equal(bytes, '}')};
}
#else
static inline marks marks_of(const char *at) {
    marks found = {0, 0, 0, 0};
    for (int i = 0; i < 64; i++) {
        uint64_t bit = (uint64_t)1 << i;
        found.quotes |= at[i] == '"' ? bit : 0;
        found.escapes |= at[i] == '\\' ? bit : 0;
        found.open |= at[i] == '{' ? bit : 0;
        found.close |= at[i] == '}' ? bit : 0;
    }
    return found;
}
#endif

/* Where text is inside of strings: every bit after an odd number of quotes. */
static inline uint64_t inside_of(uint64_t quotes, uint64_t in_string) {
    for (int shift = 1; shift < 64; shift *= 2)
        quotes ^= quotes << shift;
    return quotes ^ in_string;
}

/* What is open where a scan stands. */
typedef struct {
    uint64_t in_string; /* all bits or none */
    int64_t depth;
    int escaped;
} state;

/* Byte by byte, for text with escapes and for the last bytes. Returns the end of the object, or NULL. */
static const char *walk(state *s, const char *at, const char *stop) {
    for (; at < stop; at++) {
        char c = *at;
        if (s->escaped) {
            s->escaped = 0;
        } else if (s->in_string) {
            s->escaped = c == '\\';
            if (c == '"')
                s->in_string = 0;
        } else if (c == '"') {
            s->in_string = ~(uint64_t)0;
        } else if (c == '{') {
            s->depth++;
        } else if (c == '}' && --s->depth == 0) {
            return at + 1;
        }
    }
    return NULL;
}

const char *weft_object_end(const char *at, const char *end) {
    state s = {0, 0, 0};
    while (at < end) {
        if (!s.escaped && end - at >= 64) {
            marks found = marks_of(at);
            if (!found.escapes) {
                uint64_t inside = inside_of(found.quotes, s.in_string);
                uint64_t braces = (found.open | found.close) & ~inside;
                while (braces) {
                    int bit = __builtin_ctzll(braces);
                    s.depth += (found.open >> bit & 1) ? 1 : -1;
                    if (s.depth == 0)
                        return at + bit + 1;
                    braces &= braces - 1;
                }
                s.in_string = (uint64_t)((int64_t)inside >> 63);
                at += 64;
                continue;
            }
        }
        const char *stop = end - at > 64 ? at + 64 : end;
        const char *found = walk(&s, at, stop);
        if (found)
            return found;
        at = stop;
    }
    return NULL;
}

static const char *array_end(const char *at, const char *end) {
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

const char *weft_value_end(const char *at, const char *end) {
    if (at >= end)
        return NULL;
    if (*at == '"')
        return string_end(at, end);
    if (*at == '{')
        return weft_object_end(at, end);
    if (*at == '[')
        return array_end(at, end);
    const char *start = at;
    while (at < end && *at != ',' && *at != '}' && *at != ']' && (unsigned char)*at > ' ')
        at++;
    return at > start ? at : NULL;
}
