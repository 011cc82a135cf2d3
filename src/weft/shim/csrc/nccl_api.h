/* The few types of NCCL's C API that weft needs, so that no NCCL header is required to build. RCCL has the same API. A
 * configuration contains its own size and version: NCCL accepts every layout since 2.14, and members are only added. */
#ifndef WEFT_NCCL_API_H
#define WEFT_NCCL_API_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

typedef int ncclResult_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

enum { NCCL_SUCCESS = 0, NCCL_INTERNAL_ERROR = 3, NCCL_INVALID_ARGUMENT = 4, NCCL_IN_PROGRESS = 7 };
enum { NCCL_BUILT_IN_OPS = 5 };   /* larger numbers are operations that the program defined for one communicator */
enum { NCCL_SUSPEND_MEMORY = 1 }; /* a flag of ncclCommSuspend (2.29.7) */
enum { NCCL_SHRINK_ABORT = 1 };   /* a flag of ncclCommShrink (2.27) */
enum { NCCL_UNDEFINED = INT_MIN, NCCL_NO_COLOR = -1 };
enum { NCCL_WITH_CTAS = 21700, NCCL_WITH_SPLIT = 21800, NCCL_WITH_TUNER = 22400, NCCL_WITH_CALL_CONFIG = 23100 };
enum { NCCL_WITH_CTA_POLICY = 22700, NCCL_WITH_COPIES = 22800 }; /* the latter: collectives by copy engines */
enum { NCCL_CTA_POLICY_ZERO = 2, NCCL_WIN_COLL_SYMMETRIC = 1 };
#define NCCL_MAGIC 0xcafebeefu

typedef struct { /* the layout of 2.27; later versions accept this one and the older ones */
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;     /* 2.25 */
    const char *commName; /* 2.27, like the following members */
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;

typedef struct { /* configuration of one collective call; the layout of 2.31, which later versions accept */
    size_t size;
    unsigned magic, version;
    void *ext;
    int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
    const char *algSelection;
    int forceAlgSelection, CTAPolicy;
    uint64_t userProfilerTag;
} ncclCollConfig_t;

#endif
