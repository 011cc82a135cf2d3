"""WatchBudget: which checks and further searches a watched job may still have, in steps and in time."""

from __future__ import annotations

from dataclasses import dataclass

from weft.tuning.live.check import MEETING_STEPS
from weft.tuning.live.search import BUDGET
from weft.tuning.live.tuned_job import TunedJob

CREDIT = 36  # steps of checks that a job has at once
CHECK = 12  # steps of a check
MEETINGS = 2  # checks at meetings that a job with framework controls has at once, in addition
RARER = 2  # times as few probes while there is no check left, which they then pay for
COSTLY = 5  # times less of the job's time than of its steps: a search may keep the ranks waiting


@dataclass
class WatchBudget:
    """`share`: of the steps so far, for probes, checks and further searches."""

    share: float
    each: int
    """Steps of a trial."""
    at_meetings: bool
    """Whether the policy in force has framework controls."""
    price_ms: float
    """What the last search cost, and so what the next one may cost."""
    steps: int = 0
    ms: float = 0.0
    """Of the watched job so far."""
    spent: int = 0
    """Steps."""
    check_ms: float = 0.0
    """What ranks have waited in checks at meetings."""
    check_price_ms: float = 0.0
    """The same, in the last one."""
    in_vain: int = 0
    """Further searches in a row that found nothing."""

    def __post_init__(self) -> None:
        self.credit = CREDIT * self.each + (MEETINGS * MEETING_STEPS if self.at_meetings else 0)
        self.spent_ms = self.price_ms

    def refit(self, each: int) -> None:
        """A trial has another number of steps from now on."""
        self.each = each
        self.credit = max(self.credit, CREDIT * each)

    def ran(self, steps: int, ms: float, paused_ms: float, *, spent: bool) -> None:
        """Count a trial; `spent`: it was not for the policy in force."""
        self.steps += steps
        self.ms += ms
        self.price_ms += paused_ms  # what a search created was released after it
        self.spent_ms += paused_ms
        self.spent += steps if spent else 0

    def searched(self, outcome: TunedJob) -> None:
        """Count what another search has used."""
        self.spent += outcome.steps
        self.price_ms = max(0.0, outcome.cost_ms)
        self.spent_ms += self.price_ms
        self.in_vain = 0 if outcome.kept else self.in_vain + 1

    def met(self, steps: int, waited_ms: float) -> None:
        """Count a check at meetings, whose pauses are not the price of a search."""
        self.spent += steps
        self.price_ms -= waited_ms
        self.spent_ms -= waited_ms
        self.check_ms += waited_ms
        self.check_price_ms = waited_ms

    @property
    def probe_share(self) -> float:
        """Probes, as a share of all steps."""
        return self.share if self.may_check() else self.share / RARER

    def may_check(self, checks: int = 1) -> bool:
        """Whether the steps of so many checks are left."""
        return self.spent + checks * CHECK * self.each <= self.credit + self.share * self.steps

    def may_meet(self) -> bool:
        """Whether a check at meetings is allowed, in steps and in time."""
        enough = self.spent + MEETING_STEPS <= self.credit + self.share * self.steps
        return enough and self.check_ms + self.check_price_ms <= self.share / COSTLY * self.ms

    def may_search(self) -> bool:
        """Whether another search is allowed, in steps and in time: where a step is short, what a search makes
        and gives back takes longer than its steps. All searches of a job together may take 1/COSTLY of the
        share, of its time: 1% by default. A job whose pace changes all the time, and for which nothing is
        ever found, is searched half as often each time."""
        rarer = 1 << self.in_vain
        enough = self.spent + rarer * BUDGET <= self.share * self.steps
        return enough and self.spent_ms + rarer * self.price_ms <= self.share / COSTLY * self.ms
