/* weft's own memory in a symmetric window of one of the program's communicators, for buffers of collectives.
 *
 * Allocation affects only this rank. Registration waits for all ranks of the communicator, so they must agree on it
 * first. The memory comes from NCCL because torch's memory cannot be shared between processes. */
#define _GNU_SOURCE
#include "nccl.h"

#include <stdlib.h>

typedef struct {
    weft_nccl *l;
    weft_comm *c;
    ncclComm_t handle;
    size_t size;
    void *memory, *window;
} arena;

static weft_comm *with_key(uint64_t key) {
    for (weft_comm *c = weft_comm_first(); c; c = weft_comm_next(c))
        if (c->key == key && !atomic_load(&c->dead))
            return c;
    return NULL;
}

EXPORT int weft_nccl_arena(uint64_t key, size_t size, void **made, void **memory, char *why, size_t room) {
    weft_comm *c = key ? with_key(key) : NULL;
    if (!c)
        return weft_refuse(why, room, "there is no such communicator");
    weft_nccl *l = c->library;
    if (l->version < NCCL_WITH_COPIES || l->amd || !l->ncclMemAlloc || !l->ncclMemFree || !l->ncclCommWindowRegister)
        return weft_refuse(why, room, "this NCCL has no symmetric windows for copy engines (2.28 and newer have)");
    arena *a = calloc(1, sizeof *a);
    if (!a || l->ncclMemAlloc(memory, size) != NCCL_SUCCESS || !*memory) {
        free(a);
        return weft_refuse(why, room, "NCCL could not allocate the memory");
    }
    *a = (arena){.l = l, .c = c, .handle = c->handle, .size = size, .memory = *memory};
    *made = a;
    return 0;
}

EXPORT int weft_nccl_arena_register(void *made, char *why, size_t room) {
    arena *a = made;
    if (weft_comm_of(a->handle) != a->c)
        return weft_refuse(why, room, "the communicator has ended");
    ncclResult_t result =
        weft_on_ncclCommWindowRegister(a->l, a->handle, a->memory, a->size, &a->window, NCCL_WIN_COLL_SYMMETRIC);
    if (result != NCCL_SUCCESS)
        return weft_refuse(why, room, "NCCL refused to register a symmetric window");
    return a->window ? 0 : weft_refuse(why, room, "NCCL has no symmetric windows between these ranks");
}

/* If the communicator has ended, its windows are already gone. */
EXPORT void weft_nccl_arena_close(void *made) {
    arena *a = made;
    if (a->window && weft_comm_of(a->handle) == a->c && a->l->ncclCommWindowDeregister)
        weft_on_ncclCommWindowDeregister(a->l, a->handle, a->window);
    a->l->ncclMemFree(a->memory);
    free(a);
}
