/* The configuration of one collective call: the rules' settings added to the program's own. */
#include "nccl.h"

#include <string.h>

static const char *const algorithms[] = {NULL,           "tree", "ring",     "collnetdirect",
                                         "collnetchain", "nvls", "nvlstree", "pat"};
enum { ALGORITHMS = sizeof algorithms / sizeof *algorithms };

static void fresh(ncclCollConfig_t *config) {
    memset(config, 0, sizeof *config);
    config->size = sizeof *config;
    config->magic = NCCL_MAGIC;
    config->version = NCCL_WITH_CALL_CONFIG;
    config->minCTAs = config->maxCTAs = config->nvlsCTAs = config->cgaClusterSize = config->CTAPolicy = NCCL_UNDEFINED;
    config->forceAlgSelection = 1; /* as in NCCL's own initializer */
}

/* A rule sets the exact number of CTAs, if NCCL supports it; the limit for all other calls only lowers NCCL's
 * choice. */
static bool set_ctas(ncclCollConfig_t *config, const weft_comm_rule *rule, uint32_t limit, int most) {
    bool by_rule = rule && rule->ctas;
    int ctas = (int)(by_rule ? rule->ctas : limit);
    if (!ctas || config->maxCTAs != NCCL_UNDEFINED || config->minCTAs != NCCL_UNDEFINED)
        return false;
    if (most > 0 && ctas > most)
        ctas = most; /* NCCL ignores a number above the communicator's */
    config->maxCTAs = ctas;
    if (by_rule)
        config->minCTAs = ctas;
    if (config->nvlsCTAs == NCCL_UNDEFINED)
        config->nvlsCTAs = ctas;
    return true;
}

/* All collectives of a group share one cluster size: that of the first. */
static bool set_cluster(ncclCollConfig_t *config, const weft_comm_rule *rule) {
    weft_nccl_thread *me = &weft_nccl_me;
    if (config->cgaClusterSize != NCCL_UNDEFINED) {
        me->cluster = config->cgaClusterSize + 1;
        return false;
    }
    int cluster = me->depth > 0 && me->cluster >= 0 ? me->cluster : rule ? (int)rule->cluster : 0;
    if (me->depth > 0)
        me->cluster = cluster;
    if (cluster > 0)
        config->cgaClusterSize = cluster - 1;
    return cluster > 0;
}

static bool set_algorithm(ncclCollConfig_t *config, const weft_comm_rule *rule) {
    if (!rule || !rule->algorithm || rule->algorithm >= ALGORITHMS || (config->algSelection && *config->algSelection))
        return false;
    config->algSelection = algorithms[rule->algorithm];
    config->forceAlgSelection = 0; /* if it is impossible, NCCL chooses */
    return true;
}

static bool set_policy(ncclCollConfig_t *config, const weft_comm_rule *rule, bool zero) {
    int asked = rule && rule->cta_policy ? (int)rule->cta_policy : zero ? NCCL_CTA_POLICY_ZERO : 0;
    if (!asked || config->CTAPolicy != NCCL_UNDEFINED)
        return false;
    config->CTAPolicy = asked;
    return true;
}

static bool fill(weft_comm *c, const weft_call_rules *rules, const weft_comm_rule *rule, bool zero,
                 ncclCollConfig_t *config) {
    bool any = set_ctas(config, rule, rules ? rules->limit : 0, c->max_ctas);
    any |= set_cluster(config, rule);
    any |= set_algorithm(config, rule);
    return set_policy(config, rule, zero) || any;
}

/* Whether weft may extend this configuration. One that NCCL would refuse is left unchanged, since weft's copy of it
 * could turn out valid. */
static bool known(const ncclCollConfig_t *own) {
    return own->magic == NCCL_MAGIC && own->size >= sizeof *own && own->size <= sizeof(nccl_call_config) &&
           (own->forceAlgSelection == 0 || own->forceAlgSelection == 1);
}

/* Whether the whole rule reaches NCCL. A configuration works for all collectives, the tuner plugin for the first five.
 * The CTAs of other operations are limited when the program starts, if a rule covers every size. */
static bool reaches(weft_nccl *l, int operation, const weft_call_rules *rules, const weft_comm_rule *rule) {
    if (operation < OP_ALL_TO_ALL)
        return !weft_rule_why_not(l, rule);
    if (operation < OP_SEND && weft_nccl_path(l) == WEFT_PATH_CONFIG)
        return true;
    return rules == weft_call_rules_at_start() && !rule->min_bytes && rule->max_bytes == UINT64_MAX;
}

const ncclCollConfig_t *weft_call_config(weft_nccl *l, weft_comm *c, int operation, uint64_t bytes, bool captured,
                                         bool zero, const ncclCollConfig_t *own, nccl_call_config *room) {
    const weft_call_rules *rules = captured ? weft_call_rules_at_start() : weft_nccl_me.rules;
    bool grouped = weft_nccl_me.depth > 0 && weft_nccl_me.cluster > 0;
    if (!rules && !grouped)
        return NULL;
    if (c->size < 0)
        weft_comm_complete(c);
    const weft_comm_rule *rule = weft_rule_of(rules, operation, weft_call_bytes(operation, bytes, c->size));
    bool by_config = operation < OP_SEND && weft_nccl_path(l) == WEFT_PATH_CONFIG;
    bool unknown = own && !known(own); /* left as the program wrote it */
    if (rule && (unknown || !reaches(l, operation, rules, rule)))
        weft_count(WEFT_COUNT_RULES_UNAPPLIED);
    if (!by_config || unknown)
        return NULL;
    if (own)
        memcpy(room, own, own->size);
    else
        fresh(&room->config);
    return fill(c, rules, rule, zero, &room->config) ? &room->config : NULL;
}
