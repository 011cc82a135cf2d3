/* Collectives by copy engines (comm.engine dma). NCCL copies instead of launching a kernel if the communicator or the
 * call asks for zero CTAs and the buffers are in symmetric windows. If it cannot, it silently launches its kernels.
 * Therefore each collective is counted, with the reason, and for one that should have been copied, the shim checks
 * whether this thread launched a kernel. */
#define _GNU_SOURCE
#include "nccl.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    COPIES_OF_TWO = 23102,
    SEND_ANYWHERE = 22900,
    WITH_TRAFFIC_CLASS = 22500,
    NOT_YET_KNOWN = 23300
}; /* NCCL versions */
enum { REASONS = WEFT_COUNT_ENGINE_REFUSED - WEFT_COUNT_ENGINE_COPIED };
enum { CAN = -1, UNCOUNTED = -2 };

static _Thread_local struct {
    bool open;
    uint64_t launches; /* this thread's count before the call or the group */
    uint32_t copies, elsewhere, unsure, others;
    uint32_t reasons[REASONS];
} now;

bool weft_engine_asked(void) { return weft_attach(WEFT_API_CUDA) && weft_policy_now()->data.flags & WEFT_ENGINE_DMA; }

/* --- communicators ------------------------------------------------------------------------------------------------ */

/* The first copy between two ranks can hang before 2.31.2 (github.com/NVIDIA/nccl/issues/2241). */
static bool may_hang(const weft_nccl *l, int size) { return l->version < COPIES_OF_TWO && size >= 0 && size <= 2; }

/* Extends a configuration to the current layout. NCCL accepts every layout since 2.14; the added members get the values
 * of NCCL's initializer. */
static void widen(ncclConfig_t *own) {
    if (own->version >= NCCL_WITH_CTA_POLICY && own->size >= sizeof *own)
        return;
    if (own->version < WITH_TRAFFIC_CLASS)
        own->trafficClass = NCCL_UNDEFINED;
    own->commName = NULL;
    own->collnetEnable = own->CTAPolicy = own->shrinkShare = own->nvlsCTAs = NCCL_UNDEFINED;
    own->size = sizeof *own;
    own->version = NCCL_WITH_CTA_POLICY;
}

const ncclConfig_t *weft_engine_config(weft_nccl *l, const ncclConfig_t *config, bool inherits, int size,
                                       nccl_config *room) {
    if (l->version < NCCL_WITH_COPIES || l->amd || (!config && inherits) || !l->ncclCommInitRankConfig ||
        !weft_engine_asked())
        return config;
    bool unknown = config && (config->magic != NCCL_MAGIC || config->size > sizeof *room);
    /* In a group, a refusal fails the whole group, even if the call is repeated. 2.28 to 2.32 are known to accept
     * it. */
    bool risky = weft_nccl_me.depth > 0 && l->version >= NOT_YET_KNOWN;
    if (unknown || risky || may_hang(l, size) || (size < 0 && l->version < COPIES_OF_TWO))
        return config;
    weft_config_copy(room, config);
    widen(&room->config);
    if (room->config.CTAPolicy != NCCL_UNDEFINED)
        return config; /* the program's own */
    room->config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    return &room->config;
}

/* The environment outranks every configuration of a communicator. */
static bool asks_for_zero(const weft_comm *c) {
    const char *given = getenv("NCCL_CTA_POLICY");
    if (given && *given)
        return atoi(given) == NCCL_CTA_POLICY_ZERO || strcasestr(given, "zero");
    const ncclConfig_t *own = &c->config.config;
    bool has = own->version >= NCCL_WITH_CTA_POLICY && own->size >= offsetof(ncclConfig_t, shrinkShare);
    return has && own->CTAPolicy != NCCL_UNDEFINED && own->CTAPolicy & NCCL_CTA_POLICY_ZERO;
}

/* --- one collective ----------------------------------------------------------------------------------------------- */

static bool copied_kind(int operation) {
    return operation == OP_ALL_GATHER || operation == OP_ALL_TO_ALL || operation == OP_GATHER ||
           operation == OP_SCATTER;
}

static bool in_windows(const weft_nccl *l, weft_comm *c, const void *send, const void *recv) {
    return weft_in_window(c, recv) && (l->version >= SEND_ANYWHERE || weft_in_window(c, send));
}

weft_engine_call weft_engine_look(weft_nccl *l, weft_comm *c, int operation, size_t count, const void *send,
                                  const void *recv, const ncclCollConfig_t *own) {
    weft_engine_call call = {c, UNCOUNTED, false};
    if (c->size < 0)
        weft_comm_complete(c);
    if (c->size == 1 || !count)
        return call; /* nothing is communicated */
    bool chosen = own && own->magic == NCCL_MAGIC && own->size >= sizeof *own && own->CTAPolicy != NCCL_UNDEFINED;
    bool zero = chosen ? own->CTAPolicy & NCCL_CTA_POLICY_ZERO : asks_for_zero(c);
    bool by_call = !zero && !chosen && weft_nccl_path(l) == WEFT_PATH_CONFIG && !may_hang(l, c->size);
    if (l->version < NCCL_WITH_COPIES || l->amd)
        call.why = WEFT_COUNT_ENGINE_OLD;
    else if (!copied_kind(operation))
        call.why = WEFT_COUNT_ENGINE_KIND;
    else if (!in_windows(l, c, send, recv))
        call.why = WEFT_COUNT_ENGINE_WINDOW;
    else if (!zero && !by_call)
        call.why = may_hang(l, c->size) ? WEFT_COUNT_ENGINE_TWO : WEFT_COUNT_ENGINE_POLICY;
    else
        call.why = CAN;
    call.by_call = call.why == CAN && by_call;
    return call;
}

static void open_now(void) {
    if (now.open)
        return;
    memset(&now, 0, sizeof now);
    now.open = true;
    now.launches = weft_comm_launches_here; /* nothing of a group is launched before it ends */
}

static bool on_several_nodes(const weft_comm *c) {
    const char *local = getenv("LOCAL_WORLD_SIZE");
    return local && atoi(local) > 0 && c->size > atoi(local);
}

void weft_engine_called(const weft_engine_call *call, bool own) {
    if (call->why == UNCOUNTED || !call->c)
        return;
    open_now();
    int why = call->why == CAN && !own ? WEFT_COUNT_ENGINE_WINDOW : call->why; /* a sibling has no windows */
    if (why != CAN) {
        now.others++;
        now.reasons[why - WEFT_COUNT_ENGINE_COPIED]++;
        return;
    }
    now.copies++;
    now.unsure += !call->c->blocking; /* NCCL launches from its own thread */
    now.elsewhere += on_several_nodes(call->c);
}

void weft_engine_other(void) {
    if (weft_nccl_me.depth > 0) {
        open_now();
        now.others++;
    }
}

void weft_engine_end(ncclResult_t result) {
    if (LIKELY(!now.open))
        return;
    now.open = false;
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return;
    for (int i = 0; i < REASONS; i++)
        weft_add(WEFT_COUNT_ENGINE_COPIED + i, now.reasons[i]);
    bool launched = weft_comm_launches_here != now.launches;
    if (now.unsure || (launched && now.others))
        weft_add(WEFT_COUNT_ENGINE_UNSURE, now.copies);
    else if (!launched)
        weft_add(WEFT_COUNT_ENGINE_COPIED, now.copies);
    else {
        weft_add(WEFT_COUNT_ENGINE_NODES, now.elsewhere);
        weft_add(WEFT_COUNT_ENGINE_KERNELS, now.copies - now.elsewhere);
    }
}

void weft_forget_engine(void) { now.open = false; }
