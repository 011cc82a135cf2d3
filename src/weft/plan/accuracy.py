"""How far predictions are from published runs: measured on the held-out half, shipped with the figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from weft.plan.config import TrainingJob
from weft.plan.published import Published
from weft.plan.step import predict

SHIPPED = Path(__file__).parent / "data" / "accuracy.json"


def held_out_error(rows: Iterable[Published]) -> dict[str, Any]:
    """Mean and 90th percentile of the absolute error of step time, in percent, where nothing was fitted."""
    held_out = [row for row in rows if row.half == "held-out"]
    errors = sorted(
        abs(100.0 * (predict(row.job, check_memory=False).step_s / row.step_s - 1.0)) for row in held_out
    )
    return {
        "mean_pct": round(statistics.fmean(errors), 2),
        "p90_pct": round(errors[-(-9 * len(errors) // 10) - 1], 2),
        "max_pct": round(errors[-1], 2),
        "runs": len(errors),
        "on": sorted({_kind(row.job) for row in held_out}),
    }


def _kind(job: TrainingJob) -> str:
    return f"{job.software} on {job.gpu.name}"


def unchecked(job: TrainingJob, error: Mapping[str, Any] | None) -> list[str]:
    """A warning that the known error is of other software or other GPUs than this job has."""
    if not error or _kind(job) in error["on"]:
        return []
    return [f"no published run of {_kind(job)} was checked: the error may be larger"]


@cache
def known_error() -> dict[str, Any] | None:
    """The error that is known of the shipped figures."""
    if not SHIPPED.exists():
        return None
    found: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return found
