/* Numbers of a trace: whole ones, decimal microseconds, and sizes in three dimensions. Each returns whether the text
   is one to its end. */

#ifndef WEFT_NUMBERS_H
#define WEFT_NUMBERS_H

#include "text.h"

int weft_whole(text value, int64_t *out);

/* Decimal microseconds in nanoseconds, rounded half up. */
int weft_nanoseconds(text value, int64_t *out);

/* x times y times z of `[x, y, z]`; -1 where these are not three positive numbers. */
int weft_size(text value, int64_t *out);

#endif
