/* Configurations of communicators. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NAMES = 64 };

static bool has_ctas(const ncclConfig_t *config) {
    return config && config->magic == NCCL_MAGIC && config->version >= NCCL_WITH_CTAS &&
           config->size >= offsetof(ncclConfig_t, splitShare);
}

bool weft_config_too_large(const ncclConfig_t *config) {
    return config && config->magic == NCCL_MAGIC && config->size > NCCL_CONFIG_BYTES;
}

static void fresh(ncclConfig_t *config) {
    memset(config, 0, sizeof *config);
    config->size = offsetof(ncclConfig_t, trafficClass) + sizeof(int); /* the 2.18 layout, with its padding */
    config->magic = NCCL_MAGIC;
    config->version = NCCL_WITH_SPLIT;
    config->blocking = config->cgaClusterSize = config->minCTAs = config->maxCTAs = config->splitShare = NCCL_UNDEFINED;
    config->trafficClass = NCCL_UNDEFINED;
}

void weft_config_copy(nccl_config *into, const ncclConfig_t *config) {
    fresh(&into->config);
    if (has_ctas(config)) {
        size_t known = weft_config_too_large(config) ? NCCL_CONFIG_BYTES : config->size;
        memcpy(into, config, known);
        into->config.size = known;
    } else if (config && config->magic == NCCL_MAGIC && config->size >= offsetof(ncclConfig_t, cgaClusterSize))
        into->config.blocking = config->blocking;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A program has few networks but may make any number of communicators, so each name is copied once. */
static const char *kept_name(const char *name) {
    static char *names[NAMES];
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < NAMES && names[i] && strcmp(names[i], name) != 0)
        i++;
    if (i < NAMES && !names[i])
        names[i] = strdup(name);
    const char *kept = i < NAMES ? names[i] : NULL;
    pthread_mutex_unlock(&lock);
    return kept;
}

void weft_comm_configure(weft_comm *c, const ncclConfig_t *config, const weft_comm *parent) {
    if (!config && parent)
        c->config = parent->config;
    else
        weft_config_copy(&c->config, config);
    c->cut = config ? weft_config_too_large(config) : parent && parent->cut;
    ncclConfig_t *own = &c->config.config;
    if (own->netName) /* the program may free its own string */
        own->netName = kept_name(own->netName);
    if (own->size >= offsetof(ncclConfig_t, commName) + sizeof own->commName)
        own->commName = NULL;
    int fixed = c->library->limits_fixed ? weft_nccl_limit(NCCL_LIMIT_MAX) : 0;
    c->max_ctas = fixed ? fixed : own->maxCTAs > 0 ? own->maxCTAs : 0;
    char text[16];
    c->blocking = weft_nccl_setting("NCCL_COMM_BLOCKING", text, sizeof text) ? atoi(text) != 0 : own->blocking != 0;
    c->shares = weft_nccl_setting("NCCL_COMM_SPLIT_SHARE_RESOURCES", text, sizeof text) ? atoi(text) == 1
                                                                                        : own->splitShare == 1;
}

void weft_forget_config(void) { pthread_mutex_init(&lock, NULL); }
