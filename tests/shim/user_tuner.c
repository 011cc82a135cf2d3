/* A user's tuner plugin, of version VERSION: tree with LL and 5 channels for everything;
 * USER_TUNER_FAILS names the function that fails. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>


static int at(const char *name) { return getenv("USER_TUNER_FAILS") && getenv("USER_TUNER_FAILS")[0] == name[0] ? 2 : 0; }

#if VERSION >= 5
static int init(void **context, uint64_t id, size_t ranks, size_t nodes, void *log, void *domain, void *constants) {
    (void)id, (void)ranks, (void)nodes, (void)log, (void)domain, (void)constants;
    *context = (void *)0x77;
    return at("init");
}
#else
static int init(size_t ranks, size_t nodes, void *log, void **context) {
    (void)ranks, (void)nodes, (void)log;
    *context = (void *)0x77;
    return at("init");
}
#endif

#if VERSION == 2
static int info(void *context, int function, size_t bytes, int collnet, int nvls, int pipelined, int *algorithm,
                int *protocol, int *channels) {
    (void)function, (void)bytes, (void)pipelined;
    if (context != (void *)0x77 || collnet || nvls)
        abort();
    *algorithm = *protocol = 0;
    *channels = 5;
    return at("question");
}
#else
static int info(void *context, int function, size_t bytes, int pipelined, float **costs, int algorithms, int protocols,
#if VERSION >= 4
                int registered,
#endif
                int *channels) {
    (void)function, (void)bytes, (void)pipelined, (void)algorithms, (void)protocols;
#if VERSION >= 4
    (void)registered;
#endif
    if (context != (void *)0x77)
        abort();
    ((float *)costs)[0] = 0;
    *channels = 5;
    return at("question");
}
#endif

static int end(void *context) { return context == (void *)0x77 ? at("end") : 1; }

static int chunk(void *context, int function, size_t bytes, int algorithm, int protocol, int channels, size_t *size) {
    (void)context, (void)function, (void)bytes, (void)algorithm, (void)protocol, (void)channels;
    *size = 4096;
    return at("chunk");
}

#define NAME_(version) ncclTunerPlugin_v##version
#define NAME(version) NAME_(version)
struct {
    const char *name;
    void *init, *info, *end, *chunk;
} NAME(VERSION) = {"user", (void *)init, (void *)info, (void *)end, VERSION >= 6 ? (void *)chunk : NULL};
