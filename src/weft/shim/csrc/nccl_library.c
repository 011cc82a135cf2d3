/* The NCCL libraries of this process, and which of them a caller is bound to. */
#define _GNU_SOURCE
#include "nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static const char PROBE[] = "ncclGroupStart"; /* every NCCL has it */

weft_nccl weft_nccl_libraries[NCCL_LIBRARIES];
static _Atomic int library_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static weft_nccl *loaded_at(void *base) {
    int count = atomic_load(&library_count);
    for (int i = 0; i < count; i++)
        if (weft_nccl_libraries[i].base == base)
            return &weft_nccl_libraries[i];
    return NULL;
}

weft_nccl *weft_nccl_at(void *address) {
    Dl_info info;
    return dladdr(address, &info) ? loaded_at(info.dli_fbase) : NULL;
}

static weft_nccl *keep(const weft_nccl *found) {
    pthread_mutex_lock(&lock);
    weft_nccl *l = loaded_at(found->base);
    int count = atomic_load(&library_count);
    if (!l && count < NCCL_LIBRARIES) {
        l = memcpy(&weft_nccl_libraries[count], found, sizeof *found);
        atomic_store(&library_count, count + 1);
    }
    pthread_mutex_unlock(&lock);
    return l;
}

static bool is_rccl(const char *path) {
    const char *slash = strrchr(path, '/');
    return strstr(slash ? slash : path, "rccl") != NULL;
}

/* The library that has this function; NULL if there are too many libraries. The loader is called before our lock is
 * taken, since it may hold its own lock while a library's constructor calls us. */
weft_nccl *weft_nccl_with(void *real) {
    Dl_info info;
    if (!dladdr(real, &info))
        return NULL;
    weft_nccl *known = loaded_at(info.dli_fbase);
    void *handle = known ? NULL : dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); /* not closed, to keep it loaded */
    if (!handle)
        return known;
    weft_nccl found = {.base = info.dli_fbase, .amd = is_rccl(info.dli_fname)};
    weft_nccl_fill(&found, handle, weft_next_symbol(PROBE) == real);
    return keep(&found);
}

static void *probe(void *handle) {
    void *real = handle ? weft_real_symbol(handle, PROBE) : NULL, *ours = NULL;
    weft_nccl_own(PROBE, &ours);
    return real == ours ? NULL : real;
}

static void *probe_file(const char *path) {
    void *handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD), *real = probe(handle);
    if (handle)
        dlclose(handle);
    return real;
}

static void *loaded_anywhere(void) {
    static const char *const words[] = {"nccl", "rccl", NULL};
    weft_files found;
    void *real = NULL;
    weft_loaded_files(words, &found);
    for (int i = 0; i < found.count && !real; i++)
        real = probe_file(found.paths[i]);
    return real;
}

weft_nccl *weft_nccl_anywhere(void) {
    void *real = loaded_anywhere();
    return real ? weft_nccl_with(real) : NULL;
}

/* Resolves as the linker would have for the caller: first in the libraries of the whole program, then in those that the
 * caller was loaded with. */
static void *bound_for(void *address) {
    void *real = weft_next_symbol(PROBE);
    Dl_info info;
    if (!real && dladdr(address, &info) && info.dli_fname)
        real = probe_file(info.dli_fname);
    return real ? real : loaded_anywhere();
}

weft_nccl *weft_nccl_for(void *address) {
    void *real = bound_for(address);
    weft_nccl *found = real ? weft_nccl_with(real) : NULL;
    dlerror(); /* the program must not see our failed lookups */
    return found;
}

void *weft_nccl_unlisted(const char *name, void *address) {
    Dl_info info;
    void *real = bound_for(address);
    void *handle = real && dladdr(real, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void *function = handle ? weft_real_symbol(handle, name) : NULL;
    dlerror();
    return function;
}

void weft_forget_library(void) { pthread_mutex_init(&lock, NULL); }
