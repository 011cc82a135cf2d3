"""Probes: single steps under the default while a policy is in force. Are they faster than their neighbors?

A job may change its pace at any moment, for seconds: a step that is faster than those before it proves
nothing. So a probe counts as faster only if it is faster than the steps on both sides of it. In a job whose
steps alternate (gradient accumulation, two models), most steps under the policy are that, too: there, such
probes prove nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

NEIGHBORS = 2  # steps on each side
COUNTED, AGREE = 8, 7  # so many of the last probes must be faster
OTHERS, MOST_OTHERS = 200, 0.44  # the last steps under the policy, and how many of them may be


class Probes:
    """Notes the steps of a watch in order, as logarithms."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, bool]] = deque(maxlen=2 * NEIGHBORS + 1)
        self._faster: deque[bool] = deque(maxlen=COUNTED)
        self._others_faster: deque[bool] = deque(maxlen=OTHERS)

    def add(self, log_ms: float, *, probe: bool) -> None:
        """Note a step under the policy, or a probe."""
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

        Where they take as long as other steps, that is so in one of 230 such series at most.
        """
        return (
            len(self._faster) == COUNTED
            and sum(self._faster) >= AGREE
            and fmean(self._others_faster) <= MOST_OTHERS
        )
