"""The race with synthetic times: what wins, what drops out, and when it stops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from weft.errors import UsageError, WeftError
from weft.measure.intervals import bootstrap_ci, ratio_ci
from weft.measure.race import race


def noisy(times, seed=0, noise=0.02):
    rng = random.Random(seed)
    return lambda candidate: times[candidate] * math.exp(rng.gauss(0, noise))


def test_finds_the_best_of_many_and_drops_the_rest():
    wins, measurements = 0, 0
    for trial in range(40):
        rng = random.Random(trial)
        times = [10.0] + [10.0 + 8 * rng.random() for _ in range(39)]
        order = list(range(40))
        rng.shuffle(order)
        times[order[0]], times[0] = 9.0, times[order[0]]
        result = race(range(40), noisy(times, trial, 0.05), rounds=15, confirm=0, seed=trial)
        wins += result.chosen == min(range(40), key=times.__getitem__)
        measurements += result.measurements
    assert wins >= 37
    assert measurements / 40 < 40 * 15 / 3  # a third of the full grid


def test_every_round_has_a_new_order_and_all_that_are_alive():
    seen = []
    race("abcd", lambda c: seen.append(c) or 1.0, rounds=4, min_rounds=4, confirm=0, seed=1)
    rounds = ["".join(seen[i : i + 4]) for i in range(0, 16, 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 1
    again = []
    race("abcd", lambda c: again.append(c) or 1.0, rounds=4, min_rounds=4, confirm=0, seed=1)
    assert again == seen


def test_a_much_slower_candidate_is_measured_once():
    counts = {"good": 0, "bad": 0}

    def measure(candidate):
        counts[candidate] += 1
        return {"good": 1.0, "bad": 2.0}[candidate]

    result = race(["good", "bad"], measure, rounds=8, confirm=0)
    assert counts["bad"] == 1
    assert "100.0% behind" in result.entries[1].problem
    assert not result.entries[1].kept


def test_drift_does_not_decide_the_race():
    clock = iter(range(10**6))

    def measure(candidate):
        drift = 1 + 0.02 * next(clock)  # each measurement is slower than the one before
        return {"slow": 1.05, "fast": 1.0}[candidate] * drift

    for seed in range(5):
        assert race(["slow", "fast"], measure, rounds=20, min_rounds=20, confirm=0, seed=seed).chosen == 1


def test_a_baseline_is_kept_unless_it_is_clearly_beaten():
    for trial in range(30):
        result = race(
            ["sequential", "overlap", "same"],
            noisy({"sequential": 20.0, "overlap": 10.0, "same": 10.0}, trial, 0.03),
            baselines=(0, 1),
            rounds=9,
            seed=trial,
        )
        assert result.entries[0].kept
        assert len(result.entries[0].samples) == len(result.entries[1].samples)
        if result.chosen == 2:
            _, _, high = ratio_ci(result.entries[2].samples, result.entries[1].samples)
            assert high < 1
    times = {"sequential": 20.0, "overlap": 10.0, "better": 9.0}
    result = race(list(times), noisy(times, 1, 0.01), baselines=(0, 1), confirm=7)
    assert result.chosen == 2
    assert [len(entry.again) for entry in result.entries] == [7, 7, 7]


def test_references_are_measured_but_never_chosen():
    times = {"overlap": 10.0, "better": 9.0, "compute": 5.0}
    result = race(list(times), noisy(times), baselines=(0,), aside=(2,), rounds=6, min_rounds=6, confirm=2)
    assert result.chosen == 1
    assert len(result.entries[2].samples) == 6
    assert result.entries[2].again == []
    assert result.entries[1].kept  # 80% behind a reference is not behind


def test_failures_are_recorded_and_the_race_continues():
    def measure(candidate):
        if candidate == "hangs":
            raise WeftError("hangs: no end after 30 s")
        return 1.0

    result = race(["a", "hangs"], measure, rounds=3)
    assert result.entries[1].failed
    assert result.entries[1].problem == "hangs: no end after 30 s"
    assert result.entries[1].samples == []
    assert result.chosen == 0
    nothing = race(["hangs"], measure)
    assert nothing.chosen is None


def test_a_candidate_that_fails_later_is_not_chosen():
    state = {"n": 0}

    def measure(candidate):
        state["n"] += candidate == "fast"
        if candidate == "fast" and state["n"] > 2:
            raise WeftError("died")
        return {"fast": 1.0, "slow": 1.2}[candidate]

    assert race(["fast", "slow"], measure, rounds=6).chosen == 1


def test_the_deadline_ends_the_race_after_the_first_rounds():
    now = [0.0]

    def measure(candidate):
        now[0] += 1.0
        return 1.0

    result = race("ab", measure, rounds=50, min_rounds=3, confirm=0, deadline_s=10, clock=lambda: now[0])
    assert result.out_of_time
    assert 3 <= len(result.entries[0].samples) <= 6


def test_statistics():
    low, high = bootstrap_ci([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1 <= low <= 3 <= high <= 100
    assert bootstrap_ci([5.0]) == (5.0, 5.0)
    assert all(math.isnan(value) for value in bootstrap_ci([]))
    middle, low, high = ratio_ci([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (middle, low, high) == (2.0, 2.0, 2.0)  # paired: drift cancels
    middle, low, high = ratio_ci([2.0, 4.0, 6.0, 4.0], [1.0, 2.0, 3.0])
    assert low < 2 == middle < high
    with pytest.raises(UsageError, match="at least one"):
        race([], lambda c: 1.0)


def test_intervals_cover_the_truth():
    rng, covered = random.Random(4), 0
    for trial in range(200):
        low, high = bootstrap_ci([rng.gauss(10, 1) for _ in range(11)], seed=trial)
        covered += low <= 10 <= high
    assert covered > 170


@pytest.mark.parametrize(("count", "k"), [(1, 0), (5, 0), (7, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_reaches_the_order_statistics_that_enclose_the_median(count, k):
    # Tabulated ranks of the exact 95% interval of a median (k smaller ones are left out on each side).
    samples = [float(n) for n in range(count)]
    low, high = bootstrap_ci(samples)
    assert low <= k
    assert high >= count - 1 - k


def test_intervals_of_seven_samples_have_their_nominal_coverage():
    rng = np.random.default_rng(0)
    held = sum(
        low <= 0 <= high for low, high in (bootstrap_ci(rng.normal(size=7), seed=s) for s in range(400))
    )
    assert held >= 0.95 * 400
