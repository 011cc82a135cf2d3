"""The shim's tracer against Kineto on a GPU: are the spans the same, and what does a traced step cost?

    WEFT_NCCL=libnccl.so.2 weft run -- python benchmarks/tracer.py [--out FILE] [--details FILE] [PROGRAM …]

Programs of tracer_programs.py, in one process: `launches` (thousands of small kernels), `mixed` (cuBLAS,
cuDNN, Triton, ATen, NCCL, a CUDA graph), `persistent` (GEMMs that take every SM, so that collectives wait),
`layers` (a transformer; nothing was fitted to it), `anatomy` (single kinds of kernels; part 3 only).

1. Control: for each program, episodes of two blocks of steps with a short sleep between them. No trace has
   run yet.
2. Episodes of [untraced block A] [traced steps] [untraced block B]. B over A of one episode is the cost that
   a trace leaves behind; A of the next episode over B is the null, without a trace in between.
3. Steps under Kineto, the tracer and both, interleaved. Comes last, since Kineto slows everything after it.

Needs an NCCL that places two ranks on one GPU. About 70 seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import signal
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tracer_programs import PROGRAMS, Step, self_times

from weft.kernels import is_comm
from weft.shim import spans, tracer

Row = tuple[str, int, int]  # name, start, end in ns
DEADLINE_S = 170
STEPS = 3
BLOCK = 6
EPISODES = 12
TURNS, KEPT_TURNS = 5, 2
SLEEP_S = 0.02


def step_ms(step: Step, steps: int = STEPS) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def traced(step: Step) -> tuple[float, Any]:
    torch.cuda.synchronize()
    assert tracer.start()
    ms = step_ms(step)
    recording = tracer.stop()
    assert recording is not None
    return ms, recording


def rows_of(recording: Any) -> list[Row]:
    return [(s.name, s.start_ns, s.end_ns) for s in spans.spans_of(recording) if s.kind != "memory"]


def profiled(step: Step, *, both: bool = False) -> tuple[list[Row], Any]:
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
        (e.name(), int(e.start_ns()), int(e.start_ns()) + int(e.duration_ns()), int(e.device_resource_id()))
        for e in profiler.profiler.kineto_results.events()
        if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0
    ]
    everything.append({"both": both, "kineto": found, **raw_of(recording)})
    return [row[:3] for row in found if not row[0].startswith(("Memcpy", "Memset", "weft_"))], recording


def figures(rows: list[Row]) -> dict[str, float]:
    """Figures of one step, in ms."""
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


def without_own_gaps(recording: Any) -> dict[str, float]:
    """Figures of one step in ms, as live tuning uses them: without the gaps that events cause."""
    profile = spans.span_profile(recording, STEPS)
    assert profile is not None
    assert profile.comm_ms is not None
    assert profile.exposed_ms is not None
    return {"exposed_ms": profile.exposed_ms, "overlapped_ms": profile.comm_ms - profile.exposed_ms}


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


def control(step: Step, episodes: int) -> dict[str, Any]:
    for _ in range(5):
        step()
    blocks, cores = [], set()
    for _ in range(episodes):
        before = step_ms(step, BLOCK)
        time.sleep(SLEEP_S)
        blocks.append((before, step_ms(step, BLOCK)))
        cores.add(processor())
    return {**ratios(blocks), "cores": sorted(cores)}


def without_kineto(step: Step, episodes: int) -> dict[str, Any]:
    for _ in range(3):
        step()
    blocks, costs, recordings, cores = [], [], [], set()
    for _ in range(episodes):
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
    """Least, median and most time from "stream ready" to the event after the launch completion."""
    both = [raw for raw in recording.spans if raw.placed_ns >= 0 and raw.before_ns >= 0]
    found = sorted((raw.placed_ns - raw.before_ns) / 1e3 for raw in both)
    return [found[0], statistics.median(found), found[-1]] if found else []


RAW = (
    *("host_front_ns", "host_ns", "host_end_ns", "host_placed_ns", "before_ns", "after_ns", "placed_ns"),
    *("again_ns", "stream", "lane", "kind", "row", "flags", "graph_kernels"),
)


def raw_of(recording: Any) -> dict[str, Any]:
    """Everything about a recording, for later inspection."""
    times = {"self_times": self_times[-1].found() if self_times else []}
    if recording is None:
        return times
    return {
        **times,
        "fields": RAW,
        "calibrated_ns": list(recording.header.calibrated_ns),
        "raw": [[getattr(span, name) for name in RAW] for span in recording.spans],
        "grids": [list(span.grid) for span in recording.spans],
        "symbols": recording.symbols,
        "graph_rows": recording.graph_rows,
        "spans": [(s.name, s.start_ns, s.end_ns, s.timing) for s in spans.spans_of(recording)],
    }


everything: list[dict[str, Any]] = []
"""Recordings and profiles of the current program, for --details."""


def with_kineto(step: Step) -> dict[str, Any]:
    """Kineto alone, the tracer alone and both at once, interleaved."""
    step()
    alone, ours, alike, same, errors = [], [], [], [], []
    kernels = 0
    for _ in range(TURNS):
        rows, _ = profiled(step)
        alone.append(figures(rows))
        kernels = len(rows) // STEPS
        recording = traced(step)[1]
        ours.append(figures(rows_of(recording)))
        alike.append(without_own_gaps(recording))
        everything.append({"traced": True, **raw_of(recording)})
        rows, recording = profiled(step, both=True)
        mine = rows_of(recording)
        same.append({f"kineto_{key}": value for key, value in figures(rows).items()} | figures(mine))
        errors += comm_errors(rows, mine)
    return {
        "same_steps": middle(same),
        "same_steps_ratio": middle([ratio_of(one) for one in same]),
        "comm_start_error_us": quartiles(errors),
        "kineto": middle(alone),
        "tracer": middle(ours),
        "tracer_without_own_gaps": middle(alike),
        "spread": {key: spread([one[key] for one in alone]) for key in alone[0]},
        "kineto_kernels": kernels,
        "traced_kernels": kernels_in(recording) // STEPS,
    }


def ratio_of(same: dict[str, float]) -> dict[str, float]:
    """Our figures over Kineto's, for the same steps."""
    return {
        key: value / (same[f"kineto_{key}"] or 1e-9) for key, value in same.items() if "kineto" not in key
    }


