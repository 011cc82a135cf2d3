/* How the fake NCCL plans a collective: it loads a tuner plugin by NCCL's own rules and asks it, v4 from 2.24, v5 from
 * 2.28, v6 from 2.30. As in NCCL, an error of the plugin fails the call. FAKE_TUNER: its only plugin version. */
#include <dlfcn.h>

enum { ALGORITHMS = 7, PROTOCOLS = 3, CHANNELS = 32, CHUNK = 131072 };

typedef struct {
    const char *name;
    void *init;
    ncclResult_t (*info)(void *, int, size_t, int, float **, int, int, int, int *);
    ncclResult_t (*end)(void *);
    ncclResult_t (*chunk)(void *, int, size_t, int, int, int, size_t *);
} fake_plugin;

typedef struct {
    int algorithm, protocol, channels;
    size_t chunk;
} fake_plan;

static const fake_plugin *plugin;
static int plugin_version;
static bool plugin_searched;

static const fake_plugin *plugin_of(void *library, int *found) {
#ifdef FAKE_TUNER
    int newest = FAKE_TUNER, oldest = FAKE_TUNER;
#else
    int newest = FAKE_VERSION >= 23000 ? 6 : FAKE_VERSION >= 22800 ? 5 : 4, oldest = 4;
#endif
    for (int version = newest; library && version >= oldest; version--) {
        char name[32];
        snprintf(name, sizeof name, "ncclTunerPlugin_v%d", version);
        const fake_plugin *p = dlsym(library, name);
        *found = version;
        if (p)
            return p;
    }
    return NULL;
}

static void load_plugin(void) {
    const char *name = getenv("NCCL_TUNER_PLUGIN");
    if (plugin_searched || FAKE_VERSION < 22400)
        return;
    plugin_searched = true;
    void *library = dlopen(!name || !*name ? "libnccl-tuner.so" : strcmp(name, "STATIC_PLUGIN") == 0 ? NULL : name, RTLD_NOW);
    plugin = plugin_of(library, &plugin_version);
}

static ncclResult_t start_plugin(ncclComm_t comm) {
    load_plugin();
    if (!plugin)
        return 0;
    if (plugin_version == 4)
        return ((ncclResult_t(*)(size_t, size_t, void *, void **))plugin->init)((size_t)comm->size, 1, NULL, &comm->tuner);
    return ((ncclResult_t(*)(void **, uint64_t, size_t, size_t, void *, void *, void *))plugin->init)(
        &comm->tuner, 7, (size_t)comm->size, 1, NULL, NULL, NULL);
}

static ncclResult_t end_plugin(ncclComm_t comm) {
    void *tuner = comm->tuner;
    comm->tuner = NULL;
    return plugin && tuner ? plugin->end(tuner) : 0;
}

/* Tree and ring with every protocol; ring with Simple has the least cost. */
static ncclResult_t make_plan(ncclComm_t comm, int function, size_t bytes, bool simulated, fake_plan *plan) {
    float costs[ALGORITHMS][PROTOCOLS];
    int channels = 0;
    for (int a = 0; a < ALGORITHMS; a++)
        for (int p = 0; p < PROTOCOLS; p++)
            costs[a][p] = a > 1 ? -1 : (float)(10 - 3 * a - p);
    if (plugin && comm->tuner) {
        ncclResult_t result = plugin->info(comm->tuner, function, bytes, 1, (float **)costs, ALGORITHMS, PROTOCOLS, 0, &channels);
        if (result)
            return result;
    }
    float best = 1e9f;
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++) {
        float cost = costs[i / PROTOCOLS][i % PROTOCOLS];
        if (cost >= 0 && cost < best) {
            best = cost;
            plan->algorithm = i / PROTOCOLS;
            plan->protocol = i % PROTOCOLS;
        }
    }
    int most = comm->max_ctas < CHANNELS ? comm->max_ctas : CHANNELS;
    plan->channels = channels > 0 && channels < most ? channels : most;
    plan->chunk = CHUNK;
    if (!simulated && plugin && comm->tuner && plugin_version >= 6 && plugin->chunk) /* for one channel, as NCCL asks */
        return plugin->chunk(comm->tuner, function, bytes / (size_t)plan->channels, plan->algorithm, plan->protocol, 1, &plan->chunk);
    return 0;
}
