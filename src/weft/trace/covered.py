"""How much of an interval a set of disjoint intervals covers."""

from __future__ import annotations

import numpy as np

from weft.timeline import Intervals, Ns


class Measure:
    """Tells in O(log n) how much of an interval a set of disjoint intervals covers."""

    def __init__(self, intervals: Intervals) -> None:
        self._start, self._end = intervals
        zero = np.zeros(1, dtype=np.int64)
        self._before: Ns = np.concatenate((zero, np.cumsum(self._end - self._start)))

    def until(self, t: Ns) -> Ns:
        """Covered time before t."""
        if not len(self._end):
            return np.zeros_like(t)
        at = np.searchsorted(self._start, t, side="right")
        beyond = np.where(at > 0, np.maximum(self._end[at - 1] - t, 0), 0)
        covered: Ns = self._before[at] - beyond
        return covered

    def between(self, low: Ns, high: Ns) -> Ns:
        """Covered time in [low, high); 0 if high is below low."""
        return self.until(np.maximum(low, high)) - self.until(low)
