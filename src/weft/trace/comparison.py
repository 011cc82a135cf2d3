"""Two runs of the same program side by side: before and after a change."""

from __future__ import annotations

from typing import Any

from weft.trace.analysis import Analysis

_PER_RANK = ("span_us", "compute_us", "comm_us", "overlap_us", "exposed_comm_us", "memory_us", "idle_us")


def compare(before: Analysis, after: Analysis) -> dict[str, Any]:
    """The document of `weft analyze BEFORE AFTER`: both analyses, and what changed.

    `change` has, for means over ranks, `{before, after, delta, percent}` in µs (`overlap_pct` in percent and
    points), for the causes likewise, and for each collective found on both sides.
    """
    old, new = before.to_json(), after.to_json()
    change = {key: _delta(_mean(old, key), _mean(new, key)) for key in _PER_RANK}
    change["overlap_pct"] = _delta(old["summary"]["overlap_pct"], new["summary"]["overlap_pct"])
    causes = {
        cause: _delta(_mean_cause(old, cause), _mean_cause(new, cause))
        for cause in old["summary"]["attribution"]
    }
    return {
        "before": old,
        "after": new,
        "change": {
            **change,
            "attribution": causes,
            "collectives": _collectives(old, new),
            "text": _text(change),
        },
        "warnings": _warnings(old, new),
    }


def _mean(document: dict[str, Any], key: str) -> float:
    ranks = document["ranks"]
    return float(sum(rank[key] for rank in ranks)) / len(ranks)


def _mean_cause(document: dict[str, Any], cause: str) -> float:
    ranks = document["ranks"]
    return float(sum(rank["attribution"][cause] for rank in ranks)) / len(ranks)


def _delta(old: float, new: float) -> dict[str, float | None]:
    return {
        "before": round(old, 4),
        "after": round(new, 4),
        "delta": round(new - old, 4),
        "percent": round(100 * (new - old) / old, 2) if old else None,
    }


def _collectives(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Exposed time per kind of collective, as mean over ranks, where either run has it."""
    sides = [_by_kind(document) for document in (old, new)]
    kinds = sorted({*sides[0], *sides[1]}, key=lambda kind: -sides[0].get(kind, 0.0))
    return [{"kind": kind, "exposed_us": _delta(*(side.get(kind, 0.0) for side in sides))} for kind in kinds]


def _by_kind(document: dict[str, Any]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for rank in document["ranks"]:
        for row in rank["collectives"]:
            totals[row["kind"]] = totals.get(row["kind"], 0.0) + row["exposed_us"] / len(document["ranks"])
    return totals


def _text(change: dict[str, dict[str, float | None]]) -> str:
    exposed, span = change["exposed_comm_us"], change["span_us"]

    def said(entry: dict[str, float | None]) -> str:
        percent = "" if entry["percent"] is None else f" ({entry['percent']:+.1f}%)"
        return f"{(entry['before'] or 0) / 1000:.3f} → {(entry['after'] or 0) / 1000:.3f} ms{percent}"

    return f"Per rank: exposed communication {said(exposed)}, span {said(span)}."


def _warnings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    out = [*old["warnings"], *new["warnings"]]
    if len(old["ranks"]) != len(new["ranks"]):
        out.append(f"the runs have {len(old['ranks'])} and {len(new['ranks'])} ranks: means are compared")
    steps = [sum(len(rank["steps"]) for rank in side["ranks"]) for side in (old, new)]
    if steps[0] != steps[1]:
        out.append(f"the runs have {steps[0]} and {steps[1]} marked steps: compare per step, not totals")
    return out
