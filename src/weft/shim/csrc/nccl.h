/* The NCCL side of the shim: the program's communicators, their siblings with other CTA limits, and which of them a
 * collective uses. src/weft/shim/nccl_binding.py mirrors weft_nccl_info and weft_nccl_call. */
#ifndef WEFT_NCCL_H
#define WEFT_NCCL_H

#include "nccl_api.h"
#include "weft.h"

enum { NCCL_LIBRARIES = 4, NCCL_LIMITS = 16, NCCL_WHY = 256, NCCL_CONFIG_BYTES = 256 };

enum { /* operations, in the order of NCCL_OPERATIONS in layout.py */
       OP_ALL_REDUCE,
       OP_BROADCAST,
       OP_REDUCE,
       OP_ALL_GATHER,
       OP_REDUCE_SCATTER,
       OP_ALL_TO_ALL,
       OP_GATHER,
       OP_SCATTER,
       OP_SEND,
       OP_RECV,
       NCCL_OPERATIONS,
};

/* An NCCL library in this process: its own functions, NULL if it lacks one. */
typedef struct {
    void *base; /* load address */
    int version;
    bool amd;                  /* it is RCCL */
    _Atomic bool limits_fixed; /* it has read a CTA limit from the environment, which outranks any configuration */
#define HOOK(name, args, ...) ncclResult_t (*name)(__VA_ARGS__);
#include "nccl_hooks.def"
    _Atomic bool config_refused; /* it has refused a per-call configuration that weft knows to be valid */
    _Atomic int tuner;           /* version of the interface by which it asks weft's tuner plugin; 0: it does not */
    ncclResult_t (*ncclGetVersion)(int *);
    const char *(*ncclGetErrorString)(ncclResult_t);
    const char *(*ncclGetLastError)(ncclComm_t);
    ncclResult_t (*ncclCommCount)(ncclComm_t, int *);
    ncclResult_t (*ncclCommUserRank)(ncclComm_t, int *);
    ncclResult_t (*ncclCommCuDevice)(ncclComm_t, int *);
    ncclResult_t (*ncclMemAlloc)(void **, size_t);
    ncclResult_t (*ncclMemFree)(void *);
} weft_nccl;

typedef union {
    ncclConfig_t config;
    char bytes[NCCL_CONFIG_BYTES]; /* later versions are longer */
} nccl_config;

/* A communicator of the program. Its memory is never freed, and reused for another communicator only much later, since
 * a thread may still be reading it. */
typedef struct weft_comm {
    struct weft_comm *next; /* in creation order */
    struct weft_comm *next_unused;
    weft_nccl *library;
    _Atomic(ncclComm_t) handle;
    uint64_t key;                   /* 0: unknown */
    _Atomic int rank, size, device; /* -1: not known yet */
    int max_ctas;                   /* 0: NCCL's choice */
    uint32_t order;
    nccl_config config; /* the configuration it was created with */
    bool blocking, shares;
    bool cut;   /* its configuration is larger than weft can copy */
    bool leads; /* the first communicator with this key in the process: only its calls are recorded */
    _Atomic bool dead, registered;
    _Atomic bool suspended;              /* by the program, to free its memory: it cannot be used */
    _Atomic bool revoked;                /* by the program: NCCL refuses all calls on it */
    _Atomic uint32_t suspended_siblings; /* one bit per place */
    _Atomic bool splitting;              /* a background split by weft did not finish by its deadline */
    _Atomic uint32_t splits;
    _Atomic uint64_t collectives, point_to_point, bytes[NCCL_OPERATIONS];
    _Atomic(ncclComm_t) sibling[NCCL_LIMITS]; /* by place of the limit; place 0 is never filled */
} weft_comm;

/* --- nccl_library.c: the libraries of this process ----------------------------------------------------------- */

extern weft_nccl weft_nccl_libraries[NCCL_LIBRARIES];
weft_nccl *weft_nccl_with(void *real);   /* the library that has this function; NULL if there are too many libraries */
weft_nccl *weft_nccl_for(void *address); /* the library that code at this address calls */
weft_nccl *weft_nccl_at(void *address);  /* the known library that contains this address, or NULL */
weft_nccl *weft_nccl_anywhere(void);     /* any loaded NCCL library, or NULL */
void *weft_nccl_unlisted(const char *name, void *address); /* a function of a library beyond NCCL_LIBRARIES */

/* --- nccl_comms.c: the program's communicators and calls ------------------------------------------------ */

