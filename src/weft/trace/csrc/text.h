/* Pieces of JSON text: where strings and values end, and the pairs of an object. */

#ifndef WEFT_TEXT_H
#define WEFT_TEXT_H

#include <stdint.h>
#include <string.h>

typedef struct {
    const char *at;
    int64_t length;
} text;

/* The end of the object that starts at `at`, or NULL where the text ends in it. */
const char *weft_object_end(const char *at, const char *end);

/* The end of any value, or NULL. */
const char *weft_value_end(const char *at, const char *end);

static inline int is(text word, const char *name, size_t length) {
    return (size_t)word.length == length && !memcmp(word.at, name, length);
}

#define IS(word, name) is(word, name, sizeof(name) - 1)

static inline int starts(text word, const char *prefix, size_t length) {
    return (size_t)word.length >= length && !memcmp(word.at, prefix, length);
}

#define STARTS(word, prefix) starts(word, prefix, sizeof(prefix) - 1)

static inline const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

/* The end of a string that starts at its quote, or NULL. */
static inline const char *string_end(const char *at, const char *end) {
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

/* The end of a key that starts at its quote; NULL where it does not end, or has an escape. */
static inline const char *key_end(const char *at, const char *end) {
    for (at++; at < end && *at != '"'; at++)
        if (*at == '\\')
            return NULL;
    return at < end ? at + 1 : NULL;
}

/* Steps to the next pair of an object. 1: found, 0: the object ended, -1: not what is expected here. */
static inline int next_pair(const char **at, const char *end, text *key, text *value) {
    const char *p = skip_space(*at, end);
    if (p < end && *p == ',')
        p = skip_space(p + 1, end);
    if (p < end && *p == '}')
        return 0;
    if (p >= end || *p != '"')
        return -1;
    const char *after = key_end(p, end);
    if (!after)
        return -1;
    *key = (text){p + 1, after - p - 2};
    p = skip_space(after, end);
    if (p >= end || *p != ':')
        return -1;
    p = skip_space(p + 1, end);
    const char *stop = weft_value_end(p, end);
    if (!stop)
        return -1;
    *value = (text){p, stop - p};
    *at = stop;
    return 1;
}

#endif
