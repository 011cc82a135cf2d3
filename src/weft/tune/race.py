"""Race: which candidate is fastest, with as few measurements as the noise allows. `measure` is injected.

Candidates are measured in rounds, each in a new random order, so that drift of the machine hits all alike.
Those that are clearly behind drop out. The winner is measured again beside the baselines, out of sample.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Generic, TypeVar

import numpy as np

from weft.errors import UsageError, WeftError

T = TypeVar("T")

HOPELESS = 1.5  # times the fastest in a round: dropped without waiting for statistics
DROP_Z = 2.5  # standard errors behind the leader
NOISE_FLOOR = 0.002  # relative; keeps a lucky quiet start from dropping good candidates
RESAMPLES = 1000


def bootstrap_ci(samples: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Confidence interval of the median, by resampling.

    Never narrower than the exact interval between two order statistics: of a handful of samples, resampling
    promises more than it holds.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    if not len(values):
        return math.nan, math.nan
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [(1 - level) / 2, (1 + level) / 2])
    outer = _order_statistic(len(values), level)
    return float(min(low, values[outer])), float(max(high, values[-1 - outer]))


def _order_statistic(count: int, level: float) -> int:
    """The largest k for which the k-th smallest and k-th largest sample enclose the median at this level."""
    k, outside = 0, 2 * 0.5**count
    while k + 1 < count // 2:
        outside += 2 * math.comb(count, k + 1) * 0.5**count
        if outside > 1 - level:
            break
        k += 1
    return k


def ratio_ci(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Median of a/b and its confidence interval. Samples are paired by round where both have as many."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not len(x) or not len(y):
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(seed)
    first = rng.integers(0, len(x), (RESAMPLES, len(x)))
    if len(x) == len(y):
        estimates, middle = np.median((x / y)[first], axis=1), float(np.median(x / y))
    else:
        second = rng.integers(0, len(y), (RESAMPLES, len(y)))
        estimates = np.median(x[first], axis=1) / np.median(y[second], axis=1)
        middle = float(np.median(x) / np.median(y))
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2])
    return middle, float(low), float(high)


@dataclass
class Entry(Generic[T]):
    """A candidate and its measurements in ms."""

    candidate: T
    samples: list[float] = field(default_factory=list)
    kept: bool = True
    problem: str = ""
    """Why it could not be measured, or why it was dropped; empty for one that ran to the end."""
    error: WeftError | None = None
    again: list[float] = field(default_factory=list)
    """Measurements out of sample, for the winner and the baselines."""

    @property
    def failed(self) -> bool:
        """Whether it could not be measured."""
        return self.error is not None

    @property
    def ms(self) -> float:
        """Median, infinite without a sample."""
        return median(self.samples) if self.samples else math.inf

    @property
    def ci_ms(self) -> tuple[float, float]:
        return bootstrap_ci(self.samples)


@dataclass
class Result(Generic[T]):
    """All entries in the order given, and the index of the chosen one (None: nothing could be measured)."""

    entries: list[Entry[T]]
    baselines: tuple[int, ...]
    aside: tuple[int, ...] = ()
    chosen: int | None = None
    measurements: int = 0
    out_of_time: bool = False

    @property
    def best_baseline(self) -> int | None:
        """The fastest baseline that could be measured."""
        alive = [i for i in self.baselines if self.entries[i].samples]
        return min(alive, key=lambda i: self.entries[i].ms, default=None)


def race(
    candidates: Sequence[T],
    measure: Callable[[T], float],
    *,
    baselines: Sequence[int] = (),
    aside: Sequence[int] = (),
    rounds: int = 9,
    min_rounds: int = 3,
    confirm: int = 5,
    seed: int = 0,
    deadline_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_sample: Callable[[int, float | None], None] | None = None,
) -> Result[T]:
    """Find the fastest candidate. `measure` returns ms, or raises WeftError for one that cannot run.

    Baselines (indices) are never dropped, and another candidate is chosen only if it beats the best of them
    beyond doubt. Those `aside` are references: measured in every round, never dropped and never chosen. After
    `deadline_s` no new round begins; the first `min_rounds` are always run.
    """
    if not candidates:
        raise UsageError("a race needs at least one candidate")
    result = Result([Entry(c) for c in candidates], tuple(baselines), tuple(aside))
    order, until = random.Random(seed), math.inf if deadline_s is None else clock() + deadline_s

    def take(index: int, into: list[float]) -> None:
        entry = result.entries[index]
        try:
            into.append(float(measure(entry.candidate)))
            result.measurements += 1
        except WeftError as error:
            entry.kept, entry.error, entry.problem = False, error, str(error)
        if on_sample is not None:
            on_sample(index, into[-1] if into and not entry.failed else None)

    for number in range(rounds):
        alive = [i for i, entry in enumerate(result.entries) if entry.kept]
        if number >= min_rounds and (clock() >= until or _settled(result, alive)):
            result.out_of_time = clock() >= until
            break
        order.shuffle(alive)
        for index in alive:
            take(index, result.entries[index].samples)
        _drop(result, number + 1, min_rounds)
    result.chosen = _choose(result)
    _measure_again(result, take, confirm, order)
    return result


def _settled(result: Result[T], alive: Sequence[int]) -> bool:
    """Whether more rounds would change nothing: one challenger is left, and ahead or behind beyond doubt."""
    spared = {*result.baselines, *result.aside}
    challengers, baseline = [i for i in alive if i not in spared], result.best_baseline
    if not challengers:
        return True
    if len(challengers) > 1 or baseline is None:
        return False
    _, low, high = ratio_ci(result.entries[challengers[0]].samples, result.entries[baseline].samples)
    return high < 1.0 or low > 1.0


def _noise(entries: Sequence[Entry[T]]) -> float:
    """Pooled relative standard deviation of one measurement."""
    squares, freedom = 0.0, 0
    for entry in entries:
        if len(entry.samples) > 1:
            logs = [math.log(s) for s in entry.samples]
            middle = fmean(logs)
            squares += sum((value - middle) ** 2 for value in logs)
            freedom += len(logs) - 1
    return max(NOISE_FLOOR, math.sqrt(squares / freedom)) if freedom else NOISE_FLOOR


def _drop(result: Result[T], rounds_done: int, min_rounds: int) -> None:
    racing = [entry for i, entry in enumerate(result.entries) if i not in result.aside]
    alive = [entry for entry in racing if entry.kept and entry.samples]
    if not alive:
        return
    leader = min(alive, key=lambda entry: entry.ms)
    margin = DROP_Z * _noise(alive) * math.sqrt(2 / rounds_done)
    spared = [leader, *(result.entries[i] for i in result.baselines)]
    for entry in alive:
        if any(entry is one for one in spared):
            continue
        # Rounds are shared, so a slow moment of the machine cancels in the ratio.
        behind = fmean(
            math.log(a / b) for a, b in zip(entry.samples, leader.samples, strict=False) if a > 0 and b > 0
        )
        if behind > math.log(HOPELESS) or (rounds_done >= min_rounds and behind > margin):
            entry.kept = False
            entry.problem = f"{100 * math.expm1(behind):.1f}% behind after {rounds_done} rounds"


def _choose(result: Result[T]) -> int | None:
    entries = enumerate(result.entries)
    usable = [i for i, e in entries if e.samples and not e.failed and i not in result.aside]
    alive = [i for i in usable if result.entries[i].kept] or usable
    if not alive:
        return None
    best, baseline = min(alive, key=lambda i: result.entries[i].ms), result.best_baseline
    if baseline is None or best in result.baselines:
        return best
    _, _, high = ratio_ci(result.entries[best].samples, result.entries[baseline].samples)
    return best if high < 1.0 else baseline


def _measure_again(
    result: Result[T], take: Callable[[int, list[float]], None], rounds: int, order: random.Random
) -> None:
    if result.chosen is None:
        return
    again = [i for i in {result.chosen, *result.baselines} if not result.entries[i].failed]
    for _ in range(rounds):
        order.shuffle(again)
        for index in again:
            if not result.entries[index].failed:
                take(index, result.entries[index].again)
