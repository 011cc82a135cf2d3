"""The error of predictions against published runs, by family of jobs.

`benchmarks/plan/fit.py` predicts every published run with constants that were fitted without its source.
These errors give the mean error of a family and the interval that covers 90% of its runs (a split conformal
interval over sources). `benchmarks/plan/validate.py` writes both to `data/accuracy.json`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.plan.config import TrainingJob

ACCURACY_FILE = Path(__file__).parent / "data" / "accuracy.json"
TITLES = {
    "dense": "dense, tensor and pipeline parallel",
    "fsdp": "fully sharded (FSDP, ZeRO-3)",
    "moe": "mixture of experts",
    "long-context": "sequences of 32,768 tokens and more",
    "large": "more than 2,304 GPUs",
    "untested": "no published run of this GPU or precision",
}
"""The families of jobs, each with its title."""
LONG_TOKENS = 32_768
LARGE_GPUS = 2_304
COVERAGE = 0.90
TESTED_GPUS = frozenset({"a100-80gb", "h100", "h100-96gb", "h200", "h800"})
TESTED_PRECISIONS = frozenset({"bf16", "fp16", "fp8"})
_ENOUGH = 40
"""Fewest runs with which a family gets an interval of its own."""
UNTESTED_FACTOR = 1.5
"""Width of the interval of a job without published runs, relative to the widest measured one. A judgement."""


def family(job: TrainingJob) -> str:
    """The family whose error applies to a job: a key of `TITLES`."""
    if job.gpu.name not in TESTED_GPUS or job.precision not in TESTED_PRECISIONS:
        return "untested"
    if job.model.experts:
        return "moe"
    if job.seq_len >= LONG_TOKENS:
        return "long-context"
    if job.sharding == "zero3":
        return "fsdp"
    return "large" if job.gpus > LARGE_GPUS else "dense"


@dataclass(frozen=True)
class Residual:
    """One published run, predicted without its source."""

    source: str
    family: str
    log_error: float
    """Logarithm of the predicted over the published step time."""


@dataclass(frozen=True)
class Interval:
    """The interval that contains a job's step time with 90% probability, in seconds."""

    low_s: float
    high_s: float
    family: str
    runs: int
    """Published runs of the family that the interval is based on; 0: none, the width is a judgement."""
    coverage_pct: float = 100 * COVERAGE


def bounds(residuals: Sequence[float], coverage: float = COVERAGE) -> tuple[float, float]:
    """Bounds on the logarithm of the true over the predicted step time.

    These are quantiles of the errors of left-out runs, taken one rank further out because there are few runs.
    The interval always contains the prediction itself.
    """
    ordered = sorted(-error for error in residuals)
    count = len(ordered)
    tail = (1 - coverage) / 2
    skipped = max(0, math.floor((count + 1) * tail) - 1)
    return min(0.0, ordered[skipped]), max(0.0, ordered[count - 1 - skipped])


def family_bounds(residuals: Sequence[Residual], name: str) -> tuple[float, float]:
    """The bounds of a family. If it has few runs, they are at least as wide as the bounds of all runs."""
    mine = [row.log_error for row in residuals if row.family == name]
    every = bounds([row.log_error for row in residuals])
    if not mine:
        return every
    own = bounds(mine)
    if len(mine) >= _ENOUGH:
        return own
    return min(own[0], every[0]), max(own[1], every[1])


def covered(residuals: Iterable[Residual]) -> list[tuple[Residual, bool]]:
    """Each run, and whether it lies in the interval derived from the runs of other sources."""
    rows = list(residuals)
    found = []
    for row in rows:
        low, high = family_bounds([r for r in rows if r.source != row.source], row.family)
        found.append((row, low <= -row.log_error <= high))
    return found


def summary(residuals: Sequence[Residual]) -> dict[str, Any]:
    """Error and interval of each family, and the error of all runs, in the format of `data/accuracy.json`."""
    inside = covered(residuals)
    families = {}
    for name in TITLES:
        mine = [row for row in residuals if row.family == name]
        if not mine:
            continue
        low, high = family_bounds(residuals, name)
        families[name] = {
            **_errors(mine),
            "sources": len({row.source for row in mine}),
            "low_pct": round(100 * math.expm1(low), 1),
            "high_pct": round(100 * math.expm1(high), 1),
            "covered_pct": _share([ok for row, ok in inside if row.family == name]),
        }
    return {
        **_errors(residuals),
        "covered_pct": _share([ok for _, ok in inside]),
        "families": families,
    }


def _errors(rows: Sequence[Residual]) -> dict[str, Any]:
    sizes = sorted(100 * abs(math.expm1(row.log_error)) for row in rows)
    return {
        "mean_pct": round(statistics.fmean(sizes), 2),
        "p90_pct": round(sizes[-(-9 * len(sizes) // 10) - 1], 2),
        "max_pct": round(sizes[-1], 2),
        "runs": len(sizes),
    }


def _share(flags: Sequence[bool]) -> float:
    return round(100 * sum(flags) / len(flags), 1) if flags else 0.0


@cache
def known_error() -> dict[str, Any] | None:
    """The error of the shipped constants, by family; None if it was never measured."""
    if not ACCURACY_FILE.exists():
        return None
    found: dict[str, Any] = json.loads(ACCURACY_FILE.read_text(encoding="utf-8"))
    return found


def error_of(job: TrainingJob, known: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The error that applies to a job; None without a table.

    It is the error of the job's family or, if that has none, a widened copy of the widest one, with 0 runs.
    """
    table = known if known is not None else known_error()
    if not table or "families" not in table:
        return None
    families, name = table["families"], family(job)
    if name in families:
        return {**families[name], "family": name, "on": table["on"]}
    worst = max(families.values(), key=lambda one: one["high_pct"] - one["low_pct"])
    wider = {
        "low_pct": round(100 * math.expm1(UNTESTED_FACTOR * math.log1p(worst["low_pct"] / 100)), 1),
        "high_pct": round(100 * math.expm1(UNTESTED_FACTOR * math.log1p(worst["high_pct"] / 100)), 1),
    }
    return {**worst, **wider, "family": name, "runs": 0, "sources": 0, "on": table["on"]}


def error_interval(
    job: TrainingJob, step_s: float, known: Mapping[str, Any] | None = None
) -> Interval | None:
    """The 90% interval of a step predicted without weft's controls; None without a table of errors."""
    found = error_of(job, known)
    if found is None:
        return None
    low, high = (step_s * (1 + found[key] / 100) for key in ("low_pct", "high_pct"))
    return Interval(low, high, found["family"], found["runs"])


def kind(job: TrainingJob) -> str:
    """Software and GPU of a job, in the form used by `known_error()["on"]`, which lists the tested ones."""
    return f"{job.software} on {job.gpu.name}"


def unchecked(job: TrainingJob, error: Mapping[str, Any] | None) -> list[str]:
    """A warning if the known error was measured on other software or GPUs than this job's; else empty."""
    if not error or kind(job) in error["on"]:
        return []
    return [f"no published run of {kind(job)} was checked: the error may be larger"]
