"""Probes: tests whether single default steps, while a policy is in force, are faster than their neighbors.

A job's pace may change at any moment, for seconds: a step that is faster than those before it proves nothing.
So a probe counts as faster only if it beats the steps on both sides. In a job whose steps alternate (gradient
accumulation, two models), many steps under the policy do so too; there, faster probes prove nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

NEIGHBORS = 2  # steps on each side
COUNTED, AGREE = 8, 7  # of the last COUNTED probes, AGREE must be faster
OTHERS, MOST_OTHERS = 200, 0.44  # of the last OTHERS policy steps, at most this share may be faster


class Probes:
    """Takes the steps of a watch in order, as log times."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, bool]] = deque(maxlen=2 * NEIGHBORS + 1)
        self._faster: deque[bool] = deque(maxlen=COUNTED)
        self._others_faster: deque[bool] = deque(maxlen=OTHERS)

    def add(self, log_ms: float, *, probe: bool) -> None:
        """Add a step under the policy, or a probe."""
        self._steps.append((log_ms, probe))
        if len(self._steps) < 2 * NEIGHBORS + 1:
            return
        times = [ms for ms, _ in self._steps]
        found, was_probe = self._steps[NEIGHBORS]
        faster = found < min(fmean(times[:NEIGHBORS]), fmean(times[-NEIGHBORS:]))
        (self._faster if was_probe else self._others_faster).append(faster)

    @property
    def agree(self) -> bool:
        """Whether nearly all of the last probes were faster.

        If probes take as long as other steps, this happens in at most one of 230 such series.
        """
        return (
            len(self._faster) == COUNTED
            and sum(self._faster) >= AGREE
            and fmean(self._others_faster) <= MOST_OTHERS
        )
