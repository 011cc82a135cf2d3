"""The cost of cutting a GEMM and of sharing the GPU with copies, measured on this machine's GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from weft.errors import UnavailableError, WeftError
from weft.ops.characterize import (
    AXES,
    COPY_BYTES,
    SHAPES,
    WAYS,
    Shape,
    contention_row,
    cut_row,
    cut_s,
    gemm_slowed_pct,
)
from weft.sim.gemm import Gemms
from weft.sim.profile import by_title

CHUNK = 64 << 20
GEMM_SIZE = 8192
MEMORY_BOUND = (65536, 128, 8192)
"""A memory-bound GEMM, which competes with copies for memory bandwidth."""
LEAST_MS = 20.0
"""Shortest time for which each side is timed."""
_COPIES = 16
WAIT_CYCLES = 20_000_000
"""GPU cycles for which both streams wait while the host issues everything: about 10 ms."""


def measured(shapes: Sequence[Shape] = SHAPES, dtype: str = "bf16", repeats: int = 7) -> dict[str, Any]:
    """The JSON document, in the same form as for a simulated GPU.

    Copies come from pinned host memory, by a copy engine or by a kernel on as many SMs as NCCL uses.
    """
    torch = torch_with_gpu()
    title = torch.cuda.get_device_name()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    rows = [row for shape in shapes for row in _cuts(torch, shape, kind, repeats)]
    square = (GEMM_SIZE,) * 3
    shared = {
        (square, 1): _contention(torch, "dma", kind, repeats),
        (square, 0): _contention(torch, "sm", kind, repeats),
        (square, 2): _contention(torch, "dma", kind, repeats, both_ways=True),
        (MEMORY_BOUND, 2): _contention(torch, "dma", kind, repeats, MEMORY_BOUND, both_ways=True),
    }
    _compare(rows, shared, title, dtype)
    copies, start_us, rate = _copies(torch, repeats)
    return {
        "device": "cuda",
        "simulated": False,
        "gpu": title,
        "dtype": dtype,
        "decomposition": rows,
        "contention": list(shared.values()),
        "copies": copies,
        "copy_start_us": start_us,
        "copy_gb_s": rate,
    }


def torch_with_gpu() -> Any:
    """The torch module. Raises UnavailableError without PyTorch or a GPU."""
    try:
        import torch
    except ImportError:
        raise UnavailableError(
            "weft explore --device cuda needs PyTorch; install it, or use --device sim:NAME"
        ) from None
    if not torch.cuda.is_available():
        raise UnavailableError("this machine has no GPU that PyTorch can use; use --device sim:NAME")
    return torch


def interleaved(torch: Any, works: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median time of each work in ms. Each round has a new random order; the first round warms up."""
    draw = random.Random(0)
    times: dict[Any, list[float]] = {key: [] for key in works}
    for turn in range(repeats + 1):
        for key in draw.sample(list(works), len(works)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            works[key]()
            end.record()
            end.synchronize()
            if turn:
                times[key].append(float(begin.elapsed_time(end)))
    return {key: median(values) for key, values in times.items()}


def _compare(
    rows: list[dict[str, Any]], shared: Mapping[tuple[Shape, int], dict[str, Any]], title: str, dtype: str
) -> None:
    """Add the modelled loss to each measured one, if there is a profile of this GPU.

    `shared`: contention by GEMM and number of copy directions. 0 stands for copies by a kernel, which the
    model does not run concurrently with persistent GEMMs.
    """
    try:
        costs = Gemms(by_title(title))
    except WeftError:
        return
    for row in rows:
        m, n, k = row["gemm"]
        seconds = cut_s(costs, (m, n, k), dtype, row["axis"], row["ways"])
        row["simulated_loss_pct"] = round(100 * (seconds / costs.cost(m, n, k, dtype).seconds - 1), 2)
    for (shape, directions), row in shared.items():
        if directions:
            moved = 1e9 * directions * row["copy_alone_gb_s"]
            row["simulated_gemm_slowed_pct"] = round(gemm_slowed_pct(costs, shape, dtype, moved), 2)
            row["simulated_copy_slowed_pct"] = 0.0


def _graph(torch: Any, work: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph, without host launches between its kernels."""
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


def _cuts(torch: Any, shape: Shape, dtype: Any, repeats: int) -> list[dict[str, Any]]:
    m, n, k = shape
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    c = torch.empty(m, n, device="cuda", dtype=dtype)

    def rows(ways: int) -> None:
        for part, out in zip(a.chunk(ways), c.chunk(ways), strict=True):
            torch.mm(part, b, out=out)

    def columns(ways: int) -> None:
        for i, (left, right) in enumerate(zip(a.chunk(ways, 1), b.chunk(ways), strict=True)):
            if i:
                c.addmm_(left, right)
            else:
                torch.mm(left, right, out=c)

    works = {("M", 1): _graph(torch, partial(rows, 1))}
    for ways in WAYS:
        works["M", ways] = _graph(torch, partial(rows, ways))
        works["K", ways] = _graph(torch, partial(columns, ways))
    times = interleaved(torch, works, repeats)
    return [cut_row(shape, axis, ways, times["M", 1], times[axis, ways]) for axis in AXES for ways in WAYS]


class _Concurrent:
    """A GEMM and copies that can run on several streams at once."""

    def __init__(self, torch: Any, engine: str, dtype: Any, shape: Shape, both_ways: bool) -> None:
        m, n, k = shape
        self.torch, self.engine, self.both_ways = torch, engine, both_ways
        self.a, self.b = (torch.randn(*size, device="cuda", dtype=dtype) for size in ((m, k), (k, n)))
        self.c = torch.empty(m, n, device="cuda", dtype=dtype)
        rows = CHUNK // GEMM_SIZE // dtype.itemsize
        self.near = [torch.zeros(rows, GEMM_SIZE, device="cuda", dtype=dtype) for _ in range(2)]
        self.far = [torch.zeros(rows, GEMM_SIZE, dtype=dtype).pin_memory() for _ in range(2)]
        self.streams = {name: torch.cuda.Stream() for name in ("gemm", "in", "out")}
        self.work = {"gemm": self._multiply, "in": self._copy_in, "out": self._copy_out}

    def _multiply(self) -> None:
        self.torch.mm(self.a, self.b, out=self.c)

    def _copy_in(self) -> None:
        self._copy(self.near[0], self.far[0])

    def _copy_out(self) -> None:
        self._copy(self.far[1], self.near[1])

    def _copy(self, target: Any, source: Any) -> None:
        if self.engine == "dma":
            target.copy_(source, non_blocking=True)
            return
        from weft.comm.copy_kernel import launch_copy

        launch_copy(source, target, self.torch.cuda.current_stream())

    def ms(self, of: str, count: int, others: int) -> float:
        """Milliseconds of each of `count` GEMMs or copies, while `others` of the other kind run.

        Copies go in, or in and out at once, as on a rank that sends as much as it receives; then the slower
        direction counts.
        """
        torch = self.torch
        copies = ("in", "out") if self.both_ways else ("in",)
        timed, rest = (("gemm",), copies) if of == "gemm" else (copies, ("gemm",))
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in timed}
        gate = torch.cuda.Event()
        torch.cuda.synchronize()
        torch.cuda._sleep(WAIT_CYCLES)
        gate.record()
        for stream in self.streams.values():
            stream.wait_event(gate)
        for name in rest:
            with torch.cuda.stream(self.streams[name]):
                for _ in range(others):
                    self.work[name]()
        for name in timed:
            with torch.cuda.stream(self.streams[name]):
                events[name][0].record()
                for _ in range(count):
                    self.work[name]()
                events[name][1].record()
        torch.cuda.synchronize()
        return max(float(begin.elapsed_time(end)) for begin, end in events.values()) / count


def _contention(
    torch: Any,
    engine: str,
    dtype: Any,
    repeats: int,
    shape: Shape | None = None,
    both_ways: bool = False,
) -> dict[str, Any]:
    """The slowdown of a GEMM and of copies by each other; each side is timed while the other runs throughout.

    Each round times GEMMs alone, copies alone and each with the other, in a random order. A slowdown is the
    median over rounds of the ratio of one side's two times in the same round.
    """
    both = _Concurrent(torch, engine, dtype, shape or (GEMM_SIZE,) * 3, both_ways)
    both.ms("gemm", 4, 4)  # warm up, and compile the copy kernel
    copy_ms, gemm_ms = both.ms("copy", 4, 0), both.ms("gemm", 4, 0)
    gemms, moves = max(8, math.ceil(LEAST_MS / gemm_ms)), max(4, math.ceil(LEAST_MS / copy_ms))
    # The other side runs twice as long, so that it covers the timed side even if both slow down.
    other_gemms, other_copies = (
        math.ceil(2 * moves * copy_ms / gemm_ms),
        math.ceil(2 * gemms * gemm_ms / copy_ms),
    )
    counts = {"gemm": (gemms, other_copies), "copy": (moves, other_gemms)}
    turns = [(of, shared) for of in counts for shared in (False, True)]
    found: dict[tuple[str, bool], list[float]] = {turn: [] for turn in turns}
    draw = random.Random(0)
    for _ in range(repeats):
        for of, shared in draw.sample(turns, len(turns)):
            count, others = counts[of]
            found[of, shared].append(both.ms(of, count, others if shared else 0))
    ms = {key: median(values) for key, values in found.items()}
    slowed = {
        of: sorted(100 * (b / a - 1) for a, b in zip(found[of, False], found[of, True], strict=True))
        for of in counts
    }
    how = f"host to device{' and back' if both_ways else ''}{', 16 SMs' if engine == 'sm' else ''}"
    if shape is not None:
        how += f", GEMM {'x'.join(map(str, shape))}"
    rates = (CHUNK / 1e6 / ms["copy", False], CHUNK / 1e6 / ms["copy", True])
    row = contention_row(engine, (ms["gemm", False], ms["gemm", True]), rates, how)
    for of, values in slowed.items():
        row[f"{of}_slowed_pct"] = round(median(values), 2)
        row[f"{of}_slowed_range_pct"] = [round(values[0], 2), round(values[-1], 2)]
    return row


def _copies(torch: Any, repeats: int) -> tuple[list[dict[str, Any]], float, float]:
    """Copies from pinned memory: a row per size, µs of the smallest copy (its overhead), GB/s of large ones.

    Copies run back to back after a wait on the GPU, so that the host's time to issue them does not count.
    """
    largest, before = COPY_BYTES[-1], COPY_BYTES[-2]
    source = torch.empty(largest, dtype=torch.uint8).pin_memory()
    target = torch.empty(largest, device="cuda", dtype=torch.uint8)

    def ms(size: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        for _ in range(_COPIES):
            target[:size].copy_(source[:size], non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _COPIES

    ms(largest)
    times = {size: median(ms(size) for _ in range(repeats)) for size in COPY_BYTES}
    rate = (largest - before) / (times[largest] - times[before]) / 1e6
    rows = []
    for size in COPY_BYTES:
        us, moving = 1e3 * times[size], size / rate / 1e3
        rows.append({"bytes": size, "us": round(us, 3), "overhead_pct": round(100 * (1 - moving / us), 2)})
    return rows, round(1e3 * times[COPY_BYTES[0]], 3), round(rate, 3)
