"""What a product of any shape costs on a GPU, in closed form: tiles against SMs, length of K, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.gpu.specs import GpuSpec, spec
from weft.sim.profile import Profile, names, profile
from weft.workload import DTYPE_BYTES

TILES: tuple[tuple[int, int, float], ...] = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.9),
    (64, 256, 0.85),
    (64, 128, 0.75),
    (64, 64, 0.6),
)
"""Tiles that a library chooses from, and the share of the largest ones' speed that each reaches (assumed)."""
TAIL = 1.0
"""Of a tile, besides its steps along K: so many times a load from memory and a block's start (assumed)."""
ADDED = 1.0
"""How much of the time to read and write C stays exposed where a product is added to it. An H200 shows 0.8
with K of 1024 and 1.2 with 128 (8192³ cut along K, benchmarks/results/ops/h200_characterize.json)."""
STEP_K = 64
SPLITS = (2, 4, 8, 16)
MOST_KNOWN = 200_000
MEMORY_SHARE = 0.85
"""Of the data sheet's memory bandwidth, where no profile says more: what the H200 reaches."""
NEAREST = {"a100-80gb": "a100", "b200": "h200"}
"""GPUs without a profile of their own take the rest of their figures from these."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """The cost of one product, alone on the GPU."""

    seconds: float
    compute_s: float
    """By arithmetic alone; the rest, if any, waits for memory."""
    memory_bytes: float
    """Through device memory."""
    tile: tuple[int, int]
    waves: int
    """Tiles that the busiest SM computes, one after the other."""
    split: int = 1
    """Ways in which K is cut so that there is a tile for every SM."""


def machine(name: str) -> Profile:
    """The profile of a GPU by name or file; of one without a profile, what its data sheet and its kin say."""
    if name.endswith(".json"):
        return profile(name)
    return _kin(spec(name).name)


@lru_cache(maxsize=64)
def _kin(name: str) -> Profile:
    gpu = spec(name)
    if gpu.name in names() or gpu.name == "a100-40gb":
        return profile(gpu.name)
    base = profile(NEAREST.get(gpu.name, "h200" if gpu.vendor == "nvidia" else "mi300x"))
    faster = gpu.fabric_bytes_per_s / base.spec.fabric_bytes_per_s
    share = {
        "memory_tb_s": MEMORY_SHARE * gpu.memory_bytes_per_s / 1e12,
        "bus_gb_s": base.figures.bus_gb_s * faster,
        "cta_gb_s": base.figures.cta_gb_s * faster,
    }
    source = f"taken from {base.name}, not measured here"
    found = replace(base, name=gpu.name, spec=gpu, sources=dict.fromkeys(base.sources, source))
    return found.with_figures(**share)


class Gemms:
    """Costs of products on one GPU; each is worked out once."""

    def __init__(self, of: Profile) -> None:
        self.profile = of
        self._known: dict[tuple[int, int, int, str, int, int, bool], Gemm] = {}

    def cost(
        self,
        m: int,
        n: int,
        k: int,
        dtype: str = "bf16",
        *,
        parts: int = 1,
        sms: int = 0,
        accumulate: bool = False,
    ) -> Gemm:
        """C[m, n] = A[m, k] @ B[k, n], added to C with `accumulate`.

        `parts`: blocks of rows that lie apart, so that no tile spans two; `sms`: with only so many of them.
        """
        key = (m, n, k, dtype, parts, sms or self.profile.spec.sms, accumulate)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = _cost(self.profile, *key)
        return found


@lru_cache(maxsize=64)
def gemms(name: str) -> Gemms:
    """The costs on a GPU by name or profile file."""
    return Gemms(machine(name))


def _cost(of: Profile, m: int, n: int, k: int, dtype: str, parts: int, sms: int, accumulate: bool) -> Gemm:
    """The fastest of what a library could choose."""
    if min(m, n, k) <= 0:
        return Gemm(0.0, 0.0, 0.0, (0, 0), 0)
    rate, size = _rate(of.spec, dtype) * of.figures.library_efficiency, DTYPE_BYTES[dtype]
    waits_ns = of.figures.latency_ns + of.figures.memory_latency_ns + of.figures.block_start_ns
    tail_s = TAIL * waits_ns * 1e-9
    memory = of.figures.memory_tb_s * 1e12
    steps = -(-k // STEP_K)
    found = []
    for tile_m, tile_n, share in TILES:
        tiles = parts * math.ceil(m / parts / tile_m) * -(-n // tile_n)
        step_s = 2.0 * tile_m * tile_n * STEP_K * of.spec.sms / (rate * share)
        moved = _traffic(of.spec, (m, n, k), (tile_m, tile_n), tiles, sms, size)
        moved += m * n * size if accumulate else 0
        added_s = ADDED * 2 * m * n * size / memory if accumulate else 0.0
        for split in (1, *SPLITS) if 2 * tiles <= sms else (1,):
            if split > 1 and (split > steps or tiles * split > 2 * sms):
                break
            waves = -(-tiles * split // sms)
            extra = 8.0 * m * n * split if split > 1 else 0.0  # partial sums in fp32, written and read
            compute_s = waves * (-(-steps // split) * step_s + tail_s) + extra / memory + added_s
            seconds = max(compute_s, (moved + extra) / memory)
            found.append(Gemm(seconds, compute_s, moved + extra, (tile_m, tile_n), waves, split))
    return min(found, key=lambda one: one.seconds)


def _rate(gpu: GpuSpec, dtype: str) -> float:
    """Peak FLOP/s; fp32 on the matrix units where they take it."""
    if dtype == "fp32" and gpu.throughput.fp32_matrix_tflops:
        return gpu.throughput.fp32_matrix_tflops * 1e12
    if dtype == "fp64" and gpu.throughput.fp64_matrix_tflops:
        return gpu.throughput.fp64_matrix_tflops * 1e12
    return gpu.flops(dtype)


def _traffic(
    gpu: GpuSpec, shape: tuple[int, int, int], tile: tuple[int, int], tiles: int, sms: int, size: int
) -> float:
    """Bytes through memory: a wave of tiles forms a square and fetches its panels once; an operand that fits
    into the cache is fetched once in all."""
    m, n, k = shape
    wave = min(tiles, sms)
    wide = min(-(-n // tile[1]), max(1, round(math.sqrt(wave * tile[0] / tile[1]))))
    high = wave / wide
    keeps = max(gpu.l2_bytes, gpu.last_level_bytes) / 2
    waves = tiles / wave
    bytes_a, bytes_b = float(m * k * size), float(n * k * size)
    if bytes_a > keeps:
        bytes_a = max(bytes_a, waves * high * tile[0] * k * size)
    if bytes_b > keeps:
        bytes_b = max(bytes_b, waves * wide * tile[1] * k * size)
    return bytes_a + bytes_b + m * n * size
