"""WatchBudget: how many more checks and searches a watched job may have, in steps and in time."""

from __future__ import annotations

from dataclasses import dataclass

from weft.tuning.live.check import MEETING_STEPS
from weft.tuning.live.search import BUDGET
from weft.tuning.live.tuned_job import TunedJob

CREDIT = 36  # trials for checks that a job may use from the start
CHECK = 12  # trials of a check
MEETINGS = 2  # checks at meetings that a job with framework controls may also use from the start
RARER = 2  # factor by which probes are rarer while no check is left, to save for one
COSTLY = 5  # the share of time is this factor below the share of steps: a search may make ranks wait


@dataclass
class WatchBudget:
    """What a watch may spend. `share`: share of the steps for probes, checks and further searches."""

    share: float
    each: int
    """Steps per trial."""
    at_meetings: bool
    """Whether the policy in force has framework controls."""
    price_ms: float
    """Cost of the last search, which is also the estimate for the next one."""
    steps: int = 0
    """Steps of the watched job so far."""
    ms: float = 0.0
    """Time of these steps."""
    spent: int = 0
    """Steps used for probes, checks and searches."""
    check_ms: float = 0.0
    """Total time that ranks waited in checks at meetings."""
    check_price_ms: float = 0.0
    """Time that ranks waited in the last check at meetings."""
    in_vain: int = 0
    """Further searches in a row that found nothing."""

    def __post_init__(self) -> None:
        self.credit = CREDIT * self.each + (MEETINGS * MEETING_STEPS if self.at_meetings else 0)
        self.spent_ms = self.price_ms

    def refit(self, each: int) -> None:
        """Set a new number of steps per trial."""
        self.each = each
        self.credit = max(self.credit, CREDIT * each)

    def ran(self, steps: int, ms: float, paused_ms: float, *, spent: bool) -> None:
        """Count a trial. `spent`: whether it ran the default for a probe or a check."""
        self.steps += steps
        self.ms += ms
        self.price_ms += paused_ms  # after a search, what it created is released
        self.spent_ms += paused_ms
        self.spent += steps if spent else 0

    def searched(self, outcome: TunedJob) -> None:
        """Count the cost of another search."""
        self.spent += outcome.steps
        self.price_ms = max(0.0, outcome.cost_ms)
        self.spent_ms += self.price_ms
        self.in_vain = 0 if outcome.kept else self.in_vain + 1

    def met(self, steps: int, waited_ms: float) -> None:
        """Count a check at meetings; its pauses are not part of a search's price."""
        self.spent += steps
        self.price_ms -= waited_ms
        self.spent_ms -= waited_ms
        self.check_ms += waited_ms
        self.check_price_ms = waited_ms

    @property
    def probe_share(self) -> float:
        """Share of all steps to use for probes."""
        return self.share if self.may_check() else self.share / RARER

    def may_check(self, checks: int = 1) -> bool:
        """Whether enough steps are left for this many checks."""
        return self.spent + checks * CHECK * self.each <= self.credit + self.share * self.steps

    def may_meet(self) -> bool:
        """Whether a check at meetings is allowed, in steps and in time."""
        enough = self.spent + MEETING_STEPS <= self.credit + self.share * self.steps
        return enough and self.check_ms + self.check_price_ms <= self.share / COSTLY * self.ms

    def may_search(self) -> bool:
        """Whether another search is allowed, in steps and in time.

        If steps are short, what a search creates and releases takes longer than its steps. All searches of a
        job together may take `share / COSTLY` of its time: 1% by default. Each search in vain doubles the
        allowance that the next one needs: a job's pace may change all the time without any gain to find.
        """
        rarer = 1 << self.in_vain
        enough = self.spent + rarer * BUDGET <= self.share * self.steps
        return enough and self.spent_ms + rarer * self.price_ms <= self.share / COSTLY * self.ms
