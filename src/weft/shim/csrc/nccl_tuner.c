/* A tuner plugin for NCCL that answers from the policy's rules. NCCL finds it in the process itself if
 * NCCL_TUNER_PLUGIN is STATIC_PLUGIN and asks it when it plans a collective. An error would fail the call, so the
 * plugin never returns one. The answer of the user's own plugin applies unless a rule overrides it. */
#include "nccl_tuner.h"
#include "cuda_shim.h"

#include <stdlib.h>
#include <string.h>

enum { COSTS = 64 };
#define ALMOST_FREE 1e-6f

/* The state for one communicator. NCCL asks for chunk sizes per channel, after it has asked about every collective of
 * the group, and passes the bytes of one channel instead of the collective's size. Therefore the chunk size of each
 * function is remembered. */
typedef struct {
    weft_nccl *library;
    user_tuner user;
    void *user_context;
    size_t ranks;
    bool chunks_asked;
    struct {
        uint64_t chunk;
        bool known, differs;
    } planned[TUNER_FUNCTIONS];
} tuner;

static const int operations[TUNER_FUNCTIONS] = {OP_BROADCAST, OP_REDUCE, OP_ALL_GATHER, OP_REDUCE_SCATTER,
                                                OP_ALL_REDUCE};

/* --- rules ------------------------------------------------------------------------------------------------------ */

/* The rules of the calling thread's group. If a group has several communicators, NCCL plans them on its own threads. */
static const weft_call_rules *rules_of_plan(void) {
    bool mine = weft_nccl_me.inside > 0;
    bool captured = mine ? weft_nccl_me.captured : weft_capture_open();
    return captured ? weft_call_rules_at_start() : mine ? weft_nccl_me.rules : weft_call_rules_now();
}

static bool is_possible(float cost) { return cost >= 0; }

/* Sets the cost of the cheapest entry that the rule allows to zero, so that NCCL chooses it. */
static bool prefer(const weft_comm_rule *rule, bool algorithm_too, float *costs, int algorithms, int protocols) {
    uint32_t algorithm = algorithm_too ? rule->algorithm : 0;
    int best = -1;
    if (!algorithm && !rule->protocol)
        return true;
    for (int i = 0; i < algorithms * protocols; i++)
        if (is_possible(costs[i]) && (!algorithm || i / protocols == (int)algorithm - 1) &&
            (!rule->protocol || i % protocols == (int)rule->protocol - 1) && (best < 0 || costs[i] < costs[best]))
            best = i;
    for (int i = 0; i < algorithms * protocols && best >= 0; i++)
        if (i == best)
            costs[i] = 0;
        else if (costs[i] == 0) /* the choice of the user's plugin; of two zero costs, NCCL takes the first */
            costs[i] = ALMOST_FREE;
    return best >= 0;
}

/* NCCL gives a small collective fewer channels, according to these sizes, but uses a plugin's number unchanged. So the
 * limit is lowered here in the same way. */
static int limited(int ctas, size_t bytes, size_t ranks, const float *costs, int algorithms, int protocols) {
    int best = -1;
    for (int i = 0; i < algorithms * protocols; i++)
        if (is_possible(costs[i]) && (best < 0 || costs[i] < costs[best]))
            best = i;
    int algorithm = best / protocols, protocol = best % protocols;
    if (best < 0 || algorithm >= ALGORITHM_COLLNET_DIRECT)
        return ctas;
    size_t per_channel = protocol == PROTOCOL_SIMPLE  ? 512 * 64
                         : protocol == PROTOCOL_LL128 ? 640 * 8
                                                      : 512 * 8 * (algorithm == ALGORITHM_RING ? ranks : 1);
    size_t channels = bytes / (per_channel ? per_channel : 1);
    return channels < 1 ? 1 : channels < (size_t)ctas ? (int)channels : ctas;
}

/* NCCL versions that ask for chunk sizes (2.30 and newer) plan on the thread that ends the group, with two exceptions:
 * non-blocking groups, which launch even when they should only be simulated, and NCCL_SINGLE_PROC_MEM_REG_ENABLE. */
