"""The race's bar: the best of 40 candidates under 5% noise, at most a third of a full grid (benchmarks/race.py has more)."""

from __future__ import annotations

import numpy as np
import pytest

from weft.errors import UsageError, WeftError
from weft.measure.race import most_measurements, race
from weft.measure.scores import Noise, fit_scores

COUNT, NOISE = 40, 0.05


def machine(seed, gap, spread, draw=None):
    """One candidate, at a random place, is `gap` faster than the others, which are spread over `spread`."""
    rng = np.random.default_rng(seed)
    times = rng.permutation(np.append(1.0, (1 + gap) * (1 + spread * rng.random(COUNT - 1))))
    drawn = iter((draw or (lambda r, n: NOISE * r.standard_normal(n)))(rng, 20_000).tolist())
    return times, lambda candidate: float(times[candidate] * np.exp(next(drawn)))


def grid_finds(repeats, gap, spread, trials=300):
    """How often measuring each candidate `repeats` times finds the best."""
    found = 0
    for seed in range(trials):
        times, _ = machine(10**6 + seed, gap, spread)
        rng = np.random.default_rng([seed, 7])
        found += np.argmin(np.log(times) + NOISE / repeats**0.5 * rng.standard_normal(COUNT)) == np.argmin(
            times
        )
    return found / trials


@pytest.mark.parametrize(("gap", "spread", "repeats"), [(0.03, 0.3, 14), (0.05, 0.5, 7)])
def test_the_best_of_forty_at_a_third_of_the_grid(gap, spread, repeats):
    assert grid_finds(repeats - 3, gap, spread) < 0.97  # the grid is no larger than necessary
    wins = 0
    for seed in range(100):
        times, measure = machine(seed, gap, spread)
        result = race(range(COUNT), measure, rounds=repeats, confirm=0, seed=seed)
        wins += result.chosen == int(np.argmin(times))
        assert result.measurements <= COUNT * repeats / 3 + 1
    assert wins >= 95


@pytest.mark.parametrize("spread", ["uniform", "even", "lognormal"])
def test_the_call_as_it_comes_meets_the_bar(spread):
    """No options: a third of 15 rounds, while the grid needs 20 rounds for the first two of these spreads."""
    wins = 0
    for seed in range(100):
        rng = np.random.default_rng([seed, 31])
        others = {
            "uniform": rng.uniform(10.3, 15, COUNT - 1),
            "even": np.linspace(10, 20, COUNT)[1:],
            "lognormal": 10.3 * np.exp(np.abs(0.3 * rng.standard_normal(COUNT - 1))),
        }
        times = dict(enumerate(rng.permutation(np.append(10.0, others[spread])).tolist()))
        draw = np.random.default_rng([seed, 32])
        result = race(
            list(times), lambda c, t=times, d=draw: t[c] * (1 + NOISE * d.standard_normal()), seed=seed
        )
        wins += result.best == min(times, key=times.__getitem__)
        assert result.measurements <= COUNT * 15 / 3
    assert wins >= 95


def test_outliers_do_not_decide():
    def draw(rng, count):
        slow = np.log(rng.uniform(1.2, 2.0, count)) * (rng.random(count) < 0.05)
        return NOISE * rng.standard_normal(count) + slow

    wins = 0
    for seed in range(40):
        times, measure = machine(seed, 0.04, 0.3, draw)
        wins += race(range(COUNT), measure, rounds=30, confirm=0, seed=seed).chosen == int(np.argmin(times))
    assert wins >= 36


def test_a_hiccup_does_not_hide_a_large_gain_over_the_baseline():
    """Of five rounds that both were in, one in which the winner hiccups must not cast doubt on twice the speed."""
    times = [4.0, *(4.0 if i % 3 else 2.0 for i in range(1, 24))]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        slow = lambda r=rng: 3 * r.random() if r.random() < 0.08 else 0.0  # noqa: E731
        noise = lambda r=rng: 1 + abs(0.02 * r.standard_normal())  # noqa: E731
        result = race(range(24), lambda c, s=slow, n=noise: times[c] * n() + s(), baselines=(0,), rounds=5)
        assert times[result.best] == 2.0


