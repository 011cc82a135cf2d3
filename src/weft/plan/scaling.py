"""Weak and strong scaling: one job on increasing numbers of GPUs, with and without weft's controls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import UsageError
from weft.plan.config import AUTO, TrainingJob
from weft.plan.step import PlanProgress, Predict, Prediction, predict

MAX_GPUS = 1 << 18
_KINDS = ("weak", "strong")
STRONG_TOKENS = 1 << 24
"""Most tokens in a step of a strong curve if no batch is given, as in Llama 3's largest run."""


@dataclass(frozen=True)
class Point:
    """One size of a curve, `without` weft's controls and `with_weft`, the best policy for each collective."""

    gpus: int
    job: TrainingJob
    without: Prediction
    with_weft: Prediction

    def tokens_per_s_per_gpu(self, prediction: Prediction) -> float:
        return self.job.tokens / prediction.step_s / self.gpus


@dataclass(frozen=True)
class Curve:
    """`weak`: the batch grows with the GPUs; `strong`: the batch stays the same."""

    kind: str
    points: tuple[Point, ...]
    note: str = ""
    """Why the curve starts later or ends earlier than the range; empty if it covers the range."""


def parse_range(words: str) -> tuple[int, int]:
    """`8..16384` as two numbers of GPUs."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.|-|:)\s*(\d{1,9})\s*", words)
    if not match:
        raise UsageError(f"--scale {words!r} is not a range of GPUs; write it as 8..16384")
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high:
        raise UsageError(
            f"--scale {words!r}: the first number is above the second; did you mean {high}..{low}?"
        )
    if high > MAX_GPUS:
        raise UsageError(f"--scale {words!r}: more than {MAX_GPUS} GPUs; nearest is {low}..{MAX_GPUS}")
    return low, high


def sizes(job: TrainingJob, low: int, high: int) -> list[int]:
    """Numbers of GPUs in the range: the smallest one that the split divides, and its doublings."""
    unit = job.tp * job.pp * job.cp
    start = max(unit, -(-low // unit) * unit)
    if start > high:
        raise UsageError(
            f"--scale {low}..{high}: tp {job.tp} x pp {job.pp} x cp {job.cp} needs at least {unit} GPUs; "
            f"nearest is {unit}..{max(unit, high) * 2}"
        )
    found = []
    while start <= high:
        found.append(start)
        start *= 2
    return found


def resized(job: TrainingJob, gpus: int, kind: str) -> TrainingJob:
    """The job on another number of GPUs."""
    unit = job.tp * job.pp * job.cp
    dp = gpus // unit
    batch = job.global_batch // job.dp * dp if kind == "weak" else job.global_batch
    return job.but(gpus=gpus, dp=dp, global_batch=batch)


def curve(
    job: TrainingJob,
    low: int,
    high: int,
    kind: str,
    *,
    run: Predict = predict,
    progress: PlanProgress | None = None,
) -> Curve:
    """Predictions over a range of GPUs. A strong curve ends at the size that cannot divide the batch."""
    chosen = sizes(job, low, high)
    points: list[Point] = []
    note = ""
    for at, gpus in enumerate(chosen):
        try:
            here = resized(job, gpus, kind)
            points.append(Point(gpus, here, run(here.but(policy=None)), run(here.but(policy=AUTO))))
        except UsageError as error:
            note = f"{gpus} GPUs: {error}"
            if points:
                break
        if progress:
            progress(at + 1, len(chosen))
    if not points:
        raise UsageError(note)
    return Curve(kind, tuple(points), note)


def curves(
    job: TrainingJob,
    low: int,
    high: int,
    *,
    batch_given: bool = True,
    run: Predict = predict,
    progress: PlanProgress | None = None,
) -> Iterator[Curve]:
    """The weak and the strong curve.

    The weak curve keeps the batch of each data-parallel rank. The strong curve divides the job's batch or, if
    none was given, a batch that the largest size can divide, of at most `STRONG_TOKENS`.
    """
    for kind in _KINDS:
        base = job
        if kind == "strong" and not batch_given:
            base = job.but(global_batch=strong_batch(job, sizes(job, low, high)[-1]))
        yield curve(base, low, high, kind, run=run, progress=progress)


def strong_batch(job: TrainingJob, gpus: int) -> int:
    """Global batch with one micro-batch per stage and data-parallel rank of `gpus`, up to `STRONG_TOKENS`."""
    unit = job.dp * job.micro_batch * job.pp
    most = max(unit, STRONG_TOKENS // job.seq_len // unit * unit)
    wanted = gpus // (job.tp * job.pp * job.cp) * job.micro_batch * job.pp
    return min(most, -(-wanted // unit) * unit)
