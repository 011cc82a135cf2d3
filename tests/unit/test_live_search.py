"""Live tuning's method on simulated jobs: noise, drift, odd steps, connecting communicators, policies that stall."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter

import pytest

from weft.measure.sequential import WIDEST
from weft.policy import Policy
from weft.tuning.live import proof, search
from weft.tuning.live.levers import beyond, search_stages
from weft.tuning.live.options import Facts, Kernel, merge
from weft.tuning.live.search import tune
from weft.tuning.live.trial import Record, Sample, Trial
from weft.tuning.live.tuned_job import TunedJob, read_result, result_file, stopped
from weft.tuning.live.watch import watch
from weft.tuning.live.watch_status import WatchStatus

TRITON = Kernel("my_gemm", "my_gemm", 40, 30, 4)
CUBLAS = Kernel("nvjet_hsh", "nvjet_hsh", 40, 30, 1)
NORM = Kernel("layer_norm_kernel", "vectorized_layer_norm_kernel", 20, 10, 16)
CTAS = (6, 16, 24, 32)


class Job:
    """A job of 40 ms a step and 12 CTAs; everything else is drawn at random unless given."""

    def __init__(self, seed: int = 0, **given: object) -> None:
        r = self.random = random.Random(seed)
        self.noise = r.uniform(0.005, 0.01)
        exposed, speed, cost = r.uniform(0, 0.9) * r.uniform(0.2, 0.6), r.uniform(0.3, 1), r.uniform(0, 0.006)
        counts = (3, 6, 16, 24, 32)
        self.ctas = {c: 1 + exposed * ((12 / c) ** speed - 1) + cost * (c - 12) for c in counts}
        self.head = 1 + r.choice([0, 0, r.uniform(-0.02, 0.02)])
        self.priority = 1 + r.choice([0, 0, r.uniform(-0.03, 0.01)])
        shaped = r.choice([0, 0, r.uniform(-0.08, 0.08)])
        self.residency = {3: 1 + shaped, 2: 1 + shaped + r.uniform(-0.02, 0.08)}
        self.kernels = (TRITON, CUBLAS, NORM) if r.random() < 0.5 else (CUBLAS, NORM)
        self.wave, self.length, self.slope = r.uniform(0, 0.02), r.uniform(15, 60), r.uniform(-2e-4, 2e-4)
        self.odd = 0.02
        self.warm_up = 4
        self.choices: tuple[int, ...] = CTAS
        self.stalls: set[str] = set()
        self.steps = 0
        self.connected: set[int | None] = {None}
        self.ran: list[Policy] = []
        for name, value in given.items():
            setattr(self, name, value)

    def ms(self, policy: Policy) -> float:
        """The true step time in ms."""
        factor = self.ctas[policy.max_ctas] if policy.max_ctas else 1.0
        factor *= self.head if policy.head_start_us else 1.0
        factor *= self.priority if policy.priority == "high" else 1.0
        return 40 * factor * (self.residency[policy.residency] if policy.residency else 1.0)

    @property
    def best_ms(self) -> float:
        """The best true step time of all combinations."""
        shaped = self.residency.values() if TRITON in self.kernels else ()
        ctas = min([1.0, *(self.ctas[c] for c in self.choices)])
        return 40 * ctas * min(1, self.head) * min(1, self.priority) * min([1.0, *shaped])

    def step(self, policy: Policy) -> float:
        self.steps += 1
        self.ran.append(policy)
        ms = self.ms(policy) * math.exp(self.random.gauss(0, self.noise))
        ms *= 1 + self.wave * math.sin(self.steps / self.length) + self.slope * self.steps
        if self.steps <= self.warm_up:
            ms *= 1 + 2 / self.steps**2
        if self.random.random() < self.odd:
            ms *= 1 + self.random.expovariate(1 / 0.2)
        if policy.max_ctas not in self.connected:
            self.connected.add(policy.max_ctas)
            ms *= 4
        return ms

    def trial(self, trial: Trial) -> Sample:
        if trial.policy.label in self.stalls:
            self.ran.append(trial.policy)
            return Sample(5000.0, "stalled")
        ms = sum(self.step(trial.policy) for _ in range(trial.steps)) / trial.steps
        facts = Facts(collectives=10, ctas=12, cta_choices=self.choices, most_ctas=33, kernels=self.kernels)
        return Sample(ms, facts=facts if trial.learn else None)


def play(job: Job, default: Policy | None = None, **options: object) -> TunedJob:
    method = tune(default or Policy(), **options)  # type: ignore[arg-type]
    trial = next(method)
    for _ in range(most_steps()):
        try:
            trial = method.send(job.trial(trial))
        except StopIteration as end:
            return end.value
    raise AssertionError("the method does not end")


def most_steps() -> int:
    """The most steps that warm-up and search may take."""
    at_meetings = proof.PROMISING_AT_MEETINGS * proof.STEPS_AFTER_MEETING
    budget = round(search.BUDGET_LIMIT * search.MOST_NOISY)
    return search.MOST_WARM_UP + budget + at_meetings + proof.MOST_BLOCKS * proof.BLOCK


def steps_to_proof(outcome: TunedJob) -> int:
    """Steps of the search, without those that only measure the gain of a proven policy."""
    return outcome.steps - (len(outcome.proof.blocks) * proof.BLOCK if outcome.proof else 0)


def watched(job: Job, outcome: TunedJob) -> TunedJob:
    """How the watch settles a proof that the search left open."""
    status = WatchStatus(outcome, outcome.policy)
    watching = watch(outcome, status=status)
    trial = next(watching)
    while status.outcome is outcome or status.proving:
        trial = watching.send(job.trial(trial))
    return status.outcome


def quiet(**given: object) -> Job:
    same = {
        "head": 1.0,
        "priority": 1.0,
        "residency": {3: 1.0, 2: 1.0},
        "ctas": dict.fromkeys((3, 6, 16, 24, 32), 1.0),
    }
    return Job(1, **{"noise": 0.004, "wave": 0.0, "slope": 0.0, "odd": 0.0, **same, **given})


@pytest.mark.parametrize("jobs", [100, pytest.param(200, marks=pytest.mark.slow)])
def test_it_ends_near_the_best_and_never_slower_and_proves_it_in_under_90_steps(jobs):
    behind, slower = [], 0
    for seed in range(jobs):
        job = Job(seed)
        outcome = play(job, seed=seed)
        slower += job.ms(outcome.policy) > 40 * 1.005
        assert steps_to_proof(outcome) < 90
        assert outcome.steps + outcome.warm_up_steps == job.steps
        assert outcome.warm_up_steps <= search.MOST_WARM_UP
        outcome = watched(job, outcome) if outcome.still_open else outcome
        slower += job.ms(outcome.policy) > 40 * 1.005
        behind.append(job.ms(outcome.policy) / job.best_ms - 1)
    assert slower == 0
    assert sum(excess <= 0.01 for excess in behind) >= 0.9 * len(behind)
    assert sum(excess <= 0.02 for excess in behind) >= 0.97 * len(behind)


def test_where_nothing_helps_the_job_is_left_alone_and_told_why():
    outcomes = [
        play(quiet(random=random.Random(seed), ctas={3: 1.5, 6: 1.2, 16: 1.0, 24: 1.01, 32: 1.02}), seed=seed)
        for seed in range(100)
    ]
    kept = [outcome for outcome in outcomes if outcome.kept]
    assert len(kept) <= 5  # by chance, at the 95% level, and then it does no harm
    told = next(outcome for outcome in outcomes if "nothing was faster" in outcome.reason)
    assert told.policy == Policy()
    assert "ctas6 +" in told.text
    assert "step times vary by" in told.text


def test_a_gain_is_stated_with_an_interval_that_holds_it():
    held = 0
    for seed in range(100):
        job = quiet(
            random=random.Random(seed), ctas={3: 1.4, 6: 1.2, 16: 0.92, 24: 0.97, 32: 1.0}, noise=0.01
        )
        outcome = play(job, seed=seed)
        assert outcome.kept
        low, high = outcome.ci_pct
        held += low <= 100 * (1 - job.ms(outcome.policy) / 40) <= high
    assert held >= 90


def test_a_policy_that_is_clearly_slower_is_left_after_one_step():
    job = quiet(kernels=(TRITON,), residency={3: 2.5, 2: 4.0}, choices=())
    play(job)
    slow = [i for i, policy in enumerate(job.ran) if policy.residency]
    assert slow
    assert all(job.ran[i + 1].residency != job.ran[i].residency for i in slow)
    assert max(Counter(job.ran[i] for i in slow).values()) <= 2


def test_a_policy_that_stalls_is_dropped_and_the_rest_still_tried():
    job = quiet(ctas={3: 1.4, 6: 1.2, 16: 0.9, 24: 0.8, 32: 1.0}, stalls={"ctas24"})
    outcome = play(job)
    assert outcome.policy.max_ctas == 16
    assert next(one for one in outcome.tried if one.policy.max_ctas == 24).problem == "stalled"
    assert job.ran.count(Policy(max_ctas=24)) == 1


def paused(job: Job, at: set[int], problem: str = "paused") -> tuple[TunedJob, Record]:
    """A search of a job that pauses, for an evaluation, in these plans (counted from 0)."""
    record, plans = Record(), 0
    method = tune(Policy(), record=record)
    trial = next(method)
    while True:
        plan = [trial, *(Trial(policy) for policy in trial.then)] if not trial.learn else [trial]
        changed = any(one.policy != Policy() for one in plan)
        samples = [job.trial(one) for one in plan]
        if changed and plans in at:
            samples = [Sample(9000.0, problem) for _ in samples]
        plans += changed
        for sample in samples:
            try:
                trial = method.send(sample)
            except StopIteration as end:
                return end.value, record


def test_a_plan_in_which_the_program_paused_is_measured_again():
    for first in (0, 3, 6, 9):
        job = quiet(ctas={3: 1.4, 6: 1.2, 16: 0.9, 24: 1.0, 32: 1.0})
        outcome, record = paused(job, {first})
        assert outcome.policy.max_ctas == 16
        assert not any(one.problem for one in outcome.tried)
        repeated = sum(step.purpose == "pause" for step in record.steps)
        assert repeated > 0
        assert record.number == outcome.steps + outcome.warm_up_steps == job.steps
        assert outcome.cost_ms < 9000.0


def test_a_plan_that_is_late_twice_drops_its_candidates():
    outcome, _ = paused(quiet(), {0, 1})
    assert [one.problem for one in outcome.tried if one.problem] == ["stalled"]


@pytest.mark.parametrize("jobs", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_whatever_happens_it_ends_in_time_and_says_something(jobs):
    for seed in range(jobs):
        some = random.Random(seed)
        job = Job(seed, noise=some.choice([0.0, 0.01, 0.5, 2.0]), odd=some.choice([0.0, 0.3]))
        trial, share = job.trial, some.choice([0.02, 0.3])

        def hostile(asked: Trial, job=job, trial=trial, some=some, share=share) -> Sample:
            sample = trial(asked)
            if asked.policy != Policy() and some.random() < share:
                return Sample(some.choice([math.inf, 0.0, sample.ms]), "stalled")
            return Sample(0.0 if some.random() < share / 10 else sample.ms, facts=sample.facts)

        job.trial = hostile  # type: ignore[method-assign]
        outcome = play(job, seed=seed)
        most = 70 * search.MOST_NOISY + proof.PROMISING_DRAWS
        assert outcome.steps < most + proof.MOST_BLOCKS * proof.BLOCK
        assert json.dumps(outcome.to_dict(), allow_nan=False)
        assert outcome.text


def test_the_largest_number_of_ctas_is_not_the_end_where_it_is_best():
    job = quiet(ctas={3: 1.5, 6: 1.3, 16: 0.9, 24: 0.8, 32: 0.7}, choices=(6, 16, 24))
    assert play(job).policy.max_ctas == 32


@pytest.mark.parametrize("warm_up", [0, 12, 30])
def test_it_waits_for_even_steps_but_not_for_ever(warm_up):
    job = quiet(ctas={3: 1.4, 6: 1.2, 16: 0.9, 24: 0.95, 32: 1.0})
    slow = iter([3.0 - 2.0 * i / 30 for i in range(warm_up)])
    step = job.step
    job.step = lambda policy: step(policy) * next(slow, 1.0)  # type: ignore[method-assign]
    outcome = play(job)
    assert outcome.policy.max_ctas == 16
    assert outcome.warm_up_steps >= min(warm_up, 6)

    uneven = Job(3, noise=0.5, odd=0.0)
    outcome = play(uneven)
    assert outcome.warm_up_steps <= search.MOST_WARM_UP
    assert uneven.ms(outcome.policy) <= 40.4


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_become_faster_during_all_of_the_warm_up_do_not_end_the_search(seed):
    """For example because compilation, or another job on the machine, slows the first hundred steps."""
    job = quiet(noise=0.01, ctas={3: 1.4, 6: 1.2, 16: 0.8, 24: 0.95, 32: 1.0})
    step = job.step
    job.step = lambda policy: step(policy) * math.exp(-0.02 * job.steps)  # type: ignore[method-assign]
    outcome = play(job, seed=seed)
    assert outcome.warm_up_steps == search.MOST_WARM_UP
    assert outcome.noise_pct > 0.5
    assert outcome.policy.max_ctas in (None, 16)


@pytest.mark.parametrize("slow", range(28, 42))
def test_a_job_may_become_even_in_any_step_of_the_warm_up(slow):
    """Even in its last step: the search has then not seen such steps before."""
    job = quiet(ctas={3: 1.4, 6: 1.2, 16: 0.8, 24: 0.95, 32: 1.0})
    step = job.step
    job.step = lambda policy: step(policy) * 1.05 ** max(0, slow - job.steps)  # type: ignore[method-assign]
    assert play(job).policy.max_ctas == 16


def test_what_an_earlier_run_found_is_measured_and_not_believed():
    known = Policy(max_ctas=16, priority="high")
    good = quiet(ctas={3: 1.4, 6: 1.2, 16: 0.9, 24: 0.95, 32: 1.0})
    outcome = play(good, recall=lambda facts: known)
    assert outcome.policy == known
    assert steps_to_proof(outcome) <= search.FOR_KNOWN + search.LEARN + proof.MORE
    assert set(good.ran) == {Policy(), known}
    assert "an earlier run, measured again" in outcome.text

    changed = quiet(ctas={3: 1.4, 6: 0.9, 16: 1.1, 24: 1.1, 32: 1.2})
    outcome = play(changed, recall=lambda facts: known)
    assert outcome.policy.max_ctas == 6
    assert steps_to_proof(outcome) < 70 + search.DOUBT_STEPS

    alone = quiet()
    outcome = play(alone, recall=lambda facts: Policy())
    assert outcome.steps == search.LEARN
    assert "an earlier run of this job found nothing better" in outcome.text


def test_the_policy_that_the_job_was_started_with_is_the_default():
    default = Policy(priority="high", max_ctas=16)
    job = quiet(priority=1.2, choices=(6, 24), ctas={3: 1.4, 6: 1.2, 16: 1.0, 24: 1.1, 32: 1.2})
    outcome = play(job, default)
    assert outcome.kept
    assert (outcome.policy.priority, outcome.policy.max_ctas) == ("default", 16)


# --- what is tried ------------------------------------------------------------------------------------------


def test_nothing_is_tried_that_cannot_matter():
    assert search_stages(Facts(launches=False), Policy()) == []
    assert search_stages(Facts(collectives=0), Policy()) == []
    names = [
        set(change)
        for stage in search_stages(Facts(collectives=4, kernels=(CUBLAS, NORM)), Policy())
        for change in stage.changes
    ]
    assert all(
        name <= {"priority", "head_start", "head_start_us"} for name in names
    )  # no CTA choices, one block, memory
    shaped = search_stages(Facts(collectives=4, kernels=(TRITON, NORM)), Policy())[-1].changes
    assert [change["residency"] for change in shaped] == [3, 2]
    assert all(change["when"] == "overlap" for change in shaped)


def test_a_kernel_is_shaped_by_default_and_the_others_spared_by_name():
    other = Kernel("other", "other_gemm", 10, 40, 2)
    shaped = search_stages(Facts(collectives=4, kernels=(TRITON, other, NORM)), Policy())[-1].changes
    assert [change["residency"] for change in shaped] == [
        1,
        3,
        2,
    ]  # kernels launched most often beside collectives first
    spared = {rule.kernel: rule.residency for rule in shaped[1]["rules"]}
    assert spared["other_gemm"] is None
    assert "my_gemm" not in spared
    assert Policy(**shaped[1])


def test_ctas_beyond_the_choices_are_tried_only_at_their_edge_and_where_they_fit():
    facts = Facts(ctas=12, cta_choices=(6, 16, 24), most_ctas=33)
    assert beyond(facts, Policy(max_ctas=24)) == [{"max_ctas": 32}]
    assert beyond(facts, Policy(max_ctas=6)) == [{"max_ctas": 3}]
    assert beyond(facts, Policy(max_ctas=16)) == beyond(facts, Policy()) == []
    assert beyond(Facts(ctas=12, cta_choices=(6, 16, 24), most_ctas=30), Policy(max_ctas=24)) == []


def test_what_holds_for_the_job_is_what_holds_on_every_rank():
    one = Facts(collectives=4, cta_choices=(6, 16), most_ctas=33, kernels=(TRITON,))
    two = Facts(collectives=6, cta_choices=(16, 24), most_ctas=20, kernels=(CUBLAS,), why_no_ctas="")
    both = merge([one, two])
    assert (both.cta_choices, both.most_ctas, both.collectives, both.ranks_at_work) == ((16,), 20, 6, 2)
    assert {kernel.name for kernel in both.kernels} == {"my_gemm", "nvjet_hsh"}
    assert Facts.from_dict(both.to_dict()) == both


# --- what is reported ---------------------------------------------------------------------------------------


def test_the_result_is_json_and_has_what_the_command_promises(tmp_path):
    job = quiet(ctas={3: 1.4, 6: 1.2, 16: 0.9, 24: 0.95, 32: 1.0}, stalls={"ctas24"})
    result = play(job).to_dict()
    assert {"policy", "gain_pct", "ci", "steps", "candidates", "reason", "explanation", "text"} <= set(result)
    text = json.dumps(result, allow_nan=False)
    (tmp_path / result_file(3)).write_text(text)
    (tmp_path / result_file(12)).write_text("{}")
    assert read_result(tmp_path) == json.loads(text)
    assert Policy.from_dict(result["policy"]).max_ctas == 16
    assert result["explanation"][0]["kernel"] in ("my_gemm", "nvjet_hsh")


def test_a_result_has_the_same_keys_however_it_ended():
    whole = play(quiet()).to_dict()
    assert set(stopped("a reason")) == set(whole)
    json.dumps(stopped("a reason"), allow_nan=False)


def test_without_a_report_the_likely_cause_is_told(tmp_path):
    assert "torch 2.5 or later" in read_result(tmp_path)["text"]
    (tmp_path / "tuning.loaded").touch()
    assert "initialised torch.distributed" in read_result(tmp_path)["text"]


def test_the_part_that_runs_in_a_program_needs_none_of_wefts_dependencies():
    code = """
