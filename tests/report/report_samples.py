"""Hand-made documents and timelines of the documented shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.policy import Policy
from weft.timeline import Kind, Timeline
from weft.tuning.tuned_workload import Measured, TunedWorkload
from weft.tuning.verdict import Verdict
from weft.workload import named

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>')
SPLITS = {
    "launched_late_us": 0.1,
    "behind_compute_us": 0.6,
    "slower_rank_us": 0.2,
    "nothing_to_hide_behind_us": 0.1,
}


def timeline(spans: list[tuple[int, int, int, Kind, str]], **resources: list[int]) -> Timeline:
    """From (start_ns, end_ns, stream, kind, name)."""
    names = tuple(dict.fromkeys(name for *_, name in spans))
    columns = list(zip(*spans, strict=True)) if spans else [[], [], [], [], []]
    return Timeline(
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.int64),
        np.array(columns[3], dtype=np.uint8),
        np.array([names.index(name) for name in columns[4]], dtype=np.int32),
        names,
        {key: np.array(column, dtype=np.int64) for key, column in resources.items()},
    )


def small_timeline(origin_ns: int = 1_700_000_000_000_000_000) -> Timeline:
    """100 µs: a GEMM, an all-reduce that starts in its last third, a copy; names that mean harm."""
    spans = [
        (0, 30_000, 7, Kind.COMPUTE, "gemm_kernel<64, 64>(float*)"),
        (20_000, 60_000, 20, Kind.COMM, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)"),
        (50_000, 70_000, 7, Kind.COMPUTE, HOSTILE[0]),
        (70_000, 80_000, 7, Kind.MEMORY, "Memcpy DtoH"),
        (80_000, 90_000, 20, Kind.COMM, HOSTILE[1]),
        (90_001, 100_000, 7, Kind.COMPUTE, "gemm_kernel<64, 64>(float*)"),
    ]
    moved = [(a + origin_ns, b + origin_ns, stream, kind, name) for a, b, stream, kind, name in spans]
    return timeline(
        moved,
        blocks=[128, 8, 64, -1, 8, 128],
        threads=[256, 544, 256, -1, 544, 256],
        registers=[255, 96, 40, -1, 96, 255],
        shared_bytes=[65536, 119_000, 0, -1, 119_000, 65536],
        bytes=[-1, 1 << 20, -1, 4096, 1 << 20, -1],
    )


def large_timeline(count: int, seed: int = 0) -> Timeline:
    """`count` short kernels on three streams, one in fifty a collective, with gaps and bursts."""
    draw = np.random.default_rng(seed)
    kind = np.where(draw.random(count) < 0.02, Kind.COMM, Kind.COMPUTE).astype(np.uint8)
    kind[draw.random(count) < 0.01] = Kind.MEMORY
    length = np.where(
        kind == Kind.COMM, draw.integers(20_000, 80_000, count), draw.integers(800, 9_000, count)
    )
    stream = np.where(kind == Kind.COMM, 20, np.where(draw.random(count) < 0.2, 9, 7))
    start = np.zeros(count, dtype=np.int64)
    for number in np.unique(stream):
        at = np.flatnonzero(stream == number)
        gap = draw.integers(100, 30_000 if number == 9 else 2_000, len(at)) * (
            1 + 40 * (draw.random(len(at)) < 0.01)
        )
        start[at] = np.cumsum(length[at] + gap) - length[at]
    name = np.where(kind == Kind.COMM, 0, draw.integers(1, 300, count)).astype(np.int32)
    names = (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        *(f"kernel_{i}<{'x' * (i % 90)}>(float*)" for i in range(1, 300)),
    )
    blocks = draw.integers(1, 2_000, count)
    return Timeline(start, start + length, stream.astype(np.int64), kind, name, names, {"blocks": blocks})


def rank_document(line: Timeline, rank: int) -> dict[str, Any]:
    """The figures of a timeline in the shape of `weft analyze --json`."""
    figures = line.figures()
    exposed = figures.exposed_ns / 1e3
    collectives = []
    for at in sorted(set(line.name[line.kind == Kind.COMM].tolist())):
        mine = (line.name == at) & (line.kind == Kind.COMM)
        total = int((line.end_ns - line.start_ns)[mine].sum()) / 1e3
        collectives.append(
            {
                "name": line.names[at],
                "kind": "all_reduce",
                "count": int(mine.sum()),
                "bytes": 1 << 20,
                "total_us": total,
                "exposed_us": exposed / 2,
                "median_us": total / int(mine.sum()),
                "busbw_gbps": 123.4,
                "attribution": {key: exposed / 2 * part for key, part in SPLITS.items()},
            }
        )
    return {
        "path": f"run/rank{rank}.json.gz",
        "rank": rank,
        "device": "NVIDIA H200",
        "span_us": figures.span_ns / 1e3,
        "compute_us": figures.compute_ns / 1e3,
        "comm_us": figures.comm_ns / 1e3,
        "overlap_us": figures.overlap_ns / 1e3,
        "overlap_pct": figures.overlap_pct,
        "exposed_comm_us": exposed,
        "memory_us": figures.memory_ns / 1e3,
        "idle_us": figures.idle_ns / 1e3,
        "collectives": collectives,
        "attribution": {key: exposed * part for key, part in SPLITS.items()},
    }


def analysis_document(lines: list[Timeline]) -> dict[str, Any]:
    """A complete analysis document."""
    return {
        "ranks": [rank_document(line, rank) for rank, line in enumerate(lines)],
        "summary": {},
        "advice": [
            {
                "control": "comm.priority",
                "title": "Give the collectives priority",
                "detail": "They wait behind compute that holds the SMs.",
                "collective": "all_reduce",
                "gain_us": [5.0, 20.0],
                "command": 'weft run --priority high -- torchrun train.py --name "a & b"',
            }
        ],
    }


def bench_document() -> dict[str, Any]:
    """Two workloads under three policies."""
    rows = []
    for workload, sequential in (("cb-ar", 29.3), ("mb-ar", 14.6)):
        for policy, ms in (
            ("overlap", 25.9),
            ({"version": 1, "comm": {"priority": "high"}}, 22.8),
            ("padded", 30.1),
        ):
            rows.append(
                {
                    "workload": workload,
                    "policy": policy,
                    "ms": ms,
                    "ci_ms": [ms - 0.4, ms + 0.5],
                    "time_ratio": ms / sequential,
                    "overlap_rate": 0.6,
                    "fraction_of_ideal": (29.3 - ms) / (29.3 - 18.8),
                }
            )
    return {"device": "NVIDIA H200", "suite": "paper", "rows": rows}


def tuned_workload(**changes: Any) -> TunedWorkload:
    """Four candidates, one kept."""
    high, best = Policy(priority="high"), Policy(priority="high", residency=3)
    times = (
        ("sequential", "sequential", Policy(), 29.3),
        ("overlap", "overlap", Policy(), 25.9),
        (high.label, "overlap", high, 22.8),
        (best.label, "overlap", best, 19.3),
    )
    measured = tuple(
        Measured(
            candidate=label,
            mode=mode,
            policy=policy,
            ms=ms,
            ci_ms=(ms - 0.2, ms + 0.2),
            kept=policy == best,
        )
        for label, mode, policy, ms in times
    )
    verdict = Verdict(
        source=changes.pop("source", "lab"),
        policy=best,
        chosen=best.label,
        applies=True,
        gain_pct=25.5,
        gain_ci_pct=(24.9, 26.1),
        best_ms=19.3,
        baseline_ms=25.9,
        baseline="plain overlap",
        candidates=changes.pop("candidates", measured),
    )
    values = {
        "verdict": verdict,
        "device": "NVIDIA H200",
        "workload": named("cb-ar"),
        "sequential_ms": 29.3,
        "overlap_ms": 25.9,
        "ideal_ms": 18.8,
    }
    return TunedWorkload(**{**values, **changes})


def tune_document() -> dict[str, Any]:
    """The same as `weft tune --json` prints it."""
    return tuned_workload().to_dict()
