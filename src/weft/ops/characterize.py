"""The cost of cutting a GEMM and of sharing the GPU with copies, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.execute.sim import SimExecutor
from weft.ops.case import DMA_TRAFFIC, Case
from weft.ops.simulate import flow_node
from weft.policy import Policy
from weft.sim.flow import Task, flow, slowed
from weft.sim.gemm import Gemms, gemms
from weft.sim.profile import names
from weft.timeline import Kind
from weft.workload import Compute, Workload

WAYS = (8, 64)
AXES = ("M", "K")
SHAPES = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 28672, 8192))
COPY_BYTES = tuple(1 << bits for bits in range(12, 28, 3))
Shape = tuple[int, int, int]


def simulated(
    gpu: str, shapes: Sequence[Shape] = SHAPES, dtype: str = "bf16", ranks: int = 8
) -> dict[str, Any]:
    """Losses on a simulated GPU: cut GEMMs, contention with copies to and from peers, copies by size."""
    costs = gemms(gpu)
    case = Case(operation="all_gather_matmul", m=8192, n=8192, k=8192, ranks=ranks, dtype=dtype, gpu=gpu)
    return {
        "device": f"sim:{gpu}",
        "simulated": True,
        "gpu": costs.profile.spec.title,
        "dtype": dtype,
        "decomposition": [row for shape in shapes for row in _cut_rows(costs, shape, dtype)],
        "contention": [_flow_contention(case), _block_contention(case)],
        "copies": [_copy_row(case, size) for size in COPY_BYTES],
        "copy_start_us": round(1e6 * case.fabric.copy_start_s, 3),
        "copy_gb_s": round(case.fabric.peer_rate(1, 0) / 1e9, 3),
    }


def _cut_rows(costs: Gemms, shape: Shape, dtype: str) -> list[dict[str, Any]]:
    whole = costs.cost(*shape, dtype).seconds
    rows = []
    for axis in AXES:
        for ways in WAYS:
            seconds = cut_s(costs, shape, dtype, axis, ways)
            rows.append(cut_row(shape, axis, ways, 1e3 * whole, 1e3 * seconds))
    return rows


def cut_s(costs: Gemms, shape: Shape, dtype: str, axis: str, ways: int) -> float:
    """Seconds of all pieces of a GEMM, back to back; pieces along K accumulate into one result."""
    m, n, k = shape
    gap = costs.profile.figures.stream_gap_us * 1e-6 * (ways - 1)
    if axis == "M":
        return ways * costs.cost(-(-m // ways), n, k, dtype).seconds + gap
    first = costs.cost(m, n, -(-k // ways), dtype).seconds
    return first + (ways - 1) * costs.cost(m, n, -(-k // ways), dtype, accumulate=True).seconds + gap


def cut_row(shape: Shape, axis: str, ways: int, whole_ms: float, ms: float) -> dict[str, Any]:
    return {
        "gemm": list(shape),
        "axis": axis,
        "ways": ways,
        "whole_ms": round(whole_ms, 5),
        "ms": round(ms, 5),
        "loss_pct": round(100 * (ms / whole_ms - 1), 2),
    }


def gemm_slowed_pct(costs: Gemms, shape: Shape, dtype: str, moved_bytes_per_s: float) -> float:
    """Slowdown of a GEMM in percent while DMA copies move this many bytes per second through the GPU.

    The GEMM does not slow the copies: they need less than half of the memory bandwidth, which they get if
    memory serves both fairly.
    """
    cost = costs.cost(*shape, dtype)
    memory = costs.profile.figures.memory_tb_s * 1e12
    taken = DMA_TRAFFIC * moved_bytes_per_s
    return 100 * (slowed(cost.compute_s, cost.memory_bytes, taken, memory) / cost.seconds - 1)


def contention_row(
    engine: str, gemm: tuple[float, float], copy: tuple[float, float], how: str
) -> dict[str, Any]:
    """One row of the contention table. `gemm` in ms and `copy` in GB/s: (alone, concurrent)."""
    return {
        "engine": engine,
        "gemm_alone_ms": round(gemm[0], 5),
        "gemm_beside_ms": round(gemm[1], 5),
        "gemm_slowed_pct": round(100 * (gemm[1] / gemm[0] - 1), 2),
        "copy_alone_gb_s": round(copy[0], 3),
        "copy_beside_gb_s": round(copy[1], 3),
        "copy_slowed_pct": round(100 * (copy[0] / copy[1] - 1), 2),
        "how": how,
    }


def _flow_contention(case: Case) -> dict[str, Any]:
    """A GEMM concurrent with DMA copies, one per engine from different peers: they share memory bandwidth."""
    cost = case.costs.cost(case.m, case.n, case.k, case.dtype)
    copies = [
        Task(name="copy", rank=rank, source=(rank + i) % case.ranks, copied_bytes=1e9)
        for rank in range(case.fabric.period)
        for i in range(1, min(case.ranks, case.fabric.engines + 1))
    ]
    work = Task(
        name="matmul", rank=0, alone_s=cost.compute_s, shared_s=cost.compute_s, memory_bytes=cost.memory_bytes
    )
    shared = flow_node(case, "dma")
    alone = flow(shared, [work]).total_s
    concurrent = flow(shared, [*copies, work]).end_s[-1]
    moved = 1e9 * len(copies) / case.fabric.period
    lone = moved / flow(shared, copies).total_s
    together = moved / max(flow(shared, [*copies, work]).end_s[:-1])
    return contention_row(
        "dma", (1e3 * alone, 1e3 * concurrent), (lone / 1e9, together / 1e9), "memory shared"
    )


def _block_contention(case: Case) -> dict[str, Any]:
    """A GEMM concurrent with the library's collective, which takes SMs; simulated block by block."""
    known = case.gpu.endswith(".json") or case.costs.profile.spec.name.removesuffix("-40gb") in names()
    executor = SimExecutor(case.gpu, model=None if known else case.costs.profile)
    compute = Compute(kind="gemm", shape=(case.m, case.n, case.k), dtype=case.dtype)
    size = int(
        2 * executor.measure(Workload(compute=compute, iterations=1), Policy(), "compute").ms * 1e-3 * 3e11
    )
    work = Workload(compute=compute, collective="all_gather", bytes=size, ranks=case.ranks, iterations=4)
    policy = Policy(priority="high", head_start_us=5.0)
    alone = executor.measure(work, policy, "compute").ms / work.iterations
    moved = executor.measure(work, policy, "comm").ms / work.iterations
    line = executor.timeline(work, policy)
    length = (line.end_ns - line.start_ns) / 1e6
    concurrent = float(max(length[line.kind == Kind.COMPUTE]))
    together = float(max(length[line.kind == Kind.COMM]))
    rate = work.wire_bytes / 1e6
    return contention_row(
        "sm", (alone, concurrent), (rate / moved, rate / together), "SMs taken, block by block"
    )


def _copy_row(case: Case, size: int) -> dict[str, Any]:
    moving = size / case.fabric.peer_rate(1, 0)
    seconds = case.fabric.copy_start_s + moving
    return {
        "bytes": size,
        "us": round(1e6 * seconds, 3),
        "overhead_pct": round(100 * (1 - moving / seconds), 2),
    }
