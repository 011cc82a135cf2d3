import shutil
import subprocess
import sys

import pytest

from weft.errors import UnavailableError
from weft.gpu import hip
from weft.gpu.driver import Attribute, load_driver
from weft.gpu.occupancy import blocks_per_sm
from weft.gpu.placement import KERNEL_US, measure_placement
from weft.gpu.priority import BLOCK_US, WAVES, PriorityEffect, measure_priority
from weft.gpu.probe import complete, cuda_gpus, probe
from weft.gpu.specs import spec

H200 = {
    Attribute.COMPUTE_CAPABILITY_MAJOR: 9,
    Attribute.COMPUTE_CAPABILITY_MINOR: 0,
    Attribute.MULTIPROCESSOR_COUNT: 132,
    Attribute.WARP_SIZE: 32,
    Attribute.MAX_THREADS_PER_BLOCK: 1024,
    Attribute.MAX_THREADS_PER_MULTIPROCESSOR: 2048,
    Attribute.MAX_BLOCKS_PER_MULTIPROCESSOR: 32,
    Attribute.MAX_REGISTERS_PER_MULTIPROCESSOR: 65536,
    Attribute.MAX_REGISTERS_PER_BLOCK: 65536,
    Attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: 233472,
    Attribute.MAX_SHARED_MEMORY_PER_BLOCK: 49152,
    Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
    Attribute.RESERVED_SHARED_MEMORY_PER_BLOCK: 1024,
    Attribute.L2_CACHE_SIZE: 62914560,
    Attribute.CLOCK_RATE_KHZ: 1980000,
}


class FakeDriver:
    """The `Driver` calls that the probe makes, answered from a table."""

    def __init__(self, names=("NVIDIA H200",), attributes=H200, peers="nvlink"):
        self.names, self.attributes, self.peers = names, attributes, peers

    def cuda_version(self):
        return 12, 8

    def device_count(self):
        return len(self.names)

    def device(self, index):
        return index + 7  # a handle that is not an index

    def name(self, device):
        return self.names[device - 7]

    def bus_id(self, device):
        return f"0000:{device:02x}:00.0"

    def memory_bytes(self, device):
        return 150_000_000_000

    def attribute(self, device, attribute):
        return self.attributes.get(attribute, 0)

    def peer(self, device, other):
        assert device != other
        return self.peers


def test_driver_values_take_precedence_over_the_preset():
    (gpu,) = cuda_gpus(FakeDriver())
    preset = spec("h200")
    assert (gpu.index, gpu.name, gpu.preset, gpu.peers) == (0, "NVIDIA H200", "h200", ("self",))
    assert gpu.driver.endswith("(CUDA 12.8)")
    assert gpu.compute_capability == (9, 0)
    assert gpu.memory_bytes == 150_000_000_000
    assert gpu.spec.l2_bytes == 62914560 != preset.l2_bytes
    assert gpu.spec.throughput == preset.throughput
    assert gpu.spec.copy_engines == preset.copy_engines  # the fake does not report it
    assert blocks_per_sm(gpu.spec, 128, 32, 56 * 1024) == 4


def test_peer_matrix_is_by_index():
    gpus = cuda_gpus(FakeDriver(names=("NVIDIA H200",) * 3, peers="pcie"))
    assert [gpu.peers for gpu in gpus] == [
        ("self", "pcie", "pcie"),
        ("pcie", "self", "pcie"),
        ("pcie", "pcie", "self"),
    ]


def test_no_driver_is_an_empty_list():
    def absent():
        raise UnavailableError("no CUDA driver")

    assert probe(absent) == []


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", None),
    ],
)
def test_presets_are_found_by_the_drivers_name(name, preset):
    assert complete(name, "nvidia", (9, 0), {})[1] == preset


def test_an_unknown_gpu_gets_allocation_rules_but_no_rates():
    found, preset = complete("NVIDIA L40S", "nvidia", (8, 9), {"sms": 142, "max_threads_per_sm": 1536})
    assert preset is None
    assert (found.name, found.arch, found.sms) == ("nvidia-l40s", "sm_89", 142)
    assert found.shared_unit_bytes == 128
    assert found.throughput.bf16_tflops is None


def test_before_compute_capability_8_there_is_no_reserve():
    found, _ = complete("Tesla T4", "nvidia", (7, 5), {"shared_bytes_per_sm": 65536})
    assert found.shared_reserve_bytes_per_block == 0
    assert found.shared_unit_bytes == 256


def test_a_smaller_board_of_a_known_chip_is_scaled():
    live = {"sms": 66, "boost_mhz": 1980, "memory_bytes_per_s": 2e12}
    found, preset = complete("NVIDIA H100 PCIe", "nvidia", (9, 0), live)
    assert preset == "h100"
    assert found.flops("bf16") == pytest.approx(spec("h100").flops("bf16") / 2)
    assert found.memory_bytes_per_s == 2e12


