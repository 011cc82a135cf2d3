/* A stand-in for libnccl.so.2: the C API that weft calls, computed on the CPU when a group closes.
 * Floats only. Fails loudly (result 4) on what the real library would refuse. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } UniqueId;
typedef struct {
  size_t size; unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas; const char *net; int split;
} Config;
typedef struct { int rank, size, max_ctas; } Comm;
enum { REDUCE, GATHER, SCATTER, BCAST, SEND, RECV };
typedef struct { int kind, peer, op; const float *send; float *recv; size_t count; Comm *comm; } Call;

static Call calls[4096];
static int pending, depth;

int ncclGetVersion(int *v) {
  const char *fake = getenv("FAKE_NCCL_VERSION");
  *v = fake ? atoi(fake) : 23203;
  return 0;
}
const char *ncclGetErrorString(int r) { return r == 4 ? "invalid argument" : "unhandled error"; }
const char *ncclGetLastError(void *c) { (void)c; return "told by\nthe fake"; }
int ncclGetUniqueId(UniqueId *id) { memset(id, 7, sizeof *id); return 0; }
int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, Config *config) {
  if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->version != 21800) return 4;
  if (id.internal[0] != 7 || id.internal[127] != 7 || depth != 1 || !getenv("NCCL_MULTI_RANK_GPU_ENABLE")) return 4;
  Comm made = {rank, size, config->max_ctas};
  *out = malloc(sizeof(Comm));
  **out = made;
  return 0;
}
int ncclCommDestroy(Comm *c) { free(c); return 0; }
int ncclCommAbort(Comm *c) { free(c); return 0; }
int ncclGroupStart(void) { depth++; return 0; }

static int push(Call call, int dtype) {
  if (dtype != 7 || depth != 1 || !call.comm) return 4;
  calls[pending++] = call;
  return 0;
}
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, Comm *c, void *st) {
  (void)st;
  return push((Call){REDUCE, 0, op, s, r, n, c}, t);
}
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, Comm *c, void *st) {
  (void)st;
  return push((Call){BCAST, root, 0, s, r, n, c}, t);
}
int ncclAllGather(const void *s, void *r, size_t n, int t, Comm *c, void *st) {
  (void)st;
  return push((Call){GATHER, 0, 0, s, r, n, c}, t);
}
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, Comm *c, void *st) {
  (void)st;
  return push((Call){SCATTER, 0, op, s, r, n, c}, t);
}
int ncclSend(const void *s, size_t n, int t, int peer, Comm *c, void *st) {
  (void)st;
  return push((Call){SEND, peer, 0, s, NULL, n, c}, t);
}
int ncclRecv(void *r, size_t n, int t, int peer, Comm *c, void *st) {
  (void)st;
  return push((Call){RECV, peer, 0, NULL, r, n, c}, t);
}

static float combine(int op, float a, float b) { return op == 2 ? (a > b ? a : b) : op == 1 ? a * b : a + b; }

static void reduce(Call *first, int size, int scatter) {
  size_t whole = first->count * (scatter ? size : 1);
  float *total = malloc(whole * sizeof(float));
  for (size_t i = 0; i < whole; i++) {
    total[i] = first->send[i];
    for (int r = 1; r < size; r++) total[i] = combine(first->op, total[i], first[r].send[i]);
    if (first->op == 4) total[i] /= size;
  }
  for (int r = 0; r < size; r++)
    memcpy(first[r].recv, total + (scatter ? r * first->count : 0), first->count * sizeof(float));
  free(total);
}

int ncclGroupEnd(void) {
  if (--depth || !pending) return 0;
  int count = pending, size = calls[0].comm->size;
  pending = 0;
  if (calls[0].kind == SEND || calls[0].kind == RECV) {
    for (int i = 0; i < count; i++) {
      if (calls[i].kind != SEND) continue;
      int found = 0;
      for (int j = 0; j < count && !found; j++)
        if (calls[j].kind == RECV && calls[j].comm->rank == calls[i].peer && calls[j].peer == calls[i].comm->rank &&
            calls[j].recv) {
          if (calls[j].count != calls[i].count) return 4;
          memcpy(calls[j].recv, calls[i].send, calls[i].count * sizeof(float));
          calls[j].recv = NULL;
          found = 1;
        }
      if (!found) return 4;
    }
    return 0;
  }
  if (count != size) return 4;
  for (int r = 0; r < size; r++)
    if (calls[r].comm->rank != r || calls[r].count != calls[0].count || calls[r].kind != calls[0].kind) return 4;
  if (calls[0].kind == REDUCE || calls[0].kind == SCATTER) reduce(calls, size, calls[0].kind == SCATTER);
  for (int r = 0; r < size && calls[0].kind == GATHER; r++)
    for (int s = 0; s < size; s++)
      memcpy(calls[r].recv + s * calls[0].count, calls[s].send, calls[0].count * sizeof(float));
  for (int r = 0; r < size && calls[0].kind == BCAST; r++)
    if (calls[r].recv != calls[calls[0].peer].send)
      memcpy(calls[r].recv, calls[calls[0].peer].send, calls[0].count * sizeof(float));
  return 0;
}
