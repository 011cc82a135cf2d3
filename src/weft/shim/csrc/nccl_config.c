/* Configurations of communicators, and the limits of CTAs that the environment sets. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LIMIT_MAX, LIMIT_MIN, ENVIRONMENT_LIMITS };
enum { NAMES = 64 };
static const char *const limit_names[] = {"NCCL_MAX_CTAS", "NCCL_MIN_CTAS"};

static int limit_in_environment(int which) {
    const char *text = getenv(limit_names[which]);
    int value = text ? atoi(text) : 0;
    return value > 0 ? value : 0;
}

static bool live(void) {
    static _Atomic int state;
    int known = atomic_load_explicit(&state, memory_order_relaxed);
    if (known == 0) {
        const char *asked = getenv("WEFT_LIVE");
        known = asked && *asked && strcmp(asked, "0") != 0 && weft_enabled() ? 1 : -1;
        atomic_store_explicit(&state, known, memory_order_relaxed);
    }
    return known > 0;
}

static bool has_ctas(const ncclConfig_t *config) {
    return config && config->magic == NCCL_MAGIC && config->version >= NCCL_WITH_CTAS &&
           config->size >= offsetof(ncclConfig_t, splitShare) && config->size <= NCCL_CONFIG_BYTES;
}

static void fresh(ncclConfig_t *config) {
    memset(config, 0, sizeof *config);
    config->size = offsetof(ncclConfig_t, trafficClass) + sizeof(int); /* padded, as the 2.18 layout */
    config->magic = NCCL_MAGIC;
    config->version = NCCL_WITH_SPLIT;
    config->blocking = config->cgaClusterSize = config->minCTAs = config->maxCTAs = config->splitShare = NCCL_UNDEFINED;
    config->trafficClass = NCCL_UNDEFINED;
}

void weft_config_copy(nccl_config *into, const ncclConfig_t *config) {
    fresh(&into->config);
    if (has_ctas(config))
        memcpy(into, config, config->size);
    else if (config && config->magic == NCCL_MAGIC && config->size >= offsetof(ncclConfig_t, cgaClusterSize))
        into->config.blocking = config->blocking;
}

/* NCCL lets the environment outrank every configuration, and reads it once. To keep the limits changeable it must
 * not find them: while a communicator is made, the entries of `environ` point elsewhere. */
static char hidden_entries[][40] = {"WEFT_HIDDEN_NCCL_MAX_CTAS=1", "WEFT_HIDDEN_NCCL_MIN_CTAS=1"};
static char *kept_entries[ENVIRONMENT_LIMITS];
static int hidden_limits[ENVIRONMENT_LIMITS];
static int hiders;
static _Thread_local bool hiding;
static pthread_mutex_t hide_lock = PTHREAD_MUTEX_INITIALIZER;

static void hide(void) {
    for (int which = 0; which < ENVIRONMENT_LIMITS; which++) {
        size_t length = strlen(limit_names[which]);
        hidden_limits[which] = limit_in_environment(which);
        kept_entries[which] = NULL;
        for (char **entry = environ; entry && *entry && hidden_limits[which]; entry++)
            if (strncmp(*entry, limit_names[which], length) == 0 && (*entry)[length] == '=') {
                kept_entries[which] = *entry;
                __atomic_store_n(entry, hidden_entries[which], __ATOMIC_RELEASE);
                break;
            }
    }
}

static void show(void) {
    for (int which = 0; which < ENVIRONMENT_LIMITS; which++)
        for (char **entry = environ; entry && *entry && kept_entries[which]; entry++)
            if (*entry == hidden_entries[which]) {
                __atomic_store_n(entry, kept_entries[which], __ATOMIC_RELEASE);
                break;
            }
}

const ncclConfig_t *weft_limits_begin(weft_nccl *library, const ncclConfig_t *config, bool inherits,
                                      nccl_config *room) {
    if (!live() || library->version < NCCL_WITH_CTAS || !library->ncclCommInitRankConfig || library->limits_fixed ||
        (config && config->magic != NCCL_MAGIC)) {
        if (limit_in_environment(LIMIT_MAX) || limit_in_environment(LIMIT_MIN))
            library->limits_fixed = true;
        return config;
    }
    pthread_mutex_lock(&hide_lock);
    hiding = true;
    if (hiders++ == 0)
        hide();
    int most = hidden_limits[LIMIT_MAX], least = hidden_limits[LIMIT_MIN];
    pthread_mutex_unlock(&hide_lock);
    if ((!most && !least) || (!config && inherits))
        return config;
    weft_config_copy(room, config);
    if (most)
        room->config.maxCTAs = most;
    if (least)
        room->config.minCTAs = least;
    if (room->config.maxCTAs > 0 && room->config.minCTAs > room->config.maxCTAs)
        room->config.minCTAs = room->config.maxCTAs;
    return &room->config;
}

void weft_limits_end(void) {
    if (!hiding)
        return;
    hiding = false;
    pthread_mutex_lock(&hide_lock);
    if (--hiders == 0)
        show();
    pthread_mutex_unlock(&hide_lock);
}

/* A program has few networks and may make communicators without end: each name is copied once. */
static const char *kept_name(const char *name) {
    static char *names[NAMES];
    pthread_mutex_lock(&hide_lock);
    int i = 0;
    while (i < NAMES && names[i] && strcmp(names[i], name) != 0)
        i++;
    if (i < NAMES && !names[i])
        names[i] = strdup(name);
    const char *kept = i < NAMES ? names[i] : NULL;
    pthread_mutex_unlock(&hide_lock);
    return kept;
}

void weft_comm_configure(weft_comm *c, const ncclConfig_t *config, const weft_comm *parent) {
    if (!config && parent)
        c->config = parent->config;
    else
        weft_config_copy(&c->config, config);
    ncclConfig_t *own = &c->config.config;
    if (own->netName) /* the program may free its own */
        own->netName = kept_name(own->netName);
    if (own->size >= offsetof(ncclConfig_t, commName) + sizeof own->commName)
        own->commName = NULL;
    int fixed = c->library->limits_fixed ? limit_in_environment(LIMIT_MAX) : 0;
    c->max_ctas = fixed ? fixed : own->maxCTAs > 0 ? own->maxCTAs : 0;
    const char *blocking = getenv("NCCL_COMM_BLOCKING"), *share = getenv("NCCL_COMM_SPLIT_SHARE_RESOURCES");
    c->blocking = blocking && *blocking ? atoi(blocking) != 0 : own->blocking != 0;
    c->shares = share && *share ? atoi(share) == 1 : own->splitShare == 1;
}

void weft_forget_config(void) {
    pthread_mutex_init(&hide_lock, NULL);
    if (hiders > 0)
        show();
    hiders = 0;
    hiding = false;
}