import importlib, sys
for name in ("numpy", "msgspec", "typer", "rich", "jinja2", "zstandard"):
    sys.modules[name] = None  # importing it fails
for name in ("job", "controls", "session", "conductor", "search"):
    importlib.import_module(f"weft.tuning.live.{name}")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def seen(*kernels: Kernel, comm_ms: float) -> Facts:
    exposed = comm_ms - sum(kernel.beside_ms or 0 for kernel in kernels)
    figures = {"span_ms": 40.0, "comm_ms": comm_ms, "exposed_ms": exposed}
    return Facts(collectives=8, ctas=12, cta_choices=CTAS, most_ctas=32, kernels=kernels, **figures)


def test_where_nothing_runs_beside_collectives_only_more_ctas_can_matter():
    launched_ahead = Kernel("my_gemm", "my_gemm", 40, 30, 4, 20.0, 0.0)
    (stage,) = search_stages(seen(launched_ahead, comm_ms=8), Policy())
    assert stage.changes == [{"max_ctas": count} for count in (16, 24, 32)]


def test_only_kernels_with_time_beside_collectives_are_shaped():
    often = Kernel("small", "small", 400, 300, 8, 0.4, 0.2)
    long = Kernel("my_gemm", "my_gemm", 40, 30, 4, 20.0, 6.0)
    shaped = search_stages(seen(often, long, comm_ms=8), Policy())[-1].changes
    assert [change["residency"] for change in shaped] == [3, 2]
    assert seen(often, long, comm_ms=8).beside == (long, often)


