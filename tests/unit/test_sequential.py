"""The test that predicts random draws: valid under any noise, and powerful if there is an effect."""

from __future__ import annotations

import math
import random

import pytest
from live_noise import KINDS

from weft.measure.sequential import Coins, Step, capital, confidence_interval, estimate
from weft.measure.steadiness import Cycle, cycle, roughness


def drawn(kind: str, seed: int, steps: int, effect: float = 0.0, share: float = 0.5) -> list[Step]:
    times, order = KINDS[kind](random.Random(f"noise {seed}")), random.Random(f"draws {seed}")
    found = []
    for number in range(steps):
        arm = int(order.random() < share)
        known = 0.0 if number < 8 else share
        arm = arm if known else 0
        found.append(Step(math.log(next(times)) - effect * arm, arm, known, number))
    return found


@pytest.mark.parametrize(
    "kind",
    ["scatter 3%", "cycle 1, 1.1, 1.2, 1.1", "Cauchy", "autocorrelation 0.95, 3%", "lengths 0.5 to 1.5"],
)
def test_without_a_difference_the_capital_rarely_exceeds_what_it_may(kind):
    jobs, most = 300, 10.0
    above = 0
    for seed in range(jobs):
        coins, peak = Coins(periods=(1, 4)), 0.0
        for step in drawn(kind, seed, 48):
            coins.add(step)
            peak = max(peak, coins.capital)
        above += peak >= most
    # By Ville's inequality at most 1 in 10, however often one checks: 30, and 3 standard errors of 5.
    assert above <= 46


def test_the_expected_capital_is_one_however_unfair_the_draws():
    for share in (0.1, 0.5, 0.95):
        capitals = [capital(drawn("scatter 3%", seed, 14, share=share)) for seed in range(400)]
        assert sum(capitals) / len(capitals) < 1.5


def test_an_effect_is_found_and_its_interval_holds_it():
    found = held = 0
    for seed in range(60):
        steps = drawn("scatter 1%", seed, 32, effect=0.05)
        found += capital(steps) >= 100
        low, high = confidence_interval(steps, estimate(steps))
        held += low <= 0.05 <= high
        assert high - low < 0.06
    assert found == 60
    assert held >= 57


def test_steps_of_a_cycle_are_compared_at_the_same_place():
    for seed in range(20):
        steps = drawn("cycle 1, 1, 2, 2", seed, 40, effect=0.05)
        assert abs(estimate(steps, 4) - 0.05) < 0.01
        assert capital(steps, periods=(1, 4)) >= 100


def test_a_renewed_test_reacts_after_a_long_time_without_an_effect():
    random_one = random.Random(4)
    steps = drawn("scatter 1%", 1, 600, effect=0.05)
    coins = Coins((-0.05,), renewed=True)
    for step in steps:
        coins.add(step)
    before = coins.capital
    for number in range(600, 620):
        arm = number % 2
        coins.add(Step(random_one.gauss(0.05 * arm, 0.01), arm, 0.5, number))
    assert before < 100 < coins.capital
    coins.restart()
    assert coins.capital == 1.0


@pytest.mark.parametrize("period", range(2, 9))
def test_a_cycle_is_recognised_with_its_place(period):
    some = random.Random(period)
    times = [100 * (1.3 if n % period == 1 else 1.0) * math.exp(some.gauss(0, 0.003)) for n in range(7, 27)]
    found = cycle(times, first=7)
    assert found.period == period
    at = next(n for n in range(100) if n % period == 1)
    assert found.level(at) == pytest.approx(math.log(1.3), abs=0.15)
    assert found.level(at + 1) == pytest.approx(0, abs=0.15)


def test_noise_is_not_a_cycle():
    taken = 0
    for seed in range(200):
        some = random.Random(seed)
        taken += cycle([math.exp(some.gauss(0, 0.03)) for _ in range(16)]) != Cycle()
    assert taken <= 10
    assert cycle([1.0] * 5) == Cycle()
    assert cycle([1.0, 0.0] * 10) == Cycle()


def test_roughness_is_the_scatter_of_successive_steps():
    some = random.Random(1)
    times = [(1 + n / 1000) * math.exp(some.gauss(0, 0.02)) for n in range(2000)]
    assert roughness(times) == pytest.approx(0.02, rel=0.1)
    assert math.isinf(roughness([1.0]))
