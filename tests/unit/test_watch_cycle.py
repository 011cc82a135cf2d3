"""The cycle of a watched job: trials are compared after removing the effect of their place in it."""

from __future__ import annotations

import math
import random

import pytest
from live_jobs import reverted, steps_after_drift
from live_kinds import JOBS
from live_machines import jitter

from weft.measure.steadiness import cycle
from weft.tuning.live.trial import Sample
from weft.tuning.live.watch_cycle import CYCLE_TRIALS, WatchCycle

FACTORS = (1.0, 1.0, 2.0)


def times(count, factors=FACTORS, scatter=0.01, seed=0):
    r = random.Random(f"cycle {seed}")
    return [100 * factors[number % len(factors)] * jitter(r, scatter) for number in range(count)]


def left(watched, factors, first=999):
    """How much a trial at each place still differs from the others."""
    even = [watched.even(Sample(100 * factor), first + place).ms for place, factor in enumerate(factors)]
    return max(even) / min(even) - 1


def test_a_cycle_is_known_from_the_steps_before_the_watch():
    watched = WatchCycle(times(48))
    assert watched.known
    assert left(watched, FACTORS) < 0.02


def test_a_cycle_is_learned_while_the_job_is_watched():
    watched = WatchCycle()
    learned = []
    for number, ms in enumerate(times(60)):
        watched.note(ms, number)
        learned.append(watched.learn())
    assert learned.index(True) == CYCLE_TRIALS[0] - 1
    assert sum(learned) == 1
    assert left(watched, FACTORS) < 0.02


def test_trials_that_do_not_follow_each_other_teach_nothing():
    watched = WatchCycle()
    for number, ms in enumerate(times(200)):
        watched.note(ms, 2 * number)
        assert not watched.learn()
    assert not watched.known


@pytest.mark.parametrize("scatter", [0.003, 0.01, 0.05])
def test_a_job_without_a_cycle_has_none(scatter):
    for seed in range(20):
        watched = WatchCycle()
        for number, ms in enumerate(times(1200, (1.0,), scatter, seed)):
            watched.note(ms, number)
            assert not watched.learn()
        assert watched.even(Sample(100.0), 7).ms == 100.0


@pytest.mark.parametrize("factors", [(1.0, 2.0), FACTORS, (1.0, 1.1, 1.3, 1.1)])
@pytest.mark.parametrize("at", range(48, 56))
def test_a_cycle_moves_with_a_job_that_has_left_out_a_step(factors, at):
    watched, ran = WatchCycle(times(48, factors)), times(200, factors)
    for number in range(48, 150):
        watched.note(ran[number + (number >= at)], number)
        assert not watched.learn()
        if number >= at + 16:
            following = [factors[(number + 2 + place) % len(factors)] for place in range(len(factors))]
            assert left(watched, following, number + 1) < 0.03


def test_a_job_that_breaks_its_cycle_is_learned_again_later_each_time():
    r, number, waits = random.Random(1), 48, []
    watched = WatchCycle(times(48))
    for _ in range(3):
        while watched.known:
            number = ran(watched, 1.0, number, r)
        since = number
        while not watched.known:
            number = ran(watched, FACTORS[number % len(FACTORS)], number, r)
        waits.append(number - since)
    assert waits[0] < waits[1] < waits[2]


def ran(watched, factor, number, r):
    watched.note(100 * factor * jitter(r, 0.01), number)
    watched.learn()
    return number + 1


def test_a_cycle_that_ends_is_forgotten():
    watched = WatchCycle(times(48))
    changes = []
    for number, ms in enumerate(times(100, (1.0,))):
        watched.note(ms, 48 + number)
        changes.append(watched.learn())
    assert True in changes[:10]
    assert not watched.known


@pytest.mark.parametrize("period", [2, 3, 5, 8])
def test_a_change_of_pace_is_no_part_of_a_cycle(period):
    """Half of the steps are those of a policy that takes less time."""
    factors = [1.0] * (period - 1) + [1.6]
    found = cycle([ms * (0.9 if i >= 20 else 1.0) for i, ms in enumerate(times(44, factors))])
    assert found.period == period
    added = [level - found.levels[0] for level in found.levels]
    assert added == pytest.approx([math.log(factor) for factor in factors], abs=0.02)


@pytest.mark.parametrize(
    "kind", ["every 2 steps +50%", "every 4 steps +50%", "cycle 1, 1, 2, 2", "cycle 1, 2, 3", "two models 3"]
)
def test_a_policy_that_becomes_slower_is_left_in_time_in_a_job_with_a_cycle(kind):
    jobs = 20
    assert sum(steps_after_drift(JOBS[kind], seed, 100) <= 50 for seed in range(jobs)) >= jobs - 1


@pytest.mark.parametrize("kind", ["cycle 1, 2", "cycle 1, 2, 3", "cycle 1, 1.1, 1.2, 1.1"])
def test_a_cycle_does_not_revert_a_policy_that_stays_faster(kind):
    assert not any(reverted(JOBS[kind], seed, 0.05, 1500) for seed in range(12))
