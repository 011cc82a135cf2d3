/* The parts of NCCL's tuner plugin interface that weft needs, v2 to v6. */
#ifndef WEFT_NCCL_TUNER_H
#define WEFT_NCCL_TUNER_H

#include "nccl.h"

enum { TUNER_OLDEST = 2, TUNER_NEWEST = 6 };
enum { FUNC_BROADCAST, FUNC_REDUCE, FUNC_ALL_GATHER, FUNC_REDUCE_SCATTER, FUNC_ALL_REDUCE, TUNER_FUNCTIONS };
enum { PROTOCOL_LL, PROTOCOL_LL128, PROTOCOL_SIMPLE };
enum {
    ALGORITHM_TREE,
    ALGORITHM_RING,
    ALGORITHM_COLLNET_DIRECT,
    ALGORITHM_COLLNET_CHAIN,
    ALGORITHM_NVLS,
    ALGORITHM_NVLS_TREE
};

typedef ncclResult_t (*tuner_init_v4)(size_t ranks, size_t nodes, void *log, void **context);
typedef ncclResult_t (*tuner_init_v5)(void **context, uint64_t id, size_t ranks, size_t nodes, void *log, void *domain,
                                      void *constants);
typedef ncclResult_t (*tuner_info_v2)(void *context, int function, size_t bytes, int collnet, int nvls, int pipelined,
                                      int *algorithm, int *protocol, int *channels);
typedef ncclResult_t (*tuner_info_v3)(void *context, int function, size_t bytes, int pipelined, float **costs,
                                      int algorithms, int protocols, int *channels);
typedef ncclResult_t (*tuner_info_v4)(void *context, int function, size_t bytes, int pipelined, float **costs,
                                      int algorithms, int protocols, int registered, int *channels);
typedef ncclResult_t (*tuner_end)(void *context);
typedef ncclResult_t (*tuner_chunk_v6)(void *context, int function, size_t bytes, int algorithm, int protocol,
                                       int channels, size_t *chunk);

/* All versions begin with the same four members; `chunk` exists in v6 only. */
typedef struct {
    const char *name;
    void *init, *info;
    tuner_end end;
    tuner_chunk_v6 chunk;
} tuner_plugin;

/* The plugin that NCCL would have loaded without weft, with an interface version that this NCCL knows. */
typedef struct {
    const tuner_plugin *plugin; /* NULL: there is none */
    int version;
} user_tuner;

user_tuner weft_user_tuner(int newest);

#endif
