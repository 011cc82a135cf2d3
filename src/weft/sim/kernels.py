"""The compute operation of a Workload as kernels: blocks, footprint and rate, from shape and profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weft.errors import UsageError
from weft.gpu.cost import LARGE_TILE, wave_columns
from weft.gpu.occupancy import blocks_per_sm, shared_bytes_for, tile_launch_size
from weft.kernels import TRITON_GEMM
from weft.sim.core import SHARPNESS
from weft.sim.launches import Footprint, LaunchKind, Speed
from weft.sim.profile import Profile, footprint
from weft.workload import DTYPE_BYTES, Compute

SURPLUS_WAVES = 16
"""Surplus blocks (blocks without a tile) beyond this many waves are simulated in batches."""
LINE_BYTES = 128
"""Size of a line of the shared cache (L2)."""
SHORT_REQUEST_COST = 0.125
"""Additional cache bandwidth per byte of A if requests cover half a line, as with tiles of 32 along K. On an
H200 these tiles are 3 to 7% slower than tiles of 64 where the cache is the limit."""
SHARED_WORDS = 32
"""32-bit words that an SM reads from shared memory per clock, on every GPU that weft has a profile of."""
ATTENTION_TILE = 128
"""Rows of queries, and of keys, in one tile of attention."""
ROW_WAVES = 64
"""Most waves that are simulated for row kernels, whose blocks are short."""
_MAX_WAVES = 512
"""Most waves that are simulated for blocks with work: beyond it, single blocks make no difference."""


@dataclass(frozen=True, kw_only=True)
class ComputeKernel:
    """One kernel of a compute operation, before a policy is applied."""

    name: str
    threads: int
    registers: int
    shared_bytes: int
    runs: Callable[[int], tuple[tuple[int, float], ...]]
    """Maps the resident blocks per SM to the runs of the grid: (blocks, work per block)."""
    speed: Callable[[int], Speed]
    """Maps the resident blocks per SM to the rate of a block."""
    kind: LaunchKind = LaunchKind.GRID
    units: int = 0
    unit_bytes: float = 0.0

    def shaped(self, profile: Profile, residency: int | None) -> ShapedKernel:
        """This kernel with at most `residency` blocks per SM, if shared memory can enforce that."""
        gpu, shared = profile.spec, self.shared_bytes
        if residency is not None:
            shared = shared_bytes_for(gpu, self.threads, self.registers, shared, residency) or shared
        place = footprint(gpu, self.name, self.threads, self.registers, shared)
        count = blocks_per_sm(gpu, self.threads, self.registers, shared)
        return ShapedKernel(self, place, count, self.runs(count), self.speed(count))


@dataclass(frozen=True)
class ShapedKernel:
    """A kernel with the residency that it is launched with."""

    kernel: ComputeKernel
    footprint: Footprint
    residency: int
    runs: tuple[tuple[int, float], ...]
    speed: Speed = field(default_factory=Speed)


def kernels(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    """The kernels of one iteration, in order."""
    if compute.kind == "callable":
        raise UsageError(
            f"{compute}: a callable cannot be simulated; use --device cuda, or give its shape with --gemm"
        )
    return _MODELS[compute.kind](compute, profile) * compute.repeat


def _triton_gemm(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    m, n, k = compute.shape
    return [_tiled(compute, profile, (m, n, k), compute.grid)]


def _triton_mlp(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    tokens, hidden, inner = compute.shape
    return [_tiled(compute, profile, s, None) for s in ((tokens, inner, hidden), (tokens, hidden, inner))]


def _tiled(
    compute: Compute, profile: Profile, shape: tuple[int, int, int], grid: tuple[int, int] | None
) -> ComputeKernel:
    """A Triton GEMM. Blocks of a small grid loop over tiles; surplus blocks exit immediately."""
    m, n, k = shape
    tile_m, tile_n, tile_k = compute.tile or (64, 64, 64)
    size = DTYPE_BYTES[compute.dtype]
    across, down = -(-n // tile_n), -(-m // tile_m)
    columns, rows = grid or (across, down)
    threads, registers, shared = tile_launch_size(profile.spec, compute)
    tile_bytes = (tile_m + tile_n) * k * size
    step = (tile_m + tile_n) * tile_k * size
    flops_per_byte = 2 * tile_m * tile_n * k / tile_bytes
    rate = profile.spec.flops(compute.dtype) / profile.spec.sms * profile.figures.matrix_efficiency

    def speed(residency: int) -> Speed:
        slots = residency * profile.spec.sms
        # If all blocks are resident, they loop over their tiles in lockstep. With several waves, blocks drift
        # apart and spread over all columns.
        walk = min(columns, across) if columns * rows <= slots else across
        miss = _miss(profile, shape, (tile_m, tile_n), size, walk, min(slots, columns * rows))
        return Speed(
            sm_rate=min(rate / flops_per_byte, profile.figures.intake_gb_s * 1e9),
            window_bytes=_window(profile, max(1, compute.stages - 1) * step, miss),
            miss=miss,
            weight=1 + SHORT_REQUEST_COST * tile_m / (tile_m + tile_n) * (tile_k * size < LINE_BYTES),
            start_s=profile.figures.block_start_ns * 1e-9,
        )

    def runs(residency: int) -> tuple[tuple[int, float], ...]:
        model = speed(residency)
        alone = min(model.sm_rate, model.window_bytes / (profile.figures.latency_ns * 1e-9))
        slots = residency * profile.spec.sms
        # Blocks without work exit at once, so their start does not compete for the SM's arithmetic and loads.
        free = min(1.0, model.sm_rate / residency / alone)
        grid_runs = _grid_runs(across, down, columns, rows, tile_bytes)
        return _batched(grid_runs, slots, model.start_s * alone, free)

    return ComputeKernel(
        name=TRITON_GEMM,
        threads=threads,
        registers=registers,
        shared_bytes=shared,
        runs=runs,
        speed=speed,
    )


def _batched(
    runs: tuple[tuple[int, float], ...], slots: int, start_work: float, free: float
) -> tuple[tuple[int, float], ...]:
    """Replace long runs of equal blocks by fewer blocks, each of which does the work of several in sequence.

    `free`: fraction of the start-up work (`start_work`) that a block without work costs.
    """
    found = []
    for count, work in runs:
        size = -(-count // (slots * (_MAX_WAVES if work else SURPLUS_WAVES)))
        starts = (size - 1) * start_work if work else max(0.0, size * free - 1) * start_work
        found.append((-(-count // size), size * work + starts))
    return tuple(found)


def _tile_gemm(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    """A textbook tiled GEMM on vector units: load one tile into shared memory, barrier, compute.

    A block alternates between loads and arithmetic, so a block alone leaves its SM idle while it waits.
    Arithmetic reads its operands from shared memory: a thread with n x n results needs 2n words for n² steps.
    GPUs with twice the vector units read no more words per clock, so they gain little.
    """
    tiled = _tiled(compute, profile, (compute.shape[0], compute.shape[1], compute.shape[2]), compute.grid)
    tile_m, tile_n, tile_k = compute.tile or (64, 64, 64)
    step = (tile_m + tile_n) * tile_k * DTYPE_BYTES[compute.dtype]
    bytes_per_flop = step / (2.0 * tile_m * tile_n * tile_k)
    threads = tiled.threads
    operands = SHARED_WORDS * math.sqrt(tile_m * tile_n / threads) / 2 / profile.spec.fp32_lanes_per_sm
    reached = (1 + operands**-SHARPNESS) ** (-1 / SHARPNESS)
    peak = profile.spec.flops("fp32") / profile.spec.sms
    sm_rate = peak * reached * profile.figures.vector_efficiency * bytes_per_flop

    def speed(residency: int) -> Speed:
        model = tiled.speed(residency)
        window = _window(profile, step, model.miss)
        waits_s = profile.figures.tile_loads * profile.figures.latency_ns * 1e-9
        alone = 1 / (waits_s / window + 1 / sm_rate)
        return replace(model, sm_rate=sm_rate, block_rate=alone, window_bytes=window)

    return [replace(tiled, speed=speed)]


def _window(profile: Profile, in_flight: float, miss: float) -> float:
    """Effective bytes in flight at the cache's latency: misses take longer, which reduces them."""
    latency = profile.figures.latency_ns
    return in_flight * latency / (latency + miss * profile.figures.memory_latency_ns)


