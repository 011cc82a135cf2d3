"""Pipeline: the layers of each stage, the bubble, and the number of micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.config import TrainingJob


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage, and whether it has the embedding and the output."""

    dense_layers: int
    moe_layers: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


def chunk_layers(layers: int, chunks: int) -> list[int]:
    """Number of layers of each chunk, in model order, as even as possible.

    If the layers do not divide evenly, the embedding and the output count as one layer each, as in Megatron,
    so the first and the last chunk have fewer.
    """
    if layers % chunks == 0:
        return [layers // chunks] * chunks
    each, more = divmod(layers + 2, chunks)
    if each > 1 or not more:
        sizes = [each + (index < more) for index in range(chunks)]
        sizes[0] -= 1
        sizes[-1] -= 1
        return sizes
    each, more = divmod(layers, chunks)
    first = (chunks - more) // 2
    return [each + (first <= index < first + more) for index in range(chunks)]


def stage_list(job: TrainingJob) -> list[Stage]:
    """The stages in order. Chunks are assigned to them round-robin."""
    sizes = chunk_layers(job.model.layers, job.pp * job.interleave)
    first_moe = job.model.dense_layers if job.model.experts else job.model.layers
    dense, moe = [0] * job.pp, [0] * job.pp
    start = 0
    for index, count in enumerate(sizes):
        plain = max(0, min(start + count, first_moe) - start)
        dense[index % job.pp] += plain
        moe[index % job.pp] += count - plain
        start += count
    assert start == job.model.layers, sizes
    return [Stage(dense[i], moe[i], i == 0, i == job.pp - 1) for i in range(job.pp)]


def stages(job: TrainingJob) -> dict[Stage, int]:
    """The distinct stages and the count of each. Their number does not grow with the number of GPUs."""
    found: dict[Stage, int] = {}
    for stage in stage_list(job):
        found[stage] = found.get(stage, 0) + 1
    return found


def bubble_share(job: TrainingJob) -> float:
    """The bubble relative to that of 1F1B, which is one pass of a micro-batch over all other stages.

    Interleaving divides it by the number of chunks. Zero bubble (ZB-H1 of Qi et al., arXiv:2401.10241) delays
    weight gradients, a third of the work: of F + B + W, it leaves F + B - W. DualPipe (DeepSeek-V3, table 2)
    feeds micro-batches from both ends: (p/2 - 1)(F&B + B - 3W), where B is a whole backward pass.
    """
    if job.schedule == "zero-bubble":
        return 1 / 3
    if job.schedule == "dualpipe":
        return (job.pp / 2 - 1) * 2 / 3 / max(1, job.pp - 1)
    return 1 / job.interleave


def span_s(times_s: dict[Stage, float], counts: dict[Stage, int], job: TrainingJob) -> tuple[float, float]:
    """Seconds of all micro-batches on the slowest stage, and seconds of the bubble.

    The bubble is the time of one micro-batch on all other stages, times the schedule's `bubble_share`.
    """
    slowest = max(times_s.values())
    once = sum(times_s[stage] * counts[stage] for stage in counts)
    return job.micro_batches * slowest, (once - slowest) * bubble_share(job)


def in_flight(job: TrainingJob) -> float:
    """Micro-batches whose activations the first stage keeps, in multiples of a whole stage's."""
    m, p, v = job.micro_batches, job.pp, job.interleave
    if job.schedule == "gpipe":
        return float(m)
    if job.schedule == "dualpipe":
        return min(float(m), p + 1)
    if v > 1:
        return min(float(m), p * (1 + (p - 1) / (p * v)))
    return float(min(m, p))
