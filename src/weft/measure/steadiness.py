"""Steadiness: whether a job's steps are even enough to compare, how much they scatter, and their cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

WINDOW = 6
EVEN = 0.04  # relative deviation from the median up to which WINDOW steps count as even
UNEVEN_WINDOW = 16  # steps after which a job's own scatter is accepted, unless it is still getting faster
FALLING = 0.97
_FLOOR = 0.002  # relative; keeps a lucky quiet start from looking exact
_NORMAL = 1.4826  # converts a median absolute deviation to a standard deviation
LONGEST_CYCLE = 8
CYCLE_GAIN = 0.33  # a cycle must reduce the scatter of successive steps to this share or less
CYCLE_STEPS = 10  # fewest steps in which a cycle can be found


def steady(times: Sequence[float]) -> bool:
    """Whether warm-up is over: the last steps are alike, or as uneven as the job always is."""
    if len(times) < WINDOW:
        return False
    last = times[-WINDOW:]
    middle = median(last)
    if all(abs(t - middle) <= EVEN * middle for t in last):
        return True
    if len(times) < UNEVEN_WINDOW:
        return False
    half = UNEVEN_WINDOW // 2
    return median(times[-half:]) > FALLING * median(times[-UNEVEN_WINDOW:-half])


@dataclass(frozen=True)
class Cycle:
    """A pattern that step times repeat, such as logging or evaluation every few steps."""

    levels: tuple[float, ...] = (0.0,)
    """By place in the cycle: log(step time / median of all steps)."""

    @property
    def period(self) -> int:
        """Steps per cycle; 1 if there is no cycle."""
        return len(self.levels)

    def level(self, number: int) -> float:
        """Log time of step `number` (counted as in `cycle`) relative to the others."""
        return self.levels[number % self.period]


def cycle(times: Sequence[float], first: int = 0) -> Cycle:
    """The cycle in the step times of an unchanged job. `first`: number of the first step.

    A cycle must occur twice and explain most of the scatter; without one, the period is 1.
    """
    logs = [math.log(t) for t in times if t > 0]
    if len(logs) < len(times) or len(logs) < CYCLE_STEPS:
        return Cycle()
    scatter = {
        p: fmean(min(abs(b - a), 1.0) for a, b in zip(logs, logs[p:], strict=False))
        for p in range(1, min(LONGEST_CYCLE, len(logs) - WINDOW, len(logs) // 2 + 1) + 1)
    }
    best = min(scatter, key=lambda p: (scatter[p], p))
    shortest = next(p for p in scatter if scatter[p] <= 1.5 * scatter[best] + _FLOOR / 2)
    if scatter[shortest] > CYCLE_GAIN * scatter[1]:
        return Cycle()
    return Cycle(_levels(logs, shortest, first))


def _levels(logs: Sequence[float], period: int, first: int) -> tuple[float, ...]:
    """What each place of a cycle adds to the mean of the cycles around it. A change of pace adds nothing."""
    if period == 1:
        return (0.0,)
    means = [fmean(logs[start : start + period]) for start in range(len(logs) - period + 1)]
    added: list[list[float]] = [[] for _ in range(period)]
    for i, log_ms in enumerate(logs):
        before, after = max(0, i - period + 1), min(i, len(means) - 1)
        added[(first + i) % period].append(log_ms - (means[before] + means[after]) / 2)
    levels = [median(values) for values in added]
    usual = median(levels)
    return tuple(level - usual for level in levels)


def roughness(times: Sequence[float]) -> float:
    """Relative scatter of successive steps, including odd ones; infinite for fewer than two."""
    logs = [math.log(t) for t in times if t > 0]
    squares = [(b - a) ** 2 / 2 for a, b in pairwise(logs)]
    return math.sqrt(fmean(squares)) if squares else math.inf


@dataclass
class StepNoise:
    """Relative scatter of one step's time, learned as trials come in."""

    squares: float = 0.0
    freedom: float = 0.0

    @property
    def sigma(self) -> float:
        """Relative standard deviation of a step."""
        return max(_FLOOR, math.sqrt(self.squares / self.freedom)) if self.freedom else _FLOOR

    def start(self, times: Sequence[float]) -> None:
        """Learn from steps under one policy, by successive differences so that slow drift does not count."""
        logs = [math.log(t) for t in times if t > 0]
        steps = [abs(b - a) for a, b in pairwise(logs)]
        if steps:
            sigma = _NORMAL * median(steps) / math.sqrt(2)
            self._add([sigma] * (len(steps) // 2), len(steps) // 2)

    def including(self, rounds: Sequence[Sequence[float]]) -> StepNoise:
        """This noise with what a race's rounds add: one row of log times per policy, all equally long."""
        more = StepNoise(self.squares, self.freedom)
        count = len(rounds[0]) if rounds else 0
        if len(rounds) < 2 or count < 2:
            return more
        policies = [fmean(row) for row in rounds]
        turns = [fmean(column) for column in zip(*rounds, strict=True)]
        whole = fmean(policies)
        left = [
            value - policy - turn + whole
            for policy, row in zip(policies, rounds, strict=True)
            for turn, value in zip(turns, row, strict=True)
        ]
        more._add(left, (len(rounds) - 1) * (count - 1))
        return more

    def _add(self, residuals: Sequence[float], freedom: float) -> None:
        self.squares += sum(r * r for r in residuals)
        self.freedom += freedom
