"""The analysis of one run: figures, collectives, causes, price of overlap and advice, over all its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import InputError
from weft.timeline import Kind, OverlapFigures, Timeline
from weft.trace.advise import Advice, advise
from weft.trace.attribute import CAUSES, Attribution, attribute
from weft.trace.collectives import Collectives, collectives
from weft.trace.custom import comm_matcher
from weft.trace.kineto import Trace
from weft.trace.match import Match, match
from weft.trace.names import short_name
from weft.trace.parallel import Helper, Progress, read_all
from weft.trace.price import KernelPrice, price_of_overlap
from weft.trace.steps import StepFigures, step_figures

_PRICED_KERNELS = 50


@dataclass(frozen=True, eq=False)
class RankAnalysis:
    """One GPU of the run."""

    trace: Trace
    figures: OverlapFigures
    found: Collectives
    matched: Match
    attribution: Attribution
    steps: tuple[StepFigures, ...]
    prices: tuple[KernelPrice, ...]

    @property
    def exposed_comm_us(self) -> float:
        """Communication during which no compute kernel ran, in µs."""
        return us(self.figures.exposed_ns)

    def to_json(self) -> dict[str, Any]:
        """The entry of `ranks` in the document of `weft analyze --json`. Times in µs, exact to 1 ns."""
        trace = self.trace
        return {
            "path": trace.path,
            "rank": trace.rank,
            "device": trace.device_name or None,
            "device_index": trace.device,
            "world_size": trace.world_size,
            "events": trace.events,
            "gpu_events": len(trace.timeline),
            "partial": trace.partial,
            "warnings": list(trace.warnings),
            **figures_json(self.figures),
            "steps": [
                {"name": step.name, "start_us": us(step.start_ns), **figures_json(step.figures)}
                for step in self.steps
            ],
            "collectives": collective_rows(self),
            "attribution": causes_json(self.attribution.totals()),
            "price_of_overlap": _price_json(self.prices),
            "clock_offset_us": us(self.matched.offset_ns),
            "matched_collectives": int(self.matched.matched.sum()),
        }


@dataclass(frozen=True, eq=False)
class Analysis:
    """What `weft.analyze` returns. The totals below are over all ranks."""

    ranks: tuple[RankAnalysis, ...]
    advice: tuple[Advice, ...]
    warnings: tuple[str, ...] = ()

    @property
    def timelines(self) -> list[Timeline]:
        """What ran on each GPU, in the order of `ranks`."""
        return [rank.trace.timeline for rank in self.ranks]

    @property
    def partial(self) -> bool:
        """Whether some file was cut short or damaged, so that figures cover only a part of it."""
        return any(rank.trace.partial for rank in self.ranks)

    @property
    def exposed_comm_us(self) -> float:
        """Exposed communication summed over ranks, in µs."""
        return us(sum(rank.figures.exposed_ns for rank in self.ranks))

    @property
    def comm_us(self) -> float:
        """Communication summed over ranks, in µs."""
        return us(sum(rank.figures.comm_ns for rank in self.ranks))

    @property
    def compute_us(self) -> float:
        """Compute summed over ranks, in µs."""
        return us(sum(rank.figures.compute_ns for rank in self.ranks))

    @property
    def overlap_us(self) -> float:
        """Communication beside compute summed over ranks, in µs."""
        return us(sum(rank.figures.overlap_ns for rank in self.ranks))

    @property
    def overlap_pct(self) -> float:
        """Share of all communication that ran beside compute, in percent."""
        comm = sum(rank.figures.comm_ns for rank in self.ranks)
        return 100.0 * sum(rank.figures.overlap_ns for rank in self.ranks) / comm if comm else 0.0

    @property
    def attribution(self) -> dict[str, float]:
        """Exposed µs by cause, summed over ranks."""
        return causes_json(_sum_causes(self.ranks))

    def to_json(self) -> dict[str, Any]:
        """The document that `weft analyze --json` prints."""
        return {
            "ranks": [rank.to_json() for rank in self.ranks],
            "summary": summary(self),
            "advice": [item.to_json() for item in self.advice],
            "partial": self.partial,
            "warnings": list(self.warnings),
        }


def analyze_files(
    files: list[Path],
    in_folder: set[Path],
    comm: str | None,
    helpers: list[Helper],
    progress: Progress | None,
) -> Analysis:
    """Reads files and analyzes them, see `weft.trace.analyze`. In a folder some may be no traces."""
    comm_matcher(comm)  # a bad expression is told before any file is read
    read: list[Path] = []

    def done(file: Path) -> None:
        read.append(file)
        if progress:
            progress(str(file), len(read), len(files))

    traces: list[Trace] = []
    warnings: list[str] = []
    for file, outcome in zip(files, read_all(files, comm, helpers, done), strict=True):
        if isinstance(outcome, list):
            traces += outcome
        elif file in in_folder and len(files) > 1 and isinstance(outcome, InputError):
            warnings.append(f"left out: {outcome}")
        else:
            raise outcome
    if not traces:
        raise InputError(f"no usable trace; {warnings[0]}")
    traces.sort(key=lambda t: (t.rank if t.rank is not None else 1 << 31, t.device))
    return analyze_traces(traces, warnings)


def analyze_traces(traces: Sequence[Trace], warnings: Sequence[str] = ()) -> Analysis:
    """Analyzes traces already read, which belong to one run."""
    found = [collectives(trace) for trace in traces]
    matched = match(traces, found)
    ranks = tuple(
        RankAnalysis(
            trace=trace,
            figures=trace.timeline.figures(),
            found=spans,
            matched=pairing,
            attribution=attribute(trace, spans, pairing),
            steps=step_figures(trace),
            prices=tuple(price_of_overlap(trace.timeline)),
        )
        for trace, spans, pairing in zip(traces, found, matched, strict=True)
    )
    own = [f"{rank.trace.path}: {w}" for rank in ranks for w in rank.trace.warnings]
    return Analysis(ranks, tuple(advise(ranks)), (*warnings, *own))


def us(ns: int) -> float:
    """Microseconds that print with exactly the nanoseconds they have."""
    return round(ns / 1000, 3)


def figures_json(figures: OverlapFigures) -> dict[str, float]:
    """The figures under the names of the contract, in µs and percent."""
    return {
        "span_us": us(figures.span_ns),
        "compute_us": us(figures.compute_ns),
        "comm_us": us(figures.comm_ns),
        "overlap_us": us(figures.overlap_ns),
        "overlap_pct": round(figures.overlap_pct, 4),
        "exposed_comm_us": us(figures.exposed_ns),
        "memory_us": us(figures.memory_ns),
        "idle_us": us(figures.idle_ns),
    }


def causes_json(totals: dict[str, int]) -> dict[str, float]:
    """Causes under the names of the contract, in µs."""
    return {f"{cause}_us": us(totals[cause]) for cause in CAUSES}


def collective_rows(rank: RankAnalysis) -> list[dict[str, Any]]:
    """The collectives of a rank, grouped by kernel, kind and process group, the most exposed first."""
    timeline, found, why = rank.trace.timeline, rank.found, rank.attribution
    names = timeline.name[found.span]
    keys = [
        (timeline.names[name], found.kind[label], found.group[label])
        for name, label in zip(names.tolist(), found.label.tolist(), strict=True)
    ]
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    number = np.array([distinct[key] for key in keys], dtype=np.int64)
    length = timeline.end_ns[found.span] - timeline.start_ns[found.span]
    rows = []
    for (name, kind, group), i in distinct.items():
        mine = number == i
        sized, bus = mine & (found.bytes >= 0), mine & ~np.isnan(found.bus_bytes)
        bus_ns = int(length[bus].sum())
        rows.append(
            {
                "name": short_name(name),
                "kernel": name,
                "kind": kind,
                "group": group or None,
                "count": int(mine.sum()),
                "bytes": int(found.bytes[sized].sum()) if sized.any() else None,
                "total_us": us(int(length[mine].sum())),
                "exposed_us": us(int(why.exposed_ns[mine].sum())),
                "median_us": us(int(np.median(length[mine]))),
                "busbw_gbps": round(float(found.bus_bytes[bus].sum()) / bus_ns, 3) if bus_ns else None,
                "attribution": causes_json(why.totals(mine)),
            }
        )
    return sorted(rows, key=lambda row: -row["exposed_us"])


def _price_json(prices: Sequence[KernelPrice]) -> dict[str, Any]:
    alone = sum(price.beside * price.alone_ns for price in prices)
    lost = sum(price.lost_ns for price in prices)
    return {
        "lost_us": us(lost),
        "slowdown_pct": round(100.0 * lost / alone, 2) if alone else None,
        "spans_beside": sum(price.beside for price in prices),
        "spans_alone": sum(price.alone for price in prices),
        "kernels": [
            {
                "name": short_name(price.name),
                "beside": price.beside,
                "alone": price.alone,
                "beside_us": us(price.beside_ns),
                "alone_us": us(price.alone_ns),
                "slowdown_pct": round(price.slowdown_pct, 2),
                "lost_us": us(price.lost_ns),
            }
            for price in prices[:_PRICED_KERNELS]
        ],
    }


def _sum_causes(ranks: Sequence[RankAnalysis]) -> dict[str, int]:
    totals = [rank.attribution.totals() for rank in ranks]
    return {cause: sum(t[cause] for t in totals) for cause in CAUSES}


def summary(analysis: Analysis) -> dict[str, Any]:
    """Totals over ranks, and what they mean in one sentence."""
    worst = max(analysis.ranks, key=lambda rank: rank.figures.exposed_ns)
    return {
        "text": _sentence(analysis),
        "ranks": len(analysis.ranks),
        "comm_us": analysis.comm_us,
        "compute_us": analysis.compute_us,
        "overlap_us": analysis.overlap_us,
        "overlap_pct": round(analysis.overlap_pct, 4),
        "exposed_comm_us": analysis.exposed_comm_us,
        "worst_rank": worst.trace.rank,
        "worst_rank_exposed_comm_us": worst.exposed_comm_us,
        "attribution": analysis.attribution,
        "recoverable_us": max((a.gain_us[1] for a in analysis.advice if a.control != "program"), default=0.0),
    }


_WORDS = {
    "launched_late": "launched late by the CPU",
    "behind_compute": "waiting behind compute",
    "slower_rank": "waiting for a slower rank",
    "nothing_to_hide_behind": "with nothing left to hide behind",
}


def _sentence(analysis: Analysis) -> str:
    if not any((rank.trace.timeline.kind == Kind.COMM).any() for rank in analysis.ranks):
        return "No communication was found; if a kernel of yours communicates, name it with --comm."
    comm, exposed = analysis.comm_us, analysis.exposed_comm_us
    said = f"{exposed / 1000:.3f} of {comm / 1000:.3f} ms of communication is exposed"
    if len(analysis.ranks) > 1:
        said += f" over {len(analysis.ranks)} ranks"
    totals = _sum_causes(analysis.ranks)
    cause = max(totals, key=lambda key: totals[key])
    if not totals[cause]:
        return said + "."
    return f"{said}, {totals[cause] / 10 / exposed:.0f}% of it {_WORDS[cause]}."
