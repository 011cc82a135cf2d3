"""The occupancy calculator against the driver's own answer, on this machine's GPU."""

import itertools

import pytest

from weft.errors import UnavailableError
from weft.gpu.driver import FunctionAttribute, load_driver
from weft.gpu.occupancy import blocks_per_sm, shared_bytes_for
from weft.gpu.probe import cuda_gpus
from weft.gpu.specs import spec

REGISTERS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 168, 192, 200, 224, 240, 255)
THREADS = (1, 32, 33, 64, 96, 128, 160, 256, 288, 384, 512, 544, 672, 768, 1000, 1024)
STATIC_SHARED = (0, 4096)


def ptx(registers, shared_bytes):
    """A kernel that keeps about `registers` values alive: volatile loads cannot move over the barrier."""
    live = max(4, registers - 8)
    loads = "\n".join(f"    ld.volatile.global.u32 %r{i}, [%a+{4 * i}];" for i in range(live))
    uses = "\n".join(f"    mad.lo.u32 %s, %s, %r{i}, %r{(7 * i + 3) % live};" for i in range(live))
    touch = "mov.u32 %t, pad;\n    st.volatile.shared.u32 [%t], %s;"
    shared = f"    .shared .align 16 .b8 pad[{shared_bytes}];\n    {touch}" if shared_bytes else ""
    return f"""\
.version 7.0
.target sm_70
.address_size 64

.visible .entry kernel(.param .u64 data)
.maxnreg {registers}
{{
    .reg .u64 %a;
    .reg .u32 %s, %t;
    .reg .u32 %r<{live}>;
    ld.param.u64 %a, [data];
    ld.volatile.global.u32 %s, [%a];
{loads}
    bar.sync 0;
{uses}
{shared}
    st.global.u32 [%a], %s;
    ret;
}}
"""


@pytest.fixture(scope="module")
def driver():
    try:
        driver = load_driver()
    except UnavailableError as error:
        pytest.skip(str(error))
    with driver.context(driver.device(0)):
        yield driver


@pytest.fixture(scope="module")
def gpu(driver):
    return cuda_gpus(driver)[0]


@pytest.fixture(scope="module")
def kernels(driver, gpu):
    """(function, registers, static shared bytes) for every register count and static size."""
    built = []
    for registers, shared in itertools.product(REGISTERS, STATIC_SHARED):
        function = driver.function(driver.load(ptx(registers, shared)), "kernel")
        static = driver.function_attribute(function, FunctionAttribute.SHARED_SIZE_BYTES)
        assert static == shared
        driver.allow_dynamic_shared(function, gpu.spec.shared_bytes_per_block_optin - static)
        built.append((function, driver.function_attribute(function, FunctionAttribute.NUM_REGS), static))
    return built


def answer(driver, function, threads, dynamic):
    try:
        return driver.blocks_per_sm(function, threads, dynamic)
    except UnavailableError as error:
        if "(CUDA error 1)" in str(error):  # CUDA_ERROR_INVALID_VALUE: a block of this size can never launch
            return 0
        raise


def test_the_kernels_use_many_register_counts(kernels):
    counts = {registers for _, registers, _ in kernels}
    assert len(counts) >= 12
    assert max(counts) > 220


def test_blocks_per_sm_equals_the_drivers_answer(driver, gpu, kernels):
    most = gpu.spec.shared_bytes_per_block_optin
    sizes = (0, 1, 127, 128, 1000, 8192, 16384, 20000, 28 * 1024, 45 * 1024, 57 * 1024, 75 * 1024, 119 * 1024)
    sizes += tuple(most // n + d for n in (1, 2, 3, 5, 7) for d in (-128, -1, 0))
    seen, wrong = set(), []
    for function, registers, static in kernels:
        for threads, size in itertools.product(THREADS, sizes):
            dynamic = min(size, most - static)
            ours = blocks_per_sm(gpu.spec, threads, registers, static + dynamic)
            theirs = answer(driver, function, threads, dynamic)
            seen.add((threads, registers, static + dynamic))
            if ours != theirs:
                wrong.append((threads, registers, static, dynamic, ours, theirs))
    assert len(seen) >= 200
    assert not wrong, f"{len(wrong)} of {len(seen)} differ; first {wrong[:5]}"


def test_shared_bytes_for_pins_the_residency(driver, gpu, kernels):
    pinned = 0
    for function, registers, static in kernels:
        for threads in (64, 128, 256, 512):
            natural = driver.blocks_per_sm(function, threads, 0)
            for residency in range(1, natural + 1):
                size = shared_bytes_for(gpu.spec, threads, registers, static, residency)
                if size is not None:
                    assert driver.blocks_per_sm(function, threads, size - static) == residency
                    pinned += 1
    assert pinned >= 200


def test_the_preset_agrees_with_the_driver(gpu):
    if gpu.preset is None:
        pytest.skip(f"no preset for {gpu.name}")
    preset = spec(gpu.preset)
    if preset.sms != gpu.spec.sms:
        pytest.skip(f"{gpu.name} is another board than the preset's")
    same = (
        "compute_capability",
        "warp_size",
        "max_threads_per_block",
        "max_threads_per_sm",
        "max_blocks_per_sm",
        "registers_per_sm",
        "registers_per_block",
        "shared_bytes_per_sm",
        "shared_bytes_per_block",
        "shared_bytes_per_block_optin",
        "shared_reserve_bytes_per_block",
    )
    assert {f: getattr(gpu.spec, f) for f in same} == {f: getattr(preset, f) for f in same}
    assert gpu.memory_bytes == pytest.approx(preset.memory_bytes, rel=0.06)
    assert gpu.spec.l2_bytes == pytest.approx(preset.l2_bytes, rel=0.25)
