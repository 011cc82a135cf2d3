"""A proof that the search left open continues in the watch; a proven gain is measured and stored."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from live_jobs import SimulatedJob, better_by, searched, settled
from live_kinds import JOBS
from test_live_watch import DEFAULT, POLICY, left_alone

from weft.tuning.live.earlier import Earlier
from weft.tuning.live.proof import MOST_BLOCKS, Claim, Proof
from weft.tuning.live.search import DOUBT_STEPS
from weft.tuning.live.trial import Sample
from weft.tuning.live.tuned_job import TunedJob, final
from weft.tuning.live.watch import Watch, watch
from weft.tuning.live.watch_proof import MOST_DRAWS
from weft.tuning.live.watch_status import WatchStatus


def test_a_promising_proof_goes_on_in_the_watch():
    proven = 0
    for seed in range(25):
        step = SimulatedJob(JOBS["scatter 1%"], seed, better_by(0.018)).run
        outcome = searched(step)
        if not outcome.still_open:
            continue
        assert outcome.steps < 70 + DOUBT_STEPS
        status = WatchStatus(outcome, outcome.policy)
        watching = watch(outcome, seed=seed, status=status)
        trial = next(watching)
        for _ in range(110):
            trial = watching.send(step(trial))
        proven += status.outcome.kept
        if status.outcome.kept:
            assert status.outcome.policy.max_ctas == 16
            assert status.outcome.ci_pct[0] > 0
    assert proven >= 3


def test_a_proof_that_goes_on_follows_steps_that_become_long():
    """8 steps of 2 ms to a trial: once a step takes 100 ms, 64 such trials would take most of a minute."""
    proof = Proof(DEFAULT, POLICY, 1e-30, 0.02, 0.01, (1,), [])
    for number in range(12):
        proof.add(Sample(100.0 - 2 * (number % 2) + number % 3), number % 2, 0.5, number)
    outcome = replace(left_alone(), proof=proof)
    assert outcome.still_open
    watching = watch(outcome, each=8, status=(status := WatchStatus(outcome, outcome.policy)))
    trial, lengths = next(watching), []
    while status.outcome is outcome:
        lengths.append(trial.steps)
        trial = watching.send(Sample(98.0 if trial.policy == POLICY else 100.0))
    assert (set(lengths[:12]), set(lengths[17:])) == ({8}, {1})  # once it has run the trials already decided
    assert status.outcome.steps == outcome.steps + sum(lengths)


def still_open(effect: float, scatter: float, seed: int = 0) -> TunedJob:
    """A search that has ended while the proof of POLICY, of this effect, was promising and still open."""
    for number in range(seed, seed + 500):
        r = random.Random(f"open {number}")
        proof = Proof(DEFAULT, POLICY, 1 / 83, effect, scatter, (1,), [])
        for step in range(20):
            ms = 100 * math.exp(r.gauss(0, scatter) - effect * (step % 2))
            proof.add(Sample(ms), step % 2, 0.5, step)
        outcome = replace(left_alone(), proof=proof)
        if outcome.still_open and proof.proven() is None:
            return outcome
    raise AssertionError("no such proof")


@pytest.mark.parametrize("each", [1, 8, 64])
def test_a_gain_that_is_proven_in_the_watch_is_measured_in_blocks_of_steps(each):
    """Single steps show 8%, the job as it goes on 4%: its steps after the first three of a policy say so."""
    outcome = still_open(0.08, 0.03)
    status, policy, ran, r = WatchStatus(outcome, outcome.policy), DEFAULT, 0, random.Random("blocks")
    watching = watch(outcome, each=each, status=status)
    trial, seen = next(watching), []
    while not seen or status.proving:
        ran = ran + 1 if trial.policy == policy else 0
        policy = trial.policy
        less = 0.04 if ran * each > 3 else 0.08
        step_ms = 100 / each
        ms = step_ms * math.exp(r.gauss(0, 0.01) - less * (policy == POLICY))
        trial = watching.send(Sample(ms))
        if status.proving and status.outcome.kept:
            seen.append(final(status)["text"])
    assert seen[0].endswith("; the job ended before this was measured any further")
    end = final(status)
    assert end["state"] == "kept"
    assert "measured any further" not in end["text"]
    assert status.outcome.proof.blocks
    if each == 1:  # otherwise a trial is as long as the effect of a change
        assert end["gain_pct"] == pytest.approx(4, abs=1)
        low, high = end["ci"]
        assert low <= 4 <= high


def test_a_proof_that_stays_promising_finds_gains_below_the_scatter_of_a_step():
    found = false = 0
    for seed in range(30):
        job = SimulatedJob(JOBS["scatter 3%"], f"small {seed}", better_by(0.025))
        found += settled(job, still_open(0.025, 0.03, seed)).kept
        same = SimulatedJob(JOBS["scatter 3%"], f"none {seed}", better_by(0))
        false += settled(same, still_open(0.01, 0.03, seed)).kept
    assert found >= 20
    assert false <= 3  # proofs chosen because they looked promising


def begin(outcome: TunedJob, seed: int = 0, **options: object) -> tuple[Watch, WatchStatus]:
    status = WatchStatus(outcome, outcome.policy)
    return watch(outcome, status=status, seed=seed, **options), status  # type: ignore[arg-type]


def test_a_proof_counts_once_its_capital_is_reached_whatever_the_decided_steps_show():
    """Ten steps are decided by then; in a third of such jobs the capital was below the bound after them."""
    reached = kept = 0
    for seed in range(60):
        outcome = still_open(0.02, 0.03, seed)
        watching, status = begin(outcome, seed)
        trial, r = next(watching), random.Random(seed)
        while status.outcome is outcome or status.proving:
            ms = 100 * math.exp(r.gauss(0, 0.03) - 0.02 * (trial.policy == POLICY))
            trial = watching.send(Sample(ms))
        reached += outcome.proof.reached
        kept += status.outcome.kept
    assert reached > 40
    assert kept >= 0.95 * reached


def test_a_problem_ends_the_measurement_and_is_the_reason():
    outcome = still_open(0.08, 0.03)
    watching, status = begin(outcome)
    trial, r, measured = next(watching), random.Random(1), 0
    for _ in range(400):
        measured += status.proving and status.outcome.kept
        ms = 100 * math.exp(r.gauss(0, 0.03) - 0.08 * (trial.policy == POLICY))
        trial = watching.send(Sample(ms, "stalled" if measured == 30 else ""))
    assert not status.proving
    assert status.in_force == DEFAULT
    assert final(status)["reason"] == f"{POLICY.label} stalled"


@pytest.mark.parametrize("ms", [math.inf, math.nan, 0.0, -1.0])
@pytest.mark.parametrize("at", [3, 120])
def test_steps_that_have_no_time_end_the_proof(ms, at):
    outcome = still_open(0.08, 0.03)
    watching, status = begin(outcome)
    trial, r = next(watching), random.Random(1)
    for number in range(300):
        usual = 100 * math.exp(r.gauss(0, 0.03) - 0.08 * (trial.policy == POLICY))
        trial = watching.send(Sample(ms if number == at else usual))
        json.dumps(final(status), allow_nan=False)
    assert not status.proving


def test_no_more_is_drawn_than_a_proof_may_have():
    """81 trials of 64 steps are decided in advance."""
    outcome = still_open(0.03, 0.03)
    watching, status = begin(outcome, each=64, ahead=81)
    trial, r = next(watching), random.Random(4)
    while status.outcome is outcome or status.proving:
        # As fast as the default half of the time: promising, and never clear.
        ms = math.exp(r.gauss(0, 0.03) - 0.03 * (trial.policy == POLICY) * r.randrange(2))
        trial = watching.send(Sample(ms))
    assert len(outcome.proof.drawn) <= MOST_DRAWS
    assert len(outcome.proof.blocks) <= MOST_BLOCKS


def test_blocks_that_refuted_a_policy_are_not_drawn_again():
    outcome = still_open(0.08, 0.03)
    outcome.proof.first = Claim(True, 0.08, (0.05, 0.11))
    assert outcome.proof.promising
    assert not outcome.still_open


def test_the_steps_of_a_proof_are_not_those_of_a_job_that_goes_on_and_have_their_cost():
    outcome = still_open(0.05, 0.03)
    watching, status = begin(outcome)
    trial, r, took_ms = next(watching), random.Random(2), 0.0
    while status.outcome is outcome or status.proving:
        less = 0.05 * (trial.policy == POLICY)
        took_ms += 100 * (1 - less) - 100
        trial = watching.send(Sample(100 * (1 - less) * math.exp(r.gauss(0, 0.01))))
    assert not status.policy_ms
    assert not status.default_ms
    assert status.outcome.kept
    assert status.outcome.cost_ms == pytest.approx(took_ms, rel=0.25)


def test_another_search_starts_with_nothing_from_before_it():
    status = WatchStatus(left_alone(), DEFAULT)
    status.policy_ms.extend([92.0] * 100)
    status.default_ms.extend([100.0] * 10)
    status.effects.own.extend([0.5] * 10)
    status.found(replace(left_alone(), policy=POLICY, kept=True, default_ms=160.0, best_ms=128.0))
    assert status.in_force == POLICY
    assert status.lately_ms is None
    assert not status.default_ms
    assert not status.effects.own


# --- the store ------------------------------------------------------------------------------------------------


class Kept(list[str]):
    """The labels that an `Earlier` stores; "" where it removes one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.earlier = Earlier(DEFAULT, lambda line: None)
        self.earlier.key = object()  # type: ignore[assignment]
        put = lambda _, key, policy, result: self.append(policy.label)  # noqa: E731
        monkeypatch.setattr("weft.tuning.store.Store.put", put)
        monkeypatch.setattr("weft.tuning.store.Store.remove", lambda *_: self.append(""))


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "store"))
    return Kept(monkeypatch)