def test_importing_the_package_loads_neither_torch_nor_a_driver():
    code = (
        "import sys, weft.gpu.probe, weft.gpu.occupancy;"
        "assert not {'torch', 'numpy'} & set(sys.modules);"
        "assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FAKE_CUDA = r"""
#include <stddef.h>
int cuInit(unsigned flags) { (void)flags; return INIT; }
int cuGetErrorString(int code, const char **text) { *text = code == 100 ? "no device here" : 0; return 0; }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { (void)n; (void)d; s[0] = 'X'; s[1] = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; if (a > 100) return 1; *v = a; return 0; }
int cuDeviceTotalMem_v2(size_t *v, int d) { (void)d; *v = (size_t)5 << 32; return 0; }
"""

FAKE_HIP = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
int hipGetDeviceCount(int *n) { *n = 2; return 0; }
int hipDriverGetVersion(int *v) { *v = 60342134; return 0; }
int hipDeviceGetName(char *s, int n, int d) { (void)d; strncpy(s, "AMD Instinct MI300X", n); return 0; }
int hipDeviceGetPCIBusId(char *s, int n, int d) { (void)d; strncpy(s, "0000:05:00.0", n); return 0; }
int hipDeviceTotalMem(size_t *v, int d) { (void)d; *v = (size_t)192 << 30; return 0; }
int hipDeviceCanAccessPeer(int *v, int d, int o) { *v = d != o; return 0; }
int hipExtGetLinkTypeAndHopCount(int a, int b, uint32_t *t, uint32_t *h) {
    *t = a != b ? 4 : 0;
    *h = 1;
    return 0;
}
int hipDeviceGetAttribute(int *v, int a, int d) {
    (void)d;
    switch (a) {
    case 23: *v = 9; return 0;
    case 61: *v = 4; return 0;
    case 63: *v = 304; return 0;
    case 87: *v = 64; return 0;
    case 74: *v = 65536; return 0;
    default: return 1;
    }
}
"""


@pytest.fixture
def build(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a fake library")

    def compile_(source, *flags):
        path = tmp_path / "fake.c"
        path.write_text(source)
        library = tmp_path / f"libfake{len(list(tmp_path.iterdir()))}.so"
        subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", library, path], check=True)
        return str(library)

    return compile_


def test_driver_binding_passes_values_through(build):
    driver = load_driver(build(FAKE_CUDA, "-DINIT=0"))
    assert driver.cuda_version() == (12, 8)
    assert driver.device_count() == 1
    assert driver.name(0) == "X"
    assert driver.memory_bytes(0) == 5 << 32
    assert driver.attribute(0, Attribute.WARP_SIZE) == 10
    assert driver.attribute(0, Attribute.RESERVED_SHARED_MEMORY_PER_BLOCK) == 0  # an old driver refuses it
    assert not driver.has("cuGreenCtxCreate")
    with pytest.raises(UnavailableError, match="no cuCtxSynchronize; update the NVIDIA driver"):
        driver.synchronize()


def test_driver_errors_include_the_drivers_message(build):
    with pytest.raises(UnavailableError, match=r"cuInit failed: no device here \(CUDA error 100\)"):
        load_driver(build(FAKE_CUDA, "-DINIT=100"))
    with pytest.raises(UnavailableError, match="unknown error"):
        load_driver(build(FAKE_CUDA, "-DINIT=999"))


def test_missing_driver_library_is_named():
    with pytest.raises(UnavailableError, match="libnosuch"):
        load_driver("libnosuch.so.1")


def test_amd_devices_through_a_fake_runtime(build):
    devices = hip.devices(("libnosuch.so", build(FAKE_HIP)))
    assert [d.peers for d in devices] == [("self", "xgmi"), ("xgmi", "self")]
    assert (devices[0].driver, devices[0].bus_id) == ("HIP 6.3", "0000:05:00.0")
    found, preset = complete(devices[0].name, "amd", devices[0].compute_capability, devices[0].live)
    assert preset == "mi300x"
    assert (found.memory_bytes, found.sms) == (192 << 30, 304)


def test_no_amd_runtime_is_an_empty_list():
    assert hip.devices(("libnosuch.so",)) == []


# A GPU of 10 SMs: a kernel ends after all the waves launched before it, at high priority (where that is
# honoured) after the first. Streams are their priority plus 100, events the address of their time.
FAKE_GPU = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static double full_ms, small_ms;
int cuInit(unsigned f) { return f != 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = 10; return a != 16; }
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = (void *)77; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return 0; }
int cuCtxSetCurrent(void *c) { return c != 0 && c != (void *)77; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = MOST; return 0; }
int cuModuleLoadData(void **m, const char *ptx) { *m = (void *)5; return strstr(ptx, "weft_spin") == NULL; }
int cuModuleGetFunction(void **f, void *m, const char *n) {
    *f = (void *)6;
    return m != (void *)5 || strcmp(n, "weft_spin");
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) {
    *n = 2048 / threads;
    return f != (void *)6 || shared != 0;
}
int cuStreamCreateWithPriority(void **s, unsigned flags, int p) {
    *s = (void *)(intptr_t)(100 + p);
    return flags != 1;
}
int cuEventCreate(void **e, unsigned f) { *e = calloc(1, sizeof(double)); return f != 0; }
int cuEventRecord(double *e, void *s) { (void)s; *e = small_ms; return 0; }
int cuEventElapsedTime(float *ms, double *a, double *b) { *ms = (float)(*b - *a); return 0; }
int cuCtxSynchronize(void) { full_ms = small_ms = 0; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
    if (f != (void *)6 || gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra) return 1;
    double ms = *(uint64_t *)params[0] / 1e6;
    if (gx > 1) full_ms = ms * gx / (10 * (2048 / bx));
    else small_ms = HONOURS && stream == (void *)95 ? 0.4 : full_ms;
    return 0;
}
"""


def test_priority_that_is_honoured_overtakes_the_waves(build):
    effect = measure_priority(load_driver(build(FAKE_GPU, "-DMOST=-5", "-DHONOURS=1")))
    assert effect.equal_ms == pytest.approx(WAVES * BLOCK_US / 1000)
    assert effect.ratio == pytest.approx(WAVES)
    assert effect.conclusive


def test_priority_that_is_ignored_gives_one(build):
    effect = measure_priority(load_driver(build(FAKE_GPU, "-DMOST=-5", "-DHONOURS=0")))
    assert effect.ratio == pytest.approx(1)


def test_a_single_priority_is_an_error(build):
    driver = load_driver(build(FAKE_GPU, "-DMOST=0", "-DHONOURS=1"))
    with pytest.raises(UnavailableError, match="one stream priority"):
        measure_priority(driver)


def test_a_gpu_that_was_not_full_is_inconclusive():
    assert not PriorityEffect(equal_ms=0.5, high_ms=0.4, block_ms=0.4).conclusive


# The waiting kernel ends soon after the long one is placed (EARLY), or with it. The event for that must come
# without timing, on the launch of the long kernel; then the waiting stream waits for it.
FAKE_PLACING = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned flags; double ms; } event;
typedef struct { unsigned id, pad; event *placed; int flags; char rest[52]; } attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; attribute *all; unsigned count; } config;
static double ends[3];
static event *placed;
int cuInit(unsigned f) { return f != 0; }
int cuDriverGetVersion(int *v) { return *v = VERSION, 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = (void *)77; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return 0; }
int cuCtxSetCurrent(void *c) { return c != 0 && c != (void *)77; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
int cuModuleLoadData(void **m, const char *ptx) { *m = (void *)5; return strstr(ptx, "weft_spin") == NULL; }
int cuModuleGetFunction(void **f, void *m, const char *n) { (void)m, (void)n; *f = (void *)6; return 0; }
int cuStreamCreateWithPriority(void **s, unsigned flags, int p) {
    static intptr_t next = 1;
    (void)flags, (void)p;
    *s = (void *)next++;
    return 0;
}
int cuEventCreate(event **e, unsigned f) { *e = calloc(1, sizeof **e); (*e)->flags = f; return 0; }
int cuEventRecord(event *e, intptr_t s) { e->ms = ends[s]; return e->flags != 0; }
int cuEventElapsedTime(float *ms, event *a, event *b) { *ms = (float)(b->ms - a->ms); return 0; }
int cuCtxSynchronize(void) { memset(ends, 0, sizeof ends); return 0; }
int cuLaunchKernelEx(config *c, void *f, void **params, void **extra) {
    if (f != (void *)6 || extra || c->count != 1 || c->all->id != 12 || c->all->placed->flags != 2) return 1;
    placed = c->all->placed;
    ends[(intptr_t)c->stream] += *(uint64_t *)params[0] / 1e6;
    placed->ms = EARLY ? 0.01 : ends[(intptr_t)c->stream];
    return 0;
}
int cuStreamWaitEvent(intptr_t s, event *e, unsigned flags) { ends[s] = e->ms; return e != placed || flags; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, intptr_t stream, void **params, void **extra) {
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    ends[stream] += *(uint64_t *)params[0] / 1e6;
    return 0;
}
"""


@pytest.mark.parametrize("early", [True, False])
def test_a_wait_for_placement_that_lasts_as_long_as_the_kernel_is_told(build, early):
    effect = measure_placement(load_driver(build(FAKE_PLACING, f"-DEARLY={int(early)}", "-DVERSION=12030")))
    assert effect.works is early
    assert effect.kernel_ms == pytest.approx(KERNEL_US / 1000)


def test_a_driver_before_cuda_12_3_has_no_such_event(build):
    with pytest.raises(UnavailableError, match=r"CUDA 12\.3"):
        measure_placement(load_driver(build(FAKE_PLACING, "-DEARLY=1", "-DVERSION=12020")))
