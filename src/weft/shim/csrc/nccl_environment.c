/* The settings that NCCL reads from its environment and files, and the CTA limits there, which outrank every
 * configuration.
 *
 * NCCL reads a limit only once. To keep the limits changeable, the shim hides them: while a communicator is made, the
 * variables are empty, which NCCL treats as unset, and the communicator's configuration carries the limits instead. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ENTRY = 64 };
static const char *const names[] = {[NCCL_LIMIT_MAX] = "NCCL_MAX_CTAS", [NCCL_LIMIT_MIN] = "NCCL_MIN_CTAS"};

/* --- settings --------------------------------------------------------------------------------------------------- */

static bool set_in_file(const char *path, const char *name, char *value, size_t size) {
    size_t length = strlen(name);
    char line[4096];
    bool found = false;
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = 0;
        found = strncmp(line, name, length) == 0 && line[length] == '=';
    }
    if (file)
        fclose(file);
    if (found)
        snprintf(value, size, "%.*s", (int)size - 1, line + length + 1);
    return found;
}

bool weft_nccl_set_in_files(const char *name, char *value, size_t size) {
    char path[1024];
    const char *given = getenv("NCCL_CONF_FILE"), *home = getenv("HOME");
    if (given && *given)
        snprintf(path, sizeof path, "%s", given);
    else
        snprintf(path, sizeof path, "%s/.nccl.conf", home ? home : "");
    return set_in_file(path, name, value, size) || set_in_file("/etc/nccl.conf", name, value, size);
}

/* A variable that is set but empty still hides the setting in NCCL's files. */
bool weft_nccl_setting(const char *name, char *value, size_t size) {
    const char *text = getenv(name);
    if (text)
        snprintf(value, size, "%s", text);
    return (text || weft_nccl_set_in_files(name, value, size)) && *value;
}

int weft_nccl_limit(int which) {
    char text[ENTRY];
    long value = weft_nccl_setting(names[which], text, sizeof text) ? strtol(text, NULL, 0) : 0;
    return value > 0 && value <= INT_MAX ? (int)value : 0;
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

/* --- limits that are hidden from NCCL --------------------------------------------------------------------------- */

/* putenv only replaces one pointer, under the libc's lock, so other threads may use the environment meanwhile. */
static char empty_entries[NCCL_ENVIRONMENT_LIMITS][ENTRY], written_entries[NCCL_ENVIRONMENT_LIMITS][ENTRY];
static char *kept_entries[NCCL_ENVIRONMENT_LIMITS]; /* NULL: not hidden */
static int hidden_limits[NCCL_ENVIRONMENT_LIMITS];
static int hiders;
static _Thread_local bool hiding;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Keeps the program's own string if there is one, since the program may hold a pointer to it. A limit from NCCL's files
 * becomes a variable afterwards, as NCCL itself would have set it. */
static void hide(int which) {
    const char *name = names[which], *text = getenv(name);
    kept_entries[which] = NULL;
    hidden_limits[which] = weft_nccl_limit(which);
    if (!hidden_limits[which])
        return;
    snprintf(empty_entries[which], ENTRY, "%s=", name);
    snprintf(written_entries[which], ENTRY, "%s=%d", name, hidden_limits[which]);
    char *kept = text ? (char *)text - strlen(name) - 1 : written_entries[which];
    if (putenv(empty_entries[which]) == 0)
        kept_entries[which] = kept;
}

static bool is_hidden(int which) {
    return kept_entries[which] && getenv(names[which]) == empty_entries[which] + strlen(names[which]) + 1;
}

static void show(int which) {
    if (is_hidden(which)) /* otherwise the program has set another value meanwhile */
        putenv(kept_entries[which]);
    kept_entries[which] = NULL;
}

static bool changeable(const weft_nccl *library, const ncclConfig_t *config) {
    return live() && library->version >= NCCL_WITH_CTAS && library->ncclCommInitRankConfig && !library->limits_fixed &&
           (!config || config->magic == NCCL_MAGIC) && !weft_config_too_large(config);
}

void weft_limits_fix(weft_nccl *library) {
    if (!library->limits_fixed && (weft_nccl_limit(NCCL_LIMIT_MAX) || weft_nccl_limit(NCCL_LIMIT_MIN)))
        library->limits_fixed = true;
}

const ncclConfig_t *weft_limits_begin(weft_nccl *library, const ncclConfig_t *config, bool inherits,
                                      nccl_config *room) {
    if (!changeable(library, config)) {
        weft_limits_fix(library);
        return config;
    }
    pthread_mutex_lock(&lock);
    hiding = true;
    if (hiders++ == 0)
        for (int which = 0; which < NCCL_ENVIRONMENT_LIMITS; which++)
            hide(which);
    int most = hidden_limits[NCCL_LIMIT_MAX], least = hidden_limits[NCCL_LIMIT_MIN];
    pthread_mutex_unlock(&lock);
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
    pthread_mutex_lock(&lock);
    if (--hiders == 0)
        for (int which = 0; which < NCCL_ENVIRONMENT_LIMITS; which++)
            show(which);
    pthread_mutex_unlock(&lock);
}

/* Another thread may have held the libc's lock when this child was forked, so the entries are written without it. */
static void show_in_child(int which) {
    for (char **entry = environ; entry && *entry && kept_entries[which]; entry++)
        if (*entry == empty_entries[which]) {
            *entry = kept_entries[which];
            break;
        }
    kept_entries[which] = NULL;
}

void weft_forget_environment(void) {
    pthread_mutex_init(&lock, NULL);
    for (int which = 0; which < NCCL_ENVIRONMENT_LIMITS && hiders > 0; which++)
        show_in_child(which);
    hiders = 0;
    hiding = false;
}
