"""The answers of `weft plan` as JSON documents: one configuration, a sweep, scaling curves. All simulated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from weft.plan.accuracy import error_interval, error_of, family, unchecked
from weft.plan.calibrate import Calibration
from weft.plan.changes import Change, planned_changes
from weft.plan.config import TrainingJob
from weft.plan.figures import Figures
from weft.plan.pipeline import bubble_share, stage_list
from weft.plan.scaling import Curve
from weft.plan.schedule import drawing
from weft.plan.step import Prediction, predict
from weft.plan.sweep import Sweep, SweepRow, total_memory
from weft.policy import Policy

_Document = dict[str, Any]
SHOWN = (
    "gpus",
    "tp",
    "pp",
    "cp",
    "ep",
    "expert_tp",
    "dp",
    "interleave",
    "schedule",
    "micro_batch",
    "micro_batches",
    "global_batch",
    "seq_len",
    "sharding",
    "shard_ranks",
    "sequence_parallel",
    "recompute",
    "precision",
    "software",
)
"""Fields of a job that its document contains."""


@dataclass(frozen=True)
class Answer:
    """One configuration, predicted with weft's controls (or the requested policy) and without any."""

    job: TrainingJob
    prediction: Prediction
    without: Prediction
    others: tuple[Change, ...] = ()
    """What other schedules and compressions would change, largest gain first."""

    @property
    def gain_pct(self) -> float:
        """Reduction of the step time by the controls, in percent."""
        return 100.0 * (1.0 - self.prediction.step_s / self.without.step_s)


def answer(job: TrainingJob, figures: Figures | None = None) -> Answer:
    """Predict a job under its own policy, and without weft's controls."""
    found = predict(job, figures)
    return Answer(job, found, predict(job.but(policy=None), figures), planned_changes(job, found, figures))


def job_document(job: TrainingJob) -> _Document:
    """The configuration."""
    return {
        "model": job.model.name,
        "params": job.model.params,
        "gpu": job.gpu.name,
        **{name: getattr(job, name) for name in SHOWN},
        "compression": str(job.compression),
        "network": job.network.name,
        "tokens": job.tokens,
    }


def policy_document(policy: Any) -> Any:
    """The document of a policy, of a dict of policies by collective, or of None."""
    if isinstance(policy, Policy):
        return policy.to_dict()
    if isinstance(policy, dict):
        return {str(name): policy_document(value) for name, value in policy.items()}
    return policy


def prediction_document(job: TrainingJob, found: Prediction) -> _Document:
    """The figures of one prediction; times in seconds."""
    return {
        "step_time_s": found.step_s,
        "tflops_per_gpu": found.tflops_per_gpu,
        "mfu_pct": found.mfu_pct,
        "tokens_per_s": job.tokens / found.step_s,
        "tokens_per_s_per_gpu": job.tokens / found.step_s / job.gpus,
        "exposed_comm_s": found.exposed_comm_s,
        "breakdown": dict(found.breakdown),
        "policy": policy_document(found.policy),
        "memory_bytes": total_memory(found),
        "memory": dict(found.memory_bytes),
        "collectives": [
            {**{k: v for k, v in asdict(one).items() if k != "policy"}, "policy": policy_document(one.policy)}
            for one in found.collectives
        ],
    }


def expected(job: TrainingJob, step_s: float, error: _Document | None) -> _Document:
    """The job's family, its error, and the 90% interval of a step without weft's controls.

    `error`: the table from `known_error`; if None, there is no interval.
    """
    found = error_interval(job, step_s, error) if error else None
    mine = error_of(job, error) if error else None
    return {
        "family": family(job),
        "interval": None if found is None else asdict(found),
        "known_error": mine or error,
    }


def cost_document(job: TrainingJob, step_s: float, price: float = 0.0) -> _Document:
    """GPU-hours of a step and of a billion tokens, and the cost in USD if `price` (per GPU-hour) is not 0."""
    hours = job.gpus * step_s / 3600
    billion = hours / job.tokens * 1e9
    return {
        "gpu_hours_per_step": hours,
        "gpu_hours_per_billion_tokens": billion,
        "usd_per_gpu_hour": price or None,
        "usd_per_billion_tokens": billion * price if price else None,
    }


def document(
    found: Answer,
    *,
    calibration: Calibration | None = None,
    error: _Document | None = None,
    price: float = 0.0,
) -> _Document:
    """The output of `weft plan --json` for one configuration."""
    without = prediction_document(found.job, found.without)
    return {
        "kind": "plan",
        "simulated": True,
        **expected(found.job, found.without.step_s, error),
        "job": job_document(found.job),
        **prediction_document(found.job, found.prediction),
        "memory_limit_bytes": found.job.gpu.memory_bytes,
        "controls": found.job.policy if isinstance(found.job.policy, str) else _asked(found.job),
        "without_weft": {k: without[k] for k in ("step_time_s", "exposed_comm_s", "mfu_pct", "breakdown")},
        "gain_pct": found.gain_pct,
        "changes": [asdict(change) for change in found.others],
        "cost": cost_document(found.job, found.without.step_s, price),
        "pipeline": pipeline_document(found.job),
        "calibration": calibration_document(calibration),
        "notes": [*found.prediction.notes, *unchecked(found.job, error)],
    }


