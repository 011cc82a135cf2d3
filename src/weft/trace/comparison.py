"""Compares two runs of the same program, before and after a change, per step and by collective."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from weft.errors import UsageError
from weft.timeline import Kind
from weft.trace.analysis import Analysis, RankAnalysis

_PER_RANK = ("span_us", "compute_us", "comm_us", "overlap_us", "exposed_comm_us", "memory_us", "idle_us")

SAME_MODEL = 0.5
"""Runs with less than this share of their compute time in common kernels may be of different models."""


def compare(before: Analysis, after: Analysis) -> dict[str, Any]:
    """The document of `weft analyze AFTER --against BEFORE`: both analyses, and what changed.

    `change` has `{before, after, delta, percent}` of means over ranks in µs (`overlap_pct` in percent and
    points), for the figures, the causes and each kind of collective; `change.per_step` has the figures of one
    step of each run. Raises UsageError if the runs have different world sizes.
    """
    _check_world(before, after)
    old, new = before.to_json(), after.to_json()
    change = {key: _delta(_mean(old, key), _mean(new, key)) for key in _PER_RANK}
    change["overlap_pct"] = _delta(old["summary"]["overlap_pct"], new["summary"]["overlap_pct"])
    counts = (_steps(before), _steps(after))
    per_step = {key: _delta(_mean(old, key) / counts[0], _mean(new, key) / counts[1]) for key in _PER_RANK}
    return {
        "before": old,
        "after": new,
        "change": {
            **change,
            "attribution": _amounts(old, new, "attribution"),
            "reasons": _amounts(old, new, "reasons"),
            "collectives": _collectives(old, new),
            "per_step": per_step,
            "steps": {"before": counts[0], "after": counts[1]},
            "matched": _matched(before, after, counts),
            "text": _text(per_step, counts),
        },
        "warnings": list(
            dict.fromkeys([*old["warnings"], *new["warnings"], *_warnings(before, after, counts)])
        ),
    }


def _check_world(before: Analysis, after: Analysis) -> None:
    """Rejects runs of different sizes: their collectives move different bytes."""
    sizes = []
    for side in (before, after):
        known = {rank.trace.world_size for rank in side.ranks if rank.trace.world_size}
        sizes.append(max(known) if known else None)
    if sizes[0] and sizes[1] and sizes[0] != sizes[1]:
        raise UsageError(
            f"the runs have {sizes[0]} and {sizes[1]} ranks in all: their collectives are not comparable; "
            "compare runs of the same size"
        )


def _steps(analysis: Analysis) -> int:
    return max(max(len(rank.steps) for rank in analysis.ranks), 1)


def _mean(document: dict[str, Any], key: str) -> float:
    ranks = document["ranks"]
    return float(sum(rank[key] for rank in ranks)) / len(ranks)


def _amounts(old: dict[str, Any], new: dict[str, Any], kind: str) -> dict[str, Any]:
    """Change of each cause or reason, as means over ranks."""
    sides = []
    for document in (old, new):
        ranks = document["ranks"]
        sides.append({key: sum(r[kind][key] for r in ranks) / len(ranks) for key in ranks[0][kind]})
    return {key: _delta(sides[0][key], sides[1][key]) for key in sides[0]}


def _delta(old: float, new: float) -> dict[str, float | None]:
    return {
        "before": round(old, 4),
        "after": round(new, 4),
        "delta": round(new - old, 4),
        "percent": round(100 * (new - old) / old, 2) if old else None,
    }


def _collectives(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Change of exposed time per kind of collective in either run, as mean over ranks."""
    sides = [_by_kind(document) for document in (old, new)]
    kinds = sorted({*sides[0], *sides[1]}, key=lambda kind: -sides[0].get(kind, 0.0))
    return [{"kind": kind, "exposed_us": _delta(*(side.get(kind, 0.0) for side in sides))} for kind in kinds]


