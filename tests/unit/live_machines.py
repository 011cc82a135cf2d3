"""Simulated steps whose noise is more than a factor: it depends on the clock, the step's number, earlier
steps, or a policy switch just before. This module: effects of the host, its data and the machines."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from live_noise import Noise


@dataclass(frozen=True)
class Moment:
    """Everything that a step's time may depend on."""

    ms: float
    """The step's time in ms under its policy, without noise."""
    clock_ms: float
    number: int
    switched: bool
    """Whether the step before ran under another policy."""


StepTimes = Callable[[Moment], float]
"""The wall time of a step, in ms."""


Times = Callable[[random.Random], StepTimes]
"""Makes the steps of a kind from one job's random draws."""


def multiplied(noise: Noise) -> Times:
    """Steps whose noise is only a factor."""

    def times(r: random.Random) -> StepTimes:
        factors = noise(r)
        return lambda now: now.ms * next(factors)

    return times


def jitter(r: random.Random, sigma: float = 0.005) -> float:
    return math.exp(r.gauss(0, sigma))


def phases(extra: float, mean_s: float) -> Times:
    """A neighbor that slows the job down for seconds at a time."""

    def times(r: random.Random) -> StepTimes:
        slow, until_ms = r.random() < 0.5, 0.0
        neighbor = random.Random(r.random())  # its phases do not depend on what this job does

        def step(now: Moment) -> float:
            nonlocal slow, until_ms
            while now.clock_ms >= until_ms:
                slow, until_ms = not slow, until_ms + neighbor.expovariate(1 / (1e3 * mean_s))
            return now.ms * (1 + extra * slow) * jitter(r)

        return step

    return times


def pauses(pause_ms: float, steps: int) -> Times:
    """A garbage collector that stops the program about every `steps` steps."""

    def times(r: random.Random) -> StepTimes:
        due = r.randrange(1, steps)

        def step(now: Moment) -> float:
            nonlocal due
            ms = now.ms * jitter(r)
            if now.number >= due:
                due = now.number + max(1, round(steps * jitter(r, 0.3)))
                ms += pause_ms * jitter(r, 0.3)
            return ms

        return step

    return times


def heap_growth(r: random.Random) -> StepTimes:
    """A collector whose pauses grow with the heap, until a full collection empties it."""
    heap = r.random()

    def step(now: Moment) -> float:
        nonlocal heap
        heap += 0.01 * jitter(r, 0.5)
        pause_ms = 25 * heap if now.number % 9 == 0 else 0.0
        if heap > 1:
            heap, pause_ms = 0.0, 400 * jitter(r, 0.2)
        return now.ms * jitter(r) + pause_ms

    return step


def loader(ratio: float, depth: int, sigma: float, burst: int = 1) -> Times:
    """A data loader: `ratio` times 100 ms per batch, `burst` batches at a time, a buffer of `depth`."""

    def times(r: random.Random) -> StepTimes:
        ready, taken, made_ms = deque([0.0] * depth), list[float](), 0.0

        def step(now: Moment) -> float:
            nonlocal made_ms
            wait_ms = max(0.0, ready.popleft() - now.clock_ms)
            taken.append(now.clock_ms + wait_ms)
            if len(taken) >= burst:
                made_ms = max(made_ms, taken[0]) + burst * ratio * 100 * jitter(r, sigma)
                ready.extend([made_ms] * len(taken))
                taken.clear()
            return wait_ms + now.ms * jitter(r)

        return step

    return times


def workers(count: int, epoch: int) -> Times:
    """Loader workers that take turns, each at its own speed, and restart with every epoch."""

    def times(r: random.Random) -> StepTimes:
        late_ms = [max(0.0, r.gauss(-3, 5)) for _ in range(count)]
        first = r.randrange(epoch)

        def step(now: Moment) -> float:
            place = (now.number + first) % epoch
            restart_ms = 600 * jitter(r, 0.3) if place == 0 else 0.0
            return now.ms * jitter(r) + late_ms[place % count] * jitter(r, 0.3) + restart_ms

        return step

    return times


def time_slices(share: float, ms: float, sigma: float) -> Times:
    """A busy host takes a time slice now and then."""
    return lambda r: lambda now: now.ms * jitter(r, sigma) + (ms * r.random() if r.random() < share else 0.0)


def cron(r: random.Random) -> StepTimes:
    """Every minute another program runs on the host for a few seconds."""
    first_ms = r.uniform(0, 60e3)

    def step(now: Moment) -> float:
        busy = (now.clock_ms + first_ms) % 60e3 < 4e3
        return now.ms * (1.12 if busy else 1.0) * jitter(r, 0.02 if busy else 0.004)

    return step


