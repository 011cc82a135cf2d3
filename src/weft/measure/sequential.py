"""Sequential: tests whether a change makes steps faster; valid at any stopping time and for any noise.

Which of two arms a step runs under is drawn at random. If the arms do not differ, a step's time does not
depend on its arm, so nobody can predict the draws better than chance. `Coins` predicts them from the times
alone and bets on its predictions at fair odds: without a difference, its capital exceeds c with a probability
of at most 1/c, whenever one chooses to stop (Ville's inequality). This assumes nothing about the noise.
Cycles of any period, heavy tails, drift, bursts and autocorrelation cost power, never validity.

How well it predicts depends on a model of the noise: steps scatter with a Student's t distribution around the
level of recent steps, or of recent steps at the same place of a cycle. Several models and several effect
sizes share the capital, so the bets of the best one soon dominate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

FASTER = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Effects that are bet on: log(default time / changed time)."""
WINDOWS = (4, 16)  # recent steps that determine the level
_MEMORY = 32  # recent prediction errors that determine the scatter
_FLOOR = 0.0015  # relative; keeps a quiet start from looking exact
_NORMAL = 1.4826  # converts a median absolute deviation to a standard deviation
TAILS = 4.0  # degrees of freedom of the Student's t distribution
_POWER = -(TAILS + 1) / 2
WIDEST, PRECISION = 0.7, 0.03  # largest distance of an interval's ends, and their relative precision
_CAUTION = 0.05  # share of the capital that is kept out of every bet
_NEAREST = 3  # steps of the other arm that a step is compared with


class _Bet:
    """One model with one effect: its capital, the recent level, and the errors of its predictions."""

    __slots__ = ("_errors", "_magnitudes", "_recent", "effect", "log_capital", "period", "window")

    def __init__(self, effect: float, window: int, period: int) -> None:
        self.effect, self.window, self.period = effect, window, period
        self.log_capital = 0.0
        self._errors: deque[float] = deque()
        """Magnitudes of recent errors, oldest first."""
        self._magnitudes: list[float] = []
        """The same, sorted."""
        self._recent: list[list[float]] = [[] for _ in range(period)]
        """By place in the cycle: recent log times, converted to arm 0."""

    def bet(self, step: Step) -> None:
        """Predict a step's arm from its time, and bet on the prediction."""
        recent = self._recent[step.number % self.period]
        if not recent:
            return
        log_ms, share, magnitudes = step.log_ms, step.share, self._magnitudes
        level = _middle(sorted(recent))
        if 0 < share < 1 and len(magnitudes) >= 3:
            scatter = max(_FLOOR, _NORMAL * _middle(magnitudes))
            # Densities of Student's t distribution, up to a factor.
            x = (log_ms - level) / scatter
            default = math.pow(1 + x * x / TAILS, _POWER)
            x = (log_ms + self.effect - level) / scatter
            changed = math.pow(1 + x * x / TAILS, _POWER)
            expected = share * changed + (1 - share) * default
            odds = (changed if step.arm else default) / expected
            self.log_capital += math.log((1 - _CAUTION) * odds + _CAUTION)
        error = abs(log_ms + self.effect * step.arm - level)
        self._errors.append(error)
        if len(self._errors) > _MEMORY:
            del magnitudes[bisect_left(magnitudes, self._errors.popleft())]
        insort(magnitudes, error)

    def note(self, step: Step) -> None:
        """Add a step to the level."""
        recent = self._recent[step.number % self.period]
        recent.append(step.log_ms + self.effect * step.arm)
        if len(recent) > self.window:
            del recent[0]


def _middle(ordered: Sequence[float]) -> float:
    """The median of sorted values."""
    half = len(ordered) >> 1
    return ordered[half] if len(ordered) & 1 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True)
class Step:
    """A measured step, the arm it ran under, and the probability (`share`) with which that was arm 1."""

    log_ms: float
    arm: int
    share: float
    number: int
    """Position among all steps of the job, which places it in a cycle."""