weft_comm *weft_comm_of(ncclComm_t handle);             /* NULL: unknown */
weft_nccl *weft_nccl_of(weft_nccl *l, ncclComm_t comm); /* the library that made it; if unknown, `l`, the caller's */
weft_comm *weft_comm_new(void);                         /* NULL: out of memory */
void weft_comm_add(weft_comm *c, ncclComm_t handle);
void weft_comm_gone(weft_comm *c);
weft_comm *weft_comm_first(void);
weft_comm *weft_comm_next(weft_comm *c);
void weft_comm_complete(weft_comm *c); /* asks NCCL for the facts that are still unknown */
uint64_t weft_key(uint64_t seed, const void *data, size_t size);
const char *weft_comm_why_not(weft_comm *c); /* NULL: it can have siblings */
void weft_comm_called(weft_comm *c, int operation, uint64_t bytes, bool routed);
void weft_comm_boundary(void); /* called outside groups, where the callback may run */

/* --- nccl_config.c --------------------------------------------------------------------------------------- */

void weft_comm_configure(weft_comm *c, const ncclConfig_t *config, const weft_comm *parent);
void weft_config_copy(nccl_config *into, const ncclConfig_t *config); /* NULL: NCCL's initializer */
bool weft_config_too_large(const ncclConfig_t *config);               /* a copy would lack its last members */

/* --- nccl_environment.c: the settings that NCCL reads from the environment and nccl.conf ---------------------- */

enum { NCCL_LIMIT_MAX, NCCL_LIMIT_MIN, NCCL_ENVIRONMENT_LIMITS };

bool weft_nccl_setting(const char *name, char *value, size_t size);      /* false: unset or empty */
bool weft_nccl_set_in_files(const char *name, char *value, size_t size); /* ignores the environment */
int weft_nccl_limit(int which);                                          /* CTAs; 0: no limit */
void weft_limits_fix(weft_nccl *library); /* the library is about to read the limits, if there are any */

/* Hides the limits in the environment and adds them to the configuration, if they must stay changeable. A communicator
 * that inherits its configuration inherits them too. */
const ncclConfig_t *weft_limits_begin(weft_nccl *library, const ncclConfig_t *config, bool inherits, nccl_config *room);
void weft_limits_end(void);

/* --- nccl_windows.c: memory that all ranks of a communicator registered as a symmetric window ------------------ */

void weft_window_add(weft_comm *c, void *buffer, size_t size, void **window, int flags, ncclResult_t result);
void weft_window_remove(weft_comm *c, const void *window);
void weft_windows_settle(bool made);  /* this thread's group has ended; `made`: its windows now exist */
void weft_windows_drop(weft_comm *c); /* the communicator ends */
bool weft_in_window(weft_comm *c, const void *buffer);

/* --- nccl_engine.c: collectives by copy engines ------------------------------------------------------------------ */

/* Facts about one collective before it is called. */
typedef struct {
    weft_comm *c;
    int why;      /* the counter of the reason why it cannot be copied; -1: it can be copied; -2: not counted */
    bool by_call; /* the call itself must ask for zero CTAs, since the communicator does not */
} weft_engine_call;

bool weft_engine_asked(void); /* whether the policy in force asks for copy engines in new communicators */
const ncclConfig_t *weft_engine_config(weft_nccl *l, const ncclConfig_t *config, bool inherits, int size,
                                       nccl_config *room);
weft_engine_call weft_engine_look(weft_nccl *l, weft_comm *c, int operation, size_t count, const void *send,
                                  const void *recv, const ncclCollConfig_t *own);
void weft_engine_called(const weft_engine_call *call, bool own); /* own: on the program's own communicator */
void weft_engine_other(void);                                    /* a send or a receive of the group */
void weft_engine_end(ncclResult_t result);                       /* the call or group has ended: count the outcome */

/* --- nccl_route.c: which siblings are used ---------------------------------------------------------------------- */

int weft_route_take(void); /* the place of the limit in force, held until weft_route_give */
void weft_route_hold(int place);
void weft_route_give(int place);
int weft_route_limit(int place); /* CTAs; 0: none */
int weft_route_now(void);        /* the place in force */
void weft_route_set_limit(int place, int ctas);
const char *weft_route_not_now(void); /* why siblings can be neither made nor ended now; NULL: they can */
int weft_refuse(char *why, size_t size, const char *reason);
void weft_nap(void);

/* --- nccl_siblings.c --------------------------------------------------------------------------------------------- */

void weft_abort_siblings(weft_comm *c); /* aborts the siblings in the background; NULL: does nothing */

/* --- nccl_rules.c: which rule applies to a call ----------------------------------------------------------------- */