static void remember_chunk(tuner *t, int function, uint64_t chunk) {
    if (weft_nccl_me.simulating)
        return;            /* no plan follows */
    if (t->chunks_asked) { /* this is a new plan */
        memset(t->planned, 0, sizeof t->planned);
        t->chunks_asked = false;
    }
    t->planned[function].differs |= t->planned[function].known && t->planned[function].chunk != chunk;
    t->planned[function].chunk = chunk;
    t->planned[function].known = true;
}

static void answer(tuner *t, int function, size_t bytes, float **table, int algorithms, int protocols, int *channels) {
    const weft_call_rules *rules = rules_of_plan();
    float *costs = (float *)table;
    if (function < 0 || function >= TUNER_FUNCTIONS || algorithms <= 0 || protocols <= 0)
        return;
    const weft_comm_rule *rule = weft_rule_of(rules, operations[function], bytes);
    remember_chunk(t, function, rule ? rule->chunk : 0);
    bool all = !t->library || weft_nccl_path(t->library) != WEFT_PATH_CONFIG; /* false: the call's configuration acts */
    bool possible = !rule || prefer(rule, all, costs, algorithms, protocols);
    if (!possible)
        weft_count(WEFT_COUNT_RULES_UNAPPLIED);
    if (all && rule && rule->ctas)
        *channels = (int)rule->ctas;
    else if (all && rules && rules->limit)
        *channels = limited((int)rules->limit, bytes, t->ranks, costs, algorithms, protocols);
    if (rule && possible)
        weft_count(WEFT_COUNT_TUNED);
}

/* --- the interface ---------------------------------------------------------------------------------------------- */

static tuner *start(int version, void *caller, size_t ranks, void **context) {
    tuner *t = calloc(1, sizeof *t);
    *context = t;
    if (!t)
        return NULL; /* all later questions are then left unanswered */
    t->ranks = ranks;
    t->library = weft_nccl_at(caller);
    if (!t->library)
        t->library = weft_nccl_anywhere();
    if (t->library)
        atomic_store(&t->library->tuner, version);
    t->user = weft_user_tuner(version);
    if (weft_attach(WEFT_API_CUDA)) {
        atomic_store(&weft_hot.self->nccl_user_tuner, (uint32_t)t->user.version);
        weft_call_rules_begin();
    }
    return t;
}

/* After an error of the user's plugin, NCCL chooses by itself, as NCCL documents. */
static void started(tuner *t, ncclResult_t result) {
    if (result == NCCL_SUCCESS)
        return;
    weft_count(WEFT_COUNT_TUNER_FAILURES);
    t->user.plugin = NULL;
}

static ncclResult_t init_v4(size_t ranks, size_t nodes, void *log, void **context) {
    tuner *t = start(4, __builtin_return_address(0), ranks, context);
    if (t && t->user.plugin)
        started(t, ((tuner_init_v4)t->user.plugin->init)(ranks, nodes, log, &t->user_context));
    return NCCL_SUCCESS;
}

static ncclResult_t start_newer(int version, void *caller, void **context, uint64_t id, size_t ranks, size_t nodes,
                                void *log, void *domain, void *constants) {
    tuner *t = start(version, caller, ranks, context);
    if (t && t->user.plugin)
        started(t, t->user.version >= 5 ? ((tuner_init_v5)t->user.plugin->init)(&t->user_context, id, ranks, nodes, log,
                                                                                domain, constants)
                                        : ((tuner_init_v4)t->user.plugin->init)(ranks, nodes, log, &t->user_context));
    return NCCL_SUCCESS;
}

static ncclResult_t init_v5(void **context, uint64_t id, size_t ranks, size_t nodes, void *log, void *domain,
                            void *constants) {
    return start_newer(5, __builtin_return_address(0), context, id, ranks, nodes, log, domain, constants);
}

static ncclResult_t init_v6(void **context, uint64_t id, size_t ranks, size_t nodes, void *log, void *domain,
                            void *constants) {
    return start_newer(6, __builtin_return_address(0), context, id, ranks, nodes, log, domain, constants);
}

static bool has(const float *costs, int algorithm, int algorithms, int protocols) {
    return algorithm < algorithms && PROTOCOL_SIMPLE < protocols &&
           is_possible(costs[algorithm * protocols + PROTOCOL_SIMPLE]);
}