class Coins:
    """A test of arm 1 (changed) against arm 0 (default): is arm 1 faster (`effects` > 0) or slower (< 0)?

    `periods`: lengths, in steps, of cycles that the job may have. `renewed`: a bet that has lost gets its
    capital back, so that the test reacts to a change after a long time without one (an e-detector). Without a
    difference, a capital of c is then exceeded at most once in c bets.
    """

    def __init__(
        self,
        effects: Sequence[float] = FASTER,
        periods: Sequence[int] = (1,),
        windows: Sequence[int] = WINDOWS,
        renewed: bool = False,
    ) -> None:
        self._renewed = renewed
        shapes = [(w, p) for p in sorted(set(periods)) for w in (windows if p == 1 else (4,))]
        self._bets = [_Bet(e, w, p) for e in effects for w, p in shapes]

    @property
    def capital(self) -> float:
        """Current capital, from one unit at the start."""
        top = max(bet.log_capital for bet in self._bets)
        total = sum(math.exp(bet.log_capital - top) for bet in self._bets)
        return math.exp(min(top, 600.0)) * total / len(self._bets)

    def restart(self) -> None:
        """Begin a new test; estimates of level and noise stay."""
        for bet in self._bets:
            bet.log_capital = 0.0

    def add(self, step: Step) -> None:
        """Bet on a step's arm. If its share is 0 or 1, the step only updates the level."""
        certain = self._renewed and not 0 < step.share < 1
        for bet in self._bets:
            if not certain:
                bet.bet(step)
                if self._renewed:
                    bet.log_capital = max(0.0, bet.log_capital)
            bet.note(step)


def capital(
    steps: Sequence[Step],
    effects: Sequence[float] = FASTER,
    periods: Sequence[int] = (1,),
    shift: float = 0.0,
) -> float:
    """The capital after all steps, under the null hypothesis that arm 1 takes exp(-shift) times arm 0."""
    coins = Coins(effects, periods)
    for step in steps:
        coins.add(Step(step.log_ms + shift * step.arm, step.arm, step.share, step.number))
    return coins.capital


def estimate(
    steps: Sequence[Step], period: int = 1, middle: Callable[[Sequence[float]], float] = median
) -> float:
    """The effect: median (or other `middle`) of the differences between each drawn step and the nearest steps
    of the other arm at the same place of a cycle of `period` steps. 0 if there is nothing to compare.
    """
    drawn = sorted((step for step in steps if 0 < step.share < 1), key=lambda step: step.number)
    times: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    for step in drawn:
        numbers, logs = times.setdefault((step.number % period, step.arm), ([], []))
        numbers.append(step.number)
        logs.append(step.log_ms)
    differences = []
    for one in drawn:
        numbers, logs = times.get((one.number % period, 1 - one.arm), ([], []))
        if near := _nearest(numbers, one.number):
            level = sum(logs[index] for index in near) / len(near)
            differences.append(level - one.log_ms if one.arm else one.log_ms - level)
    return middle(differences) if differences else 0.0


def _nearest(numbers: Sequence[int], number: int) -> list[int]:
    """Indices of the _NEAREST nearest values in ascending `numbers`."""
    after = bisect_left(numbers, number)
    before, found = after - 1, list[int]()
    while len(found) < _NEAREST and (before >= 0 or after < len(numbers)):
        if after == len(numbers) or (before >= 0 and number - numbers[before] <= numbers[after] - number):
            found.append(before)
            before -= 1
        else:
            found.append(after)
            after += 1
    return found


def confidence_interval(
    steps: Sequence[Step],
    middle: float,
    effects: Sequence[float] = FASTER,
    periods: Sequence[int] = (1,),
    level: float = 0.95,
) -> tuple[float, float]:
    """A confidence interval of the effect, valid at any stopping time: the shifts that are not refuted.

    `middle`: the estimate, from which the search for both ends starts. `effects`: deviations that are bet on.
    """
    needed = 2 / (1 - level)
    slower = [-effect for effect in effects]
    low = _end(lambda shift: capital(steps, effects, periods, shift) >= needed, middle, -1)
    high = _end(lambda shift: capital(steps, slower, periods, shift) >= needed, middle, 1)
    return low, high


def _end(refuted: Callable[[float], bool], middle: float, side: int) -> float:
    """The nearest refuted shift on one side of the middle, at most WIDEST away."""
    inner, width = 0.0, 0.01
    while not refuted(middle + side * width):
        inner, width = width, 2 * width
        if width > WIDEST:
            return middle + side * WIDEST
    while width - inner > max(0.0005, PRECISION * width):
        half = (inner + width) / 2
        inner, width = (inner, half) if refuted(middle + side * half) else (half, width)
    return middle + side * width
