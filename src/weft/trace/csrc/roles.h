/* What an event is, by its category and its name. */

#ifndef WEFT_ROLES_H
#define WEFT_ROLES_H

#include "intern.h"
#include "text.h"

/* The first three are numbers that the Python reader uses too. */
enum { KERNEL, MEMCPY, MEMSET, RUNTIME, ANNOTATION, OPERATOR, SYNC, MODULE, OTHER };
enum { LAUNCHES = 1, BLOCKS = 2, NEITHER = 3 };

/* The role of a category, which is a JSON string. */
int weft_category(text category);

/* Whether an operator or annotation marks a step or a collective, whether a Python function is a module's. */
static inline int is_mark(text name) {
    return STARTS(name, "\"ProfilerStep#") || STARTS(name, "\"record_param_comms") || STARTS(name, "\"nccl:");
}
static inline int is_module(text name) { return STARTS(name, "\"nn.Module: "); }

/* Whether a call of the runtime launches work or waits for the GPU; `seen` remembers. 0: no memory. */
int weft_call_role(weft_intern *seen, text name);

#endif
