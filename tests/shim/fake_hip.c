/* A libamdhip64.so for tests: one CDNA compute unit's occupancy, a log of launches, failures on request. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint32_t x, y, z;
} dim3;

typedef struct {
    char name[64];
    int vgprs, static_lds;
} kernel;

typedef struct {
    char route[32], name[64];
    uint64_t shared;
    void *stream;
} record;

enum { LDS = 65536, WAVES = 32, WAVE = 64, VGPRS = 512, SIMDS = 4 };

static kernel kernels[64];
static int kernel_count, record_count, failures;
static record records[1024];
static struct {
    uint32_t *where, value;
} pending[64];
static int pending_count;
static void *writes[64];
void *fake_write_stream(int i) { return writes[i]; }

void *fake_kernel(const char *name, int vgprs, int static_lds) {
    kernel *k = &kernels[kernel_count++];
    snprintf(k->name, sizeof k->name, "%s", name);
    k->vgprs = vgprs;
    k->static_lds = static_lds;
    return k;
}
int fake_launches(void) { return record_count; }
const record *fake_launch(int i) { return &records[i]; }
void fake_fail(int times) { failures = times; }
void fake_finish(void) {
    for (int i = 0; i < pending_count; i++)
        *pending[i].where = pending[i].value;
    pending_count = 0;
}

static int fit(const kernel *k, int threads, size_t lds) {
    int waves = (threads + WAVE - 1) / WAVE, all = (int)((lds + (size_t)k->static_lds + 511) / 512 * 512);
    int per_simd = VGPRS / ((k->vgprs + 7) / 8 * 8);
    int most = (per_simd > 8 ? 8 : per_simd) * SIMDS / waves;
    if (all > LDS)
        return 0;
    return all && LDS / all < most ? LDS / all : most;
}

static int launch(const char *route, const void *f, size_t shared, void *stream) {
    const kernel *k = f;
    if (failures > 0)
        return failures--, 1;
    if (!k || shared + (size_t)k->static_lds > LDS)
        return 1;
    record *r = &records[record_count++];
    snprintf(r->route, sizeof r->route, "%s", route);
    snprintf(r->name, sizeof r->name, "%s", k->name);
    r->shared = shared;
    r->stream = stream;
    return 0;
}

const char *hipKernelNameRef(void *f) { return ((kernel *)f)->name; }
const char *hipKernelNameRefByPtr(const void *f, void *stream) { return (void)stream, ((const kernel *)f)->name; }
int hipOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t lds) { return *n = fit(f, threads, lds), 0; }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t lds) { return *n = fit(f, threads, lds), 0; }
int hipGetDevice(int *d) { return *d = 0, 0; }
int hipDeviceGetAttribute(int *v, int a, int d) { return (void)d, *v = a == 63 ? 104 : a == 74 ? LDS : 0, 0; }
static void *captured_stream;
static int capture_mode, capture_lost;
void fake_capture(void *stream) { captured_stream = stream; }
int fake_capture_lost(void) { return capture_lost; }
int hipThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    return *mode = before, 0;
}
int hipStreamIsCapturing(void *stream, int *status) {
    *status = captured_stream && stream == captured_stream;
    return captured_stream && !stream ? 906 : 0; /* the legacy stream does not report the capture, which goes on */
}
int hipHostRegister(void *p, size_t size, unsigned flags) {
    (void)p, (void)size, (void)flags;
    capture_lost += captured_stream && capture_mode != 2;
    return 0;
}
int hipHostGetDevicePointer(void **d, void *h, unsigned flags) { return (void)flags, *d = h, 0; }
int hipStreamWriteValue32(void *stream, void *where, uint32_t value, unsigned flags) {
    (void)flags;
    if (stream == (void *)1)
        return 400; /* ROCm before 6.2 has no such stream */
    if (captured_stream && (!stream || stream == captured_stream))
        return capture_lost++, 900;
    writes[pending_count] = stream;
    pending[pending_count].where = where;
    pending[pending_count++].value = value;
    return 0;
}
int hipModuleUnload(void *m) { return (void)m, 0; }
int hipGraphLaunch(void *exec, void *stream) { return (void)stream, exec ? 0 : 1; }
int hipGraphLaunch_spt(void *exec, void *stream) { return (void)stream, exec ? 0 : 1; }

#define HOST const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream
#define MODULE void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz
#define UNUSED_HOST (void)grid, (void)block, (void)args
#define UNUSED_MODULE (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)params, (void)extra
int hipLaunchKernel(HOST) { return UNUSED_HOST, launch("hipLaunchKernel", f, shared, stream); }
int hipLaunchKernel_spt(HOST) { return UNUSED_HOST, launch("hipLaunchKernel_spt", f, shared, stream); }
int hipExtLaunchKernel(HOST, void *a, void *b, int c) {
    return UNUSED_HOST, (void)a, (void)b, (void)c, launch("hipExtLaunchKernel", f, shared, stream);
}
int hipModuleLaunchKernel(MODULE, unsigned shared, void *stream, void **params, void **extra) {
    return UNUSED_MODULE, launch("hipModuleLaunchKernel", f, shared, stream);
}
int hipExtModuleLaunchKernel(MODULE, size_t shared, void *stream, void **params, void **extra, void *a, void *b, uint32_t c) {
    return UNUSED_MODULE, (void)a, (void)b, (void)c, launch("hipExtModuleLaunchKernel", f, shared, stream);
}
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream, *attributes;
    unsigned count;
} config;
int hipLaunchKernelExC(const config *c, const void *f, void **args) {
    return (void)args, launch("hipLaunchKernelExC", f, c->shared, c->stream);
}
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned count;
} driver_config;
int hipDrvLaunchKernelEx(const driver_config *c, void *f, void **params, void **extra) {
    return (void)params, (void)extra, launch("hipDrvLaunchKernelEx", f, c->shared, c->stream);
}
int hipGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags, void *status) {
    (void)version, (void)flags, (void)status;
    *pfn = strcmp(symbol, "hipModuleLaunchKernel") == 0 ? (void *)hipModuleLaunchKernel : NULL;
    return *pfn ? 0 : 500;
}
