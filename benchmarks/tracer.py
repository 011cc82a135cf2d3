"""The shim's tracer against Kineto on a GPU: are the spans the same, and what does a traced step cost?

    WEFT_NCCL=libnccl.so.2 weft run -- python benchmarks/tracer.py [--out FILE] [PROGRAM …]

Three programs in one process: `launches` (thousands of small kernels), `mixed` (cuBLAS, cuDNN, Triton, ATen,
NCCL, a CUDA graph), `persistent` (GEMMs that take every SM, so that collectives wait).

1. Control: for each program, episodes of two blocks of steps with a short sleep between them. No trace has
   run yet.
2. Episodes of [untraced block A] [traced steps] [untraced block B]. B over A of one episode is what a trace
   leaves behind; A of the next episode over B is the same without a trace in between.
3. Since Kineto slows what comes after it, last: steps under Kineto, the tracer and both, by turns.

Needs an NCCL that places two ranks on one GPU. About 70 seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from weft.comm import nccl
from weft.kernels import is_comm
from weft.shim import spans, tracer

Row = tuple[str, int, int]  # name, start, end in ns
DEADLINE_S = 170
STEPS = 3
BLOCK = 6
EPISODES = 12
TURNS = 3
SLEEP_S = 0.02
SIDES = {"attribute": 0, "stream": 1}
"""How a stamp gets its collective's priority: by an attribute of its launch, or from its stream."""
SIDE = "attribute"


