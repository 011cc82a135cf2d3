"""Simulated steps of programs whose steps are not all alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

from live_machines import Moment, StepTimes, Times, jitter


def evaluation(steps: int, cost: float) -> Times:
    """Every `steps` steps one includes an evaluation of `cost` times 100 ms."""

    def times(r: random.Random) -> StepTimes:
        first = r.randrange(steps)
        return lambda now: (
            now.ms * jitter(r) + (100 * cost * jitter(r, 0.02) if (now.number + first) % steps == 0 else 0.0)
        )

    return times


def accumulation(counts: Sequence[int], hold: int) -> Times:
    """Gradient accumulation over a varying number of micro-batches; a policy affects only the last one."""

    def times(r: random.Random) -> StepTimes:
        count = r.choice(counts)

        def step(now: Moment) -> float:
            nonlocal count
            if r.random() < 1 / hold:
                count = r.choice(counts)
            return (now.ms + 70 * (count - 1)) * jitter(r)

        return step

    return times


def larger_batches(steps: int, growth: float) -> Times:
    def times(r: random.Random) -> StepTimes:
        first = r.randrange(steps)
        return lambda now: now.ms * (1 + growth * ((now.number + first) // steps)) * jitter(r)

    return times


def curriculum(r: random.Random) -> StepTimes:
    """Sequences of random lengths below a limit that rises every 40 steps; attention grows quadratically."""
    first = r.randrange(40)

    def step(now: Moment) -> float:
        limit = min(1.0, 0.25 + 0.05 * ((now.number + first) // 40))
        length = limit * max(r.betavariate(3, 1.5) for _ in range(4))
        return now.ms * (0.2 + 0.5 * length + 0.6 * length * length) * jitter(r)

    return step


def adversarial_pair(critic_steps: int, swap: float) -> Times:
    """A discriminator for `critic_steps` steps, then a generator; sometimes the order slips by a step."""

    def times(r: random.Random) -> StepTimes:
        place = r.randrange(critic_steps + 1)

        def step(now: Moment) -> float:
            nonlocal place
            place += 1 + (r.random() < swap)
            return now.ms * (1.0 if place % (critic_steps + 1) else 1.7) * jitter(r)

        return step

    return times


def two_models(factor: float, swap: float) -> Times:
    def times(r: random.Random) -> StepTimes:
        second = False

        def step(now: Moment) -> float:
            nonlocal second
            second ^= r.random() >= swap
            return now.ms * (factor if second else 1.0) * jitter(r)

        return step

    return times


def two_speeds(factor: float, steps: int) -> Times:
    """Two programs in one, alternating every `steps` steps."""
    return lambda r: lambda now: now.ms * (1.0 if now.number // steps % 2 else factor) * jitter(r, 0.01)


def unfreezing(r: random.Random) -> StepTimes:
    """Layers are unfrozen one after the other during the warm-up, and steps get longer each time."""
    moments = sorted(r.uniform(0, 400) for _ in range(6))
    return lambda now: now.ms * (1 + 0.07 * sum(now.number > m for m in moments)) * jitter(r)


def recompilation(r: random.Random) -> StepTimes:
    """Each new shape is compiled when it first appears, common ones first; each has its own step time."""
    known: dict[int, float] = {}

    def step(now: Moment) -> float:
        shape = min(200, int(r.paretovariate(0.9)))
        compile_ms = 0.0 if shape in known else 1500 * jitter(r, 0.3)
        factor = known.setdefault(shape, 0.8 + 0.4 * r.random())
        return now.ms * factor * jitter(r) + compile_ms

    return step


def rollouts(r: random.Random) -> StepTimes:
    """Reinforcement learning: rollouts of random length, then a few updates that take much longer."""
    left, updating = 0, False

    def step(now: Moment) -> float:
        nonlocal left, updating
        if left == 0:
            updating = not updating
            left = 4 if updating else 1 + int(r.expovariate(1 / 14))
        left -= 1
        return now.ms * (3.0 if updating else jitter(r, 0.1)) * jitter(r)

    return step


def serving(r: random.Random) -> StepTimes:
    """Continuous batching: requests come and go; the more there are, the longer a step takes."""
    live = 16

    def step(now: Moment) -> float:
        nonlocal live
        live += sum(r.random() < 0.2 for _ in range(8)) - sum(r.random() < 0.1 for _ in range(live))
        prefill_ms = 0.4 * now.ms if r.random() < 0.15 else 0.0
        return now.ms * (0.6 + 0.025 * live) * jitter(r) + prefill_ms

    return step


def checkpoints(r: random.Random) -> StepTimes:
    """Every 20 s a checkpoint: a copy that blocks, then an upload that slows the steps down for a while."""
    due_ms = r.uniform(0, 20e3)

    def step(now: Moment) -> float:
        nonlocal due_ms
        ms = now.ms * jitter(r)
        if now.clock_ms >= due_ms:
            due_ms += 20e3
            return ms + 900 * jitter(r, 0.2)
        uploading = due_ms - now.clock_ms > 17e3
        return ms * (1.08 * jitter(r, 0.02) if uploading else 1.0)

    return step


def profiled(r: random.Random) -> StepTimes:
    """The program's own profiler: 10 slow steps of every 120, then one that writes the file."""
    first = r.randrange(120)

    def step(now: Moment) -> float:
        place = (now.number + first) % 120
        write_ms = 700 * jitter(r, 0.1) if place == 10 else 0.0
        return now.ms * (1.25 if place < 10 else 1.0) * jitter(r) + write_ms

    return step
