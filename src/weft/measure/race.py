"""Race: finds the fastest candidate in as few measurements as the noise allows. `measure` is injected.

Candidates are measured in rounds, in a random order and then in its reverse, so that machine drift affects
all of them equally. Candidates that are clearly behind are dropped, and the measurements saved go to close
contenders. The winner is measured again, interleaved with the baselines, in fresh rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weft.errors import UsageError, WeftError
from weft.measure.intervals import ratio_ci
from weft.measure.result import RaceEntry, RaceResult
from weft.measure.scores import Noise, Round, fit_scores

_T = TypeVar("_T")

HOPELESS = 1.75  # times the leader: dropped at once
DROP_Z = 2.4  # standard errors behind the leader at which a candidate is dropped,
DROP_Z_STEP = 0.15  # plus this for each doubling of its measurements
ONCE_Z = 3.0  # the same for a candidate measured once, when the leader is usually a lucky one
LOOKS = 16  # rounds that each end with a decision on drops; later, one follows every 1/16 more rounds
MANY = 16  # from this many challengers on, the second round measures only a few, to estimate the noise
_ENOUGH = 8  # affordable measurements per candidate from which all are measured twice before any is dropped
PROBED = 8  # fewest challengers measured in that second round
LAST = 5  # rounds reserved for the finalists
MAX_CONFIRM = 4  # times the usual rounds: longest confirmation, while its result is unclear
FEW = 12  # up to this many candidates get the full grid; more share a third of theirs, or this many's
ROUNDS = 15
"""Rounds of a full grid; a third of it finds the best of 40 candidates that leads by 3% under 5% noise."""
_TIE = 0.005
"""Candidates whose times are this close (relative) count as equally good."""
CONFIRM = 6
"""Fewest fresh rounds of a confirmation: with six, a 95% interval between order statistics exists."""


def race(
    candidates: Sequence[_T],
    measure: Callable[[_T], float],
    *,
    baselines: Sequence[int] = (),
    aside: Sequence[int] = (),
    rounds: int = ROUNDS,
    min_rounds: int = 3,
    confirm: int = 5,
    tie: float = _TIE,
    seed: int = 0,
    deadline_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_sample: Callable[[int, float | None], None] | None = None,
) -> RaceResult[_T]:
    """Find the fastest candidate. `measure` returns ms, or raises WeftError for one that cannot run.

    `rounds` is how often a full grid would measure each candidate. A race of many candidates takes at most a
    third of that grid (`most_measurements`), and may measure close contenders more than `rounds` times. It
    ends when the leader is ahead of the rest beyond doubt, or within `tie` of the best.

    Baselines (indices) are never dropped. Another candidate is chosen only if it beats the best baseline
    beyond doubt, in the race and again in a confirmation: fresh rounds of both, at least `confirm` and at
    least CONFIRM of them. If all candidates are equal, a baseline is chosen in over 95% of races. With
    `confirm` 0 (times without noise) the race alone decides. Without baselines the fastest is chosen.
    Candidates in `aside` (indices) are references: measured in `rounds` rounds, never dropped, never chosen.
    After `deadline_s` seconds no new round begins; the first `min_rounds` are always run. `on_sample`
    receives the index and ms (None if it failed) of each measurement.
    """
    if not candidates:
        raise UsageError("a race needs at least one candidate")
    result = RaceResult([RaceEntry(c) for c in candidates], tuple(baselines), tuple(aside))
    course = _Course(result, measure, on_sample, rounds, min_rounds, tie, random.Random(seed))
    until = math.inf if deadline_s is None else clock() + deadline_s
    while not course.over:
        if len(course.table) >= min_rounds and clock() >= until:
            result.out_of_time = True
            break
        course.round()
    result.chosen = course.choose()
    if confirm:
        course.confirm(confirm, lambda: clock() >= until)
    return result


def most_measurements(candidates: int, rounds: int) -> int:
    """Most measurements before the confirmation: the full grid for few candidates, a third for many."""
    return max(candidates, math.ceil(rounds * max(candidates / 3, min(candidates, FEW))))


class _Course(Generic[_T]):
    """A race in progress."""

    def __init__(
        self,
        result: RaceResult[_T],
        measure: Callable[[_T], float],
        on_sample: Callable[[int, float | None], None] | None,
        rounds: int,
        min_rounds: int,
        tie: float,
        order: random.Random,
    ) -> None:
        self.result, self.measure, self.on_sample = result, measure, on_sample
        self.rounds, self.min_rounds, self.tie, self.order = rounds, min_rounds, tie, order
        self.most = most_measurements(len(result.entries), rounds)
        self.spared = {*result.baselines, *result.aside}
        self.table: list[Round] = []
        self.noise = Noise()
        self.places: dict[int, int] = {}
        self.passed: set[int] = set()
        """Baselines clearly behind the leader, which are not measured beyond `rounds`."""
        self.over = rounds < 1

    def round(self) -> None:
        """Measure the remaining candidates once more, and drop those that are clearly behind."""
        found: dict[int, float] = {}
        members = self._members()
        for index in self._shuffled(members) if self._probing() else self._ordered(members):
            samples = self.result.entries[index].samples
            if self._take(index, samples):
                found[index] = math.log(max(samples[-1], 1e-12))
        self.table.append(found)
        done = len(self.table)
        if done <= LOOKS or done % (done // LOOKS) == 0:
            self._look()
        left = self.most - self.result.measurements
        if self.most < self.rounds * len(self.result.entries):
            self._thin(left)
        self.over |= len(self._members()) > left or (not self._challengers() and done >= self.min_rounds)

    def choose(self) -> int | None:
        """The fastest candidate, or the best baseline if not beaten beyond doubt; None if all failed."""
        field = self._field()
        if not field:
            return None
        best, baseline = self._ranked(field)[0][1], self.result.best_baseline
        if baseline is None or best in self.result.baselines or baseline in self.passed:
            return best  # a passed baseline is clearly behind by the ranking, which is robust to outliers
        return best if self._ratio(best, baseline)[2] < 1.0 else baseline

    def confirm(self, rounds: int, late: Callable[[], bool]) -> None:
        """Measure the chosen candidate and the baselines afresh; choose a baseline unless the lead holds."""
        result, chosen = self.result, self.result.chosen
        if chosen is None or not result.baselines:  # without a baseline there is nothing to confirm
            return
        leads = chosen not in result.baselines
        rounds = max(rounds, CONFIRM) if leads else rounds
        again = [i for i in {chosen, *result.baselines} if not result.entries[i].failed]
        for number in range(rounds * MAX_CONFIRM):
            # Test only three times: a test after every round would sooner or later find a gain by chance.
            if number >= rounds and (late() or (number in (rounds, 2 * rounds) and self._clear(chosen))):
                break
            for index in self._ordered(again):
                if not result.entries[index].failed:
                    self._take(index, result.entries[index].again)
        if leads and not (self._confirmed(chosen) and not result.entries[chosen].failed):
            result.unconfirmed, result.chosen = chosen, result.best_baseline

    def _clear(self, chosen: int) -> bool:
        """Whether the confirmation can end: a baseline was chosen, or the order is beyond doubt."""
        _, low, high = self.result.ratio(chosen)
        return chosen in self.result.baselines or not low <= 1.0 <= high

    def _confirmed(self, chosen: int) -> bool:
        """Whether the lead over every baseline that can still be measured held in the fresh rounds."""
        mine = self.result.entries[chosen].again
        others = [self.result.entries[i] for i in self.result.baselines]
        return bool(mine) and all(
            entry.failed or ratio_ci(mine, entry.again)[2] < 1.0 for entry in others if entry.samples
        )

    def _take(self, index: int, into: list[float]) -> bool:
        entry = self.result.entries[index]
        try:
            ms = float(self.measure(entry.candidate))
            if not math.isfinite(ms):
                raise WeftError(f"measured {ms} ms, which is not a time")
            into.append(ms)
            self.result.measurements += 1
        except WeftError as error:
            entry.kept, entry.error, entry.problem = False, error, str(error)
        if self.on_sample is not None:
            self.on_sample(index, None if entry.failed else into[-1])
        return not entry.failed

    def _challengers(self) -> list[int]:
        return [i for i, entry in enumerate(self.result.entries) if entry.kept and i not in self.spared]

    def _probing(self) -> bool:
        """Whether the next round measures only a few: they give the noise by which others can be dropped."""
        short = self.most < _ENOUGH * len(self.result.entries)
        return short and len(self.table) == 1 and len(self._challengers()) >= MANY

    def _members(self) -> list[int]:
        """The candidates of the next round."""
        done, members = len(self.table), self._challengers()
        if self._probing():
            members = sorted(members, key=self.table[0].__getitem__)[: max(PROBED, len(members) // 5)]
        others = self.spared if done < self.rounds else set(self.result.baselines) - self.passed
        return members + [i for i in sorted(others) if not self.result.entries[i].failed]

    def _ordered(self, members: Sequence[int]) -> list[int]:
        """A random order, then its reverse in the next round, so that a steady drift cancels."""
        if self.places:
            order = sorted(members, key=lambda i: -self.places.get(i, 0))
            self.places = {}
        else:
            order = self._shuffled(members)
            self.places = {index: place for place, index in enumerate(order)}
        return order

    def _shuffled(self, members: Sequence[int]) -> list[int]:
        return self.order.sample(members, len(members))

    def _field(self) -> list[int]:
        """The candidates that can still win."""
        rest = [i for i in self.result.baselines if i not in self.passed and self.result.entries[i].samples]
        return self._challengers() + [i for i in rest if not self.result.entries[i].failed]

    def _ranked(self, field: Sequence[int]) -> list[tuple[float, int, int]]:
        """Per candidate, best first: distance behind the leader (log), index and number of measurements."""
        level, counts, self.noise = fit_scores(self.table, field, self.noise)
        found = zip((level - level.min()).tolist(), field, counts.tolist(), strict=True)
        return sorted(found)

    def _look(self) -> None:
        """Drop candidates that are clearly behind; end the race once the leader is the best or as good."""
        field, done = self._field(), len(self.table)
        if not field:
            return
        ranked = self._ranked(field)
        margins = [self._margin(ranked[0][2], count) for _, _, count in ranked]
        for (behind, index, count), margin in zip(ranked[1:], margins[1:], strict=True):
            if behind > min(margin, math.log(HOPELESS)):
                self._leave(index, f"{100 * math.expm1(behind):.1f}% behind after {_times(count)}")
        rest = [
            margin - behind
            for (behind, index, _), margin in zip(ranked[1:], margins[1:], strict=True)
            if index in self.spared or self.result.entries[index].kept
        ]
        best = all(room < self.tie for room in rest)
        self.over = done >= self.min_rounds and best and self._decided(ranked)

    def _margin(self, leader: int, count: int) -> float:
        """Distance behind the leader at which a candidate is dropped, given both numbers of measurements."""
        if len(self.table) < self.min_rounds and not self._may_drop_early(count):
            return math.inf
        z = DROP_Z + DROP_Z_STEP * math.log2(count) if count > 1 else ONCE_Z
        return self.noise.margin(z, leader, count)

    def _may_drop_early(self, count: int) -> bool:
        """Whether to drop early: many candidates reveal the noise, but with outliers one slow time proves
        nothing."""
        return len(self.result.entries) >= MANY and (count > 1 or not self.noise.outliers)

    def _leave(self, index: int, why: str) -> None:
        if index in self.result.baselines:
            if len(self.table) >= self.rounds:
                self.passed.add(index)
        else:
            self.result.entries[index].kept, self.result.entries[index].problem = False, why

    def _thin(self, left: int) -> None:
        """Keep only as many candidates as LAST more rounds can be afforded for."""
        cost, challengers = len(self._members()), self._challengers()
        if len(self.table) < 2 or LAST * cost <= left or len(challengers) <= 2:
            return
        places = max(2, left // LAST - (cost - len(challengers)))
        inside = [i for _, i, _ in self._ranked(self._field()) if i in challengers]
        for index in inside[places:]:
            self._leave(index, f"not among the first {places} when measurements ran short")

    def _decided(self, ranked: Sequence[tuple[float, int, int]]) -> bool:
        """Whether the leader is a baseline, clearly ahead of or behind the best one, or level with one."""
        leader, baseline = ranked[0][1], self.result.best_baseline
        if baseline is None or leader in self.result.baselines:
            return True
        _, low, high = self._ratio(leader, baseline)
        level = any(behind < self.tie for behind, index, _ in ranked if index in self.result.baselines)
        return level or not low <= 1.0 <= high

    def _ratio(self, a: int, b: int) -> tuple[float, float, float]:
        """Ratio of a's time to b's with its interval, from the rounds that measured both."""
        both = [(math.exp(found[a]), math.exp(found[b])) for found in self.table if a in found and b in found]
        return ratio_ci([x for x, _ in both], [y for _, y in both])


def _times(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"
