"""Steadiness: when the steps of a job are even enough to compare, and how much they scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

WINDOW = 6
EVEN = 0.04  # spread of successive steps, relative, that counts as even at once
UNEVEN_WINDOW = 14  # steps after which a job's own scatter is taken as it is, unless it still gets faster
FALLING = 0.97
FLOOR = 0.002  # relative; keeps a lucky quiet start from looking exact
NORMAL = 1.4826  # from a median of absolute values to a standard deviation
TRUST = 8.0  # most weight of earlier scatter, in degrees of freedom


def steady(times: Sequence[float]) -> bool:
    """Whether warm-up is over: the last steps are alike, or as uneven as the job always is."""
    if len(times) < WINDOW:
        return False
    last = times[-WINDOW:]
    middle = median(last)
    near = sum(abs(t - middle) <= EVEN * middle for t in last)
    if near >= WINDOW - 1:
        return True
    if len(times) < UNEVEN_WINDOW:
        return False
    half = UNEVEN_WINDOW // 2
    return median(times[-half:]) > FALLING * median(times[-UNEVEN_WINDOW:-half])


@dataclass
class Noise:
    """Relative scatter of one step's time, learnt while trials come in."""

    squares: float = 0.0
    freedom: float = 0.0

    @property
    def sigma(self) -> float:
        """Relative standard deviation of a step."""
        return max(FLOOR, math.sqrt(self.squares / self.freedom)) if self.freedom else FLOOR

    def start(self, times: Sequence[float]) -> None:
        """From steps under one policy: successive differences, so that a slow drift does not count."""
        logs = [math.log(t) for t in times[-WINDOW:] if t > 0]
        steps = [abs(b - a) for a, b in pairwise(logs)]
        if steps:
            sigma = NORMAL * median(steps) / math.sqrt(2)
            self._add([sigma] * (len(steps) // 2), len(steps) // 2)

    def including(self, rounds: Sequence[Sequence[float]]) -> Noise:
        """With what rounds of a race add: one row of logs per policy, as many in each."""
        more = Noise(self.squares, self.freedom)
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

    def paired(self, gains: Sequence[float]) -> tuple[float, float]:
        """Mean of paired gains and its standard error; one odd pair does not decide."""
        middle, expected = median(gains), self.sigma * math.sqrt(2)
        usual = max(expected, 1.5 * median(abs(g - middle) for g in gains))
        kept = [clip(g, middle, 3 * usual) for g in gains]
        mean = fmean(kept)
        weight = min(self.freedom, TRUST)
        squares = sum((g - mean) ** 2 for g in kept) + weight * expected**2
        return mean, math.sqrt(squares / (len(kept) - 1 + weight or 1.0) / len(kept))


def clip(value: float, middle: float, width: float) -> float:
    """`value`, brought to at most `width` from `middle`."""
    return min(max(value, middle - width), middle + width)
