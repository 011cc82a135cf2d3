"""Pipeline: the layers of each stage, the bubble, and how many micro-batches are in flight."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.config import TrainingJob


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds."""

    dense_layers: int
    moe_layers: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


def stages(job: TrainingJob) -> dict[Stage, int]:
    """The distinct kinds of stages and how many there are of each: their number does not grow with GPUs."""
    # Megatron lets embedding and output count as layers: the first and the last stage have one less.
    short = 0 if job.model.layers % job.pp == 0 else 1
    full = (job.model.layers + 2 * short) // job.pp
    found: dict[Stage, int] = {}
    first_moe = job.model.dense_layers if job.model.experts else job.model.layers
    start = 0
    for index in range(job.pp):
        count = full - short * ((index == 0) + (index == job.pp - 1))
        dense = max(0, min(start + count, first_moe) - start)
        stage = Stage(dense, count - dense, index == 0, index == job.pp - 1)
        found[stage] = found.get(stage, 0) + 1
        start += count
    assert start == job.model.layers, found
    return found


def span_s(times_s: dict[Stage, float], counts: dict[Stage, int], job: TrainingJob) -> tuple[float, float]:
    """Seconds of all micro-batches on the slowest stage, and of the bubble around them.

    Each micro-batch passes all stages; all but one of them wait at the slowest. GPipe, 1F1B and the
    interleaved schedule have the same bubble but for its division by the chunks of a stage.
    """
    slowest = max(times_s.values())
    once = sum(times_s[stage] * counts[stage] for stage in counts)
    return job.micro_batches * slowest, (once - slowest) / job.interleave


def in_flight(job: TrainingJob) -> float:
    """Micro-batches whose activations the first stage keeps, in units of the whole stage."""
    m, p, v = job.micro_batches, job.pp, job.interleave
    if job.schedule == "gpipe":
        return float(m)
    if v > 1:
        return min(float(m), p * (1 + (p - 1) / (p * v)))
    return float(min(m, p))
