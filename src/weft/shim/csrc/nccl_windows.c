/* Symmetric windows: memory that all ranks of a communicator have registered and that copy engines can access.
 *
 * They are looked up only if the policy asks for copy engines, so a lock and a list are enough. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    weft_comm *c;
    uintptr_t start, end;
    void *handle;
    void **where; /* where NCCL writes the handle when this thread's group ends; NULL: the window exists */
    pthread_t thread;
} window;

static window *windows;
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local bool waiting; /* this thread's group has windows that do not exist yet */

static bool grow(void) {
    if (count < room)
        return true;
    size_t wider = room ? 2 * room : 64;
    window *grown = realloc(windows, wider * sizeof *grown);
    if (!grown)
        return false; /* collectives on this window then count as not in a window */
    windows = grown;
    room = wider;
    return true;
}

/* If NCCL cannot make a symmetric window, it succeeds but returns none. In a group, the window exists only when the
 * group ends. The handle of a window made in the background is written later, to memory of the program, so weft never
 * learns of it. */
void weft_window_add(weft_comm *c, void *buffer, size_t size, void **window_at, int flags, ncclResult_t result) {
    bool later = weft_nccl_me.depth > 0;
    if (result != NCCL_SUCCESS || !window_at || !(flags & NCCL_WIN_COLL_SYMMETRIC) || (!later && !*window_at))
        return;
    uintptr_t start = (uintptr_t)buffer;
    waiting |= later;
    pthread_mutex_lock(&lock);
    if (grow())
        windows[count++] = (window){.c = c,
                                    .start = start,
                                    .end = start + size,
                                    .handle = later ? NULL : *window_at,
                                    .where = later ? window_at : NULL,
                                    .thread = pthread_self()};
    pthread_mutex_unlock(&lock);
}

static void remove_at(size_t i) { windows[i] = windows[--count]; }

void weft_windows_settle(bool made) {
    if (LIKELY(!waiting))
        return;
    waiting = false;
    pthread_mutex_lock(&lock);
    for (size_t i = count; i-- > 0;) {
        if (!windows[i].where || !pthread_equal(windows[i].thread, pthread_self()))
            continue;
        windows[i].handle = made ? *windows[i].where : NULL;
        windows[i].where = NULL;
        if (!windows[i].handle)
            remove_at(i);
    }
    pthread_mutex_unlock(&lock);
}

void weft_window_remove(weft_comm *c, const void *handle) {
    pthread_mutex_lock(&lock);
    for (size_t i = count; i-- > 0;)
        if (windows[i].c == c && !windows[i].where && windows[i].handle == handle)
            remove_at(i);
    pthread_mutex_unlock(&lock);
}

void weft_windows_drop(weft_comm *c) {
    pthread_mutex_lock(&lock);
    for (size_t i = count; i-- > 0;)
        if (windows[i].c == c)
            remove_at(i);
    pthread_mutex_unlock(&lock);
}

/* Like NCCL, checks only the first byte. */
bool weft_in_window(weft_comm *c, const void *buffer) {
    uintptr_t at = (uintptr_t)buffer;
    bool found = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count && !found; i++)
        found = windows[i].c == c && !windows[i].where && at >= windows[i].start && at < windows[i].end;
    pthread_mutex_unlock(&lock);
    return found;
}

void weft_forget_windows(void) {
    pthread_mutex_init(&lock, NULL);
    count = 0;
    waiting = false;
}
