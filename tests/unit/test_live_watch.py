"""The watch after tuning: a policy that turns slower leaves, one that stays faster stays, and the budget holds."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from dataclasses import replace

import pytest
from live_jobs import FACTS, reverted
from live_kinds import JOBS

from weft.measure.sequential import Step
from weft.policy import Policy
from weft.tuning.live.conductor import conduct
from weft.tuning.live.pace import Pace
from weft.tuning.live.trial import Record, Sample, Trial
from weft.tuning.live.trial_length import steps_of_a_trial
from weft.tuning.live.tuned_job import Tried, TunedJob, final
from weft.tuning.live.watch import AHEAD, SHARE, watch
from weft.tuning.live.watch_budget import CHECK, COSTLY, CREDIT
from weft.tuning.live.watch_status import ProbeEffects, WatchStatus

DEFAULT, POLICY = Policy(), Policy(max_ctas=16)
BEFORE = (100.0, 92.0)
# By kind of drift: the times of the default and of the policy from the drift on.
DRIFTS = {
    "the policy turns slower": (100.0, 105.0),
    "longer sequences": (160.0, 168.0),
    "shorter sequences": (60.0, 63.0),
    "lower clocks": (115.0, 121.0),
    "much slower": (100.0, 140.0),
    "only the default turns faster": (92 / 1.05, 92.0),
}


def kept() -> TunedJob:
    tried = (Tried(DEFAULT, [100.0], [100.0] * 8), Tried(POLICY, [92.0], [92.0] * 8))
    return TunedJob(
        policy=POLICY, kept=True, gain_pct=8, tried=tried, default_ms=100, best_ms=92, facts=FACTS
    )


def left_alone() -> TunedJob:
    tried = (Tried(DEFAULT, [100.0]), Tried(POLICY, [101.0]))
    return TunedJob(policy=DEFAULT, kept=False, reason="none", tried=tried, default_ms=100, facts=FACTS)


def play(outcome, steps, times, *, seed=0, sigma=0.01, status=None, record=None, **options):
    """`times(step)`: times of default and policy. Returns the policy of every step, and all messages."""
    r = random.Random(f"watch {seed}")
    watching = watch(outcome, seed=seed, status=status, record=record, **options)
    trial, ran, said = next(watching), [], []
    while len(ran) < steps:
        ms = times(len(ran))[trial.policy.max_ctas == 16] * math.exp(r.gauss(0, sigma))
        ran += [trial.policy] * trial.steps
        said += [trial.say] if trial.say else []
        promised = trial.then
        try:
            following = watching.send(Sample(ms, facts=FACTS if trial.learn else None))
        except StopIteration:
            return ran, said
        assert not promised or following.policy == promised[0]
        trial = following
    return ran, said


def late(drift: str, seed: int, sigma: float = 0.01) -> int:
    """How many of 40 steps ran under the policy, from 50 steps after a drift on."""
    at = random.Random(seed).randrange(3, 200)
    ran, _ = play(
        kept(), at + 90, lambda step: DRIFTS[drift] if step >= at else BEFORE, seed=seed, sigma=sigma
    )
    return ran[at + 50 :].count(POLICY)


@pytest.mark.parametrize("drift", [name for name in DRIFTS if "only" not in name])
def test_a_policy_that_turns_5_percent_slower_is_gone_within_50_steps(drift):
    assert sum(late(drift, seed) == 0 for seed in range(40)) >= 39


def test_probes_tell_even_where_the_pace_does_not_change():
    assert sum(late("only the default turns faster", seed) == 0 for seed in range(80)) >= 77


@pytest.mark.parametrize(("gain", "sigma"), [(0.08, 0.01), (0.03, 0.005), (0.05, 0.03), (0.3, 0.1)])
def test_a_policy_that_stays_faster_stays_and_probes_are_within_the_budget(gain, sigma):
    lost = 0
    for seed in range(12):
        ran, said = play(kept(), 800, lambda step: (100, 100 * (1 - gain)), seed=seed, sigma=sigma)
        lost += ran[-1] == DEFAULT and ran[-40:].count(DEFAULT) > 30
        if not said:
            assert ran.count(DEFAULT) <= SHARE * 800 + CREDIT + CHECK  # a check that has begun is finished
    assert lost <= 1


def test_it_says_why_and_the_result_says_so_too():
    status, record = WatchStatus(kept(), POLICY), Record()
    times = lambda step: DRIFTS["longer sequences"] if step >= 60 else BEFORE  # noqa: E731
    ran, said = play(kept(), 160, times, status=status, record=record)
    assert set(ran[-20:]) == {DEFAULT}
    (line,) = said
    assert line.startswith("ctas16 was reverted; the job continues with the default: it took ")
    document = final(status)
    assert document["state"] == "left alone"
    assert "ctas16 was reverted: it took" in document["text"]
    assert Policy.from_dict(document["policy"]) == DEFAULT
    assert document["watch"]["checks"] >= 1
    json.dumps(document, allow_nan=False)
    assert [note.text for note in record.notes] == [line]


def test_a_job_that_does_not_run_as_promised_says_so():
    """A data loader that needs 100 ms for a batch, with 8 batches in store: steps of 92 ms soon wait for it."""
    claim = replace(kept(), ci_pct=(6.5, 9.4))
    for loader_ms in (100.0, 80.0):
        r, status = random.Random(1), WatchStatus(claim, POLICY)
        watching = watch(claim, status=status)
        trial, clock, ready = next(watching), 0.0, [0.0] * 8
        for _ in range(900):
            began = clock
            clock = max(clock, ready.pop(0))
            ready.append(max(ready[-1], clock) + loader_ms * math.exp(r.gauss(0, 0.2)))
            clock += (92.0 if trial.policy == POLICY else 100.0) * math.exp(r.gauss(0, 0.005))
            trial = watching.send(Sample(clock - began))
        document = final(status)
        assert document["gain_pct"] == 8
        if loader_ms == 100:
            assert document["ci"][0] < 0.5
            assert document["text"].endswith(" ms on average")
        else:
            assert document["ci"] == [6.5, 9.4]
            assert "at the end" not in document["text"]


def drawn(effect: float, count: int = 20, scatter: float = 0.01) -> list[Step]:
    """Steps of a check in which the policy takes `effect` less time (as a logarithm)."""
    r = random.Random(7)
    return [Step(4.6 - effect * (n % 2) + r.gauss(0, scatter), n % 2, 0.5, n) for n in range(count)]


def test_a_claim_becomes_smaller_where_later_checks_show_less_and_never_larger():
    claim = replace(kept(), gain_pct=19.3, ci_pct=(5.0, 30.0))
    status = WatchStatus(claim, POLICY)
    assert final(status)["gain_pct"] == 19.3
    status.checked += drawn(0.09)
    document = final(status)
    assert 8 < document["gain_pct"] < 11
    assert document["ci"][0] <= document["gain_pct"] <= document["ci"][1]
    assert document["text"].endswith("; its proof showed 19.3%; later checks showed less")
    status.checked = deque(drawn(0.4))
    assert final(status)["gain_pct"] == 19.3
    status.checked = deque(drawn(-0.5))
    assert final(status)["gain_pct"] == 0  # such a policy is reverted
    status.checked = deque(drawn(0.09, count=6))
    assert final(status)["gain_pct"] == 19.3  # too few to tell


def test_checks_of_an_exact_claim_leave_it_as_it_is():
    """A check has few steps of two: what a proof has shown to 0.1% does not move by their scatter."""
    status = WatchStatus(replace(kept(), gain_pct=8.0, ci_pct=(7.9, 8.1)), POLICY)
    status.checked += drawn(0.07, scatter=0.02)
    assert 7.9 < final(status)["gain_pct"] <= 8


def test_slower_steps_of_the_job_itself_do_not_widen_the_claim_by_much():
    claim, status = (
        replace(kept(), ci_pct=(6.5, 9.4)),
        WatchStatus(replace(kept(), ci_pct=(6.5, 9.4)), POLICY),
    )
    play(claim, 900, lambda step: BEFORE if step < 100 else (125.0, 115.0), status=status)
    low, high = final(status)["ci"]
    assert 5 < low <= 6.5
    assert 9.4 <= high < 11


def test_a_job_that_changes_is_searched_again_once_the_budget_allows_it():
    status = WatchStatus(left_alone(), DEFAULT)

    def times(step):
        return (100.0, 100.0) if step < 400 else (150.0, 120.0)

    ran, said = play(left_alone(), 2600, times, status=status, sigma=0.005)
    first = ran.index(POLICY)
    assert 1100 < first < 1500  # 58 steps of a search are 5% of 1160
    assert status.searches == 1
    assert status.in_force.max_ctas == 16
    assert "searched again, because the pace of the job changed: " in said[0]
    assert ran[-100:].count(status.in_force) > 85


@pytest.mark.parametrize("ms", [2.0, 5000.0])
def test_trials_after_another_search_have_the_length_for_the_steps_of_now(ms):
    """Trials were long while no policy was in force, and steps of the earlier search may have been short."""
    before = replace(left_alone(), default_ms=ms)
    status = WatchStatus(before, DEFAULT)
    watching = watch(before, each=steps_of_a_trial(ms), status=status)
    trial, number, watched = next(watching), 0, []
    while len(watched) < 30:
        number += trial.steps
        now = ms if number < 20_000 else 100.0 - 30.0 * (trial.policy.max_ctas == 16)
        if trial.light and status.in_force != DEFAULT:
            watched.append(trial.steps)
        trial = watching.send(Sample(now, facts=FACTS if trial.learn else None))
    assert set(watched) == {1}
    assert not status.reverted


def test_a_search_that_takes_long_for_such_short_steps_is_repeated_later():
    """A step of 2 ms, and a search that keeps the job waiting for 50 ms: two are 1% of the time of many steps."""
    costly = replace(left_alone(), cost_ms=50.0, default_ms=2.0)
    status = WatchStatus(costly, DEFAULT)
    times = lambda step: (2.0, 2.0) if step < 3200 else (3.0, 2.4)  # noqa: E731
    ran, _ = play(costly, 8000, times, status=status, each=8)
    due_ms = 2 * 50 * COSTLY / SHARE
    assert due_ms < 3200 * 2.0 + (ran.index(POLICY) - 3200) * 3.0 < 1.5 * due_ms


def test_a_good_policy_stays_where_the_pace_of_the_job_changes_all_the_time():
    """A host that is 30% slower for seconds at a time: a probe at such a moment says nothing about the policy."""
    reverted = 0
    for seed in range(8):
        r, slow = random.Random(f"phases {seed}"), [False]

        def times(step, r=r, slow=slow):
            slow[0] ^= r.random() < 1 / 30
            return tuple(ms * (1.3 if slow[0] else 1.0) for ms in (100, 90))

        status = WatchStatus(kept(), POLICY)
        play(kept(), 1500, times, seed=seed, sigma=0.005, status=status)
        reverted += bool(status.reverted)
        assert status.checks >= 2
    assert reverted <= 1


@pytest.mark.parametrize("kind", ["every 3 steps +50%", "cycle 1, 2", "GAN, 2 to 1, slips"])
def test_a_good_policy_stays_where_steps_alternate(kind):
    """Most short steps of such a job are faster than the steps on both sides of them, probes or not."""
    assert sum(reverted(JOBS[kind], seed, 0.05, 2000) for seed in range(6)) <= 1


def test_without_a_budget_or_candidates_there_is_nothing_to_watch():
    nothing = TunedJob(policy=DEFAULT, kept=False, reason="no collective", tried=(Tried(DEFAULT, [1.0]),))
    assert next(watch(nothing), None) is None
    assert next(watch(left_alone(), budget=0.0), None) is None


def test_every_trial_names_the_steps_that_are_decided():
    watching = watch(kept(), ahead=7)
    trial = next(watching)
    for _ in range(300):
        assert trial.light
        assert len(trial.then) == 7
        trial = watching.send(Sample(92.0 if trial.policy == POLICY else 100.0))
    assert AHEAD == 10  # the conductor's need at 8 steps between decisions


def test_strange_samples_do_no_harm():
    watching = watch(kept())
    next(watching)
    for ms in (math.inf, 0.0, -1.0, 1e9, 1e-9, 92.0) * 30:
        watching.send(Sample(ms))
    watching.send(Sample(92.0, "stalled"))
    watching.close()


def test_the_pace_changes_with_a_shift_and_not_with_odd_steps():
    r = random.Random(1)
    pace = Pace()
    for step in range(3000):
        odd = 2.0 if step % 10 == 0 else 1.0
        assert not pace.changed(math.log(odd) + r.gauss(0, 0.01))
    assert any(pace.changed(0.05 + r.gauss(0, 0.01)) for _ in range(12))


# --- framework controls -------------------------------------------------------------------------------------


BOTH, BUCKETS = Policy(max_ctas=16, bucket_mb=100.0), Policy(bucket_mb=100.0)


def kept_at_meetings(policy: Policy) -> TunedJob:
    tried = (Tried(DEFAULT, [100.0], [100.0] * 8), Tried(policy, [92.0], [92.0] * 8))
    return replace(kept(), policy=policy, tried=tried)


def play_at_meetings(policy, steps, times, *, seed=0, sigma=0.01, status=None):
    """`times(step)`: step time by policy. Framework controls change only in trials that are not light."""
    r, watching = random.Random(f"meetings {seed}"), watch(kept_at_meetings(policy), seed=seed, status=status)
    trial, ran, models = next(watching), [], policy.models
    while len(ran) < steps:
        assert not trial.light or trial.policy.models == models
        models = trial.policy.models
        ms = times(len(ran)).get(trial.policy, 1e3) * math.exp(r.gauss(0, sigma))
        ran += [trial.policy] * trial.steps
        trial = watching.send(Sample(ms, facts=FACTS if trial.learn else None))
    return ran


def by_policy(default, buckets, ctas, both):
    return {DEFAULT: default, BUCKETS: buckets, POLICY: ctas, BOTH: both}


@pytest.mark.parametrize(
    ("policy", "after"),
    [
        (BUCKETS, by_policy(100.0, 105.0, 100.0, 105.0)),
        (BUCKETS, by_policy(160.0, 168.0, 160.0, 168.0)),
        (BOTH, by_policy(115.0, 121.0, 115.0, 121.0)),
        (BOTH, by_policy(115.0, 115.0, 121.0, 121.0)),
    ],
)
def test_framework_controls_that_turn_slower_are_reverted_within_50_steps(policy, after):
    before, in_time = by_policy(100.0, 92.0, 100.0, 92.0), 0
    for seed in range(20):
        at = random.Random(seed).randrange(3, 200)
        ran = play_at_meetings(
            policy, at + 90, lambda step, at=at: after if step >= at else before, seed=seed
        )
        in_time += all(after[one] == after[DEFAULT] for one in ran[at + 50 :])
    assert in_time >= 19


def test_framework_controls_that_stay_faster_stay_though_the_pace_changes():
    times = [by_policy(*(factor * ms for ms in (100.0, 92.0, 100.0, 92.0))) for factor in (1.0, 1.5)]
    lost, met = 0, 0
    for seed in range(8):
        status = WatchStatus(kept_at_meetings(BUCKETS), BUCKETS)
        ran = play_at_meetings(BUCKETS, 900, lambda step: times[step >= 300], seed=seed, status=status)
        lost += bool(status.reverted)
        met += status.checks
        assert ran.count(DEFAULT) <= SHARE * 900 + CREDIT
    assert lost == 0
    assert met >= 8


def test_framework_controls_are_checked_now_and_then_even_if_the_pace_stays():
    """Only the job's own default has become faster: nothing but a check shows that."""
    before, after = by_policy(100.0, 92.0, 100.0, 92.0), by_policy(86.0, 92.0, 86.0, 92.0)
    ran = play_at_meetings(BUCKETS, 800, lambda step: after if step >= 60 else before)
    assert set(ran[700:]) == {DEFAULT}


