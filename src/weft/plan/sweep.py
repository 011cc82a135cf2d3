"""A sweep over the ways to split a job, each with and without weft's controls, and its Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from weft.errors import UsageError
from weft.plan.config import AUTO, TrainingJob
from weft.plan.figures import Figures, shipped
from weft.plan.memory import check_fits, memory_bytes
from weft.plan.step import Prediction, predict
from weft.policy import Policy

LIMIT = 200
"""Predictions of a sweep where none is given."""
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)
MICRO = (1, 2, 4)
SHARDINGS = ("zero1", "zero3")
RECOMPUTE = ("none", "selective", "full")

Predict = Callable[[TrainingJob], Prediction]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One way to run the job, and what it takes."""

    job: TrainingJob
    prediction: Prediction
    best: bool = False
    """Nothing else in the sweep is faster with as little memory."""

    @property
    def label(self) -> str:
        """What was varied, in a few words."""
        job = self.job
        parts = [f"tp{job.tp}", f"pp{job.pp}" + (f"x{job.interleave}" if job.interleave > 1 else "")]
        parts += [f"{name}{getattr(job, name)}" for name in ("cp", "ep") if getattr(job, name) > 1]
        parts += [f"dp{job.dp}", f"mb{job.micro_batch}", job.sharding]
        parts += {"selective": ["re-some"], "full": ["re-all"]}.get(job.recompute, [])
        return " ".join(parts)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.job.tokens / self.prediction.step_s / self.job.gpus


@dataclass(frozen=True)
class Sweep:
    """What was tried."""

    rows: tuple[Row, ...]
    """Fastest first."""
    refused: tuple[str, ...]
    """Why ways were left out: they do not fit into memory, or do not divide."""
    left_out: int = 0
    """Valid ways beyond the limit."""


def ways(job: TrainingJob, fixed: Iterable[str] = ()) -> tuple[list[TrainingJob], int]:
    """Jobs that differ in how they are split, and how many such splits do not divide.

    `fixed` names what the user chose; the rest varies. The GPUs, the batch and the model stay.
    """
    held = set(fixed)
    options: dict[str, Sequence[object]] = {
        "tp": TENSOR,
        "pp": PIPELINE,
        "interleave": CHUNKS,
        "micro_batch": MICRO,
        "sharding": SHARDINGS,
        "recompute": RECOMPUTE,
    }
    axes = {name: (getattr(job, name),) if name in held else values for name, values in options.items()}
    found: list[TrainingJob] = []
    impossible = 0
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        if chosen["interleave"] != 1 and chosen["pp"] == 1:
            continue
        if chosen["sharding"] == "zero3" and chosen["pp"] != 1 and "sharding" not in held:
            continue  # the same as zero1, see TrainingJob.gathers_layers
        try:
            found.append(_way(job, held, chosen))
        except UsageError:
            impossible += 1
    return found, impossible


def _way(job: TrainingJob, held: set[str], chosen: dict[str, object]) -> TrainingJob:
    """The job split that way; what follows from the split is derived again unless it was given."""
    derived = {"dp": 0, "schedule": "", "sequence_parallel": None}
    kept = {name: getattr(job, name) if name in held else value for name, value in derived.items()}
    return job.but(**{**kept, **chosen})


def spread(found: Sequence[TrainingJob], most: int) -> list[TrainingJob]:
    """At most so many of them, evenly from the first to the last."""
    if len(found) <= most:
        return list(found)
    return [found[i * len(found) // most] for i in range(most)]


def sweep(
    job: TrainingJob,
    *,
    fixed: Iterable[str] = (),
    limit: int = LIMIT,
    run: Predict = predict,
    fits: Callable[[TrainingJob], str] = lambda job: "",
    tell: Progress | None = None,
) -> Sweep:
    """Predict every way, with and without the controls, up to `limit` predictions.

    `fits` gives the reason why a job does not fit into memory, or nothing.
    """
    policies: list[Policy | str | None] = [None, AUTO]
    if "policy" in set(fixed):
        policies = [job.policy]
    found, impossible = ways(job, fixed)
    reasons = [fits(way) for way in found]
    roomy = [way for way, reason in zip(found, reasons, strict=True) if not reason]
    full = [reason for reason in reasons if reason]
    refused = [f"{len(full)} ways do not fit into memory, such as {full[-1]}"] if full else []
    chosen = spread(roomy, max(1, limit // len(policies)))
    rows: list[Row] = []
    tried = [way.but(policy=policy) for way in chosen for policy in policies]
    for at, way in enumerate(tried):
        try:
            rows.append(Row(way, run(way)))
        except UsageError as error:
            refused.append(str(error))
        if tell:
            tell(at + 1, len(tried))
    if not rows:
        reason = refused[0] if refused else f"none of the {impossible} splits divides the job"
        raise UsageError(f"--sweep found nothing that can run: {reason}")
    refused += [f"{impossible} splits do not divide the model, the GPUs or the batch"] if impossible else []
    return Sweep(tuple(front(rows)), tuple(refused), len(roomy) - len(chosen))


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows, fastest first, those on the front of step time against memory marked."""
    ordered = sorted(rows, key=lambda row: (row.prediction.step_s, total_memory(row.prediction)))
    least = float("inf")
    marked = []
    for row in ordered:
        memory = total_memory(row.prediction)
        marked.append(Row(row.job, row.prediction, memory < least))
        least = min(least, memory)
    return marked


def total_memory(found: Prediction) -> float:
    """Bytes of the fullest GPU."""
    return float(sum(found.memory_bytes.values()))


def room(figures: Figures | None = None) -> Callable[[TrainingJob], str]:
    """Says why a job does not fit into memory, or nothing."""
    known = figures or shipped()

    def reason(job: TrainingJob) -> str:
        try:
            check_fits(job, memory_bytes(job, known))
        except UsageError as error:
            return str(error)
        return ""

    return reason
