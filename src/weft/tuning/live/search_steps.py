"""How a live search measures steps: odd ones again, slow ones twice; and what the search costs the job."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from statistics import median

from weft.measure.steadiness import Cycle, StepNoise
from weft.policy import Policy
from weft.tuning.live.levers import SETTLE, preparations
from weft.tuning.live.proof import PROOF_STEPS
from weft.tuning.live.trial import Record, Sample, Trial, ask_all
from weft.tuning.live.tuned_job import Tried

SLOW = 1.3  # times the default: a policy this slow is dropped at once
ODD_Z, ODD_LEAST = 4.0, 0.02  # standard deviations, and least excess, above which a step is measured again


@dataclass
class SearchSteps:
    """The steps of a search so far, and how further ones are measured."""

    default: Policy
    budget: int
    """Steps of the job that the search may use."""
    record: Record
    spent: int = 0
    noise: StepNoise = field(default_factory=StepNoise)
    cycle: Cycle = field(default_factory=Cycle)
    tried: dict[Policy, Tried] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connected = set(preparations(self.default))
        self.best = self.default
        self._first, self._paused_ms = self.record.number, self.record.paused_ms

    def turn(self, arms: Sequence[Policy]) -> Generator[Trial, Sample, dict[Policy, float]]:
        """Run a step under each policy; returns ms by policy.

        The first step under a policy is a separate trial. A policy that is clearly slower gets a second
        chance, because one odd step proves nothing; if it is slow again, it is dropped.
        """
        ms: dict[Policy, float] = {}
        if all(self.about(arm).ms for arm in arms):
            for arm, found in zip(arms, (yield from self._ask_all(arms)), strict=True):
                ms[arm] = found
            for arm in arms:
                ms[arm] = yield from self._unless_odd(arm, ms[arm])
        else:
            for arm in arms:
                ms[arm] = yield from self.measure(arm)
        for arm in [arm for arm in arms if arm != self.default and self._slow(ms[arm])]:
            if not self.tried[arm].problem and self.spent + 2 <= self.budget - PROOF_STEPS[0]:
                yield from self.step(self.default)
                ms[arm] = yield from self.measure(arm)
                if self._slow(ms[arm]) and not self.tried[arm].problem:
                    self.tried[arm].problem = f"took more than {SLOW} times as long as the default"
        for arm in arms:
            self.tried[arm].ms.extend([ms[arm]] if math.isfinite(ms[arm]) else [])
        return ms

    def measure(self, policy: Policy) -> Generator[Trial, Sample, float]:
        """Run one step under a policy; returns ms. A somewhat slow step is measured once more."""
        ms = yield from self.step(policy)
        new = preparations(policy) - self.connected
        self.connected |= new
        # A new communicator connects in its first step; new buckets are reordered in their second.
        for _ in range(max((SETTLE[kind] for kind, _ in new), default=0)):
            if not self.about(policy).problem:
                ms = yield from self.step(policy)
        return (yield from self._unless_odd(policy, ms))

    def _unless_odd(self, policy: Policy, ms: float) -> Generator[Trial, Sample, float]:
        about = self.about(policy)
        excess = math.log(ms / median(about.ms or self.tried[self.best].ms))
        odd = excess > max(ODD_Z * self.noise.sigma, ODD_LEAST) and self.spent < self.budget - PROOF_STEPS[0]
        if odd and not about.problem and (policy == self.default or not self._slow(ms)):
            ms = min(ms, (yield from self.step(policy)))
        return ms

    def _slow(self, ms: float) -> bool:
        slow = max(SLOW, math.exp(3 * self.noise.sigma))
        return ms > slow * median(self.tried[self.default].ms[-8:])

    def step(self, policy: Policy) -> Generator[Trial, Sample, float]:
        """Run one step under a policy; returns ms."""
        return (yield from self._ask_all([policy]))[0]

    def _ask_all(self, policies: Sequence[Policy]) -> Generator[Trial, Sample, list[float]]:
        """Run a step under each policy; returns ms of each."""
        first = self.record.number
        samples = yield from ask_all(policies, self.record, "search")
        last = self.record.number - len(policies)
        self.spent += last - first  # those that had to be measured again, less those that did not run
        return [self._noted(policies[i], sample, last + i) for i, sample in enumerate(samples)]

    def _noted(self, policy: Policy, sample: Sample, number: int) -> float:
        """Count a step; returns its ms without what its place in the job's cycle explains."""
        self.spent += 1
        if sample.problem:
            self.about(policy).problem = sample.problem
        return max(sample.ms, 1e-6) / math.exp(self.cycle.level(number))

    def cost_ms(self, usual_ms: float | None) -> float:
        """Ms that the search has cost the job so far: longer steps, and waits between them."""
        waited_ms = self.record.paused_ms - self._paused_ms
        return waited_ms + (self.record.extra_ms(self._first, self.default, usual_ms) if usual_ms else 0.0)

    def usual_ms(self) -> float:
        """Median ms of a step under the default."""
        return median(self.about(self.default).ms or [0.0])

    def about(self, policy: Policy) -> Tried:
        """What was measured for a policy."""
        return self.tried.setdefault(policy, Tried(policy))
