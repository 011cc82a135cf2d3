"""InputSizes: what a step would take with a usual input, learned from steps with others.

Where the length of a batch changes from step to step, so do step times, by much more than a policy gains. How
much a program copies from the host in a step tells how large its input is, before the step runs and whatever
the policy: a step's time can be divided by what its size explains. A size has no part in which policy a step
gets, so tests on drawn steps (`weft.measure.sequential`) stay valid whatever is fitted here. A poor fit costs
power, never validity. Where a policy does change what is copied (`apart`), sizes must not be used.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median

FITS = (8, 12, 16, 24, 32, 48, 64)  # steps after which the time by size is fitted
_VARY = 0.02  # sizes that differ by less, relative to the usual one, explain nothing
_TURNS = 1  # between larger and smaller sizes, at least: one that only grows is a new pace each time
_EXPLAINS = 0.6  # of the scatter of step times may be left
_BEYOND = 0.5  # of the range of known sizes, on either side, for which the fit still counts
_LEAST = 0.2  # of the usual step: a fit that predicts less is none
_OTHERS = 8  # steps in a row of unknown sizes after which the job has other inputs


@dataclass(frozen=True)
class SizedStep:
    """A step's time, and how many bytes were copied from the host in it and in the step before."""

    ms: float
    size: float
    before: float

    def of(self, earlier: bool) -> float:
        """The size that belongs to the step: a program may copy its input one step in advance."""
        return self.before if earlier else self.size


@dataclass(frozen=True)
class _Fit:
    """Step time as a line over the size."""

    slope: float
    level: float
    least: float
    most: float
    earlier: bool

    def ms(self, size: float) -> float:
        return self.level + self.slope * size

    def knows(self, size: float) -> bool:
        beyond = _BEYOND * (self.most - self.least)
        return self.least - beyond <= size <= self.most + beyond


class InputSizes:
    """Step times by the size of their inputs, as far as it explains them."""

    def __init__(self) -> None:
        self._known: deque[SizedStep] = deque(maxlen=FITS[-1])
        self._count = self._others = 0
        self._fit: _Fit | None = None
        self._usual: float | None = None
        """The size to which times are converted."""
        self._settled = False

    def settle(self) -> None:
        """Convert to the same size from now on, so that times remain comparable while more is learned."""
        self._settled = True

    @property
    def matter(self) -> bool:
        """Whether they explain some of the step times."""
        return self._fit is not None

    @property
    def explains_nothing(self) -> bool:
        """Whether that is known not to be so."""
        return self._fit is None and self._count == FITS[-1]

    def usual_ms(self, step: SizedStep) -> float:
        """The time that the step would have taken with an input of the usual size."""
        fit = self._fit
        if fit is None or self._usual is None or not fit.knows(size := step.of(fit.earlier)):
            return step.ms
        expected, usual = fit.ms(size), fit.ms(self._usual)
        return step.ms * usual / expected if expected > _LEAST * usual else step.ms

    def note(self, step: SizedStep) -> None:
        """Learn from a step. All of them ran under the same policy."""
        if not 0 < step.ms < math.inf or self._count == FITS[-1]:
            return
        self._known.append(step)
        self._count += 1
        if self._count in FITS:
            self._refit()

    def foreign(self, step: SizedStep) -> bool:
        """Note a step; whether the job has had other inputs for some steps. Then it learns anew."""
        if self._fit is None or self._fit.knows(step.of(self._fit.earlier)):
            self._others = 0
            return False
        self._others += 1
        if self._others < _OTHERS:
            return False
        self._known.clear()
        self._count = self._others = 0
        self._fit = self._usual = None
        return True

    def _refit(self) -> None:
        fits = [fit for earlier in (False, True) if (fit := _fitted(self._known, earlier))]
        self._fit = min(fits, key=lambda fit: _left(self._known, fit), default=None)
        if self._fit is not None and not (self._settled and self._usual):
            self._usual = median(step.of(self._fit.earlier) for step in self._known)


def _fitted(steps: Sequence[SizedStep], earlier: bool) -> _Fit | None:
    """A line that a few odd steps do not move (Theil and Sen); None: the size does not explain the times."""
    sizes = [step.of(earlier) for step in steps]
    least, most = min(sizes), max(sizes)
    ups = [b > a for a, b in pairwise(sizes) if a != b]
    turns = sum(a != b for a, b in pairwise(ups))
    if most - least <= _VARY * most or turns < _TURNS:
        return None
    slope = median(
        (b.ms - a.ms) / (b.of(earlier) - a.of(earlier))
        for a, b in combinations(steps, 2)
        if a.of(earlier) != b.of(earlier)
    )
    level = median(step.ms - slope * step.of(earlier) for step in steps)
    fit = _Fit(slope, level, least, most, earlier)
    if slope <= 0 or min(map(fit.ms, sizes)) <= _LEAST * fit.ms(median(sizes)):
        return None
    explained = zip(_left(steps, fit), _rough([math.log(step.ms) for step in steps]), strict=True)
    return fit if any(left <= _EXPLAINS * rough for left, rough in explained) else None


def _left(steps: Sequence[SizedStep], fit: _Fit) -> tuple[float, float]:
    """The scatter that a fit leaves."""
    return _rough([math.log(step.ms / fit.ms(step.of(fit.earlier))) for step in steps])


def _rough(logs: Sequence[float]) -> tuple[float, float]:
    """How much successive steps differ: most of them, and on average.

    Most do not where inputs change now and then; and an average is that of a few stalls, if there are some.
    """
    apart = [min(abs(b - a), 1.0) for a, b in pairwise(logs)]
    return median(apart), fmean(apart)


def apart(sizes: Sequence[float], others: Sequence[float]) -> float:
    """How far two sets of sizes are apart, in standard errors, by ranks (Mann and Whitney)."""
    ordered, count = sorted(others), len(sizes) * len(others)
    if not count:
        return 0.0
    above = sum(bisect_left(ordered, size) + bisect_right(ordered, size) for size in sizes) / 2
    error = math.sqrt(count * (len(sizes) + len(others) + 1) / 12)
    return abs(above - count / 2) / error