def test_what_a_search_left_open_is_kept_once_it_is_proven(kept):
    outcome = still_open(0.08, 0.03)
    kept.earlier.remember(kept.earlier.found(outcome))
    assert kept == []
    status = WatchStatus(outcome, outcome.policy, proving=True)
    kept.earlier.follow(status, final(status))
    assert kept == []
    proven = replace(outcome, kept=True, policy=POLICY, gain_pct=8.0, ci_pct=(6.0, 10.0))
    status.outcome, status.in_force = proven, POLICY
    for _ in range(3):
        kept.earlier.follow(status, final(status))
    assert kept == [POLICY.label]
    status.outcome, status.proving = replace(proven, gain_pct=5.0), False
    kept.earlier.follow(status, final(status))
    assert kept == [POLICY.label] * 2
    status.reverted = "slower"
    for _ in range(3):
        kept.earlier.follow(status, final(status))
    assert kept == [POLICY.label, POLICY.label, ""]


def test_what_a_proof_has_refuted_in_the_watch_is_kept_as_nothing_to_gain(kept):
    outcome = still_open(0.08, 0.03)
    kept.earlier.remember(kept.earlier.found(outcome))
    status = WatchStatus(left_alone(), DEFAULT)
    kept.earlier.follow(status, final(status))
    assert kept == [DEFAULT.label]


def test_a_search_that_is_over_is_kept_once(kept):
    outcome = replace(left_alone(), policy=POLICY, kept=True)
    kept.earlier.remember(kept.earlier.found(outcome))
    status = WatchStatus(outcome, POLICY)
    kept.earlier.follow(status, final(status))
    assert kept == [POLICY.label]
