import random

import pytest

from weft.errors import UsageError
from weft.gpu.occupancy import UNLIMITED, blocks_per_sm, limits, shared_bytes_for
from weft.gpu.presets import GPU_PRESETS
from weft.gpu.specs import spec

EVERY = pytest.mark.parametrize("gpu", GPU_PRESETS.values(), ids=GPU_PRESETS.keys())


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared", "expected"),
    [
        # Warps: 64 on an SM of 9.0, 48 on one of 8.6; a partial warp counts as one.
        ("h200", 1024, 32, 0, 2),
        ("a40", 1024, 32, 0, 1),
        ("h200", 1000, 32, 0, 2),
        # Block slots.
        ("h200", 32, 16, 0, 32),
        ("a40", 32, 16, 0, 16),
        # Registers: 40 → 1280 per warp, 12 warps per sub-partition of 16384, 48 per SM.
        ("h200", 128, 40, 0, 12),
        # 200 → 6400 per warp: 2 warps per sub-partition, 8 per SM, though 65536 / 6400 is 10.
        ("h200", 64, 200, 0, 4),
        # 255 → 8192 per warp: 8 warps per SM.
        ("h200", 256, 255, 0, 1),
        ("h200", 288, 255, 0, 0),
        # 9 warps are checked as 12: 12 x 7168 is more than a block may have, though 9 x 7168 is not.
        ("h200", 288, 224, 0, 0),
        # NCCL's kernel: 17 warps of 96 registers, 3072 per warp, 20 warps per SM.
        ("h200", 544, 96, 119 * 1024, 1),
        # Shared memory with its reserve of 1 KiB: 4 x 57 KiB is the whole SM.
        ("h200", 128, 32, 56 * 1024, 4),
        ("h200", 128, 32, 56 * 1024 + 1, 3),
        ("h200", 128, 32, 227 * 1024, 1),
        ("h200", 128, 32, 227 * 1024 + 1, 0),
        ("a100", 128, 32, 163 * 1024, 1),
        ("a40", 128, 32, 99 * 1024 + 1, 0),
        ("h200", 1025, 16, 0, 0),
        ("h200", 32, 256, 0, 0),
        # CDNA: 8 waves on each of 4 SIMDs; VGPRs in steps of 8 out of 512; 16 groups of several waves.
        ("mi300x", 1024, 64, 0, 2),
        ("mi300x", 64, 64, 0, 32),
        ("mi300x", 128, 64, 0, 16),
        ("mi300x", 256, 65, 0, 7),
        ("mi250x", 256, 128, 0, 4),
        ("mi250x", 256, 129, 0, 3),
        ("mi250x", 256, 512, 0, 1),
        ("mi250x", 512, 512, 0, 0),
        # LDS in steps of 512 bytes, without a reserve.
        ("mi300x", 64, 32, 32 * 1024, 2),
        ("mi300x", 64, 32, 32 * 1024 + 1, 1),
        ("mi300x", 64, 32, 64 * 1024 + 1, 0),
    ],
)
def test_known_answers(name, threads, registers, shared, expected):
    assert blocks_per_sm(spec(name), threads, registers, shared) == expected


def test_limits_name_the_limiting_resource():
    assert limits(spec("h200"), 64, 200, 0).binding == ("registers",)
    assert limits(spec("h200"), 128, 32, 100 * 1024).binding == ("shared",)
    assert limits(spec("h200"), 1024, 16, 0).binding == ("warps",)
    assert limits(spec("h200"), 32, 16, 0).binding == ("blocks",)
    assert limits(spec("h200"), 64, 32, 0).binding == ("warps", "registers", "blocks")


def test_unused_resources_do_not_limit():
    assert limits(spec("mi300x"), 64, 0, 0).shared == UNLIMITED
    assert limits(spec("mi300x"), 64, 0, 0).registers == UNLIMITED


@pytest.mark.parametrize(("threads", "registers", "shared"), [(0, 32, 0), (32, -1, 0), (32, 32, -1)])
def test_invalid_arguments_are_rejected(threads, registers, shared):
    with pytest.raises(UsageError):
        blocks_per_sm(spec("h200"), threads, registers, shared)


@EVERY
def test_larger_blocks_never_raise_residency(gpu):
    rng = random.Random(1)
    for _ in range(500):
        threads, registers = rng.randint(1, 1024), rng.randint(1, 255)
        shared = rng.randint(0, gpu.shared_bytes_per_block_optin)
        here = blocks_per_sm(gpu, threads, registers, shared)
        assert blocks_per_sm(gpu, threads, min(registers + 9, 255), shared) <= here
        assert blocks_per_sm(gpu, threads, registers, shared + 700) <= here
        more_warps = threads + gpu.warp_size
        assert more_warps > 1024 or blocks_per_sm(gpu, more_warps, registers, shared) <= here


@EVERY
def test_shared_bytes_for_is_exact_and_minimal(gpu):
    rng = random.Random(2)
    for _ in range(200):
        threads, registers = rng.choice((32, 64, 96, 128, 256, 512)), rng.randint(16, 128)
        shared = rng.choice((0, 1, 4096, rng.randint(0, gpu.shared_bytes_per_block_optin)))
        natural = blocks_per_sm(gpu, threads, registers, shared)
        for residency in range(1, natural + 1):
            size = shared_bytes_for(gpu, threads, registers, shared, residency)
            if size is None:
                # No size gives this residency: one allocation unit more skips it.
                step = range(shared, gpu.shared_bytes_per_block_optin + 1, gpu.shared_unit_bytes // 2)
                assert all(blocks_per_sm(gpu, threads, registers, s) != residency for s in step)
                continue
            assert size >= shared
            assert blocks_per_sm(gpu, threads, registers, size) == residency
            assert size == shared or blocks_per_sm(gpu, threads, registers, size - 1) > residency


@pytest.mark.parametrize("residency", [0, -1, 17, 1000])
def test_impossible_residency_is_none(residency):
    assert shared_bytes_for(spec("h200"), 128, 32, 0, residency) is None


def test_a_kernel_that_fits_once_cannot_be_shaped():
    h200 = spec("h200")
    assert shared_bytes_for(h200, 384, 168, 200 * 1024, 1) == 200 * 1024
    assert shared_bytes_for(h200, 384, 168, 200 * 1024, 2) is None


def test_a_kernel_that_cannot_launch_has_no_residency():
    assert shared_bytes_for(spec("h200"), 288, 255, 0, 1) is None
