"""Search: finds, within the first steps of a running job, the policy that makes its steps shortest.

`tune` is a generator. It depends on neither torch nor a clock, so anything can drive it:

    method = tune(Policy())
    trial = next(method)
    while True:
        ms = …                  # run `trial.steps` steps under `trial.policy`: mean wall time of a step
        facts = Facts(…) if trial.learn else None
        try:
            trial = method.send(Sample(ms, facts=facts))
        except StopIteration as end:
            outcome = end.value
            break

It yields a Trial (nearly always a single step), is sent one Sample for each, and returns a TunedJob. Then
`weft.tuning.live.watch.watch(outcome)`, a generator with the same protocol, watches the job to its end.

`tune`, in this order,
1. waits until steps are even: compilation, autotuning and first allocations are over; it waits longer if
   steps take a fraction of a millisecond (`weft.tuning.live.short_steps`);
2. profiles the job's launches, and which of them overlap with collectives;
3. asks whether this job was tuned before, and if so proves only that policy;
4. goes through the levers (`weft.tuning.live.levers`) in the order of the most each could win, judged by the
   profile. For each lever, the best policy so far and its changes alternate, one step each, in random order;
   those clearly behind are dropped;
5. proves the winner against the default in fresh steps (`weft.tuning.live.proof`). Each step runs under one
   of the two, drawn at random, so the probability of keeping a policy that changes nothing is at most
   `weft.tuning.live.proof.LEVEL`, whatever the noise and whatever was tried before.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from weft.measure.steadiness import UNEVEN_WINDOW, WINDOW, StepNoise, cycle, roughness, steady
from weft.policy import Policy
from weft.tuning.live.levers import (
    SETTLE,
    LeverStage,
    beyond,
    cost_of,
    preparations,
    search_stages,
    share_of,
)
from weft.tuning.live.options import Facts
from weft.tuning.live.proof import (
    FOR_KNOWN,
    KNOWN_LEVEL,
    LEVEL,
    NOISY,
    PROOF_STEPS,
    WORTH,
    Proof,
    earlier,
    prove,
)
from weft.tuning.live.search_steps import SearchSteps
from weft.tuning.live.short_steps import run_until_affordable
from weft.tuning.live.trial import Record, Sample, Trial, ask
from weft.tuning.live.tuned_job import TunedJob, why_none_was_better, why_nothing_to_try

__all__ = ["BUDGET", "SearchMethod", "Sample", "Trial", "tune"]

BUDGET = 58  # steps of the job that the search may use
MOST_NOISY = 2.5  # largest factor on the budget if steps scatter by more than NOISY
LEARN = 2
MOST_WARM_UP = 40
MOST_ROUNDS = 6
FULL_ROUNDS = 2.0  # rounds of all levers that the budget allows for
DOUBT_STEPS = 12  # steps to measure close candidates again: a change may be bad together with later ones
BUDGET_LIMIT = 140 + DOUBT_STEPS
_DROP_Z = 1.5  # standard errors behind the leader at which a candidate is dropped
LEAD_Z = 0.3  # standard errors; with a smaller lead the best so far stays

SearchMethod = Generator[Trial, Sample, TunedJob]
Logs = dict[Policy, list[float]]


def tune(
    default: Policy,
    recall: Callable[[Facts], Policy | None] = lambda facts: None,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    level: float = LEVEL,
    record: Record | None = None,
    on_proven: Callable[[Callable[[], TunedJob]], None] = lambda so_far: None,
) -> SearchMethod:
    """The whole search; see the module docstring for the protocol.

    `recall`: returns the policy that the same job ended with before, or None. `budget`: steps to use. `seed`:
    determines the random order, together with the warm-up's measured times. `level`: largest probability of
    keeping a policy that changes nothing. `record`: receives all steps. `on_proven`: receives a function that
    computes the outcome so far, because the job may end while a proven policy's gain is still being measured.
    """
    search = _Search(default, budget, record or Record(), seed=seed, level=level, on_proven=on_proven)
    yield from search.warm_up()
    facts = yield from search.learn()
    known = recall(facts)
    if known == default:
        return search.left_alone("an earlier run of this job found nothing better")
    plan = search_stages(facts, default)
    if known is not None and (plan or facts.launches):
        outcome = yield from search.prove_known(known)
        if outcome.kept:
            return outcome
    if not plan:
        return search.left_alone(why_nothing_to_try(facts))
    search.widen(plan)
    best = default
    while plan:
        stage = plan.pop(0)
        share = share_of(stage, plan)
        best = yield from search.race(best, stage.changes, share, keep=search.for_doubts)
        if stage.lever == "CTAs" and (further := beyond(facts, best)):
            plan.insert(0, LeverStage("more CTAs", further, stage.bound_ms))
    best = yield from search.race(best, search.doubts, share=1)
    if best == default:
        return search.left_alone()
    return (yield from search.prove(best, search.budget - search.spent))


def hold(policy: Policy, record: Record) -> SearchMethod:
    """Do not search: run a step under the policy, which then stays in force."""
    yield from ask(Trial(policy), record, "watch")
    return TunedJob(policy=policy, kept=False, default=policy, steps=1, reason=f"{policy.label} is in force")


@dataclass
class _Search(SearchSteps):
    """The parts of a search, and their results so far."""

    seed: int = 0
    level: float = LEVEL
    on_proven: Callable[[Callable[[], TunedJob]], None] = lambda so_far: None
    lead: float = 0.0
    """log(default time / time of the best policy so far)."""
    warm_up_steps: int = 0
    doubts: list[dict[str, Any]] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    levers: list[tuple[str, float | None]] = field(default_factory=list)
    for_doubts: int = 0
    """Steps reserved to measure close candidates again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order = random.Random(self.seed)
        self.effort, self.rough = 1.0, 0.0

    def warm_up(self) -> Generator[Trial, Sample, None]:
        """Run steps under the default until they are even, at most MOST_WARM_UP."""
        times: list[float] = []
        begin = first = self.record.number
        if begin == 0:  # the watch allows a further search only if it is affordable
            times = yield from run_until_affordable(self.default, self.record)
        if self.record.number > first + len(times):  # it had to wait: those times are too old
            times, first = [], self.record.number
        while len(times) < MOST_WARM_UP and not (steady(times) and self._quiet(times, first)):
            yield from ask(Trial(self.default), self.record, "warm-up")
            times = self.record.usual_times(first)  # convert all of them by what is known about inputs now
        self.record.inputs.settle()
        if len(times) >= MOST_WARM_UP:  # not even: scatter is unknown, or known only for earlier steps
            self._quiet(times, first)
        self.warm_up_steps = self.record.number - begin
        # Seed with measured times, so that no cycle of the job can match a fixed sequence of draws.
        self.order = random.Random(f"{self.seed} {times!r}")
        self.effort = min(max((self.rough / NOISY) ** 2, 1.0), MOST_NOISY)
        self.budget = round(self.budget * self.effort)

    def _quiet(self, times: Sequence[float], first: int) -> bool:
        """Estimate cycle and scatter; returns whether they are clear. A large scatter needs more steps."""
        start = min(len(times) // 4, len(times) - WINDOW)
        usual = times[start:]
        self.cycle = cycle(usual, first + start)
        even = [ms / math.exp(self.cycle.level(first + start + i)) for i, ms in enumerate(usual)]
        self.noise = StepNoise()
        self.noise.start(even)
        self.about(self.default).ms = even[-4:]
        rough = roughness(even)
        self.rough = min(rough, self.noise.sigma)  # a few outliers, or a few equal steps, are not typical
        return len(times) >= UNEVEN_WINDOW or (rough <= NOISY and not self.record.inputs.matter)

    def learn(self) -> Generator[Trial, Sample, Facts]:
        """Run steps in which launches are counted and timed."""
        sample = yield from ask(Trial(self.default, LEARN, learn=True), self.record, "profile")
        self.spent += LEARN
        self.facts = sample.facts or Facts(launches=False)
        return self.facts

    def widen(self, plan: Sequence[LeverStage]) -> None:
        """Widen the budget to what the levers need: FULL_ROUNDS, DOUBT_STEPS and a proof."""
        self.levers = [(stage.lever, stage.bound_ms) for stage in plan]
        needed = LEARN + DOUBT_STEPS + PROOF_STEPS[1] + round(FULL_ROUNDS * sum(map(cost_of, plan)))
        self.budget += round(max(0, min(needed, BUDGET_LIMIT) - BUDGET) * self.effort)
        self.for_doubts = round(DOUBT_STEPS * self.effort)

    def race(
        self, best: Policy, changes: Sequence[dict[str, Any]], share: float, keep: int = 0
    ) -> Generator[Trial, Sample, Policy]:
        """Race the best policy so far against its changes, alternating; returns the leader.

        `share`: share of the remaining steps to use, after those reserved for the proof and `keep` more.
        """
        if self.about(best).problem:  # found since it became the best
            best, self.lead = self.default, 0.0
        made = {dataclasses.replace(best, **change): change for change in reversed(changes)}
        arms = list(dict.fromkeys([best, *(dataclasses.replace(best, **change) for change in changes)]))
        arms = [arm for arm in arms if arm == best or not self.about(arm).problem]
        logs: Logs = {arm: [] for arm in arms}
        self.best = best
        until = self.spent + share * (self.budget - self.spent - self._for_proof() - keep)
        noise = self.noise
        rounds = MOST_ROUNDS * self.effort
        while len(arms) > 1 and len(logs[best]) < rounds and self.spent + self._cost(arms) <= until:
            turn = yield from self.turn(self.order.sample(arms, len(arms)))
            for arm, ms in turn.items():
                logs[arm].append(math.log(ms))
            arms = [arm for arm in arms if arm == best or not self.tried[arm].problem]
            noise = self.noise.including([logs[arm] for arm in arms])
            arms = self._still_racing(arms, logs, noise)
        self.noise = noise
        leader = self._leader(arms, logs)
        self._doubt(leader, arms, logs, made)
        return leader

    def _doubt(
        self, leader: Policy, arms: Sequence[Policy], logs: Logs, made: Mapping[Policy, dict[str, Any]]
    ) -> None:
        """Note the two closest arms that were not dropped: they are measured again if steps are left."""
        close = sorted((arm for arm in arms if arm != leader and logs[arm]), key=lambda arm: fmean(logs[arm]))
        names = {name for change in made.values() for name in change}
        for arm in close[:2]:
            # The change, to add to the leader; for the best before this stage, what undoes the leader's.
            self.doubts.append(made.get(arm) or {name: getattr(arm, name) for name in names})

    def _cost(self, arms: Sequence[Policy]) -> int:
        new = {one for arm in arms for one in preparations(arm)} - self.connected
        return len(arms) + sum(SETTLE[kind] for kind, _ in new)

    def _for_proof(self) -> int:
        """Steps needed to prove the current lead."""
        least, most = PROOF_STEPS[0], round(PROOF_STEPS[1] * self.effort)
        sure = self.lead - WORTH
        steps = math.ceil(6 + 16 * (self.noise.sigma / sure) ** 2) if sure > 0 else most
        return min(max(steps, least), most)

    def _still_racing(self, arms: list[Policy], logs: Logs, noise: StepNoise) -> list[Policy]:
        """Drop arms that are clearly behind; only the best so far stays if no other can be worth a change."""
        best, rounds = arms[0], len(logs[arms[0]])
        margin = _DROP_Z * noise.sigma * math.sqrt(2 / rounds) * (2 if rounds == 1 else 1)
        # After one round, the leader may just be lucky, so compare with the best so far: steps that were odd
        # against that one have been measured twice.
        lead = fmean(logs[best]) if rounds == 1 else min(fmean(logs[arm]) for arm in arms)
        kept = []
        for arm in arms:
            behind = fmean(logs[arm]) - lead
            if arm == best or behind <= margin:
                kept.append(arm)
            else:
                after = "1 round" if rounds == 1 else f"{rounds} rounds"
                self.tried[arm].note = f"{100 * math.expm1(behind):.1f}% behind after {after}"
        hope = (fmean(logs[best]) - fmean(logs[arm]) + margin for arm in kept[1:])
        return kept if any(gain > WORTH for gain in hope) else [best]

    def _leader(self, arms: Sequence[Policy], logs: Logs) -> Policy:
        """The fastest arm, or the best so far if the lead is negligible."""
        best = arms[0]
        if not logs[best]:  # there were no steps left for this stage
            return best
        leader = min(arms, key=lambda arm: fmean(logs[arm]))
        lead = fmean(logs[best]) - fmean(logs[leader])
        if lead < LEAD_Z * self.noise.sigma * math.sqrt(2 / len(logs[best])):
            return best
        self.lead += lead
        return leader

    def prove_known(self, policy: Policy) -> SearchMethod:
        """Prove an earlier run's policy against the default."""
        about, ms = self.about(policy), (yield from self.measure(policy))
        if not about.problem and ms > self.usual_ms() * math.exp(2 * self.noise.sigma):
            again = yield from self.step(policy)
            if not about.problem and again > self.usual_ms() * math.exp(2 * self.noise.sigma):
                return self.left_alone(f"{policy.label}, from an earlier run, is no longer faster")
        self.lead = math.log(self.usual_ms() / ms) if 0 < ms < math.inf else 0.0
        source, level = "an earlier run, measured again", self.level * KNOWN_LEVEL
        self.level -= level
        before = self.spent
        outcome = yield from self.prove(policy, FOR_KNOWN, source, level=level)
        self.budget += max(0, self.spent - before - FOR_KNOWN)  # leave a search that follows its steps
        self.lead = 0.0
        return outcome

    def prove(self, policy: Policy, steps: int, source: str = "", level: float | None = None) -> SearchMethod:
        """Prove the policy against the default, in fresh steps."""
        about = self.about(policy)
        if about.problem:
            return self.left_alone(f"{policy.label} {about.problem}")
        proof = Proof(
            self.default,
            policy,
            self.level if level is None else level,
            self.lead,
            self.noise.sigma,
            (1, self.cycle.period),
            earlier(self.default, self.record),
        )
        before = self.record.number

        def so_far() -> TunedJob:
            steps = self.spent + self.record.number - before
            return dataclasses.replace(self._outcome(proof, source), steps=steps)

        yield from prove(proof, steps, self.order, self.record, lambda: self.on_proven(so_far))
        self.spent += self.record.number - before
        if proof.problem:
            about.problem = proof.problem
            return self.left_alone(f"{policy.label} {proof.problem}")
        return self._outcome(proof, source)

    def left_alone(self, reason: str = "") -> TunedJob:
        """The outcome that keeps the default."""
        noise_pct = 100 * self.noise.sigma
        why = reason or why_none_was_better(self.facts, list(self.tried.values()), self.default, noise_pct)
        return self._outcome(reason=why)

    def _outcome(self, proof: Proof | None = None, source: str = "", *, reason: str = "") -> TunedJob:
        """The outcome so far: the default stays unless a proof has shown a gain."""
        default_ms = self.about(self.default).typical_ms
        outcome = TunedJob(
            policy=self.default,
            kept=False,
            default=self.default,
            steps=self.spent,
            warm_up_steps=self.warm_up_steps,
            noise_pct=100 * self.noise.sigma,
            default_ms=default_ms,
            best_ms=default_ms,
            tried=tuple(one for one in self.tried.values() if one.ms or one.problem),
            facts=self.facts,
            levers=tuple(self.levers),
            reason=reason,
        )
        outcome = outcome.after(proof, source) if proof else outcome
        return dataclasses.replace(outcome, cost_ms=self.cost_ms(outcome.default_ms))
