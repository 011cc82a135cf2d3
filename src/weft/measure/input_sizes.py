"""InputSizes: predicts what a step would take with a usual input, from steps with other inputs.

If the length of a batch changes from step to step, so do step times, by much more than a policy gains. How
many bytes a program copies from the host in a step shows how large its input is, before the step runs and
whatever the policy: a step's time can be divided by what its size explains. The size does not influence which
policy a step gets, so tests on drawn steps (`weft.measure.sequential`) stay valid whatever is fitted here. A
poor fit costs power, never validity. If a policy does change what is copied
(`weft.measure.copied_by_policy`), sizes must not be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean, median

FITS = (8, 12, 16, 24, 32, 48, 64)  # numbers of steps after which time by size is fitted again
_VARY = 0.02  # sizes whose range is smaller than this share of the largest explain nothing
_TURNS = 1  # fewest turns between growing and shrinking sizes: if they only grow, each is a new pace
_EXPLAINS = 0.6  # share of the step times' scatter that a fit may leave
_BEYOND = 0.5  # share of the known sizes' range by which a fit extends on either side
_LEAST = 0.2  # share of the usual step: a fit that predicts less is discarded
_OTHERS = 8  # steps in a row of unknown sizes after which the job has other inputs
_JUDGED = 16  # steps of known sizes after which a fit is judged each time
_WITHOUT = 128  # steps without a fit after which inputs may have begun to vary
_SURE = 32  # steps needed for a fit if times did not follow sizes before
_LONGEST = 8  # longest cycle, in steps
_CYCLE = 0.5  # share of the scatter that may be left at the same place of a cycle, if there is one


@dataclass(frozen=True)
class SizedStep:
    """A step's time, and the bytes copied from the host in it and in the step before."""

    ms: float
    size: float
    before: float

    def of(self, earlier: bool) -> float:
        """The step's size. `earlier`: the program copies its input one step in advance."""
        return self.before if earlier else self.size


@dataclass(frozen=True)
class _Fit:
    """Step time as a linear function of the size."""

    slope: float
    level: float
    least: float
    most: float
    earlier: bool
    left: float = math.inf
    """The scatter that remains after the fit."""

    def ms(self, size: float) -> float:
        return self.level + self.slope * size

    def known(self, size: float) -> float:
        """The nearest size for which the fit is valid."""
        beyond = _BEYOND * (self.most - self.least)
        return min(max(size, self.least - beyond), self.most + beyond)

    def knows(self, size: float) -> bool:
        return self.known(size) == size


class InputSizes:
    """Relates step times to the sizes of their inputs, as far as these explain them."""

    def __init__(self) -> None:
        self._settled = False
        self._patience = _WITHOUT
        self._start()

    def _start(self, least: int = FITS[0]) -> None:
        """Forget everything. `least`: fewest steps for a fit."""
        self._least = least
        self.policy: int | None = None
        """The policy whose steps are learned from; None before the first step."""
        self._known: list[SizedStep] = []
        self.vary = False
        """Whether the sizes of the known steps differ enough to explain anything."""
        self._numbers: list[int] = []
        """Numbers of the known steps among all steps."""
        self._others = self._steps = 0
        self._fit: _Fit | None = None
        self._usual: float | None = None
        """The size to which times are converted."""
        self._latest: list[tuple[int, float, float]] = []
        """Recent steps of known size: number, measured time and converted time."""

    def settle(self) -> None:
        """Keep the usual size from now on, so that times remain comparable while more is learned."""
        self._settled = True

    @property
    def matter(self) -> bool:
        """Whether sizes explain some of the step times."""
        return self._fit is not None

    @property
    def explains_nothing(self) -> bool:
        """Whether sizes have explained no step times for long."""
        return self._fit is None and (len(self._known) == FITS[-1] or self._least > FITS[0])

    def usual_ms(self, step: SizedStep, *, beyond: bool = False) -> float:
        """The ms that the step would have taken with an input of the usual size.

        `beyond`: convert inputs far outside the known range like the nearest size within it. Otherwise inputs
        that slowly become longer would suddenly seem to take half as long again. A sudden change still shows.
        """
        fit = self._fit
        if fit is None or self._usual is None:
            return step.ms
        size, usual = step.of(fit.earlier), fit.ms(self._usual)
        expected = fit.ms(fit.known(size))
        if not beyond and (not fit.knows(size) or expected <= _LEAST * usual):
            return step.ms
        return step.ms * usual / max(expected, _LEAST * usual)

    def note(self, step: SizedStep, policy: int = 0) -> None:
        """Learn from a step. Only steps under one policy count, so that a policy's effect is not mistaken for
        an effect of the inputs it had."""
        self.policy = policy if self.policy is None else self.policy
        if policy != self.policy or not 0 < step.ms < math.inf or len(self._known) == FITS[-1]:
            return
        self._known.append(step)
        self.vary = self.vary or _vary([self._known[0].size, step.size])
        self._numbers.append(self._steps)
        if len(self._known) in FITS and len(self._known) >= self._least:
            self._refit()

    def outdated(self, step: SizedStep) -> bool:
        """Judge the fit by a step, before `note`; returns whether everything must be learned anew."""
        self._steps += 1
        if self._fit is None:
            anew, least = self._steps >= self._patience, _SURE
            if anew and _vary([known.size for known in self._known]):
                self._patience *= 2  # sizes vary but explain nothing: fit less often, it takes milliseconds
        elif self._fit.knows(step.of(self._fit.earlier)):
            self._others = 0
            self._latest.append((self._steps, step.ms, self.usual_ms(step)))
            anew, least = len(self._latest) == _JUDGED and self._misleads(), _SURE
        else:
            self._others += 1
            anew, least = self._others >= _OTHERS, FITS[0]
        if anew:
            self._start(least)
        return anew

    def _misleads(self) -> bool:
        """Whether recent times scatter more with the fit than without: they no longer follow the sizes."""
        numbers, *both = zip(*self._latest, strict=True)
        self._latest.clear()
        before, after = ([math.log(ms) for ms in times] for times in both)
        return all(left > scatter for scatter, left in _scatters(numbers, before, after))

    def _refit(self) -> None:
        fits = [fit for earlier in (False, True) if (fit := _fitted(self._known, self._numbers, earlier))]
        self._fit = min(fits, key=lambda fit: fit.left, default=None)
        if self._fit is not None and not (self._settled and self._usual):
            self._usual = median(step.of(self._fit.earlier) for step in self._known)