def test_times_count_only_if_every_rank_has_them():
    long = Kernel("my_gemm", "my_gemm", 40, 30, 4, 20.0, 6.0)
    timed = seen(long, comm_ms=8)
    slower = seen(long, comm_ms=9)
    assert merge([timed, slower]).comm_ms == 9
    assert merge([timed, Facts(kernels=(TRITON,))]).comm_ms is None


def measured_blocks(seed: int, gain: float, host: float) -> int:
    """How many blocks measure a proven gain if the host's pace changes every quarter of a second."""
    noise = random.Random(seed)
    shown = proof.Proof(Policy(), Policy(bucket_mb=400.0), 0.012, gain, 0.02, (1,), [])
    claims: list[proof.Claim] = []
    playing = proof.prove(
        shown, 26, random.Random(f"order {seed}"), Record(), lambda: claims.append(shown.claim())
    )
    trial, step, pace = next(playing), 0, 0.0
    try:
        while True:
            pace = pace if step % 6 else noise.gauss(0, host)
            less = gain if trial.policy.bucket_mb else 0.0
            trial, step = playing.send(Sample(40 * math.exp(pace + noise.gauss(0, 0.01) - less))), step + 1
    except StopIteration:
        assert len(claims) == max(0, (len(shown.blocks) - 8) // 4)
        return len(shown.blocks)


def test_a_gain_that_is_not_known_well_is_measured_longer():
    quiet = [measured_blocks(seed, 0.3, 0.0) for seed in range(20)]
    some = [measured_blocks(seed, 0.3, 0.06) for seed in range(20)]
    noisy = [measured_blocks(seed, 0.2, 0.15) for seed in range(20)]
    assert max(quiet) <= 12
    assert max(some) <= proof.USUAL_BLOCKS
    assert proof.USUAL_BLOCKS < max(noisy) <= proof.MOST_BLOCKS


def prove_buckets(seed: int, default_ms, buckets_ms, scatter: float = 0.01) -> proof.Claim:
    """The proof of a policy that needs meetings, in a job whose steps depend on how many there were since the last."""
    default, buckets = Policy(), Policy(bucket_mb=400.0)
    noise = random.Random(seed)
    shown = proof.Proof(default, buckets, 0.012, 0.1, scatter, (1,), [])
    playing = proof.prove(shown, 26, random.Random(f"order {seed}"), Record())
    trial, after, promised = next(playing), 0, ()
    try:
        while True:
            after = after + 1 if promised else 0
            promised = trial.then
            ms = default_ms(after) if trial.policy == default else buckets_ms(after)
            trial = playing.send(Sample(ms * math.exp(noise.gauss(0, scatter))))
    except StopIteration:
        return shown.claim()


def test_what_only_steps_after_a_meeting_show_is_not_claimed():
    """The device is idle after a meeting: there, fewer launches make the next two steps shorter, and no others."""
    claims = [
        prove_buckets(seed, lambda after: 38.0 if after < 2 else 30.0, lambda after: 30.0)
        for seed in range(20)
    ]
    assert sum(claim.proven for claim in claims) <= 1


def test_the_gain_of_a_policy_that_needs_meetings_is_that_of_a_job_that_goes_on():
    """It is proven right after meetings, where it looks larger, and then measured further away from them."""
    for seed in range(10):
        claim = prove_buckets(seed, lambda after: 40.0 if after < 4 else 32.0, lambda after: 30.0)
        assert claim.proven
        assert abs(claim.effect - math.log(32 / 30)) < 0.01
        assert claim.ends[1] - claim.ends[0] < 0.03
    gone = [
        prove_buckets(seed, lambda after: 40.0 if after < 4 else 30.0, lambda after: 30.0)
        for seed in range(20)
    ]
    assert sum(claim.proven for claim in gone) <= 1


def test_a_problem_before_the_counted_steps_counts():
    stalled, fine = Sample(90.0, problem="it stalled"), Sample(30.0)
    assert proof.mean_sample([stalled, fine, fine], 2) == Sample(30.0, problem="it stalled")


def test_a_gain_that_is_gone_in_a_job_that_goes_on_is_not_claimed():
    noise = random.Random(309)
    shown = proof.Proof(Policy(), Policy(max_ctas=16), 0.012, 0.1, 0.001, (1,), [])
    shown.first = proof.Claim(True, 0.1, (0.08, 0.12))
    for number, (arm, share) in enumerate(proof.draw_steps(random.Random(1), (), 40)):
        shown.add(Sample(100 * math.exp(noise.gauss(0, 0.001) + 0.3 * arm)), arm, share, number)
    claim = shown.claim()
    assert claim.ends[0] <= claim.effect <= claim.ends[1] < 0
    assert not claim.proven


@pytest.mark.parametrize(("slower", "blocks"), [(0.4, range(8, 13)), (-0.1, range(12, 50))])
def test_a_proven_policy_that_turns_slower_is_not_measured_for_long(slower, blocks):
    noise, order = random.Random(309), random.Random(2)
    shown = proof.Proof(Policy(), Policy(max_ctas=16), 0.012, 0.1, 0.001, (1,), [])
    shown.first = proof.Claim(True, 0.1, (0.08, 0.12))
    while not shown.measured:
        for arm, share in proof.draw_steps(order, shown.blocks, 4):
            ms = 100 * math.exp(noise.gauss(0, 0.05) + slower * arm)
            shown.add(Sample(ms), arm, share, len(shown.blocks))
    assert len(shown.blocks) in blocks
    assert shown.claim().proven == (slower < 0)


def test_blocks_that_are_too_uneven_leave_the_smaller_claim_and_the_wider_interval():
    noise = random.Random(309)
    shown = proof.Proof(Policy(), Policy(max_ctas=16), 0.012, 0.1, 0.001, (1,), [])
    shown.first = proof.Claim(True, 0.1, (0.08, 0.12))
    for number, (arm, share) in enumerate(proof.draw_steps(random.Random(2), (), 12)):
        shown.add(Sample(100 * math.exp(noise.gauss(0, 0.05) - 0.03 * arm)), arm, share, number)
    claim = shown.claim()
    assert claim.effect < 0.1
    assert claim.ends[0] < 0.08 < 0.12 <= claim.ends[1]


def test_blocks_that_could_not_show_the_gain_leave_the_claim_of_the_proof():
    noise = random.Random(309)
    shown = proof.Proof(Policy(), Policy(max_ctas=16), 0.012, 0.1, 0.001, (1,), [])
    shown.first = proof.Claim(True, 0.1, (0.08, 0.12))
    for number, (arm, share) in enumerate(proof.draw_steps(random.Random(2), (), 12)):
        shown.add(Sample(100 * math.exp(noise.gauss(0, 0.6))), arm, share, number)
    assert abs(proof.estimate(shown.blocks)) < shown.block_error() * 2
    assert shown.claim() == shown.first


@pytest.mark.parametrize("seed", range(4))
def test_the_claim_is_that_of_a_job_that_stays_under_the_policy(seed):
    """A policy that makes steps 10% faster, and all steps 5% slower after a while, as by a lower clock."""
    job = quiet(noise=0.01, ctas={3: 1.4, 6: 1.2, 16: 0.9, 24: 0.97, 32: 1.0})
    job.random.seed(seed)
    step, heat = job.step, [0.0]

    def heated(policy: Policy) -> float:
        heat[0] += 0.4 * ((policy.max_ctas == 16) - heat[0])
        return step(policy) * (1 + 0.05 * heat[0])

    job.step = heated  # type: ignore[method-assign]
    outcome = play(job, seed=seed)
    assert outcome.policy.max_ctas == 16
    assert outcome.gain_pct == pytest.approx(100 * (1 - 0.9 * 1.05), abs=1.2)
    assert outcome.ci_pct[0] - 0.5 < 5.5 < outcome.ci_pct[1] + 0.5


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((-0.01, 0.05), "(95%: -1.0 to 4.9)"),
        ((0.02 - WIDEST, 0.05), "(95%: at most 4.9)"),
        ((0.02 - WIDEST, 0.02 + WIDEST), "(too uneven to tell)"),
    ],
)
def test_an_end_that_the_steps_do_not_limit_is_not_shown(ends, text):
    """A proof of few uneven steps ended with "95%: -102.1 to 14.7"."""
    assert proof.Claim(False, 0.02, ends).interval_text == text
