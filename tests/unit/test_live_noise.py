"""Live tuning claims nothing where no policy matters, whatever the noise, and finds what there is."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from live_inputs import TOKEN, explaining_at_first, grouped, longer_slowly, of_the_leader
from live_jobs import (
    BETTER,
    SimulatedJob,
    better_by,
    cost_of_search,
    lived,
    reverted,
    searched,
    steps_after_drift,
    tuned,
)
from live_kinds import CLOCKED, JOBS, SIZED, Kind
from live_machines import multiplied
from live_noise import pattern

from weft.tuning.live.trial import Sample, Trial

pytestmark = pytest.mark.timeout(400)
CLOCKED_JOBS = 2  # of each kind whose steps also know the clock


@pytest.mark.parametrize("a_a_jobs", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_where_no_policy_matters_at_most_2_percent_of_jobs_are_changed(a_a_jobs):
    """`a_a_jobs`: jobs of each other kind; benchmarks/live/noise.py plays more."""
    jobs = {name: CLOCKED_JOBS if name in CLOCKED else a_a_jobs for name in JOBS}
    claims = {
        name: sum(tuned(JOBS[name], seed).kept for seed in range(count)) for name, count in jobs.items()
    }
    assert sum(claims.values()) <= 0.02 * sum(jobs.values())
    # If every fifth job of a kind were changed, the random draws would not protect that kind.
    assert max(claims.values()) <= 2, claims


@pytest.mark.parametrize(("kind", "share"), [("scatter 1%", 0.9), ("scatter 3%", 0.7)])
def test_a_gain_of_5_percent_is_found_and_its_interval_holds_it(kind, share):
    jobs = 60
    found = [outcome for seed in range(jobs) if (outcome := tuned(JOBS[kind], seed, 0.05)).kept]
    assert len(found) >= share * jobs
    assert all(outcome.policy.max_ctas == 16 for outcome in found)
    held = sum(outcome.ci_pct[0] <= 5 <= outcome.ci_pct[1] for outcome in found)
    assert held >= 0.9 * len(found)
    gains = sorted(outcome.gain_pct for outcome in found)
    assert 3.5 < gains[len(gains) // 2] < 6.5


@pytest.mark.parametrize("kind", ["every 4 steps +50%", "cycle 1, 1, 2, 2", "every 6 steps +5%"])
def test_a_cycle_of_the_job_does_not_hide_a_gain(kind):
    assert sum(tuned(JOBS[kind], seed, 0.05).kept for seed in range(20)) >= 16


@pytest.mark.parametrize("kind", SIZED)
def test_a_gain_is_found_where_inputs_vary_by_much_more(kind):
    found = [outcome for seed in range(20) if (outcome := tuned(SIZED[kind], seed, 0.05)).kept]
    assert len(found) >= 17
    assert sum(outcome.ci_pct[0] <= 5 <= outcome.ci_pct[1] for outcome in found) >= 0.8 * len(found)


@pytest.mark.parametrize("more", [-0.5, 0.5, 1.0])
def test_a_policy_that_makes_the_program_copy_more_or_less_is_not_taken_for_faster(more):
    class Copying(SimulatedJob):
        def run(self, trial: Trial) -> Sample:
            sample = super().run(trial)
            extra = TOKEN * more * (trial.policy.max_ctas == BETTER.max_ctas)
            return replace(sample, copied=tuple(size + extra for size in sample.copied))

    jobs = [Copying(SIZED["inputs 0.8 to 1.2"], seed, better_by(0)) for seed in range(20)]
    assert sum(searched(job.run, record=job.record).kept for job in jobs) <= 1


@pytest.mark.parametrize("kind", [explaining_at_first(60), grouped(10), longer_slowly(0.003), of_the_leader])
def test_a_gain_is_found_where_inputs_explain_the_first_steps_only_change_slowly_or_matter_on_one_rank(kind):
    found = [outcome for seed in range(30) if (outcome := tuned(Kind(kind), seed, 0.05)).kept]
    assert len(found) >= 21
    assert sum(outcome.ci_pct[0] <= 5 <= outcome.ci_pct[1] for outcome in found) >= 0.8 * len(found)


def test_the_watch_of_ranks_with_other_inputs_finds_steps_as_long_as_promised():
    lives = [lived(SIZED["inputs of 4 ranks"], seed, 0.05, 3000) for seed in range(8)]
    claims = [life.status for life in lives if life.claims]
    assert len(claims) >= 6
    assert sum(status.lately_ms is not None for status in claims) <= 2


@pytest.mark.parametrize("kind", [SIZED["inputs of 4 ranks"], Kind(of_the_leader)], ids=["all", "the first"])
def test_a_policy_that_becomes_slower_is_left_in_time_where_ranks_have_other_inputs(kind):
    jobs = 20
    assert sum(steps_after_drift(kind, seed, 100) <= 50 for seed in range(jobs)) >= jobs - 1


def test_a_policy_is_not_reverted_because_inputs_become_longer():
    kind = Kind(longer_slowly(0.001))
    assert sum(reverted(kind, seed, 0.05, 1000) for seed in range(30)) <= 1


def test_a_cycle_of_two_blocks_does_not_spoil_the_interval():
    """12 steps that are 3% slower and 12 that are not: each block of the measurement has one level or the other."""
    kind = Kind(multiplied(pattern([1.03] * 12 + [1.0] * 12, 0.005)))
    found = [outcome for seed in range(60) if (outcome := tuned(kind, seed, 0.05)).kept]
    assert len(found) >= 50
    assert sum(outcome.ci_pct[0] <= 5 <= outcome.ci_pct[1] for outcome in found) >= 0.88 * len(found)


class Refusing(SimulatedJob):
    """Two candidates cannot be prepared: no step runs under them."""

    def run(self, trial: Trial) -> Sample:
        if trial.policy.max_ctas in (6, 24):
            return Sample(math.inf, "cannot be prepared")
        return super().run(trial)


@pytest.mark.parametrize("name", ["every 4 steps +50%", "cycle 1, 1, 2, 2"])
def test_candidates_that_cannot_be_prepared_do_not_move_the_cycle_of_a_job(name):
    for seed in range(5):
        job = Refusing(JOBS[name], seed, better_by(0.05))
        outcome = searched(job.run, record=job.record)
        assert outcome.policy.max_ctas == BETTER.max_ctas
        assert outcome.warm_up_steps + outcome.steps == job.record.number == job.number


class AfterMeetings(SimulatedJob):
    """A step takes 30% longer after ranks have met."""

    def run(self, trial: Trial) -> Sample:
        sample = super().run(trial)
        late_ms = 0.3 * sample.ms * (sample.paused_ms > 0)
        self.clock_ms += late_ms
        return replace(sample, ms=sample.ms + late_ms / trial.steps)


@pytest.mark.parametrize(("simulated", "within"), [(SimulatedJob, 2), (AfterMeetings, 6)])
@pytest.mark.parametrize(
    "kind", ["scatter 1%", "every 4 steps +1.5%", "heavy tails 1.5, 2%", "inputs 0.8 to 1.2"]
)
def test_the_cost_of_a_search_is_what_a_stopwatch_shows(kind, simulated, within):
    """Within so many steps; where meetings make steps longer, a search takes 10 to 20 of them."""
    jobs = [cost_of_search(JOBS[kind], seed, share, simulated) for seed in range(5) for share in (0.0, 0.05)]
    assert median(abs(told - measured) for told, measured in jobs) < within * JOBS[kind].step_ms


@pytest.mark.parametrize(
    "kind", ["evaluation every 50, cost 30", "checkpoints", "pauses of 200 ms every 15, 100 ms"]
)
def test_pauses_of_the_program_are_no_cost_of_a_search(kind):
    """Also where all of them come under other policies than the default."""
    jobs = [cost_of_search(JOBS[kind], seed, share) for seed in range(8) for share in (0.0, 0.05)]
    assert median(abs(told - measured) for told, measured in jobs) < 5 * JOBS[kind].step_ms


def test_a_job_of_very_short_steps_is_not_slowed_down_by_a_search_that_it_cannot_afford():
    life = lived(JOBS["quiet, 0.3 ms"], 0, 0.0, 30_000)
    assert life.extra_pct < 1
