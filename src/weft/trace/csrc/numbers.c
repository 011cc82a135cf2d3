#include "numbers.h"

static const int64_t MAX_US = ((int64_t)1 << 62) / 1000; /* 146 years: sums of two still fit 64 bits */
static const int64_t MAX_SIZE = (int64_t)1 << 31;

static inline int is_digit(char c) { return c >= '0' && c <= '9'; }

int weft_whole(text value, int64_t *out) {
    const char *at = value.at, *end = at + value.length;
    int negative = at < end && *at == '-';
    at += negative;
    if (at >= end || end - at > 18)
        return 0;
    int64_t number = 0;
    for (; at < end; at++) {
        if (!is_digit(*at))
            return 0;
        number = number * 10 + (*at - '0');
    }
    *out = negative ? -number : number;
    return 1;
}

int weft_nanoseconds(text value, int64_t *out) {
    const char *at = value.at, *end = at + value.length;
    int negative = at < end && *at == '-';
    at += negative;
    int64_t number = 0;
    const char *start = at;
    for (; at < end && is_digit(*at) && at - start <= 16; at++)
        number = number * 10 + (*at - '0');
    if (at == start || at - start > 16 || number >= MAX_US)
        return 0;
    int places = 0, half = 0;
    if (at < end && *at == '.') {
        for (at++; at < end && is_digit(*at); at++, places++) {
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

int weft_size(text value, int64_t *out) {
    const char *at = value.at, *end = at + value.length;
    if (at >= end || *at != '[')
        return 0;
    int64_t total = 1;
    int count = 0;
    at = skip_space(at + 1, end);
    while (at < end && *at != ']') {
        const char *start = at;
        while (at < end && is_digit(*at))
            at++;
        int64_t number;
        if (!weft_whole((text){start, at - start}, &number) || number > MAX_SIZE)
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
