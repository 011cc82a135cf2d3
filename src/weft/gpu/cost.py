"""The cost of a GEMM alone on one GPU, and of a collective alone on the GPUs of one node.

Closed forms over a GpuSpec. Callers supply the rates that a GPU reaches (from a simulator profile, a fit or a
measurement), so that one formula serves the simulator, the fused operations and the planner. docs/models.md
says what each of these adds to it, and how far each is from measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.gpu.specs import GpuSpec
from weft.workload import DTYPE_BYTES

LARGE_TILE = (128, 256)
"""Rows and columns of the output tile that a library chooses for a large GEMM."""
TILES: tuple[tuple[int, int, float], ...] = (
    (*LARGE_TILE, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.9),
    (64, 256, 0.85),
    (64, 128, 0.75),
    (64, 64, 0.6),
)
"""Output tiles (rows, columns) a library chooses from, and the fraction of the largest tiles' rate that each
reaches (assumed)."""
TILE_OVERHEAD = 1.0
"""Each wave takes this multiple of `GemmRates.tile_overhead_s` (assumed; benchmarks/ops/fit_gemm.py)."""
ACCUMULATE_EXPOSED = 1.0
"""Fraction of the time to read and write C that is not hidden if the result is added to C. On an H200 it is
0.8 for K = 1024 and 1.2 for K = 128 (8192³ split along K, benchmarks/results/ops/h200_characterize.json)."""
STEP_K = 64
"""Elements along K that a tile processes per step."""
SPLITS = (2, 4, 8, 16)
"""Split-K factors a library chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRates:
    """The rates that a GPU reaches in a library's GEMM kernels."""

    efficiency: float
    """Fraction of the peak matrix rate that full waves of large tiles reach."""
    memory_bytes_per_s: float
    tile_overhead_s: float
    """Time of a tile outside its steps along K: start of the block and first load."""


@dataclass(frozen=True, slots=True)
class GemmCost:
    """The cost of one GEMM, alone on the GPU."""

    seconds: float
    compute_s: float
    """Time of the arithmetic; `seconds` is larger if memory bandwidth is the limit."""
    memory_bytes: float
    """Bytes read from and written to device memory."""
    tile: tuple[int, int]
    """Rows and columns of an output tile."""
    waves: int
    """Tiles that the busiest SM computes, one after the other."""
    split: int = 1
    """Split-K factor."""