def spread(values: list[float]) -> list[float]:
    """Least and most of the turns under Kineto alone."""
    return [round(min(values), 4), round(max(values), 4)]


def comm_errors(kineto: list[Row], ours: list[Row]) -> list[float]:
    """Microseconds by which we see collectives start later than Kineto does, relative to their ends."""
    theirs = sorted((end, end - start) for name, start, end in kineto if is_comm(name))
    mine = sorted((end, end - start) for name, start, end in ours if is_comm(name))
    if len(theirs) != len(mine):
        return []
    return [(a[1] - b[1]) / 1e3 for a, b in zip(theirs, mine, strict=True)]


def quartiles(values: list[float]) -> list[float]:
    return [round(v, 2) for v in statistics.quantiles(values, n=4)] if len(values) > 1 else []


def compared(found: dict[str, Any]) -> dict[str, float]:
    """The bars: our figures over Kineto's, on the same kind of step and on the same steps."""
    out = {}
    for key in ("comm_ms", "overlapped_ms", "exposed_ms", "compute_ms"):
        kinds = {
            "": (found["tracer"][key], found["kineto"][key], found["kineto"]["comm_ms"]),
            "_same_steps": (
                found["same_steps"][key],
                found["same_steps"][f"kineto_{key}"],
                found["same_steps"]["kineto_comm_ms"],
            ),
        }
        for kind, (ours, theirs, comm) in kinds.items():
            out[f"{key}_ratio{kind}"] = found["same_steps_ratio"][key] if kind else ours / (theirs or 1e-9)
            out[f"{key}_error_of_comm_pct{kind}"] = 100 * (ours - theirs) / (comm or 1.0)
    out["kernels_equal"] = float(found["traced_kernels"] == found["kineto_kernels"])
    return {key: round(value, 4) for key, value in out.items()}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), help=" ".join(PROGRAMS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of parts 1 and 2")
    parser.add_argument("--details", type=Path, help="raw events and Kineto's kernels, as json.gz")
    args = parser.parse_args()
    signal.alarm(DEADLINE_S)
    torch.cuda.set_device(0)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    details: dict[str, Any] = {}
    steps = {name: PROGRAMS[name]() for name in args.programs if name != "anatomy"}

    for name, step in steps.items():
        results[name] = {"control": control(step, args.episodes)}
        print(name, json.dumps(results[name]), flush=True)
    for name, step in steps.items():
        results[name] |= without_kineto(step, args.episodes)
        print(name, json.dumps(results[name]), flush=True)
    for name in args.programs:
        everything.clear()
        step = steps.get(name) or PROGRAMS[name]()
        results[name] = results.get(name, {}) | with_kineto(step)
        results[name]["compared"] = compared(results[name])
        print(name, json.dumps(results[name]["compared"]), flush=True)
        details[name] = everything[-3 * KEPT_TURNS :]
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        if args.details:
            args.details.write_bytes(gzip.compress(json.dumps(details).encode(), 5))


if __name__ == "__main__":
    main()
