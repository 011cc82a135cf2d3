"""WatchCycle: removes the cycle of a watched job, such as two alternating models, from its trials' times.

The watch compares single trials. If the job itself makes them differ by much more than a policy does, the
watch would neither notice that a policy has become slower nor be sure that it has not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from weft.measure.steadiness import CYCLE_GAIN, LONGEST_CYCLE, Cycle, cycle
from weft.tuning.live.trial import Sample

CYCLE_TRIALS = 3 * LONGEST_CYCLE, 6 * LONGEST_CYCLE  # fewest and most successive trials to find a cycle in
_JUDGED = LONGEST_CYCLE  # trials after which a known cycle is judged again
_MISLEADS = 1.25  # a cycle is wrong if trials without it scatter by this factor more than with it
_RARELY = 512  # trials between two attempts to find a cycle, at most


class WatchCycle:
    """The cycle of successive trials, learned while the job is watched.

    `times`: milliseconds of the latest trials before the watch. `first`: the number of the first of them.
    """

    def __init__(self, times: Sequence[float] = (), first: int = 0) -> None:
        least, most = CYCLE_TRIALS
        self._cycle = Cycle()
        self._times: deque[float] = deque(times[-most:], maxlen=most)
        self._next = first + len(times)
        """The number of the trial that follows those in `_times`."""
        self._interval = self._left = least
        """Trials between two attempts to find a cycle, and until the next one. The interval doubles each time
        the job has no cycle or breaks it."""
        if len(self._times) >= least:
            self._find()

    @property
    def known(self) -> bool:
        """Whether the job has a cycle."""
        return self._cycle.period > 1

    def even(self, sample: Sample, number: int) -> Sample:
        """The sample of trial `number` as it would be at any place of the cycle."""
        level = self._cycle.level(number)
        return replace(sample, ms=sample.ms / math.exp(level)) if level else sample

    def note(self, ms: float, number: int) -> None:
        """Record the measured time of trial `number`."""
        if number != self._next:
            self._times.clear()
        self._times.append(ms)
        self._next = number + 1
        self._left -= 1

    def learn(self) -> bool:
        """Judge the known cycle, or look for one, when it is due. Returns whether the period has changed.

        Times before and after such a change cannot be compared.
        """
        before = self._cycle.period
        if self.known and self._left % _JUDGED == 0 and self._misleads():
            self._move()
        elif self._left <= 0 and len(self._times) >= CYCLE_TRIALS[0]:
            self._find()
        return self._cycle.period != before

    def _misleads(self) -> bool:
        """Whether the last trials no longer follow the cycle, for instance because the job skipped a step."""
        left, without = (self._scatter(known, _JUDGED) for known in (self._cycle, Cycle()))
        return len(self._times) > _JUDGED and left > _MISLEADS * without

    def _move(self) -> None:
        """Move the cycle to where the last trials follow it, or forget it if they do not follow it at all."""
        levels, last = self._cycle.levels, self._cycle.period
        moves = [Cycle(levels[by:] + levels[:by]) for by in range(1, len(levels))]
        moved = min(moves, key=lambda known: self._scatter(known, last))
        if self._scatter(moved, last) <= CYCLE_GAIN * self._scatter(Cycle(), last):
            self._cycle = moved
            self._times = deque(list(self._times)[-last:], maxlen=CYCLE_TRIALS[1])
        else:
            self._cycle = Cycle()
            self._wait_longer()

    def _scatter(self, known: Cycle, count: int) -> float:
        """How much the last `count` trials differ from those before, without what a cycle explains."""
        last = list(self._times)[-count - 1 :]
        logs = [math.log(ms) - known.level(i) for i, ms in enumerate(last, self._next - len(last))]
        return sum(min(abs(b - a), 1.0) for a, b in pairwise(logs))

    def _find(self) -> None:
        self._cycle = cycle(self._times, self._next - len(self._times))
        self._left = CYCLE_TRIALS[0]
        if not self.known:
            self._wait_longer()

    def _wait_longer(self) -> None:
        self._interval = self._left = min(2 * self._interval, _RARELY)
