"""Live tuning claims nothing where no policy matters, whatever the noise, and finds what there is."""

from __future__ import annotations

import pytest
from live_jobs import lived, tuned
from live_kinds import CLOCKED, JOBS, SIZED, Kind
from live_machines import multiplied
from live_noise import pattern

pytestmark = pytest.mark.timeout(400)
CLOCKED_JOBS = 2  # of each kind whose steps also know the clock


@pytest.mark.parametrize("a_a_jobs", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_where_no_policy_matters_at_most_2_percent_of_jobs_are_changed(a_a_jobs):
    """`a_a_jobs`: of each other kind; benchmarks/live/noise.py plays more."""
    jobs = {name: CLOCKED_JOBS if name in CLOCKED else a_a_jobs for name in JOBS}
    claims = {
        name: sum(tuned(JOBS[name], seed).kept for seed in range(count)) for name, count in jobs.items()
    }
    assert sum(claims.values()) <= 0.02 * sum(jobs.values())
    # One kind in which every fifth job is changed would be a kind that the draws do not protect.
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


def test_a_cycle_of_two_blocks_does_not_spoil_the_interval():
    """12 steps that are 3% slower and 12 that are not: each block of the measurement has one level or the other."""
    kind = Kind(multiplied(pattern([1.03] * 12 + [1.0] * 12, 0.005)))
    found = [outcome for seed in range(60) if (outcome := tuned(kind, seed, 0.05)).kept]
    assert len(found) >= 50
    assert sum(outcome.ci_pct[0] <= 5 <= outcome.ci_pct[1] for outcome in found) >= 0.88 * len(found)


def test_a_job_of_very_short_steps_is_not_slowed_down_by_a_search_that_it_cannot_afford():
    life = lived(JOBS["quiet, 0.3 ms"], 0, 0.0, 30_000)
    assert life.extra_pct < 1
