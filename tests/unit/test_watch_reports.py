"""What followers of a watched job leave for the leader."""

from __future__ import annotations

from test_ranks import MemoryStore

from weft.ranks import Agreement
from weft.tuning.live.trial_length import LAG
from weft.tuning.live.watch_reports import CopyReports

PLAN = 8
DECISION = {"do": "run"}


class Job:
    """Two ranks, of which the follower copies as many bytes in each trial as trials have ended before."""

    def __init__(self) -> None:
        store, self.copied, self.trials = MemoryStore(), 0, 0
        self.agreements = [Agreement(store, number, range(2), deadline_s=5) for number in range(2)]
        self.leader, self.follower = (CopyReports(one, lambda: self.copied) for one in self.agreements)

    def plan(self, *, wanted: bool) -> list[float]:
        """Run a plan; what the leader knows of its follower at the next decision."""
        for reports in (self.leader, self.follower):
            reports.ask(wanted)
        for left in reversed(range(PLAN)):
            self.copied += self.trials
            self.trials += 1
            self.follower.trial_ended(1, left)
        found = self.leader.of_others(PLAN)
        for agreement in self.agreements:
            agreement.announce({}, lambda reports: DECISION)
        return [bytes_ for report in found for bytes_ in report["copied"]]


def test_the_leader_knows_the_trials_whose_times_it_knows():
    job = Job()
    assert job.plan(wanted=True) == []  # the leader also knows the last trials of the plan before
    assert job.plan(wanted=True) == list(range(PLAN - LAG, 2 * PLAN - LAG))


def test_what_is_left_from_before_a_plan_without_reports_does_not_count_later():
    job = Job()
    job.plan(wanted=True)
    assert job.plan(wanted=False) == []
    assert job.plan(wanted=True) == []
    assert job.plan(wanted=True) == list(range(3 * PLAN - LAG, 4 * PLAN - LAG))
