/* Small consecutive numbers for repeated byte strings. */
#ifndef WEFT_INTERN_H
#define WEFT_INTERN_H

#include <stdint.h>

typedef struct {
    char *text;      /* all strings, one after the other */
    int64_t *offset; /* count + 1 of them */
    int32_t *tag;    /* what the caller remembers of each */
    int32_t *slot;   /* open addressing: index + 1, or 0 */
    int64_t count, room, text_bytes, text_room, slots;
} weft_intern;

/* The number of a string, or -1 without memory. `fresh` is set where it is new. */
int64_t weft_intern_of(weft_intern *table, const char *text, int64_t length, int *fresh);
void weft_intern_free(weft_intern *table);

#endif
