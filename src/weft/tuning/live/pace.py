"""Pace: has the time of a step changed? A cumulative sum of clipped deviations from the recent level."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

_NORMAL = 1.4826  # from a median of absolute values to a standard deviation
_LEARN = 12  # steps that give the first level
KNOWN = 4  # known steps that are enough for a level
_MEMORY = 64
LEAST_SCATTER = 0.006  # relative: a shift below about 1% is not worth a check
_CLIP = 4.0  # scatters: one odd step is not a change
SLACK = 1.25  # scatters that a step may deviate
BELOW = 2.5  # scatters below the level: at an unchanged pace, one step in a hundred
_LIMIT = 9.0  # sum of the deviations beyond that


class Pace:
    """Detects a shift of the level from the logarithm of each step's time."""

    def __init__(self, known: Sequence[float] = ()) -> None:
        """`known`: logarithms of earlier steps at the pace that is expected."""
        self._recent: deque[float] = deque(known, maxlen=_MEMORY)
        self._level = self._scatter = 0.0
        self._above = self._below = 0.0
        self._count = 0
        if len(known) >= KNOWN:
            self._settle()

    def changed(self, log_ms: float) -> bool:
        """Note a step; whether the pace has changed. Starts over if so."""
        self._recent.append(log_ms)
        self._count += 1
        still = self._above == self._below == 0.0
        if still and (self._count == _LEARN or self._count % 16 == 0):
            self._settle()
        if not self._scatter:
            return False
        off = min(max((log_ms - self._level) / self._scatter, -_CLIP), _CLIP)
        self._above = max(0.0, self._above + off - SLACK)
        self._below = max(0.0, self._below - off - SLACK)
        if max(self._above, self._below) <= _LIMIT:
            return False
        self._recent.clear()
        self._above = self._below = self._scatter = 0.0
        self._count = 0
        return True

    def faster(self, log_ms: float) -> bool:
        """Whether a step that was not noted is faster than recent ones."""
        recent = list(self._recent)[-8:]
        return bool(recent) and log_ms < median(recent)

    def well_below(self, log_ms: float) -> bool:
        """Whether a step that was not noted is faster than recent ones by more than they scatter."""
        return self._scatter > 0 and log_ms < self._level - BELOW * self._scatter

    def _settle(self) -> None:
        self._level = median(self._recent)
        around = median(abs(y - self._level) for y in self._recent)
        self._scatter = max(LEAST_SCATTER, _NORMAL * around)
