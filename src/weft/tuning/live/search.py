"""Online: which policy makes the step of a running job shortest, found within its first steps.

The method is a generator: it yields Trials, is sent what each of them took, and returns an Outcome. It knows
neither torch nor time; whoever runs it applies the policies. In this order it
1. waits until steps are even: compilation, autotuning and first allocations are over;
2. learns what the job launches, and what of that runs beside collectives;
3. asks whether this job was tuned before, and if so tries only that;
4. goes through the stages (the collectives' CTAs, then head start and priority, then residency). In a stage
   the best policy so far and its changes take turns, a step each, so that drift of the job hits all alike;
   what is clearly behind drops out;
5. lets the winner and the default take turns, in fresh steps. Only a gain beyond doubt is kept.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from weft.measure.steadiness import Noise, steady
from weft.policy import Policy
from weft.tuning.live.options import Facts, beyond, stages
from weft.tuning.live.outcome import Outcome, Tried, why_none_was_better, why_nothing_to_try

BUDGET = 57  # steps of the job that tuning may use
FOR_KNOWN = 24  # of these, for the check of what an earlier run found
LEARN = 2
MOST_WARM_UP = 40
MOST_ROUNDS = 6
SLOW = 1.3  # times the default: out at once
DROP_Z = 1.5  # standard errors behind the leader
LEAD_Z = 0.3  # standard errors; a shorter lead changes nothing
ODD_Z, ODD_LEAST = 4.0, 0.02  # a step this far above expectation is measured once more
PROOF_Z = 2.0  # standard errors; a little over 1.96, because the comparison is looked at more than once
PROOF_PAIRS = (4, 10)  # turns of winner and default: at least, and kept for it at most
WORTH = 0.005  # a smaller gain is not worth a change


@dataclass(frozen=True)
class Trial:
    """Steps of the job to be run under a policy. `learn`: count what runs beside collectives."""

    policy: Policy
    steps: int = 1
    learn: bool = False


@dataclass(frozen=True)
class Sample:
    """What a trial took."""

    ms: float
    """One step, on the slowest rank."""
    problem: str = ""
    """Why the trial does not count: it stalled, or the policy could not be applied."""
    facts: Facts | None = None
    """What was learnt, where that was asked for."""


Method = Generator[Trial, Sample, Outcome]
Logs = dict[Policy, list[float]]


def tune(
    default: Policy,
    recall: Callable[[Facts], Policy | None] = lambda facts: None,
    *,
    budget: int = BUDGET,
    seed: int = 0,
) -> Method:
    """The whole method. `recall`: the policy that the same job ended with before, if there is one."""
    search = _Search(default, budget, seed)
    yield from search.warm_up()
    facts = yield from search.learn()
    known = recall(facts)
    if known == default:
        return search.left_alone("an earlier run of this job found nothing better")
    if known is not None:
        outcome = yield from search.prove(known, FOR_KNOWN, source="an earlier run, measured again")
        if outcome.kept:
            return outcome
    plan = stages(facts, default)
    if not plan:
        return search.left_alone(why_nothing_to_try(facts))
    best = default
    if "max_ctas" in plan[0][0]:
        best = yield from search.race(best, plan.pop(0), share=1 / (len(plan) + 1))
        further = beyond(facts, best)
        plan = [further, *plan] if further else plan
    while plan:
        best = yield from search.race(best, plan.pop(0), share=1 / (len(plan) + 1))
    best = yield from search.race(best, search.doubts, share=1)
    if best == default:
        return search.left_alone()
    return (yield from search.prove(best, budget - search.spent))


@dataclass
class _Search:
    """The steps of the method, and what they have shown so far."""

    default: Policy
    budget: int
    seed: int
    spent: int = 0
    lead: float = 0.0
    """Of the best so far over the default, in logarithms."""
    warm_up_steps: int = 0
    doubts: list[dict[str, Any]] = field(default_factory=list)
    noise: Noise = field(default_factory=Noise)
    tried: dict[Policy, Tried] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        self.order = random.Random(self.seed)  # never the program's own random numbers
        self.connected = {self.default.max_ctas}
        self.best = self.default

    def warm_up(self) -> Generator[Trial, Sample, None]:
        """Steps under the default until they are even, or patience ends."""
        times: list[float] = []
        while not steady(times) and len(times) < MOST_WARM_UP:
            sample = yield Trial(self.default)
            times.append(sample.ms)
        self.warm_up_steps = len(times)
        self.noise.start(times)
        self._about(self.default).ms.extend(times[-4:])

    def learn(self) -> Generator[Trial, Sample, Facts]:
        """Steps in which launches are counted."""
        sample = yield Trial(self.default, LEARN, learn=True)
        self.spent += LEARN
        self.facts = sample.facts or Facts(launches=False)
        return self.facts

    def race(
        self, best: Policy, changes: Sequence[dict[str, Any]], share: float
    ) -> Generator[Trial, Sample, Policy]:
        """The best policy so far against its changes, by turns; returns the one that leads.

        `share`: of the steps left, after those kept for the proof, that it may use.
        """
        if self._about(best).problem:  # found out since it became the best
            best, self.lead = self.default, 0.0
        arms = list(dict.fromkeys([best, *(dataclasses.replace(best, **change) for change in changes)]))
        arms = [arm for arm in arms if arm == best or not self._about(arm).problem]
        logs: Logs = {arm: [] for arm in arms}
        self.best = best
        until = self.spent + share * (self.budget - self.spent - self._for_proof())
        noise, order = self.noise, list[Policy]()
        while len(arms) > 1 and len(logs[best]) < MOST_ROUNDS and self.spent + self._cost(arms) <= until:
            order = self._order(arms, order if len(logs[best]) % 2 else [])
            turn = yield from self._turn(order)
            for arm, ms in turn.items():
                logs[arm].append(math.log(ms))
            arms = [arm for arm in arms if arm == best or not self.tried[arm].problem]
            noise = self.noise.including([logs[arm] for arm in arms])
            arms = self._still_racing(arms, logs, noise)
        self.noise = noise
        leader = self._leader(arms, logs)
        self._doubt(leader, arms, logs, {name for change in changes for name in change})
        return leader

    def _doubt(self, leader: Policy, arms: Sequence[Policy], logs: Logs, names: set[str]) -> None:
        """Note what was not clearly behind, the closest first: it gets a second look if steps are left."""
        close = sorted((arm for arm in arms if arm != leader and logs[arm]), key=lambda arm: fmean(logs[arm]))
        self.doubts += [{name: getattr(arm, name) for name in names} for arm in close[:2]]

    def _order(self, arms: Sequence[Policy], last: Sequence[Policy]) -> list[Policy]:
        """A random order, and in the next turn its reverse, so that drift cancels."""
        if last:
            return [arm for arm in reversed(last) if arm in arms]
        shuffled = list(arms)
        self.order.shuffle(shuffled)
        return shuffled

    def _cost(self, arms: Sequence[Policy]) -> int:
        return len(arms) + len({arm.max_ctas for arm in arms} - self.connected)

    def _for_proof(self) -> int:
        """Steps that it will take to prove the lead there is now."""
        least, most = PROOF_PAIRS
        sure = self.lead - WORTH
        pairs = math.ceil(2 * ((PROOF_Z + 1) * self.noise.sigma / sure) ** 2) if sure > 0 else most
        return 2 * min(max(pairs, least), most)

    def _still_racing(self, arms: list[Policy], logs: Logs, noise: Noise) -> list[Policy]:
        """Without those clearly behind; only the best so far where no other can still be worth a change."""
        best, rounds = arms[0], len(logs[arms[0]])
        margin = DROP_Z * noise.sigma * math.sqrt(2 / rounds) * (2 if rounds == 1 else 1)
        # After one turn an odd step may hide a good one; those behind the best so far were measured twice.
        lead = fmean(logs[best]) if rounds == 1 else min(fmean(logs[arm]) for arm in arms)
        kept = []
        for arm in arms:
            behind = fmean(logs[arm]) - lead
            if arm == best or behind <= margin:
                kept.append(arm)
            else:
                self.tried[arm].note = f"{100 * math.expm1(behind):.1f}% behind after {rounds} rounds"
        hope = (fmean(logs[best]) - fmean(logs[arm]) + margin for arm in kept[1:])
        return kept if any(gain > WORTH for gain in hope) else [best]

    def _leader(self, arms: Sequence[Policy], logs: Logs) -> Policy:
        """The fastest; the best so far where its lead is next to nothing."""
        best = arms[0]
        if not logs[best]:  # there were no steps left for this stage
            return best
        leader = min(arms, key=lambda arm: fmean(logs[arm]))
        lead = fmean(logs[best]) - fmean(logs[leader])
        if lead < LEAD_Z * self.noise.sigma * math.sqrt(2 / len(logs[best])):
            return best
        self.lead += lead
        return leader

    def prove(self, policy: Policy, steps: int, source: str = "") -> Method:
        """The policy and the default by turns (ABBA, so that drift cancels), until the answer is clear."""
        gains: list[float] = []
        until = self.spent + steps
        while True:
            pair = (self.default, policy) if len(gains) % 2 == 0 else (policy, self.default)
            ms = yield from self._turn(pair)
            if self.tried[policy].problem:
                return self.left_alone(f"{policy.label} {self.tried[policy].problem}")
            gains.append(math.log(ms[self.default] / ms[policy]))
            gain, error = self.noise.paired(gains)
            low, high = gain - PROOF_Z * error, gain + PROOF_Z * error
            last = self.spent + 2 > until
            if len(gains) >= PROOF_PAIRS[0] or last:
                if gain > WORTH and (low > WORTH or (last and low > 0)):
                    return self._keep(policy, gain, (low, high), source)
                if high < WORTH or last:
                    return self._unproven(policy, gain, (low, high))

    def _turn(self, arms: Sequence[Policy]) -> Generator[Trial, Sample, dict[Policy, float]]:
        """A step under each policy, in ms.

        One that is clearly slower is left at once. It gets a second chance, as one odd step proves nothing,
        and if that is slow too it is out.
        """
        ms = {}
        for arm in arms:
            ms[arm] = yield from self._measure(arm)
        for arm in [arm for arm in arms if arm != self.default and self._slow(ms[arm])]:
            if not self.tried[arm].problem and self.spent + 2 <= self.budget:
                yield from self._step(self.default)
                ms[arm] = yield from self._measure(arm)
                if self._slow(ms[arm]) and not self.tried[arm].problem:
                    self.tried[arm].problem = f"was more than {SLOW} times as slow"
        for arm in arms:
            self.tried[arm].ms.extend([ms[arm]] if math.isfinite(ms[arm]) else [])
        return ms

    def _measure(self, policy: Policy) -> Generator[Trial, Sample, float]:
        """One step under a policy, in ms; a little slow, it is measured once more."""
        about = self._about(policy)
        ms = yield from self._step(policy)
        if policy.max_ctas not in self.connected and not about.problem:
            # A new communicator connects in its first step: that one tells nothing.
            self.connected.add(policy.max_ctas)
            ms = yield from self._step(policy)
        excess = math.log(ms / median(about.ms or self.tried[self.best].ms))
        odd = excess > max(ODD_Z * self.noise.sigma, ODD_LEAST) and self.spent < self.budget
        if odd and not about.problem and (policy == self.default or not self._slow(ms)):
            ms = min(ms, (yield from self._step(policy)))
        return ms

    def _slow(self, ms: float) -> bool:
        return ms > SLOW * median(self.tried[self.default].ms[-8:])

    def _step(self, policy: Policy) -> Generator[Trial, Sample, float]:
        sample = yield Trial(policy)
        self.spent += 1
        if sample.problem:
            self._about(policy).problem = sample.problem
        return max(sample.ms, 1e-6)

    def _about(self, policy: Policy) -> Tried:
        return self.tried.setdefault(policy, Tried(policy))

    def _keep(self, policy: Policy, gain: float, bounds: tuple[float, float], source: str) -> Outcome:
        low, high = map(_less, bounds)
        return self._outcome(policy, kept=True, gain_pct=_less(gain), ci_pct=(low, high), source=source)

    def _unproven(self, policy: Policy, gain: float, bounds: tuple[float, float]) -> Outcome:
        low, high = map(_less, bounds)
        return self.left_alone(
            f"{policy.label} was best, but its gain of {_less(gain):.1f}% (95%: {low:.1f} to {high:.1f}) "
            "is not beyond doubt"
        )

    def left_alone(self, reason: str = "") -> Outcome:
        """The default it is."""
        noise_pct = 100 * self.noise.sigma
        why = reason or why_none_was_better(self.facts, list(self.tried.values()), self.default, noise_pct)
        return self._outcome(self.default, kept=False, reason=why)

    def _outcome(self, policy: Policy, **more: Any) -> Outcome:
        default, best = self._about(self.default), self._about(policy)
        return Outcome(
            policy=policy,
            steps=self.spent,
            warm_up_steps=self.warm_up_steps,
            noise_pct=100 * self.noise.sigma,
            default_ms=median(default.ms) if default.ms else None,
            best_ms=median(best.ms) if best.ms else None,
            tried=tuple(one for one in self.tried.values() if one.ms or one.problem),
            facts=self.facts,
            **more,
        )


def _less(gain: float) -> float:
    """A gain in logarithms as percent less time."""
    return -100 * math.expm1(-gain)
