"""Pipeline schedules: the order in which each stage runs its passes, and a drawing of it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.config import TrainingJob

MOST_STAGES, MOST_BATCHES = 8, 12
"""Limits of a drawing, which shows the pattern on one page."""


@dataclass(frozen=True)
class Slot:
    """One pass of one micro-batch through one chunk of a stage."""

    forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Drawn:
    """A pass in the drawing; times in units of a stage's forward pass."""

    stage: int
    start: float
    length: float
    kind: str
    """`forward`, `backward` or `weight` (delayed weight gradients)."""
    micro_batch: int


def order(job: TrainingJob, stage: int) -> list[Slot]:
    """The passes of a stage, in order: GPipe, 1F1B, or 1F1B over interleaved chunks."""
    return slots(job.micro_batches, job.pp, job.interleave, job.schedule, stage)


def slots(m: int, p: int, v: int, schedule: str, stage: int) -> list[Slot]:
    """The passes of a stage for `m` micro-batches on `p` stages of `v` chunks."""
    forward = [_slot(k, p, v, forward=True) for k in range(m * v)]
    backward = [_slot(k, p, v, forward=False) for k in range(m * v)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(m * v, (p - stage - 1) * (2 if v > 1 else 1) + (v - 1) * p)
    steady = [slot for pair in zip(forward[ahead:], backward, strict=False) for slot in pair]
    return forward[:ahead] + steady + backward[m * v - ahead :]


def _slot(k: int, p: int, v: int, *, forward: bool) -> Slot:
    if v == 1:
        return Slot(forward, 0, k)
    chunk = k // p % v
    return Slot(forward, chunk if forward else v - 1 - chunk, k // (p * v) * p + k % p)


def drawing(job: TrainingJob) -> list[Drawn]:
    """The schedule of a small pipeline of the same kind; empty for a single stage and for DualPipe."""
    if job.pp == 1 or job.schedule == "dualpipe":
        return []
    p, v = min(job.pp, MOST_STAGES), min(job.interleave, 2)
    m = min(job.micro_batches, MOST_BATCHES)
    m = max(p, m // p * p) if v > 1 else m
    split = job.schedule == "zero-bubble"
    unit = 1.0 / v
    back = unit if split else 2 * unit
    todo = [slots(m, p, v, job.schedule, stage) for stage in range(p)]
    free = [0.0] * p
    done: dict[tuple[int, Slot], float] = {}
    found: list[Drawn] = []
    late: list[list[int]] = [[] for _ in range(p)]
    moved = True
    while moved:
        moved = False
        for stage in range(p):
            while todo[stage]:
                slot = todo[stage][0]
                ready = _ready(slot, stage, p, v, done)
                if ready is None:
                    break
                while split and late[stage] and free[stage] + unit <= ready:
                    free[stage] = _draw(found, stage, free[stage], unit, "weight", late[stage].pop(0))
                length = unit if slot.forward else back
                start = max(free[stage], ready)
                kind = "forward" if slot.forward else "backward"
                free[stage] = _draw(found, stage, start, length, kind, slot.micro_batch)
                done[stage, slot] = free[stage]
                if split and not slot.forward:
                    late[stage].append(slot.micro_batch)
                todo[stage].pop(0)
                moved = True
    for stage in range(p):
        for batch in late[stage]:
            free[stage] = _draw(found, stage, free[stage], unit, "weight", batch)
    return found


def _draw(found: list[Drawn], stage: int, start: float, length: float, kind: str, batch: int) -> float:
    found.append(Drawn(stage, start, length, kind, batch))
    return start + length


def _ready(slot: Slot, stage: int, p: int, v: int, done: dict[tuple[int, Slot], float]) -> float | None:
    """Time at which the input of a pass is available; None if not known yet."""
    step = -1 if slot.forward else 1
    place = slot.chunk * p + stage + step
    own = done.get((stage, Slot(True, slot.chunk, slot.micro_batch))) if not slot.forward else 0.0
    if own is None:
        return None
    if not 0 <= place < p * v:
        return own
    came = done.get((place % p, Slot(slot.forward, place // p, slot.micro_batch)))
    return None if came is None else max(own, came)