def pipeline_document(job: TrainingJob) -> _Document:
    """The pipeline's schedule, bubble and drawing, and its stages in order: layers, and which is the head."""
    return {
        "schedule": job.schedule,
        "micro_batches": job.micro_batches,
        "stages": [
            {"layers": stage.layers, "moe_layers": stage.moe_layers, "head": stage.head}
            for stage in stage_list(job)
        ],
        "bubble_share": bubble_share(job) * (job.pp - 1) / job.micro_batches,
        "drawing": [asdict(one) for one in drawing(job)],
    }


def _asked(job: TrainingJob) -> str:
    return "none" if job.policy is None else "given"


def calibration_document(found: Calibration | None) -> _Document | None:
    """The calibration: what the trace took, and the figures before and after. None without one."""
    if found is None:
        return None
    return {
        "trace": asdict(found.measured),
        "figures": [{"name": name, "before": a, "after": b} for name, a, b in found.changes],
        "model_compute_s": found.model_s,
        "trace_compute_s": found.measured.compute_s,
    }


def row_document(row: SweepRow) -> _Document:
    """One row of a sweep."""
    made = prediction_document(row.job, row.prediction)
    kept = (
        "step_time_s",
        "tflops_per_gpu",
        "mfu_pct",
        "tokens_per_s_per_gpu",
        "exposed_comm_s",
        "memory_bytes",
    )
    return {
        "label": row.label,
        "controls": "weft" if row.job.policy is not None else "none",
        "job": job_document(row.job),
        **{name: made[name] for name in kept},
        "gpu_s_per_token": row.gpu_s_per_token,
        "pareto": row.best,
    }


def sweep_document(
    job: TrainingJob | None, found: Sweep, error: _Document | None = None, price: float = 0.0
) -> _Document:
    """The output of `weft plan --sweep --json`. `job`: the requested job, None if not valid as given."""
    rows = [row_document(row) for row in found.rows]
    best = rows[0]
    fastest = found.rows[0].job
    plain = next((row for row in found.rows if row.job == fastest.but(policy=None)), found.rows[0])
    return {
        "kind": "plan-sweep",
        "simulated": True,
        **expected(fastest, plain.prediction.step_s, error),
        "job": job_document(job or fastest),
        **{name: best[name] for name in ("step_time_s", "tflops_per_gpu", "mfu_pct", "exposed_comm_s")},
        "breakdown": dict(found.rows[0].prediction.breakdown),
        "policy": policy_document(found.rows[0].prediction.policy),
        "best": best,
        "rows": rows,
        "refused": summarised(found.refused),
        "left_out": found.left_out,
        "memory_limit_bytes": fastest.gpu.memory_bytes,
        "without_weft": {"step_time_s": plain.prediction.step_s},
        "cost": cost_document(fastest, plain.prediction.step_s, price),
        "notes": [*found.rows[0].prediction.notes, *unchecked(fastest, error)],
    }


def summarised(reasons: Iterable[str], most: int = 5) -> list[str]:
    """The first `most` distinct reasons, and the number of further ones."""
    unique = list(dict.fromkeys(reasons))
    rest = len(unique) - most
    return unique[:most] + ([f"{rest} more reasons of the same kind"] if rest > 0 else [])


def scaling_document(job: TrainingJob, curves: Iterable[Curve], error: _Document | None = None) -> _Document:
    """The output of `weft plan --scale --json`."""
    drawn = list(curves)
    made = [_curve_document(curve) for curve in drawn]
    last = made[0]["points"][-1]["with_weft"]
    largest = drawn[0].points[-1]
    return {
        "kind": "plan-scaling",
        "simulated": True,
        **expected(largest.job, largest.without.step_s, error),
        "job": job_document(job),
        **{k: last[k] for k in ("step_time_s", "tflops_per_gpu", "mfu_pct", "exposed_comm_s", "breakdown")},
        "policy": last["policy"],
        "curves": made,
        "notes": unchecked(job, error),
    }


def _curve_document(curve: Curve) -> _Document:
    points = []
    first = curve.points[0]
    for point in curve.points:
        entry: _Document = {"gpus": point.gpus, "global_batch": point.job.global_batch}
        for name in ("without", "with_weft"):
            found: Prediction = getattr(point, name)
            made = prediction_document(point.job, found)
            rate = point.tokens_per_s_per_gpu(found)
            base = first.tokens_per_s_per_gpu(getattr(first, name))
            entry[name] = {**{k: v for k, v in made.items() if k != "collectives"}}
            entry[name]["efficiency_pct"] = 100.0 * rate / base
        points.append(entry)
    return {"kind": curve.kind, "points": points, "note": curve.note}
