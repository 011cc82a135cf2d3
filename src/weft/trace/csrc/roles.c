#include "roles.h"

#include <strings.h>

typedef struct {
    const char *name;
    size_t length;
    int role;
} known_category;

#define CATEGORY(name, role) {name, sizeof(name) - 1, role}

/* Categories as PyTorch 2.x, 1.11 to 1.13, and 1.8 to 1.10 write them, the most frequent first. */
static const known_category KNOWN[] = {
    CATEGORY("cpu_op", OPERATOR),        CATEGORY("cuda_runtime", RUNTIME),
    CATEGORY("kernel", KERNEL),          CATEGORY("gpu_memcpy", MEMCPY),
    CATEGORY("gpu_memset", MEMSET),      CATEGORY("user_annotation", ANNOTATION),
    CATEGORY("cuda_driver", RUNTIME),    CATEGORY("cuda_sync", SYNC),
    CATEGORY("hip_runtime", RUNTIME),    CATEGORY("hip_driver", RUNTIME),
    CATEGORY("Kernel", KERNEL),          CATEGORY("Memcpy", MEMCPY),
    CATEGORY("memcpy", MEMCPY),          CATEGORY("Memset", MEMSET),
    CATEGORY("memset", MEMSET),          CATEGORY("runtime", RUNTIME),
    CATEGORY("Runtime", RUNTIME),        CATEGORY("driver", RUNTIME),
    CATEGORY("Driver", RUNTIME),         CATEGORY("UserAnnotation", ANNOTATION),
    CATEGORY("Operator", ANNOTATION),    CATEGORY("operator", ANNOTATION),
    CATEGORY("python_function", MODULE),
};

int weft_category(text category) {
    if (category.length < 3 || category.at[0] != '"')
        return OTHER;
    text name = {category.at + 1, category.length - 2};
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++)
        if (is(name, KNOWN[i].name, KNOWN[i].length))
            return KNOWN[i].role;
    return OTHER;
}

static int contains_any(text name, const char *const *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        int64_t size = (int64_t)strlen(words[i]);
        for (int64_t at = 0; at + size <= name.length; at++)
            if (!strncasecmp(name.at + at, words[i], (size_t)size))
                return 1;
    }
    return 0;
}

int weft_call_role(weft_intern *seen, text name) {
    static const char *const launching[] = {"launch", "memcpy", "memset", "graph"};
    static const char *const blocking[] = {
        "DeviceSynchronize",
        "StreamSynchronize",
        "EventSynchronize",
        "CtxSynchronize",
    };
    int fresh;
    int64_t at = weft_intern_of(seen, name.at, name.length, &fresh);
    if (at < 0)
        return 0;
    if (fresh)
        seen->tag[at] = contains_any(name, launching, sizeof launching / sizeof *launching) ? LAUNCHES
                        : contains_any(name, blocking, sizeof blocking / sizeof *blocking)  ? BLOCKS
                                                                                            : NEITHER;
    return seen->tag[at];
}