def gemm_cost(
    gpu: GpuSpec,
    rates: GemmRates,
    shape: tuple[int, int, int],
    dtype: str = "bf16",
    *,
    parts: int = 1,
    sms: int = 0,
    accumulate: bool = False,
) -> GemmCost:
    """The fastest tiling of C[m, n] = A[m, k] @ B[k, n] for `shape` = (m, n, k).

    `parts`: number of separate blocks of rows; no tile spans two of them. `sms`: available SMs, 0 for all.
    `accumulate`: the result is added to C.
    """
    m, n, k = shape
    if min(m, n, k) <= 0:
        return GemmCost(0.0, 0.0, 0.0, (0, 0), 0)
    available = sms or gpu.sms
    rate, size = matrix_flops(gpu, dtype) * rates.efficiency, DTYPE_BYTES[dtype]
    memory = rates.memory_bytes_per_s
    steps = -(-k // STEP_K)
    found = []
    for tile_m, tile_n, share in TILES:
        tiles = parts * math.ceil(m / parts / tile_m) * -(-n // tile_n)
        step_s = 2.0 * tile_m * tile_n * STEP_K * gpu.sms / (rate * share)
        moved = gemm_traffic_bytes(gpu, shape, (tile_m, tile_n), tiles, available, size)
        moved += m * n * size if accumulate else 0
        added_s = ACCUMULATE_EXPOSED * 2 * m * n * size / memory if accumulate else 0.0
        for split in (1, *SPLITS) if 2 * tiles <= available else (1,):
            if split > 1 and (split > steps or tiles * split > 2 * available):
                break
            waves = -(-tiles * split // available)
            extra = 8.0 * m * n * split if split > 1 else 0.0  # partial sums in fp32, written and read
            per_wave_s = -(-steps // split) * step_s + TILE_OVERHEAD * rates.tile_overhead_s
            compute_s = waves * per_wave_s + extra / memory + added_s
            seconds = max(compute_s, (moved + extra) / memory)
            found.append(GemmCost(seconds, compute_s, moved + extra, (tile_m, tile_n), waves, split))
    return min(found, key=lambda one: one.seconds)


def matrix_flops(gpu: GpuSpec, dtype: str) -> float:
    """Peak FLOP/s of matrix instructions; fp32 and fp64 use the matrix units where the GPU has them."""
    if dtype == "fp32" and gpu.throughput.fp32_matrix_tflops:
        return gpu.throughput.fp32_matrix_tflops * 1e12
    if dtype == "fp64" and gpu.throughput.fp64_matrix_tflops:
        return gpu.throughput.fp64_matrix_tflops * 1e12
    return gpu.flops(dtype)


def wave_columns(tiles: int, tile: tuple[int, int]) -> int:
    """Columns of tiles in a wave of `tiles` that forms a square, which causes the least memory traffic."""
    return max(1, round(math.sqrt(tiles * tile[0] / tile[1])))


def gemm_traffic_bytes(
    gpu: GpuSpec, shape: tuple[int, int, int], tile: tuple[int, int], tiles: int, sms: int, size: int
) -> float:
    """Device-memory traffic in bytes of a GEMM whose elements have `size` bytes.

    A wave of tiles forms a square and fetches its panels of A and B once; an operand that fits into the cache
    is fetched once in all.
    """
    m, n, k = shape
    wave = min(tiles, sms)
    wide = min(-(-n // tile[1]), wave_columns(wave, tile))
    high = wave / wide
    cached = max(gpu.l2_bytes, gpu.last_level_bytes) / 2
    waves = tiles / wave
    bytes_a, bytes_b = float(m * k * size), float(n * k * size)
    if bytes_a > cached:
        bytes_a = max(bytes_a, waves * high * tile[0] * k * size)
    if bytes_b > cached:
        bytes_b = max(bytes_b, waves * wide * tile[1] * k * size)
    return bytes_a + bytes_b + m * n * size


@dataclass(frozen=True, kw_only=True)
class NodeLinks:
    """Latencies of the library's collectives inside a node, and the bandwidth that they reach."""

    launch_us: float
    """Time to start any collective."""
    domain_us: float
    """Time of one step between GPUs of an NVLink domain."""
    domain_share: float
    """Fraction of the links' data-sheet bandwidth that large collectives reach."""
    switch_gain: float
    """Speedup of an all-reduce where the NVLink switch performs the reduction (NVLink 4 and later)."""
    half_bytes: float
    """Message size at which a collective reaches half of its bandwidth, not counting latency."""


NODE_LINKS = NodeLinks(
    launch_us=13.11, domain_us=0.164, domain_share=0.81, switch_gain=1.315, half_bytes=11.96e6
)
"""NVLink; fitted to half of the published nccl-tests results (benchmarks/plan/collectives.py)."""
UNFITTED_LINKS = replace(NODE_LINKS, half_bytes=0.0)
"""For PCIe and xGMI no published size curve was fitted: full bandwidth at every size (assumed)."""


def link_bytes_per_s(gpu: GpuSpec, links: NodeLinks = NODE_LINKS) -> float:
    """Bytes per second that a rank sends inside its node in a large collective."""
    peak = gpu.pcie_bytes_per_s if gpu.link_kind == "pcie" else gpu.fabric_bytes_per_s
    return peak * links.domain_share


def switch_reduces(gpu: GpuSpec) -> bool:
    """Whether the switch of this GPU's NVLink domain can reduce (NVLink 4 and later)."""
    return gpu.vendor == "nvidia" and gpu.compute_capability >= (9, 0) and gpu.link_kind == "nvlink"


def size_factor(bytes_: float, links: NodeLinks = NODE_LINKS) -> float:
    """Ratio of the transfer time of a message to the time at full bandwidth.

    Small messages do not fill the links: in the published curves, bandwidth rises with the square root of the
    size.
    """
    return 1.0 + math.sqrt(links.half_bytes / max(bytes_, 1.0))


def node_collective_s(
    kind: str,
    bytes_: float,
    ranks: int,
    bytes_per_s: float,
    links: NodeLinks = NODE_LINKS,
    *,
    in_switch: bool = False,
    algorithm: str | None = None,
) -> float:
    """Seconds of a collective that runs alone on one node, from its start on the host to its end.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or reduce; `bytes_`: the larger
    buffer of a rank, as in Workload; `bytes_per_s`: what a rank sends at full bandwidth; `in_switch`:
    whether an all-reduce can use the switch; `algorithm`: see `node_transfer_s`.
    """
    if ranks < 2 or bytes_ <= 0:
        return 0.0
    return links.launch_us * 1e-6 + node_transfer_s(
        kind, bytes_, ranks, bytes_per_s, links, in_switch=in_switch, algorithm=algorithm
    )


def node_transfer_s(
    kind: str,
    bytes_: float,
    ranks: int,
    bytes_per_s: float,
    links: NodeLinks,
    *,
    in_switch: bool,
    algorithm: str | None = None,
) -> float:
    """`node_collective_s` without the start-up time.

    `algorithm` of an all-reduce: `ring`, `tree` or `nvls`; None: the fastest that the node has.
    """
    hop_s, factor = links.domain_us * 1e-6, size_factor(bytes_, links)
    sent = bytes_ * (ranks - 1) / ranks
    if kind == "all_to_all":
        return sent / bytes_per_s * factor + hop_s
    if kind in ("broadcast", "reduce"):
        return (ranks - 1) * hop_s + bytes_ * factor / bytes_per_s
    ring_s = (ranks - 1) * hop_s + sent * factor / bytes_per_s
    if kind != "all_reduce":
        return ring_s
    chain_s = 2 * (ranks - 1) * hop_s + 2.0 * bytes_ / bytes_per_s * factor
    switch_s = 2 * hop_s + 2 * sent / (bytes_per_s * links.switch_gain) * factor
    by_name = {"ring": 2 * ring_s, "tree": chain_s, "nvls": switch_s}
    if algorithm in by_name:
        return by_name[algorithm]
    return min(2 * ring_s, switch_s if in_switch else chain_s)
