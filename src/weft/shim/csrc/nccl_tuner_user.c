/* The user's own tuner plugin, which NCCL does not load if it asks weft's. It is found as NCCL would find it. */
#define _GNU_SOURCE
#include "nccl_tuner.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool searched;
static void *library;

static bool is_static(const char *name) { return strncasecmp(name, "STATIC_PLUGIN", strlen(name)) == 0; }

static void *opened(const char *name, int flags) { return dlopen(name, RTLD_NOW | RTLD_LOCAL | flags); }

/* Like NCCL, tries the name itself and then PREFIX-NAME.so. */
static void *open_named(const char *prefix, const char *name, int flags) {
    char path[512];
    void *found = opened(name, flags);
    if (!found && !strchr(name, '/') && snprintf(path, sizeof path, "%s-%s.so", prefix, name) < (int)sizeof path)
        found = opened(path, flags);
    return found;
}

/* A network plugin may also contain a tuner; NCCL has already loaded it when it asks for a tuner. */
static void *open_net_plugin(void) {
    const char *names = getenv("NCCL_NET_PLUGIN");
    if (!names || !*names)
        return opened("libnccl-net.so", RTLD_NOLOAD);
    char copy[512], *rest = NULL;
    void *found = NULL;
    snprintf(copy, sizeof copy, "%s", names);
    for (char *name = strtok_r(copy, ",", &rest); name && !found; name = strtok_r(NULL, ",", &rest))
        if (strcasecmp(name, "none") != 0 && !is_static(name))
            found = open_named("libnccl-net", name, RTLD_NOLOAD);
    return found;
}

static bool in_process; /* the user's plugin is in the process itself (STATIC_PLUGIN); written before `searched` */

/* `weft run` saves the user's NCCL_TUNER_PLUGIN in WEFT_NCCL_TUNER_PLUGIN; empty if it was not set. */
static void *open_user_library(void) {
    char room[512];
    const char *name = getenv("WEFT_NCCL_TUNER_PLUGIN");
    if (!name || !*name) /* the user set no variable, so NCCL would use the setting in its files */
        name = weft_nccl_set_in_files("NCCL_TUNER_PLUGIN", room, sizeof room) ? room : NULL;
    if (name && strcasecmp(name, "none") == 0)
        return NULL;
    if (name && *name && is_static(name)) {
        in_process = true;
        return NULL;
    }
    void *found = !name || !*name ? opened("libnccl-tuner.so", 0) : open_named("libnccl-tuner", name, 0);
    return found ? found : open_net_plugin();
}

/* Opened without our lock, since the loader holds its own lock while a library's constructor may call NCCL. */
static void *user_library(void) {
    pthread_mutex_lock(&lock);
    bool known = searched;
    void *from = library;
    pthread_mutex_unlock(&lock);
    if (known)
        return from;
    void *found = open_user_library();
    pthread_mutex_lock(&lock);
    bool first = !searched;
    searched = true;
    from = library = first ? found : library;
    pthread_mutex_unlock(&lock);
    if (!first && found)
        dlclose(found);
    return from;
}

user_tuner weft_user_tuner(int newest) {
    void *from = user_library();
    dlerror(); /* the program must not see our failed lookups */
    user_tuner found = {NULL, 0};
    bool anywhere = from || in_process;
    for (int version = newest; anywhere && !found.plugin && version >= TUNER_OLDEST; version--) {
        char name[32];
        snprintf(name, sizeof name, "ncclTunerPlugin_v%d", version);
        found.plugin = from ? weft_real_symbol(from, name) : weft_next_symbol(name);
        found.version = found.plugin ? version : 0;
    }
    dlerror();
    return found;
}

void weft_forget_tuner(void) { pthread_mutex_init(&lock, NULL); }
