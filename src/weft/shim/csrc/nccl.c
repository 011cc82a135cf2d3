/* The functions that intercept NCCL's, and how a program comes to call them.
 *
 * A program reaches NCCL through the linker (torch) or through dlsym (ctypes, plugins), and may load two NCCLs. A
 * function returned by dlsym belongs to one library, so there is one set of intercepting functions per library. The
 * exported functions find out to which library their caller would have been bound. Unrecognized calls are forwarded. */
#define _GNU_SOURCE
#include "nccl.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define UNWRAP(...) __VA_ARGS__
#define WITHOUT_FIRST(first, ...) __VA_ARGS__
#define WITHOUT_COMMA(...) WITHOUT_FIRST(__VA_ARGS__)
enum { CALLERS = 64 };

static _Thread_local struct {
    uint64_t key; /* address combined with the generation */
    weft_nccl *library;
} callers[CALLERS];

/* A library may be unloaded, and another one, bound to another NCCL, loaded at its address. Since a program makes a
 * communicator before it uses one, callers that make communicators are looked up each time. If one of them uses another
 * NCCL than before, all cached callers are invalidated. */
static _Atomic uint64_t generation; /* in the bits above those of an address */
static _Atomic(weft_nccl *) latest;
#define MAKES(name) (__builtin_strncmp(#name, "ncclCommInit", strlen("ncclCommInit")) == 0)

/* --- the intercepting functions, one set for the linker and one for each library -------------------------------- */

static weft_nccl *of_caller(void *address, bool makes);

#define FOR_LIBRARY(n, name, args, ...)                                                                                \
    static ncclResult_t name##_##n(__VA_ARGS__) { return weft_on_##name(&weft_nccl_libraries[n] UNWRAP args); }
#define HOOK(name, args, ...)                                                                                          \
    FOR_LIBRARY(0, name, args, __VA_ARGS__)                                                                            \
    FOR_LIBRARY(1, name, args, __VA_ARGS__)                                                                            \
    FOR_LIBRARY(2, name, args, __VA_ARGS__)                                                                            \
    FOR_LIBRARY(3, name, args, __VA_ARGS__)                                                                            \
    EXPORT ncclResult_t name(__VA_ARGS__);                                                                             \
    ncclResult_t name(__VA_ARGS__) {                                                                                   \
        void *caller = __builtin_return_address(0);                                                                    \
        weft_nccl *l = of_caller(caller, MAKES(name));                                                                 \
        if (LIKELY(l && l->name))                                                                                      \
            return weft_on_##name(l UNWRAP args);                                                                      \
        __typeof__(&name) real = l ? NULL : (__typeof__(&name))weft_nccl_unlisted(#name, caller);                      \
        return real && real != name ? real(WITHOUT_COMMA args) : NCCL_INTERNAL_ERROR;                                  \
    }
#include "nccl_hooks.def"

static const struct {
    const char *name;
    void *ours, *of_library[NCCL_LIBRARIES];
    size_t place; /* offset of the library's own function in weft_nccl */
} hooks[] = {
#define HOOK(name, args, ...)                                                                                          \
    {#name,                                                                                                            \
     (void *)name,                                                                                                     \
     {(void *)name##_0, (void *)name##_1, (void *)name##_2, (void *)name##_3},                                         \
     offsetof(weft_nccl, name)},
#include "nccl_hooks.def"
};
enum { HOOKS = sizeof hooks / sizeof *hooks };

static int index_of(const char *name) {
    for (int i = 0; i < HOOKS; i++)
        if (strcmp(hooks[i].name, name) == 0)
            return i;
    return -1;
}

/* --- which library ---------------------------------------------------------------------------------------------- */

/* Another tool may intercept only some of the functions, so each is looked up separately. */
void weft_nccl_fill(weft_nccl *l, void *handle, bool next) {
    for (int i = 0; i < HOOKS; i++) {
        void *real = next ? weft_next_symbol(hooks[i].name) : NULL;
        if (!real)
            real = weft_real_symbol(handle, hooks[i].name);
        *(void **)((char *)l + hooks[i].place) = real == hooks[i].ours ? NULL : real;
    }
#define FIND(name) l->name = (__typeof__(l->name))weft_real_symbol(handle, #name)
    FIND(ncclGetVersion);
    FIND(ncclGetErrorString);
    FIND(ncclGetLastError);
    FIND(ncclCommCount);
    FIND(ncclCommUserRank);
    FIND(ncclCommCuDevice);
    FIND(ncclMemAlloc);
    FIND(ncclMemFree);
    if (l->ncclGetVersion)
        l->ncclGetVersion(&l->version);
    const char *without = getenv("WEFT_NO_CALL_CONFIG");
    l->config_refused = without && *without && strcmp(without, "0") != 0;
}

static weft_nccl *search(void *address) {
    weft_nccl *l = weft_nccl_me.inside > 0 ? weft_nccl_at(address) : NULL; /* a library that calls itself */
    return l ? l : weft_nccl_for(address);
}

static __attribute__((noinline)) weft_nccl *of_maker(void *address) {
    weft_nccl *l = search(address);
    if (l && weft_nccl_me.inside == 0 && atomic_exchange(&latest, l) != l)
        atomic_fetch_add(&generation, 1ull << 48);
    return l;
}

/* Each call site is looked up once per thread, because a search may cost microseconds. */
static weft_nccl *of_caller(void *address, bool makes) {
    if (makes)
        return of_maker(address);
    uint64_t key = (uint64_t)(uintptr_t)address ^ atomic_load_explicit(&generation, memory_order_relaxed);
    unsigned start = (unsigned)((key * 0x9e3779b97f4a7c15u) >> 58), at = start; /* CALLERS is 2^6 */
    for (int tries = 0; tries < CALLERS; tries++, at = (at + 1) % CALLERS) {
        if (LIKELY(callers[at].key == key))
            return callers[at].library;
        if (!callers[at].key)
            break;
    }
    weft_nccl *l = search(address);
    if (l) {
        at = callers[at].key ? start : at;
        callers[at].key = key;
        callers[at].library = l;
    }
    return l;
}

/* --- dlsym ------------------------------------------------------------------------------------------------------- */

bool weft_nccl_own(const char *name, void **ours) {
    int i = index_of(name);
    *ours = i < 0 ? NULL : hooks[i].ours;
    return i >= 0;
}

bool weft_nccl_library(const char *name) {
    if (weft_next_symbol(name))
        return true;
    weft_nccl *l = weft_nccl_anywhere();
    return l && *(void **)((char *)l + hooks[index_of(name)].place);
}

void *weft_nccl_substitute(const char *name, void *real) {
    weft_nccl *l = weft_nccl_with(real);
    return l ? hooks[index_of(name)].of_library[l - weft_nccl_libraries] : NULL;
}