def test_framework_controls_that_bring_less_than_promised_are_reported():
    status = WatchStatus(kept_at_meetings(BUCKETS), BUCKETS)
    play_at_meetings(BUCKETS, 400, lambda step: by_policy(100.0, 97.0, 100.0, 97.0), status=status)
    document = final(status)
    assert document["state"] == "kept"
    assert document["watch"]["policy_ms"] == pytest.approx(97, rel=0.01)
    assert document["text"].endswith(" ms on average")
    assert document["ci"][0] < 4


def test_a_search_after_framework_controls_begins_at_the_default():
    after, before = by_policy(*[150.0] * 4), by_policy(*[92.0] * 4)
    status = WatchStatus(kept_at_meetings(BUCKETS), BUCKETS)
    ran = play_at_meetings(BUCKETS, 2000, lambda step: before if step < 60 else after, status=status)
    assert status.searches == 1
    assert ran[-1] == DEFAULT


def test_the_conductor_has_all_ranks_meet_for_every_change_of_framework_controls():
    """Buckets that turn slower: the decisions of a whole job, as its ranks get them."""

    def found():
        yield Trial(DEFAULT)
        return kept_at_meetings(BUCKETS)

    status = WatchStatus(kept_at_meetings(BUCKETS), BUCKETS)
    conductor = conduct(
        found(), DEFAULT, lambda outcome, ahead, each: watch(outcome, ahead=ahead, each=each, status=status)
    )
    r, report, models, ran = random.Random(1), {"clock": {}, "ms": []}, DEFAULT.models, []
    next(conductor)
    while len(ran) < 300:
        decision = conductor.send([report])
        assert decision["do"] in ("run", "settle", "prepare", "report")
        report = {"clock": {}, "ms": []}
        if decision["do"] == "settle":
            models = Policy.from_dict(decision["policy"]).models
        for index in decision.get("order", ()):
            policy = Policy.from_dict(decision["policies"][index])
            assert policy.models == models
            times = (100.0, 92.0) if len(ran) < 60 else (100.0, 105.0)
            report["ms"].append(times[policy == BUCKETS] * math.exp(r.gauss(0, 0.01)))
            ran.append(policy)
    assert set(ran[1:60]) == {BUCKETS}
    assert set(ran[120:]) == {DEFAULT}
    assert status.reverted


def test_a_pause_next_to_a_probe_says_nothing_about_the_policy():
    effects = ProbeEffects()
    for number in range(20):
        for _ in range(10):
            effects.add(math.log(50), probe=False)
        effects.add(math.log(55), probe=True)
        effects.add(math.log(1500 if number % 2 else 50), probe=False)  # an evaluation after every second one
    assert len(effects.own) == 10
    assert list(effects.own) == pytest.approx([math.log(1.1)] * 10)
