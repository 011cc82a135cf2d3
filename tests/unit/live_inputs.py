"""Simulated steps whose inputs vary in length, and the bytes that their ranks copy from the host for them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from live_machines import Moment, StepTimes, Times, jitter

TOKEN = 24 * 512
"""Bytes of an input of length 1: ids, labels and a mask of 512 tokens."""


@dataclass
class Inputs:
    """Steps whose time depends on the longest input of all ranks. `copied`: bytes per rank, latest step."""

    r: random.Random
    length: Callable[[random.Random, int], float]
    curve: Callable[[float], float]
    sigma: float
    ranks: int
    ahead: bool
    copied: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._next = self._drawn(0)

    def _drawn(self, number: int) -> list[float]:
        return [self.length(self.r, number) for _ in range(self.ranks)]

    def __call__(self, now: Moment) -> float:
        lengths, self._next = self._next, self._drawn(now.number + 1)
        self.copied = tuple(float(round(TOKEN * one)) for one in (self._next if self.ahead else lengths))
        return now.ms * self.curve(max(lengths)) * jitter(self.r, self.sigma)


def inputs(
    length: Callable[[random.Random, int], float],
    curve: Callable[[float], float] = lambda length: length,
    sigma: float = 0.01,
    ranks: int = 1,
    ahead: bool = False,
) -> Times:
    """`length`: of a rank's input in a step. `curve`: from the longest input to the step time.
    `ahead`: inputs are copied one step ahead."""
    return lambda r: Inputs(r, length, curve, sigma, ranks, ahead)


def between(least: float, most: float) -> Callable[[random.Random, int], float]:
    return lambda r, number: r.uniform(least, most)


def log_normal(r: random.Random, number: int) -> float:
    return math.exp(r.gauss(0, 0.3))


def longer_later(r: random.Random, number: int) -> float:
    """Twice as long after 700 steps."""
    return r.uniform(0.8, 1.2) * (1 if number < 700 else 2)


def attention(length: float) -> float:
    return 0.7 * length + 0.3 * length**2


@dataclass
class Misleading:
    """The bytes copied are unrelated to the step, or (`by_time`) follow from its time."""

    r: random.Random
    by_time: bool
    copied: tuple[float, ...] = ()

    def __call__(self, now: Moment) -> float:
        ms = now.ms * jitter(self.r, 0.02)
        self.copied = (TOKEN * (ms / 100 if self.by_time else self.r.uniform(0.5, 1.5)),)
        return ms


def misleading(*, by_time: bool) -> Times:
    return lambda r: Misleading(r, by_time)


@dataclass
class Adaptive:
    """A program that picks a longer input after a fast step."""

    r: random.Random
    copied: tuple[float, ...] = ()
    length: float = 1.0

    def __call__(self, now: Moment) -> float:
        self.copied = (TOKEN * self.length,)
        ms = now.ms * self.length * jitter(self.r, 0.02)
        self.length = min(1.5, max(0.5, self.length * (100 / ms) ** 0.5)) * jitter(self.r, 0.1)
        return ms


def adaptive(r: random.Random) -> StepTimes:
    return Adaptive(r)


@dataclass
class Accumulation:
    """Gradient accumulation over a varying number of micro-batches; a policy affects only the last one."""

    r: random.Random
    counts: Sequence[int]
    hold: int
    copied: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._count = self.r.choice(self.counts)

    def __call__(self, now: Moment) -> float:
        if self.r.random() < 1 / self.hold:
            self._count = self.r.choice(self.counts)
        self.copied = (float(TOKEN * self._count),)
        return (now.ms + 70 * (self._count - 1)) * jitter(self.r)


def sized_accumulation(counts: Sequence[int], hold: int) -> Times:
    return lambda r: Accumulation(r, counts, hold)


@dataclass
class Batches:
    """Batches that grow every `steps` steps."""

    r: random.Random
    steps: int
    growth: float
    copied: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._first = self.r.randrange(self.steps)

    def __call__(self, now: Moment) -> float:
        size = 1 + self.growth * ((now.number + self._first) // self.steps)
        self.copied = (float(round(TOKEN * size)),)
        return now.ms * size * jitter(self.r)


def sized_batches(steps: int, growth: float) -> Times:
    return lambda r: Batches(r, steps, growth)


def limited(r: random.Random, number: int) -> float:
    """A random length below a limit that rises every 40 steps."""
    return min(1.0, 0.25 + 0.05 * (number // 40)) * r.betavariate(3, 1.5)


@dataclass
class Scripted:
    """Steps of one rank whose lengths and times come from a function of the step's number."""

    r: random.Random
    length: Callable[[random.Random, int], float]
    explains: Callable[[int], bool] = lambda number: True
    """Whether the length explains the time of a step."""
    others: tuple[float, ...] = ()
    """What further ranks copy in every step."""
    copied: tuple[float, ...] = ()

    def __call__(self, now: Moment) -> float:
        length = self.length(self.r, now.number)
        self.copied = (float(round(TOKEN * length)), *self.others)
        return now.ms * (length if self.explains(now.number) else 1.0) * jitter(self.r, 0.01)


def explaining_at_first(steps: int) -> Times:
    """Steps whose time depends on the input only at first, e.g. until its files are cached."""
    return lambda r: Scripted(r, between(0.8, 1.2), lambda number: number < steps)


def of_the_leader(r: random.Random) -> StepTimes:
    """Lengths on the first rank only; the second copies more, always as much."""
    return Scripted(r, between(0.8, 1.2), others=(10.0 * TOKEN,))


def grouped(steps: int) -> Times:
    """Batches whose lengths stay similar for about `steps` steps."""

    def times(r: random.Random) -> StepTimes:
        usual = r.uniform(0.8, 1.2)

        def length(r: random.Random, number: int) -> float:
            nonlocal usual
            if r.random() < 1 / steps:
                usual = r.uniform(0.8, 1.2)
            return usual * jitter(r, 0.03)

        return Scripted(r, length)

    return times


def longer_slowly(per_step: float) -> Times:
    """Lengths that grow by up to half."""
    return lambda r: Scripted(r, lambda r, number: min(1.5, 1 + per_step * number) * r.uniform(0.8, 1.2))