/* Immutable once published and never freed, so readers need no lock. */
typedef struct weft_call_rules {
    struct weft_call_rules *next;
    uint32_t count;
    uint32_t limit; /* maximum CTAs of collectives that no rule with CTAs names; 0: unlimited */
    bool copies;    /* use copy engines where possible (comm.engine dma) */
    weft_comm_rule rules[WEFT_COMM_RULES];
} weft_call_rules;

extern _Atomic(const weft_call_rules *) weft_call_rules_in_force; /* NULL: no rules */
extern _Atomic bool weft_call_rules_used;                         /* rules are, or once were, in force */

static inline const weft_call_rules *weft_call_rules_now(void) {
    return atomic_load_explicit(&weft_call_rules_in_force, memory_order_acquire);
}

void weft_call_rules_begin(void);                      /* adopts the rules of the policy that the job started with */
const weft_call_rules *weft_call_rules_at_start(void); /* for captured calls, which outlive later changes */
const weft_comm_rule *weft_rule_of(const weft_call_rules *rules, int operation, uint64_t bytes); /* NULL: none */
uint64_t weft_call_bytes(int operation, uint64_t bytes, int ranks); /* as NCCL's tuner plugin counts them */
bool weft_limits_comm(weft_comm *c, int ctas); /* whether each call on it can be limited to this number of CTAs */
bool weft_limit_possible(int ctas);            /* the same for every communicator */
int weft_limit_calls(int ctas, char *why, size_t size);                  /* ctas 0: unlimited */
int weft_nccl_path(weft_nccl *l);                                        /* WEFT_PATH_* */
const char *weft_rule_why_not(weft_nccl *l, const weft_comm_rule *rule); /* NULL: the whole rule reaches this NCCL */
void weft_path_note(weft_nccl *l); /* a communicator was made: adopt the rules and record the path in the file */

/* --- nccl_percall.c: the configuration of one call -------------------------------------------------------------- */

typedef union {
    ncclCollConfig_t config;
    char bytes[NCCL_CONFIG_BYTES]; /* later versions are longer */
} nccl_call_config;

/* Copies the program's own configuration (NULL: none) to `room` and adds the rules' settings. NULL: nothing to add.
 * `zero`: ask for zero CTAs. */
const ncclCollConfig_t *weft_call_config(weft_nccl *l, weft_comm *c, int operation, uint64_t bytes, bool captured,
                                         bool zero, const ncclCollConfig_t *own, nccl_call_config *room);

/* --- nccl_late.c: splits that end after their deadline ----------------------------------------------------------- */

void weft_route_settle(weft_comm *c); /* waits until weft's split has ended and the communicator is usable again */

/* --- nccl_calls.c and nccl_lifetime.c: the replacement of each NCCL function ------------------------------------ */

#define HOOK(name, args, ...) ncclResult_t weft_on_##name(weft_nccl *l, __VA_ARGS__);
#define HOOK_WITHOUT(name) ncclResult_t weft_on_##name(weft_nccl *l);
#include "nccl_hooks.def"
#define ON(name, ...) ncclResult_t weft_on_##name(weft_nccl *l, __VA_ARGS__)

typedef struct {
    int depth;                    /* nesting depth of the program's groups */
    int inside;                   /* > 0: the library or weft itself is calling, not the program */
    const weft_call_rules *rules; /* of the group; outside groups, of the call */
    int cluster;                  /* of the group: CTAs per cluster plus one; 0: NCCL's choice; -1: no call yet */
    bool captured;                /* a call of the group is being captured */
    bool simulating;              /* inside ncclGroupSimulateEnd, which launches nothing */
} weft_nccl_thread;

extern _Thread_local weft_nccl_thread weft_nccl_me;
bool weft_nccl_in_group(void);               /* whether this thread has an open group */
void weft_nccl_private(bool on);             /* marks this thread's NCCL calls as weft's own */
void weft_calls_before_end(ncclComm_t comm); /* `comm` is about to end: issues its deferred calls */
void weft_comms_made(ncclResult_t result);   /* a group has ended: adds the communicators that it made */

/* --- nccl.c ---------------------------------------------------------------------------------------------------- */

void weft_nccl_fill(weft_nccl *l, void *handle, bool next); /* finds its functions; next: as the linker binds them */

/* --- for Python -------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t key, collectives, point_to_point, bytes[NCCL_OPERATIONS];
    int32_t rank, size, device, max_ctas;
    uint32_t order;
    int32_t routed_to, prepared[NCCL_LIMITS];
    char why_not[NCCL_WHY];
    int32_t path; /* WEFT_PATH_* */
    int32_t version, tuner;
    uint32_t unused;
} weft_nccl_info;

typedef struct {
    uint64_t number, key, bytes, host_ns;
    uint32_t operation, routed;
} weft_nccl_call;

#endif
