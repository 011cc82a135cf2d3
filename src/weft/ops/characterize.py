"""What cutting a product and sharing the GPU with copies cost: simulated, or measured on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from weft.errors import UnavailableError, UsageError
from weft.ops.simulate import Case, node
from weft.policy import Policy
from weft.sim.execute import SimExecutor
from weft.sim.flow import Task, flow
from weft.sim.gemm import Gemms, gemms
from weft.sim.profile import by_title
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
    """Losses on a simulated GPU: cut products, contention with copies to and from peers, copies by size."""
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
            seconds = _cut_s(costs, shape, dtype, axis, ways)
            rows.append(_cut_row(shape, axis, ways, 1e3 * whole, 1e3 * seconds))
    return rows


def _cut_s(costs: Gemms, shape: Shape, dtype: str, axis: str, ways: int) -> float:
    """All pieces of a product, back to back; those along K add to one result."""
    m, n, k = shape
    gap = costs.profile.figures.stream_gap_us * 1e-6 * (ways - 1)
    if axis == "M":
        return ways * costs.cost(-(-m // ways), n, k, dtype).seconds + gap
    first = costs.cost(m, n, -(-k // ways), dtype).seconds
    return first + (ways - 1) * costs.cost(m, n, -(-k // ways), dtype, accumulate=True).seconds + gap


def _cut_row(shape: Shape, axis: str, ways: int, whole_ms: float, ms: float) -> dict[str, Any]:
    return {
        "gemm": list(shape),
        "axis": axis,
        "ways": ways,
        "whole_ms": round(whole_ms, 5),
        "ms": round(ms, 5),
        "loss_pct": round(100 * (ms / whole_ms - 1), 2),
    }


def _contention_row(
    engine: str, gemm: tuple[float, float], copy: tuple[float, float], how: str
) -> dict[str, Any]:
    """From (alone, beside) of a product in ms and of a copy in GB/s."""
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
    """Copies by DMA from every peer beside a product: they share memory bandwidth."""
    cost = case.costs.cost(case.m, case.n, case.k, case.dtype)
    copies = [
        Task(name="copy", rank=rank, source=(rank + i) % case.ranks, copied_bytes=1e9)
        for rank in range(case.fabric.period)
        for i in range(1, min(case.ranks, case.fabric.engines + 1))
    ]
    work = Task(
        name="matmul", rank=0, alone_s=cost.compute_s, beside_s=cost.compute_s, memory_bytes=cost.memory_bytes
    )
    shared = node(case, "dma")
    alone = flow(shared, [work]).total_s
    beside = flow(shared, [*copies, work]).end_s[-1]
    moved = 1e9 * len(copies) / case.fabric.period
    lone = moved / flow(shared, copies).total_s
    together = moved / max(flow(shared, [*copies, work]).end_s[:-1])
    return _contention_row("dma", (1e3 * alone, 1e3 * beside), (lone / 1e9, together / 1e9), "memory shared")


def _block_contention(case: Case) -> dict[str, Any]:
    """The library's collective beside a product, block by block: it takes SMs."""
    from weft.sim.profile import names

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
    beside = float(max(length[line.kind == Kind.COMPUTE]))
    together = float(max(length[line.kind == Kind.COMM]))
    rate = work.wire_bytes / 1e6
    return _contention_row(
        "sm", (alone, beside), (rate / moved, rate / together), "SMs taken, block by block"
    )


def _copy_row(case: Case, size: int) -> dict[str, Any]:
    moving = size / case.fabric.peer_rate(1, 0)
    seconds = case.fabric.copy_start_s + moving
    return {
        "bytes": size,
        "us": round(1e6 * seconds, 3),
        "overhead_pct": round(100 * (1 - moving / seconds), 2),
    }


def measured(shapes: Sequence[Shape] = SHAPES, dtype: str = "bf16", repeats: int = 7) -> dict[str, Any]:
    """The same on this machine's GPU; DMA copies come from pinned host memory, SM copies stay on the GPU."""
    torch = torch_with_gpu()
    title = torch.cuda.get_device_name()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    try:
        costs: Gemms | None = Gemms(by_title(title))
    except UsageError:  # no profile of this GPU: its measurements stand alone
        costs = None
    decomposition = []
    for shape in shapes:
        for row in _measured_cuts(torch, shape, kind, repeats):
            if costs is not None:
                whole = costs.cost(*shape, dtype).seconds
                seconds = _cut_s(costs, shape, dtype, row["axis"], row["ways"])
                row["simulated_loss_pct"] = round(100 * (seconds / whole - 1), 2)
            decomposition.append(row)
    copies, start_us, rate = _measured_copies(torch, repeats)
    return {
        "device": "cuda",
        "simulated": False,
        "gpu": title,
        "dtype": dtype,
        "decomposition": decomposition,
        "contention": [_measured_contention(torch, engine, kind, repeats) for engine in ("dma", "sm")],
        "copies": copies,
        "copy_start_us": start_us,
        "copy_gb_s": rate,
    }