/* A v2 plugin returns one algorithm and protocol, while later versions fill a table. Translated as NCCL itself does. */
static ncclResult_t ask_v2(tuner *t, int function, size_t bytes, int pipelined, float *costs, int algorithms,
                           int protocols, int *channels) {
    int algorithm = -1, protocol = -1;
    bool nvls =
        has(costs, ALGORITHM_NVLS, algorithms, protocols) || has(costs, ALGORITHM_NVLS_TREE, algorithms, protocols);
    bool collnet = has(costs, ALGORITHM_COLLNET_CHAIN, algorithms, protocols);
    ncclResult_t result = ((tuner_info_v2)t->user.plugin->info)(t->user_context, function, bytes, collnet, nvls,
                                                                pipelined, &algorithm, &protocol, channels);
    bool named = algorithm >= 0 && algorithm < algorithms && protocol >= 0 && protocol < protocols;
    if (named && is_possible(costs[algorithm * protocols + protocol]))
        costs[algorithm * protocols + protocol] = 0;
    return result;
}

static void ask_user(tuner *t, int function, size_t bytes, int pipelined, float **costs, int algorithms, int protocols,
                     int registered, int *channels) {
    float kept[COSTS];
    size_t size = (size_t)algorithms * (size_t)protocols * sizeof *kept;
    int channels_before = *channels;
    if (algorithms <= 0 || protocols <= 0 || size > sizeof kept)
        return;
    memcpy(kept, costs, size);
    ncclResult_t result =
        t->user.version == 2 ? ask_v2(t, function, bytes, pipelined, (float *)costs, algorithms, protocols, channels)
        : t->user.version == 3
            ? ((tuner_info_v3)t->user.plugin->info)(t->user_context, function, bytes, pipelined, costs, algorithms,
                                                    protocols, channels)
            : ((tuner_info_v4)t->user.plugin->info)(t->user_context, function, bytes, pipelined, costs, algorithms,
                                                    protocols, registered, channels);
    if (result != NCCL_SUCCESS) {
        weft_count(WEFT_COUNT_TUNER_FAILURES);
        memcpy(costs, kept, size);
        *channels = channels_before;
    }
}

static ncclResult_t info(void *context, int function, size_t bytes, int pipelined, float **costs, int algorithms,
                         int protocols, int registered, int *channels) {
    tuner *t = context;
    if (t && t->user.plugin)
        ask_user(t, function, bytes, pipelined, costs, algorithms, protocols, registered, channels);
    if (t)
        answer(t, function, bytes, costs, algorithms, protocols, channels);
    return NCCL_SUCCESS;
}

static ncclResult_t chunk(void *context, int function, size_t bytes, int algorithm, int protocol, int channels,
                          size_t *size) {
    tuner *t = context;
    if (!t)
        return NCCL_SUCCESS;
    size_t before = *size;
    if (t->user.plugin && t->user.version >= 6 && t->user.plugin->chunk &&
        t->user.plugin->chunk(t->user_context, function, bytes, algorithm, protocol, channels, size) != NCCL_SUCCESS) {
        weft_count(WEFT_COUNT_TUNER_FAILURES);
        *size = before;
    }
    t->chunks_asked = true;
    if (function >= 0 && function < TUNER_FUNCTIONS && t->planned[function].chunk && !t->planned[function].differs)
        *size = t->planned[function].chunk;
    return NCCL_SUCCESS;
}

static ncclResult_t end(void *context) {
    tuner *t = context;
    if (t && t->user.plugin && t->user.plugin->end && t->user.plugin->end(t->user_context) != NCCL_SUCCESS)
        weft_count(WEFT_COUNT_TUNER_FAILURES);
    free(t);
    return NCCL_SUCCESS;
}

EXPORT const tuner_plugin ncclTunerPlugin_v4 = {"weft", (void *)init_v4, (void *)info, end, NULL};
EXPORT const tuner_plugin ncclTunerPlugin_v5 = {"weft", (void *)init_v5, (void *)info, end, NULL};
EXPORT const tuner_plugin ncclTunerPlugin_v6 = {"weft", (void *)init_v6, (void *)info, end, chunk};