def test_a_quiet_race_ends_early_also_where_many_are_equal():
    rng = np.random.default_rng(1)
    result = race(
        range(12),
        lambda c: (1.0 + 0.1 * (c % 3)) * np.exp(0.001 * rng.standard_normal()),
        rounds=20,
        confirm=0,
    )
    assert result.chosen % 3 == 0
    assert result.measurements <= 12 * 8


def test_more_rounds_for_those_that_are_close():
    rng = np.random.default_rng(3)
    times = [1.0, 1.02, *([1.4] * 38)]
    result = race(range(40), lambda c: times[c] * np.exp(0.05 * rng.standard_normal()), rounds=20, confirm=0)
    assert len(result.entries[0].samples) > 20
    assert max(len(entry.samples) for entry in result.entries[2:]) < 10


@pytest.mark.parametrize(
    ("count", "rounds", "most"), [(40, 9, 120), (12, 7, 84), (3, 9, 27), (20, 7, 84), (40, 1, 40), (1, 5, 5)]
)
def test_what_a_race_takes_at_most(count, rounds, most):
    assert most_measurements(count, rounds) == most
    calls = []
    race(range(count), lambda c: calls.append(c) or 1.0, rounds=rounds, confirm=0, tie=0.0)
    assert len(calls) <= most


def test_a_steady_drift_cancels():
    """Each measurement is 1% slower than the one before: in a fixed order the second would never win."""
    for seed in range(10):
        ticks = iter(range(10**6))
        times = {"slow": 1.01, "fast": 1.0}
        result = race(
            list(times),
            lambda c, t=times, n=ticks: t[c] * 1.01 ** next(n),
            rounds=16,
            min_rounds=16,
            confirm=0,
            seed=seed,
        )
        assert result.chosen == 1


def test_a_time_that_is_none_is_a_failure():
    result = race(["nan", "fine"], lambda c: float("nan") if c == "nan" else 1.0)
    assert result.entries[0].failed
    assert "not a time" in result.entries[0].problem
    assert result.chosen == 1


def test_confirmation_goes_on_while_it_is_open():
    rng = np.random.default_rng(0)
    times = [1.0, 0.97]
    result = race(
        [0, 1],
        lambda c: times[c] * np.exp(0.04 * rng.standard_normal()),
        baselines=(0,),
        rounds=200,
        confirm=5,
    )
    assert result.chosen == 1
    assert 5 <= len(result.entries[1].again) <= 20


def test_many_ways_to_fail_leave_a_result():
    def measure(candidate):
        if candidate % 2:
            raise WeftError("no")
        return 1.0

    result = race(range(40), measure, baselines=(0, 1))
    assert result.chosen % 2 == 0
    assert sum(entry.failed for entry in result.entries) == 20
    with pytest.raises(UsageError):
        race([], measure)


def test_levels_are_those_of_candidates_not_of_rounds():
    rounds = [{0: 0.0, 1: 0.1, 2: 0.2}, {0: 1.0, 1: 1.1}, {1: 5.1, 2: 5.2}]
    level, counts, _ = fit_scores(rounds, [0, 1, 2], Noise())
    assert level - level[0] == pytest.approx([0.0, 0.1, 0.2], abs=0.002)
    assert counts.tolist() == [2, 3, 2]


def test_the_noise_is_found_despite_outliers():
    rng = np.random.default_rng(5)
    values = 0.05 * rng.standard_normal((30, 12))
    values[rng.random((30, 12)) < 0.05] += 0.5
    rounds = [dict(enumerate(column)) for column in values.T]
    _, _, noise = fit_scores(rounds, range(30), Noise())
    assert 0.045 < noise.sigma < 0.065
    assert noise.outliers


def test_where_nothing_helps_nothing_is_offered():
    """All candidates are like the baseline: the confirmation must not be fooled by the luckiest of them."""
    import weft
    from weft.policy import Policy

    policies, offered = [Policy(max_ctas=n) for n in range(1, 21)], 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        measure = lambda policy, rng=rng: float(np.exp(0.02 * rng.standard_normal()))  # noqa: E731
        offered += not weft.tune(lambda: None, measure=measure, candidates=policies, seed=seed).leave
    assert offered <= 4