def clock_ticks(tick_ms: float, sigma: float) -> Times:
    """A coarse clock."""
    return lambda r: lambda now: max(tick_ms, round(now.ms * jitter(r, sigma) / tick_ms) * tick_ms)


# --- the machines ------------------------------------------------------------------------------------------


def heat_wave(steps: int, height: float) -> Times:
    def times(r: random.Random) -> StepTimes:
        first = r.random() * steps
        return lambda now: (
            now.ms * (1 + height * math.cos(2 * math.pi * (now.number + first) / steps)) * jitter(r)
        )

    return times


def saw_tooth(r: random.Random) -> StepTimes:
    """Clocks that fall while the GPU heats up and jump back when the fan starts."""
    heat, limit = 0.06 * r.random(), 0.06

    def step(now: Moment) -> float:
        nonlocal heat, limit
        heat += now.ms / 100 * 0.0009 * jitter(r, 0.2)
        if heat > limit:
            heat, limit = 0.0, 0.06 * jitter(r, 0.2)
        return now.ms * (1 + heat) * jitter(r, 0.003)

    return step


def throttling(r: random.Random) -> StepTimes:
    """Clocks that fall once, by 8%."""
    begins = r.uniform(5, 80)
    return lambda now: (
        now.ms * (1 + 0.08 * (1 - math.exp(-max(0.0, now.number - begins) / 25))) * jitter(r, 0.003)
    )


def clock_levels(r: random.Random) -> StepTimes:
    """A random walk over clock levels of 0.8% each."""
    level = r.randrange(-4, 5)

    def step(now: Moment) -> float:
        nonlocal level
        if r.random() < 0.2:
            level = min(6, max(-6, level + r.choice((-1, 1))))
        return now.ms * (1 + 0.008 * level) * jitter(r, 0.002)

    return step


def imbalance(r: random.Random) -> StepTimes:
    """A mixture of experts: the slowest of 8 ranks counts, and the router's preferences wander."""
    loads = [r.gauss(0, 0.1) for _ in range(8)]

    def step(now: Moment) -> float:
        for rank, load in enumerate(loads):
            loads[rank] = 0.97 * load + r.gauss(0, 0.025)
        heaviest = max(load + r.gauss(0, 0.03) for load in loads)
        return now.ms * (0.5 + 0.5 * math.exp(min(heaviest, 0.4))) * jitter(r)

    return step


def stragglers(r: random.Random) -> StepTimes:
    """Every 17 steps or so another rank becomes the slow one, each by its own amount."""
    slow = [max(0.0, r.gauss(0.02, 0.03)) for _ in range(8)]
    turn = r.randrange(8)

    def step(now: Moment) -> float:
        nonlocal turn
        turn += r.random() < 1 / 17
        return now.ms * (1 + slow[turn % 8]) * max(jitter(r, 0.01) for _ in range(4))

    return step


def congestion(r: random.Random) -> StepTimes:
    """Bursts on the network whose lengths and heights have heavy tails."""
    left, height = 0.0, 0.0

    def step(now: Moment) -> float:
        nonlocal left, height
        if left <= 0 and r.random() < 0.04:
            left, height = min(300.0, r.paretovariate(1.1)), min(3.0, 0.03 * r.paretovariate(1.2))
        left -= 1
        return now.ms * (1 + (height * jitter(r, 0.3) if left > 0 else 0.0)) * jitter(r)

    return step


def pink(r: random.Random) -> StepTimes:
    """Noise without a time scale: a sum of states redrawn every 1, 2, 4, … steps."""
    states = [r.gauss(0, 0.008) for _ in range(10)]

    def step(now: Moment) -> float:
        for octave in range(10):
            if r.random() < 0.5**octave:
                states[octave] = r.gauss(0, 0.008)
        return now.ms * math.exp(sum(states))

    return step


def switching(extra: float, after: float) -> Times:
    """Every policy switch costs the first step some extra time, and the step after it."""

    def times(r: random.Random) -> StepTimes:
        before = False

        def step(now: Moment) -> float:
            nonlocal before
            factor = 1 + extra * now.switched + after * before
            before = now.switched
            return now.ms * factor * jitter(r)

        return step

    return times


def target_rate(r: random.Random) -> StepTimes:
    """A controller that makes batches larger or smaller so that a step takes 100 ms."""
    batch = 1.0

    def step(now: Moment) -> float:
        nonlocal batch
        ms = now.ms * batch * jitter(r, 0.01)
        batch = min(2.0, max(0.5, batch * (100 / ms) ** 0.3))
        return ms

    return step


def heavy(alpha: float, scale: float) -> Times:
    return lambda r: (
        lambda now: now.ms * (1 + min(50.0, scale * (r.paretovariate(alpha) - 1))) * jitter(r, 0.003)
    )