def torch_with_gpu() -> Any:
    """PyTorch, where it and a GPU are there."""
    try:
        import torch
    except ImportError:
        raise UnavailableError(
            "weft explore --device cuda needs PyTorch; install it, or use --device sim:NAME"
        ) from None
    if not torch.cuda.is_available():
        raise UnavailableError("this machine has no GPU that PyTorch can use; use --device sim:NAME")
    return torch


def _graph(torch: Any, work: Callable[[], object]) -> Callable[[], object]:
    """The same work without the host's launches between its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def _time_ms(torch: Any, work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def interleaved(torch: Any, works: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median time of each in ms, in a new random order each round; the first round warms up."""
    draw = random.Random(0)
    times: dict[Any, list[float]] = {key: [] for key in works}
    for turn in range(repeats + 1):
        for key in draw.sample(list(works), len(works)):
            ms = _time_ms(torch, works[key])
            if turn:
                times[key].append(ms)
    return {key: median(values) for key, values in times.items()}


def _measured_cuts(torch: Any, shape: Shape, dtype: Any, repeats: int) -> list[dict[str, Any]]:
    m, n, k = shape
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    c = torch.empty(m, n, device="cuda", dtype=dtype)

    def rows(ways: int) -> None:
        for part, out in zip(a.chunk(ways), c.chunk(ways), strict=True):
            torch.mm(part, b, out=out)

    def columns(ways: int) -> None:
        for i, (left, right) in enumerate(zip(a.chunk(ways, 1), b.chunk(ways), strict=True)):
            if i:
                torch.addmm(c, left, right, out=c)
            else:
                torch.mm(left, right, out=c)

    works: dict[Any, Callable[[], object]] = {("M", 1): _graph(torch, partial(rows, 1))}
    for ways in WAYS:
        works["M", ways] = _graph(torch, partial(rows, ways))
        works["K", ways] = _graph(torch, partial(columns, ways))
    times = interleaved(torch, works, repeats)
    return [_cut_row(shape, axis, ways, times["M", 1], times[axis, ways]) for axis in AXES for ways in WAYS]


def _measured_contention(torch: Any, engine: str, dtype: Any, repeats: int) -> dict[str, Any]:
    size, chunk = 8192, 64 << 20
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    target = torch.empty(chunk, device="cuda", dtype=torch.uint8)
    source = torch.empty(chunk, dtype=torch.uint8)
    source = source.pin_memory() if engine == "dma" else source.cuda()
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=c)

    def move(count: int) -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)

    def timed(count: int, others: int, *, of: str) -> float:
        """Milliseconds of each of `count` products or copies, with so many of the others beside them."""
        begin, end, gate = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # both streams wait here until the host has issued everything
        gate.record()
        mine, beside = (compute, copies) if of == "gemm" else (copies, compute)
        for stream in (mine, beside):
            stream.wait_event(gate)
        with torch.cuda.stream(beside):
            (move if of == "gemm" else multiply)(others)
        with torch.cuda.stream(mine):
            begin.record(mine)
            (multiply if of == "gemm" else move)(count)
            end.record(mine)
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / count

    gemm_ms, copy_ms = timed(4, 0, of="gemm"), timed(8, 0, of="copy")
    products, moves = 8, max(4, round(8 * gemm_ms / copy_ms))
    found: dict[str, list[float]] = {name: [] for name in ("gemm", "gemm+", "copy", "copy+")}
    for _ in range(repeats):
        found["gemm"].append(timed(products, 0, of="gemm"))
        found["gemm+"].append(timed(products, 2 * moves, of="gemm"))
        found["copy"].append(timed(moves, 0, of="copy"))
        found["copy+"].append(timed(moves, 2 * products, of="copy"))
    ms = {name: median(values) for name, values in found.items()}
    how = "pinned host to device" if engine == "dma" else "device to device"
    rates = (chunk / 1e6 / ms["copy"], chunk / 1e6 / ms["copy+"])
    return _contention_row(engine, (ms["gemm"], ms["gemm+"]), rates, how)


def _measured_copies(torch: Any, repeats: int) -> tuple[list[dict[str, Any]], float, float]:
    """Copies from pinned memory by size; µs that a copy costs besides its bytes, and GB/s of large ones."""
    largest = max(COPY_BYTES)
    source = torch.empty(largest, dtype=torch.uint8).pin_memory()
    target = torch.empty(largest, device="cuda", dtype=torch.uint8)
    works = {size: partial(target[:size].copy_, source[:size], non_blocking=True) for size in COPY_BYTES}
    times = interleaved(torch, works, 3 * repeats)
    rate = (largest - COPY_BYTES[-2]) / (times[largest] - times[COPY_BYTES[-2]]) / 1e6
    rows = []
    for size in COPY_BYTES:
        us = 1e3 * times[size]
        moving = size / rate / 1e3
        rows.append({"bytes": size, "us": round(us, 3), "overhead_pct": round(100 * (1 - moving / us), 2)})
    return rows, round(1e3 * times[COPY_BYTES[0]], 3), round(rate, 3)
