"""weft.ops.tune: the schedule that it concludes from made-up measurements."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from weft.errors import UnavailableError, WeftError
from weft.ops.choose import Choice
from weft.ops.tuner import decide
from weft.policy import ENGINES, SCHEDULES

CANDIDATES = [Choice(name, engine, None) for engine in ENGINES for name in SCHEDULES]


def gaussian(draw: random.Random) -> float:
    return 1 + 0.03 * draw.gauss(0, 1)


def skewed(draw: random.Random) -> float:
    return draw.lognormvariate(0, 0.1)


def with_outliers(draw: random.Random) -> float:
    return (1 + 0.02 * draw.gauss(0, 1)) * (3 if draw.random() < 0.05 else 1)


@pytest.mark.parametrize("noise", [gaussian, skewed, with_outliers])
def test_of_equal_candidates_serial_stays(noise):
    """500 replays in all; with the wrong bound of the interval, 461 of 500 chose another schedule."""
    trials, wrong = 167, 0
    for seed in range(trials):
        draw = random.Random(1000 + seed)
        choice, found = decide(CANDIDATES, lambda _, draw=draw: 10 * noise(draw))
        wrong += found.applies
        assert (choice.schedule == found.policy.schedule == "serial") == found.leave
        assert (found.gain_ci_pct == (0.0, 0.0)) == found.leave
    assert wrong <= 0.05 * trials


@pytest.mark.parametrize("gain", [0.1, 0.2])
def test_a_schedule_that_is_faster_is_found(gain):
    found_it = 0
    for seed in range(40):
        draw = random.Random(seed)

        def measure(choice, draw=draw):
            faster = choice == Choice("shard", "dma", None)
            return 10 * gaussian(draw) * (1 - gain if faster else 1)

        choice, found = decide(CANDIDATES, measure)
        if choice == Choice("shard", "dma", None):
            found_it += 1
            low, high = found.gain_ci_pct
            assert 0 < low < 100 * gain + 5
            assert high > 100 * gain - 5
    assert found_it >= 38


def test_a_candidate_that_cannot_run_is_left_out():
    def measure(choice):
        if choice.engine == "dma":
            raise WeftError("no copy engine")
        return 1.0 if choice.schedule == "shard" else 2.0

    choice, found = decide(CANDIDATES, measure)
    assert choice == Choice("shard", "sm", None)
    assert (found.source, found.chosen, found.baseline) == ("ops", "shard sm", "serial")
    assert all((each.ms is None) == each.candidate.endswith("dma") for each in found.candidates)


def test_where_nothing_runs_the_reason_is_given():
    def measure(choice):
        raise WeftError("no copy engine")

    with pytest.raises(UnavailableError, match="no copy engine"):
        decide(CANDIDATES, measure)