def _by_kind(document: dict[str, Any]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for rank in document["ranks"]:
        for row in rank["collectives"]:
            totals[row["kind"]] = totals.get(row["kind"], 0.0) + row["exposed_us"] / len(document["ranks"])
    return totals


_Key = tuple[str, str, int]


def _matched(before: Analysis, after: Analysis, steps: tuple[int, int]) -> list[dict[str, Any]]:
    """Collectives of either run by kind, process group and size: calls, time and exposed time per step."""
    sides = [_by_collective(side, count) for side, count in zip((before, after), steps, strict=True)]
    rows = []
    for key in sorted({*sides[0], *sides[1]}, key=lambda k: -sides[0].get(k, sides[1].get(k, (0, 0, 0)))[2]):
        old, new = (side.get(key, (0.0, 0.0, 0.0)) for side in sides)
        kind, group, size = key
        rows.append(
            {
                "kind": kind,
                "group": group or None,
                "bytes": size if size >= 0 else None,
                "calls": _delta(old[0], new[0]),
                "total_us": _delta(old[1], new[1]),
                "exposed_us": _delta(old[2], new[2]),
                "in_both": key in sides[0] and key in sides[1],
            }
        )
    return rows


def _by_collective(analysis: Analysis, steps: int) -> dict[_Key, tuple[float, float, float]]:
    """Calls, µs and exposed µs per rank and step of each kind, group and size."""
    scale = 1.0 / len(analysis.ranks) / steps
    totals: dict[_Key, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for rank in analysis.ranks:
        found, timeline = rank.found, rank.trace.timeline
        length = (timeline.end_ns - timeline.start_ns)[found.span]
        columns = (
            found.label.tolist(),
            found.bytes.tolist(),
            length.tolist(),
            rank.attribution.exposed_ns.tolist(),
        )
        for label, size, took, exposed in zip(*columns, strict=True):
            key = (found.kind[label], found.group[label], size)
            row = totals.setdefault(key, np.zeros(3))
            row += (scale, took * scale / 1e3, exposed * scale / 1e3)
    return {key: (float(row[0]), float(row[1]), float(row[2])) for key, row in totals.items()}


def _text(per_step: dict[str, dict[str, float | None]], steps: tuple[int, int]) -> str:
    def said(entry: dict[str, float | None]) -> str:
        percent = "" if entry["percent"] is None else f" ({entry['percent']:+.1f}%)"
        return f"{(entry['before'] or 0) / 1000:.3f} → {(entry['after'] or 0) / 1000:.3f} ms{percent}"

    stepped = max(steps) > 1
    where, whole = ("Per rank and step", "step") if stepped else ("Per rank", "span")
    exposed, span = said(per_step["exposed_comm_us"]), said(per_step["span_us"])
    return f"{where}: exposed communication {exposed}, {whole} {span}."


def _warnings(before: Analysis, after: Analysis, steps: tuple[int, int]) -> list[str]:
    out = []
    if len(before.ranks) != len(after.ranks):
        out.append(f"the runs have {len(before.ranks)} and {len(after.ranks)} ranks: means are compared")
    if steps[0] != steps[1]:
        out.append(f"the runs have {steps[0]} and {steps[1]} marked steps: compare per step, not totals")
    devices = [{rank.trace.device_name for rank in side.ranks} - {""} for side in (before, after)]
    if devices[0] and devices[1] and devices[0] != devices[1]:
        out.append(f"different GPUs: {', '.join(sorted(devices[0]))} and {', '.join(sorted(devices[1]))}")
    common = _in_common(before.ranks[0], after.ranks[0], steps)
    if common < SAME_MODEL:
        out.append(
            f"only {100 * common:.0f}% of the compute is in kernels that both runs have: this may be another "
            "model, batch or library"
        )
    return out


def _in_common(old: RankAnalysis, new: RankAnalysis, steps: tuple[int, int]) -> float:
    """Share of compute time in kernels that both runs have (same name and shape); the smaller time counts."""
    times = [_kernel_times(rank, count) for rank, count in zip((old, new), steps, strict=True)]
    total = max(sum(side.values()) for side in times)
    return sum(min(ns, times[1].get(key, 0.0)) for key, ns in times[0].items()) / total if total else 1.0


def _kernel_times(rank: RankAnalysis, steps: int) -> dict[tuple[str, int, int], float]:
    timeline = rank.trace.timeline
    mask = timeline.kind == Kind.COMPUTE
    totals: Counter[tuple[str, int, int]] = Counter()
    columns = (
        timeline.name[mask].tolist(),
        timeline.resources["blocks"][mask].tolist(),
        timeline.resources["threads"][mask].tolist(),
        (timeline.end_ns - timeline.start_ns)[mask].tolist(),
    )
    for name, blocks, threads, ns in zip(*columns, strict=True):
        totals[timeline.names[name], blocks, threads] += ns
    return {key: ns / steps for key, ns in totals.items()}
