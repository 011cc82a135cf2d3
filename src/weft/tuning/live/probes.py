"""Probes: single steps under the default while a policy is in force. Are they faster than their neighbors?

A job may change its pace at any moment, for seconds: a step that is faster than those before it proves
nothing. So a probe counts as faster only if it is faster than the steps on both sides of it.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

NEIGHBORS = 2  # steps on each side
COUNTED, AGREE = 8, 7  # so many of the last probes must be faster


class Probes:
    """Notes the steps of a watch in order, as logarithms."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=NEIGHBORS)
        self._probe: tuple[float, float] | None = None
        self._after: list[float] = []
        self._faster: deque[bool] = deque(maxlen=COUNTED)

    def add(self, log_ms: float, *, probe: bool) -> None:
        """Note a step under the policy, or a probe."""
        if probe:
            self._after.clear()
            ready = len(self._before) == NEIGHBORS
            self._probe = (fmean(self._before), log_ms) if ready else None
            return
        self._before.append(log_ms)
        if self._probe is None:
            return
        self._after.append(log_ms)
        if len(self._after) == NEIGHBORS:
            before, found = self._probe
            self._faster.append(found < min(before, fmean(self._after)))
            self._probe = None

    @property
    def agree(self) -> bool:
        """Whether nearly all of the last probes were faster: of equal steps, one in 230 such series."""
        return len(self._faster) == COUNTED and sum(self._faster) >= AGREE
