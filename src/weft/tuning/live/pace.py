"""Pace: detects a change of step time, by a cumulative sum of clipped deviations from the recent level."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

_NORMAL = 1.4826  # converts a median absolute deviation to a standard deviation
_LEARN = 12  # steps that determine the first level
KNOWN = 4  # number of known steps that suffices for a level
_MEMORY = 64
LEAST_SCATTER = 0.006  # relative: a shift below about 1% is not worth a check
_CLIP = 4.0  # in scatters: deviations are clipped here, so that one odd step is not a change
SLACK = 1.25  # in scatters: deviations up to this do not count
BELOW = 2.5  # in scatters below the level: one step in a hundred, at an unchanged pace
_LIMIT = 9.0  # in scatters: a larger sum of deviations beyond SLACK is a change


class Pace:
    """Detects a shift of the level from the logarithms of step times."""

    def __init__(self, known: Sequence[float] = ()) -> None:
        """`known`: log times of earlier steps at the expected pace."""
        self._recent: deque[float] = deque(known, maxlen=_MEMORY)
        self._level = self._scatter = 0.0
        self._above = self._below = 0.0
        self._count = 0
        if len(known) >= KNOWN:
            self._settle()

    def changed(self, log_ms: float) -> bool:
        """Add a step; returns whether the pace has changed, and if so starts over."""
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
        """Whether a step that is not added is faster than recent ones."""
        recent = list(self._recent)[-8:]
        return bool(recent) and log_ms < median(recent)

    def well_below(self, log_ms: float) -> bool:
        """Whether a step that is not added is faster than the level by more than BELOW scatters."""
        return self._scatter > 0 and log_ms < self._level - BELOW * self._scatter

    def _settle(self) -> None:
        self._level = median(self._recent)
        around = median(abs(y - self._level) for y in self._recent)
        self._scatter = max(LEAST_SCATTER, _NORMAL * around)