def _fitted(steps: Sequence[SizedStep], numbers: Sequence[int], earlier: bool) -> _Fit | None:
    """A line that is robust to a few odd steps (Theil-Sen); None if the size does not explain the times."""
    sizes = [step.of(earlier) for step in steps]
    ups = [b > a for a, b in pairwise(sizes) if a != b]
    turns = sum(a != b for a, b in pairwise(ups))
    if not _vary(sizes) or turns < _TURNS:
        return None
    times = [step.ms for step in steps]
    slope = median(
        (b - a) / (y - x) for (x, a), (y, b) in combinations(zip(sizes, times, strict=True), 2) if x != y
    )
    level = median(ms - slope * size for size, ms in zip(sizes, times, strict=True))
    fit = _Fit(slope, level, min(sizes), max(sizes), earlier)
    if slope <= 0 or min(map(fit.ms, sizes)) <= _LEAST * fit.ms(median(sizes)):
        return None
    after = [math.log(ms / fit.ms(size)) for size, ms in zip(sizes, times, strict=True)]
    scatters = _scatters(numbers, list(map(math.log, times)), after)
    if any(left <= _EXPLAINS * before for before, left in scatters):
        return replace(fit, left=scatters[0][1])
    return None


def _vary(sizes: Sequence[float]) -> bool:
    return max(sizes, default=0.0) - min(sizes, default=0.0) > _VARY * max(sizes, default=0.0)


def _scatters(
    numbers: Sequence[int], before: Sequence[float], after: Sequence[float]
) -> list[tuple[float, float]]:
    """How much steps differ before and after a conversion: first by the median, then by the mean.

    The median does not show inputs that change only now and then; the mean may show only a few stalls.
    Successive steps are compared, or steps at the same place of a cycle if they differ less.
    """
    periods = range(1, min(_LONGEST, len(numbers) // 4) + 1)
    both = [(_apart(numbers, before, period), _apart(numbers, after, period)) for period in periods]
    found = []
    for middle in (median, fmean):
        first, *others = [(middle(steps), middle(converted)) for steps, converted in both]
        cycle = min(others, default=first)
        found.append(cycle if cycle[0] <= _CYCLE * first[0] else first)
    return found


def _apart(numbers: Sequence[int], logs: Sequence[float], period: int) -> list[float]:
    """By how much each step differs from the previous one at the same place of a cycle, at most 1."""
    last: dict[int, float] = {}
    apart = []
    for number, log_ms in zip(numbers, logs, strict=True):
        place = number % period
        if place in last:
            apart.append(min(abs(log_ms - last[place]), 1.0))
        last[place] = log_ms
    return apart
