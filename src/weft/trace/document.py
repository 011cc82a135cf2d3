"""The JSON document of an analysis: figures, collectives, causes, critical path and price, in µs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.timeline import OverlapFigures
from weft.trace.attribute import CAUSES, REASONS
from weft.trace.critical import CriticalPath
from weft.trace.names import short_name
from weft.trace.price import KernelPrice
from weft.trace.summary import summary_sentence

if TYPE_CHECKING:
    from weft.trace.analysis import Analysis, RankAnalysis

_PRICED_KERNELS = 50


def us(ns: int) -> float:
    """Converts to microseconds that print with exactly three decimals, the nanoseconds."""
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


def reasons_json(totals: dict[str, int]) -> dict[str, float]:
    """Reasons under their names, in µs."""
    return {f"{reason}_us": us(totals[reason]) for reason in REASONS}


def path_json(path: CriticalPath) -> dict[str, Any]:
    """The critical path in µs: its parts, and the exposed communication on it by reason."""
    return {
        "compute_us": us(path.compute_ns),
        "comm_us": us(path.comm_ns),
        "memory_us": us(path.memory_ns),
        "host_us": us(path.host_ns),
        "gap_us": us(path.gap_ns),
        "recoverable_us": us(path.recoverable_ns),
        "recoverable_by_reason": reasons_json(path.reasons()),
    }


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
                "reasons": reasons_json(why.reasons(mine)),
                "recoverable_us": us(int(rank.path.saved_ns[mine].sum())),
            }
        )
    return sorted(rows, key=lambda row: -row["exposed_us"])


def price_json(prices: Sequence[KernelPrice]) -> dict[str, Any]:
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


def summed(
    ranks: Sequence[RankAnalysis], amounts: Callable[[RankAnalysis], dict[str, int]]
) -> dict[str, int]:
    """Amounts by name, summed over ranks."""
    totals: dict[str, int] = {}
    for rank in ranks:
        for key, ns in amounts(rank).items():
            totals[key] = totals.get(key, 0) + ns
    return totals


def worst_rank(ranks: Sequence[RankAnalysis]) -> RankAnalysis:
    """The rank with the most exposed communication."""
    return max(ranks, key=lambda rank: rank.figures.exposed_ns)


def summary_json(analysis: Analysis) -> dict[str, Any]:
    """Totals over ranks, and one sentence that sums them up."""
    worst = worst_rank(analysis.ranks)
    steps = max(max(len(rank.steps) for rank in analysis.ranks), 1)
    count = len(analysis.ranks)
    reasons = summed(analysis.ranks, lambda rank: rank.attribution.reasons())
    on_path = sum(rank.path.recoverable_ns for rank in analysis.ranks)
    return {
        "text": document_sentence(analysis),
        "ranks": count,
        "comm_us": analysis.comm_us,
        "compute_us": analysis.compute_us,
        "overlap_us": analysis.overlap_us,
        "overlap_pct": round(analysis.overlap_pct, 4),
        "exposed_comm_us": analysis.exposed_comm_us,
        "worst_rank": worst.trace.rank,
        "worst_rank_exposed_comm_us": worst.exposed_comm_us,
        "attribution": analysis.attribution,
        "reasons": reasons_json(reasons),
        "recoverable_us": max((a.gain_us[1] for a in analysis.advice if a.control != "program"), default=0.0),
        "steps": steps,
        "step_us": round(sum(rank.figures.span_ns for rank in analysis.ranks) / 1e3 / count / steps, 3),
        "recoverable_step_us": round(on_path / 1e3 / count / steps, 3),
        "slowest_rank": slowest_rank(analysis.ranks),
    }


def slowest_rank(ranks: Sequence[RankAnalysis]) -> int | None:
    """The rank that the others wait for most (it waits least itself); None if no rank waits."""
    waits = [rank.attribution.reasons()["slower_rank"] for rank in ranks]
    if len(ranks) < 2 or not max(waits):
        return None
    return ranks[int(np.argmin(waits))].trace.rank


def document_sentence(analysis: Analysis) -> str:
    """The summary of an analysis in one sentence."""
    worst = worst_rank(analysis.ranks)
    steps = max(len(worst.steps), 1)
    return summary_sentence(
        exposed_us=worst.figures.exposed_ns / 1e3,
        comm_us=worst.figures.comm_ns / 1e3,
        ranks=len(analysis.ranks),
        name="one rank" if worst.trace.rank is None else f"rank {worst.trace.rank}",
        reasons_us=reasons_json(summed(analysis.ranks, lambda rank: rank.attribution.reasons())),
        saved_us=worst.path.recoverable_ns / 1e3 / steps,
        step_us=worst.figures.span_ns / 1e3 / steps,
        stepped=bool(worst.steps),
    )
