"""What the ranks of a watched job tell each other without a meeting: what they copied, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.ranks import Agreement, Report
from weft.tuning.live.trial_length import LAG

OUT_OF_STEP = 2
"""Decisions of the watch in a row at which a rank differs from the leader before the tuning ends."""


class CopyReports:
    """The bytes that followers copy from their hosts in each trial, left for the leader if it asks for them.

    A follower leaves those of the trials whose times the leader will know at its next decision.
    """

    def __init__(self, agreement: Agreement, copied_bytes: Callable[[], int]) -> None:
        self._agreement, self._copied_bytes = agreement, copied_bytes
        self._wanted = False
        self._until, self._copied = 0, list[float]()
        """Bytes copied until the last trial ended, and per step of each trial since the last report."""

    def ask(self, wanted: bool) -> None:
        """Begin a plan; `wanted`: followers report. What was left before a plan without reports is lost."""
        if wanted and not self._wanted:
            self._until, self._copied = self._copied_bytes(), []
        self._wanted = wanted

    def trial_ended(self, steps: int, left: int) -> None:
        """On a follower: a trial of so many steps has ended, and `left` others of the plan have not."""
        if not self._wanted:
            return
        before, self._until = self._until, self._copied_bytes()
        self._copied.append((self._until - before) / steps)
        if left == LAG:
            self._agreement.post({"ms": [], "copied": self._copied})
            self._copied = []

    def clear(self) -> None:
        """The trials so far were reported at a meeting."""
        self._copied = []

    def of_others(self, trials: int) -> list[Report]:
        """On the leader: the followers' reports, if each has this many trials; otherwise empty."""
        found = self._agreement.posted() if self._wanted and self._agreement.leads else []
        return found if all(len(report["copied"]) == trials for report in found) else []


class Lockstep:
    """Whether a follower is at the same step as the leader, by the clocks of both at each decision."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._apart = 0
        """Decisions in a row at which the clocks differed."""

    def lost(self, leader: Mapping[str, int], own: dict[str, int]) -> bool:
        """Compare the count that has grown most; whether it has differed OUT_OF_STEP times in a row.

        Other counts may differ for a moment: a thread of the program that calls a collective now and then
        does so before the end of a step on one rank and after it on another.
        """
        before, self._before = self._before, own
        busiest = max(own, key=lambda name: own[name] - before.get(name, 0), default="")
        differs = leader.get(busiest, own.get(busiest)) != own.get(busiest)
        self._apart = self._apart + 1 if differs else 0
        return self._apart == OUT_OF_STEP