def _grid_runs(
    across: int, down: int, columns: int, rows: int, tile_bytes: float
) -> tuple[tuple[int, float], ...]:
    """Blocks in launch order (x first), each with the work of the tiles that it loops over."""
    runs: list[list[float]] = []
    for y in range(rows):
        high = (down - y + rows - 1) // rows if y < down else 0
        wide, extra = divmod(across, columns)
        for count, tiles in ((extra, (wide + 1) * high), (columns - extra, wide * high)):
            if not count:
                continue
            if runs and runs[-1][1] == tiles * tile_bytes:
                runs[-1][0] += count
            else:
                runs.append([count, tiles * tile_bytes])
    return tuple((int(count), work) for count, work in runs)


def _miss(
    profile: Profile,
    shape: tuple[int, int, int],
    tile: tuple[int, int],
    size: int,
    columns: int,
    resident: int,
) -> float:
    """Fraction of a GEMM's cache traffic that goes to device memory.

    Resident blocks proceed along K together, so they fetch each panel of A and B once for all. A later wave
    fetches it again, unless the operand fits into the cache.
    """
    m, n, k = shape
    covered = min(resident, -(-m // tile[0]) * -(-n // tile[1]))
    panels_b = min(covered, columns)
    panels_a = max(1.0, covered / panels_b)
    keeps = profile.spec.l2_bytes / 2
    bytes_a = panels_a * tile[0] * (k * size if m * k * size > keeps else 0)
    bytes_b = panels_b * tile[1] * (k * size if n * k * size > keeps else 0)
    written = covered * tile[0] * tile[1] * size
    return min(1.0, (bytes_a + bytes_b + written) / (covered * (tile[0] + tile[1]) * k * size))


def _gemm(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    m, n, k = compute.shape
    return [_library_gemm(compute, profile, (m, n, k), "gemm")]


def _conv(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    batch, channels, height, width, filters, size = compute.shape
    shape = (batch * height * width, filters, channels * size * size)
    # Implicit GEMM: neighbouring rows share pixels, so the input is read about once.
    return [_library_gemm(compute, profile, shape, "conv", persistent=False)]


def _library_gemm(
    compute: Compute,
    profile: Profile,
    shape: tuple[int, int, int],
    word: str,
    *,
    persistent: bool | None = None,
) -> ComputeKernel:
    """The vendor's kernel: large tiles, one block per SM; persistent on the newest GPUs."""
    m, n, k = shape
    size = DTYPE_BYTES[compute.dtype]
    tile_m, tile_n = LARGE_TILE
    tiles = -(-m // tile_m) * -(-n // tile_n)
    # Pairs of blocks share their loads (clusters with multicast).
    loaded = (2 * tile_m + tile_n) / 2 * k * size
    flops = 2.0 * m * n * k / tiles
    rate = profile.spec.flops(compute.dtype) / profile.spec.sms * profile.figures.library_efficiency
    pool = bool(profile.figures.persistent) if persistent is None else persistent
    share = loaded / flops
    square = wave_columns(profile.spec.sms, LARGE_TILE)
    miss = _miss(profile, shape, (tile_m, tile_n), size, min(square, -(-n // tile_n)), profile.spec.sms)
    most = profile.spec.shared_bytes_per_block_optin
    speed = Speed(
        sm_rate=rate * share,
        window_bytes=0.8 * most,
        miss=min(1.0, miss),
        start_s=profile.figures.block_start_ns * 1e-9,
    )
    threads = min(384, 6 * profile.spec.warp_size * 2)
    name = f"{'nvjet' if pool else 'library'}_{word}"
    return _library_kernel(profile, name, threads, min(184 << 10, int(0.9 * most)), tiles, loaded, speed)


def _library_kernel(
    profile: Profile, name: str, threads: int, shared_bytes: int, tiles: int, loaded: float, speed: Speed
) -> ComputeKernel:
    """A library kernel over `tiles` tiles: persistent if the profile says so, else one block per tile."""
    pool = bool(profile.figures.persistent)
    return ComputeKernel(
        name=name,
        threads=threads,
        registers=168,
        shared_bytes=shared_bytes,
        runs=lambda _: ((min(tiles, profile.spec.sms), 0.0),) if pool else ((tiles, loaded),),
        speed=lambda _: speed,
        kind=LaunchKind.POOL if pool else LaunchKind.GRID,
        units=tiles if pool else 0,
        unit_bytes=loaded if pool else 0.0,
    )


def _attention(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    batch, heads, sequence, head = compute.shape
    size = DTYPE_BYTES[compute.dtype]
    tiles = batch * heads * -(-sequence // ATTENTION_TILE)
    loaded = (sequence + ATTENTION_TILE) * head * size  # half of K and V (causal), and Q
    # Causal: tiles on the diagonal are computed in full, and the first tile fills the pipeline.
    flops = compute.flops / compute.repeat / tiles * (1 + 3 * ATTENTION_TILE / sequence)
    rate = profile.spec.flops(compute.dtype) / profile.spec.sms * profile.figures.attention_efficiency
    most = profile.spec.shared_bytes_per_block_optin
    speed = Speed(
        sm_rate=rate * loaded / flops,
        window_bytes=0.5 * most,
        miss=min(1.0, 4 * math.prod(compute.shape) * size / (tiles * loaded)),
        start_s=profile.figures.block_start_ns * 1e-9,
    )
    return [_library_kernel(profile, "flash_fprop", 384, int(0.95 * most), tiles, loaded, speed)]


def _rows(compute: Compute, profile: Profile) -> list[ComputeKernel]:
    """Memory-bound kernels, which read and write every byte once."""
    figures = profile.figures
    factor = figures.elementwise_traffic if compute.kind == "gelu" else figures.rows_traffic
    total = compute.traffic_bytes / compute.repeat * factor
    natural = compute.shape[0] if compute.kind != "gelu" else -(-math.prod(compute.shape) // 1024)
    speed = Speed(
        window_bytes=figures.rows_bytes * factor,
        miss=1.0,
        start_s=profile.figures.block_start_ns * 1e-9,
        sm_rate=1e18,
    )

    def runs(residency: int) -> tuple[tuple[int, float], ...]:
        count = min(natural, ROW_WAVES * residency * profile.spec.sms)
        return ((count, total / count),)

    return [
        ComputeKernel(
            name=_ROW_NAMES[compute.kind],
            threads=128,
            registers=32,
            shared_bytes=0,
            runs=runs,
            speed=lambda _: speed,
        )
    ]


_ROW_NAMES = {
    "layer_norm": "vectorized_layer_norm_kernel",
    "softmax": "softmax_warp_forward",
    "gelu": "vectorized_elementwise_kernel",
}
_MODELS: dict[str, Callable[[Compute, Profile], list[ComputeKernel]]] = {
    "triton_gemm": _triton_gemm,
    "tile_gemm": _tile_gemm,
    "triton_mlp": _triton_mlp,
    "gemm": _gemm,
    "conv": _conv,
    "attention": _attention,
    "layer_norm": _rows,
    "softmax": _rows,
    "gelu": _rows,
}