class Collective:
    """All-reduces of two ranks on streams of their own, as a framework overlaps them."""

    def __init__(self, megabytes: float, ctas: int = 8) -> None:
        count = int(megabytes * (1 << 20) // 2)
        self._ranks = nccl.NcclRanks(nccl.load_nccl(), 2, ctas)
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._send = [torch.ones(count, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self._recv = [torch.empty_like(part) for part in self._send]

    def begin(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        self._ranks.all_reduce(self._send, self._recv, self._streams)

    def end(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


@triton.jit
def scaled(x, out, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)


def mixed() -> Callable[[], None]:
    comm = Collective(48)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16)
    image = torch.randn(32, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    flat = torch.randn(1 << 24, device="cuda")
    out = torch.empty_like(flat)

    def block(x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(x @ a)
        return F.layer_norm(x @ a, (4096,))

    block(a)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        block(a)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        block(a)

    def step() -> None:
        for _ in range(4):
            block(a)
            comm.begin()
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            F.conv2d(image, weights, padding=1)
            scaled[(triton.cdiv(flat.numel(), 1024),)](flat, out, flat.numel(), 1024)
            block(a)
            graph.replay()
        comm.end()

    return step


def persistent() -> Callable[[], None]:
    comm = Collective(96)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)

    def step() -> None:
        for _ in range(6):
            torch.mm(a, a, out=b)
            comm.begin()
        torch.mm(a, a, out=b)
        comm.end()

    return step


def launches() -> Callable[[], None]:
    comm = Collective(8)
    small = torch.ones(4096, device="cuda")

    def step() -> None:
        for i in range(3000):
            small.add_(1.0)
            if i % 300 == 150:
                comm.begin()
        comm.end()

    return step


PROGRAMS: dict[str, Callable[[], Callable[[], None]]] = {
    "launches": launches,
    "mixed": mixed,
    "persistent": persistent,
}


def step_ms(step: Callable[[], None], steps: int = STEPS) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def traced(step: Callable[[], None]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    assert tracer.start()
    ms = step_ms(step)
    recording = tracer.stop()
    assert recording is not None
    return ms, recording


def rows_of(recording: Any) -> list[Row]:
    return [(s.name, s.start_ns, s.end_ns) for s in spans.spans_of(recording) if s.kind != "memory"]


def profiled(step: Callable[[], None], *, both: bool = False) -> tuple[list[Row], Any]:
    """Kineto's kernels; with `both`, what the tracer recorded of the same steps."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    recording = None
    with torch.profiler.profile(activities=activities) as profiler:
        if both:
            recording = traced(step)[1]
        else:
            step_ms(step)
    found = [
        (e.name(), int(e.start_ns()), int(e.start_ns()) + int(e.duration_ns()))
        for e in profiler.profiler.kineto_results.events()
        if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0
    ]
    return [row for row in found if not row[0].startswith(("Memcpy", "Memset", "weft_"))], recording


def figures(rows: list[Row]) -> dict[str, float]:
    """Of one step, in ms."""
    comm = spans.union_spans(row[1:] for row in rows if is_comm(row[0]))
    compute = spans.union_spans(row[1:] for row in rows if not is_comm(row[0]))
    ms = 1e-6 / STEPS
    overlapped = spans.common(comm, compute)
    return {
        "comm_ms": spans.total(comm) * ms,
        "overlapped_ms": overlapped * ms,
        "exposed_ms": (spans.total(comm) - overlapped) * ms,
        "compute_ms": spans.total(compute) * ms,
        "span_ms": (max(r[2] for r in rows) - min(r[1] for r in rows)) * ms,
    }


def kernels_in(recording: Any) -> int:
    profile = spans.span_profile(recording, 1)
    return round(sum(profile.launches.values())) if profile else 0


def middle(many: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(one[key] for one in many), 4) for key in many[0]}


def processor() -> int:
    """The core that this thread runs on."""
    return int(Path("/proc/thread-self/stat").read_text().rsplit(")", 1)[1].split()[36])


def interval(ratios: list[float]) -> list[float]:
    """The median with an interval of at least 95% that assumes nothing about the distribution."""
    ordered = sorted(ratios)
    n = len(ordered)
    low = 0
    while sum(math.comb(n, k) for k in range(low + 2)) / 2**n < 0.025:
        low += 1
    return [round(value, 4) for value in (statistics.median(ordered), ordered[low], ordered[n - 1 - low])]


def ratios(blocks: list[tuple[float, float]]) -> dict[str, Any]:
    """B over A of each episode, and the null: A of the next over B of this one."""
    return {
        "after_over_before": interval([b / a for a, b in blocks]),
        "next_over_after": interval([nxt[0] / this[1] for this, nxt in pairwise(blocks)]),
        "step_ms": round(statistics.median(value for pair in blocks for value in pair), 4),
        "first_ms": round(blocks[0][0], 4),
        "last_ms": round(blocks[-1][1], 4),
    }


def control(step: Callable[[], None]) -> dict[str, Any]:
    for _ in range(5):
        step()
    blocks, cores = [], set()
    for _ in range(EPISODES):
        before = step_ms(step, BLOCK)
        time.sleep(SLEEP_S)
        blocks.append((before, step_ms(step, BLOCK)))
        cores.add(processor())
    return {**ratios(blocks), "cores": sorted(cores)}


def without_kineto(step: Callable[[], None]) -> dict[str, Any]:
    for _ in range(3):
        step()
    blocks, costs, recordings, cores = [], [], [], set()
    for _ in range(EPISODES):
        before = step_ms(step, BLOCK)
        ms, recording = traced(step)
        after = step_ms(step, BLOCK)
        blocks.append((before, after))
        costs.append(2 * ms / (before + after))
        recordings.append(recording)
        cores.add(processor())
    return {
        **ratios(blocks),
        "traced_over_untraced": interval(costs),
        "kernels": kernels_in(recordings[-1]) // STEPS,
        "timings": dict(Counter(s.timing for s in spans.spans_of(recordings[-1]))),
        "counters": recordings[-1].counters,
        "calibrated_ns": [list(recording.header.calibrated_ns) for recording in recordings[-3:]],
        "placed_gap_us": gaps(recordings[-1]),
        "cores": sorted(cores),
    }


def gaps(recording: Any) -> list[float]:
    """From "stream ready" to the event behind the launch completion: least, median, most."""
    both = [raw for raw in recording.spans if raw.placed_ns >= 0 and raw.before_ns >= 0]
    found = sorted((raw.placed_ns - raw.before_ns) / 1e3 for raw in both)
    return [found[0], statistics.median(found), found[-1]] if found else []


RAW = (
    *("host_front_ns", "host_ns", "host_end_ns", "host_placed_ns", "before_ns", "after_ns", "placed_ns"),
    *("again_ns", "stream", "lane", "kind", "row", "flags", "graph_kernels"),
)


def details(kineto: list[Row], recording: Any) -> dict[str, Any]:
    """Everything about the same steps, to look at afterwards."""
    return {
        "kineto": kineto,
        "fields": RAW,
        "calibrated_ns": list(recording.header.calibrated_ns),
        "raw": [[getattr(span, name) for name in RAW] for span in recording.spans],
        "symbols": recording.symbols,
        "spans": [(s.name, s.start_ns, s.end_ns, s.timing) for s in spans.spans_of(recording)],
    }


def with_kineto(step: Callable[[], None], keep: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    step()
    alone, ours = [], []
    kernels = 0
    found: dict[str, Any] = {"same_steps": {}, "comm_start_error_us": {}}
    same: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    errors: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(TURNS):
        rows, _ = profiled(step)
        alone.append(figures(rows))
        kernels = len(rows) // STEPS
        ours.append(figures(rows_of(traced(step)[1])))
        for name, same_priority in SIDES.items():
            ctypes.CDLL(None).weft_trace_side_priority(same_priority)
            rows, recording = profiled(step, both=True)
            mine = rows_of(recording)
            same[name].append(
                {f"kineto_{key}": value for key, value in figures(rows).items()} | figures(mine)
            )
            errors[name] += comm_errors(rows, mine)
            keep(details(rows, recording), name)
        ctypes.CDLL(None).weft_trace_side_priority(SIDES[SIDE])
    for name in SIDES:
        found["same_steps"][name] = middle(same[name])
        found["comm_start_error_us"][name] = quartiles(errors[name])
    return {**found, "kineto": middle(alone), "tracer": middle(ours), "kineto_kernels": kernels}


def comm_errors(kineto: list[Row], ours: list[Row]) -> list[float]:
    """How much later than Kineto we see collectives start, relative to their ends, in us."""
    theirs = sorted((end, end - start) for name, start, end in kineto if is_comm(name))
    mine = sorted((end, end - start) for name, start, end in ours if is_comm(name))
    if len(theirs) != len(mine):
        return []
    return [(a[1] - b[1]) / 1e3 for a, b in zip(theirs, mine, strict=True)]


def quartiles(values: list[float]) -> list[float]:
    return [round(v, 2) for v in statistics.quantiles(values, n=4)] if len(values) > 1 else []


def compared(found: dict[str, Any]) -> dict[str, float]:
    """The bars: ours over Kineto's, on the same kind of step and on the same steps."""
    out = {}
    for key in ("comm_ms", "overlapped_ms", "exposed_ms", "compute_ms"):
        share = found["kineto"]["comm_ms"] or 1.0
        out[f"{key}_ratio"] = found["tracer"][key] / (found["kineto"][key] or 1e-9)
        out[f"{key}_error_of_comm_pct"] = 100 * (found["tracer"][key] - found["kineto"][key]) / share
        for name, same in found["same_steps"].items():
            out[f"{key}_ratio_same_steps_{name}"] = same[key] / (same[f"kineto_{key}"] or 1e-9)
            share = same["kineto_comm_ms"] or 1.0
            error = 100 * (same[key] - same[f"kineto_{key}"]) / share
            out[f"{key}_error_of_comm_pct_same_steps_{name}"] = error
    out["kernels_equal"] = float(found["kernels"] == found["kineto_kernels"])
    return {key: round(value, 4) for key, value in out.items()}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), help=" ".join(PROGRAMS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.alarm(DEADLINE_S)
    torch.cuda.set_device(0)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    steps = {name: PROGRAMS[name]() for name in args.programs}

    def keep() -> None:
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")

    for name, step in steps.items():
        results[name] = {"control": control(step)}
        print(name, json.dumps(results[name]), flush=True)
    for name, step in steps.items():
        results[name] |= without_kineto(step)
        print(name, json.dumps(results[name]), flush=True)
        keep()
    for name, step in steps.items():

        def keep_details(found: dict[str, Any], side: str, name: str = name) -> None:
            if args.out:
                args.out.with_suffix(f".{name}.{side}.json").write_text(json.dumps(found))

        results[name] |= with_kineto(step, keep_details)
        results[name]["compared"] = compared(results[name])
        print(name, json.dumps(results[name]["compared"]), flush=True)
        keep()


if __name__ == "__main__":
    main()
