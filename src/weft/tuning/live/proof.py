"""Proof: is a policy faster than the default? In fresh steps, each under one of the two, drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from weft.measure.sequential import Coins, Step, confidence_interval, estimate
from weft.policy import Policy
from weft.tuning.live.trial import Record, Sample, Trial, ask_all

LEVEL = 0.012
"""Largest probability, over a whole search, of keeping a policy that changes nothing. Further searches of the
same job get less each, so that it is at most 2% over its life."""
KNOWN_LEVEL = 0.25  # of that, for the check of an earlier run's policy
FOR_KNOWN = 24  # steps for that check
PROOF_STEPS = (18, 26)  # kept for a proof: at least and at most
FIRST, MORE, _LEAST = 12, 4, 8  # steps decided in advance
EACH = 4  # steps under each policy, at least
BALANCE, MOST_BALANCE = 0.08, 0.3  # how much less likely an arm is for each step that it is ahead
NOISY = 0.018  # scatter of a step from which a search may use more steps
PROMISING_STEPS = 64  # of a proof that looks promising when its steps are used up
_PROMISING = 0.3  # capital of the test
WORTH = 0.005  # a smaller gain is not worth a change
HOPELESS_Z = 2.5
LEAST_EFFECT, MOST_EFFECT = 0.01, 0.4


@dataclass(frozen=True)
class Claim:
    """What a proof has shown. Effects are logarithms of default time over policy time."""

    proven: bool
    effect: float = 0.0
    ends: tuple[float, float] = (0.0, 0.0)
    """95% confidence interval, valid at any stopping time."""

    @property
    def less_pct(self) -> tuple[float, float, float]:
        """Percent of a step's time that is saved: the estimate and the ends of its interval."""
        gain, low, high = (-100 * math.expm1(-value) for value in (self.effect, *self.ends))
        return gain, low, high


@dataclass
class Proof:
    """A running proof. `level`: largest probability of success if the two do not differ.

    `lead`: the effect to expect. `sigma`: scatter of a step. `before`: earlier steps of the default.
    """

    default: Policy
    policy: Policy
    level: float
    lead: float
    sigma: float
    periods: tuple[int, ...]
    before: Sequence[Step]
    drawn: list[Step] = field(default_factory=list)
    problem: str = ""
    """Why the policy may not be used at all."""

    def __post_init__(self) -> None:
        middle = min(max(self.lead, 2 * LEAST_EFFECT), MOST_EFFECT / 2)
        self.effects = middle / 2, middle, 2 * middle
        self.coins = Coins(self.effects, self.periods)
        for step in self.before:
            self.coins.add(step)

    def add(self, sample: Sample, arm: int, share: float, number: int) -> None:
        """Note a drawn step."""
        self.problem = self.problem or sample.problem
        if not self.problem:
            step = Step(math.log(max(sample.ms, 1e-6)), arm, share, number)
            self.coins.add(step)
            self.drawn.append(step)

    def times(self, arm: int) -> list[float]:
        """Milliseconds of the steps under the policy (1) or the default (0)."""
        return [math.exp(step.log_ms) for step in self.drawn if step.arm == arm]

    @property
    def effect(self) -> float:
        return estimate(self.drawn, max(self.periods))

    @property
    def at_meetings(self) -> bool:
        """Whether switching between the two needs a meeting of all ranks."""
        return self.policy.models != self.default.models

    @property
    def promising(self) -> bool:
        """Whether more steps may well lead to a proof."""
        return not self.problem and self.coins.capital > _PROMISING and self.effect > WORTH

    def proven(self) -> bool | None:
        """Whether it is proven, or hopeless; None: open."""
        if self.problem:
            return False
        count, changed = len(self.drawn), sum(step.arm for step in self.drawn)
        if min(changed, count - changed) < EACH:
            return None
        if self.coins.capital >= 1 / self.level:
            return True
        error = self.sigma * math.sqrt(1 / changed + 1 / (count - changed))
        return False if self.effect + HOPELESS_Z * error < WORTH else None

    def claim(self) -> Claim:
        """What has been shown so far."""
        effect = self.effect
        ends = confidence_interval([*self.before, *self.drawn], effect, self.effects, self.periods)
        return Claim(self.proven() is True and effect > WORTH and ends[0] > 0, effect, ends)


def prove(proof: Proof, steps: int, order: random.Random, record: Record) -> Generator[Trial, Sample, Proof]:
    """The policy and the default in random order until the answer is clear, or `steps` are used up."""
    while True:
        drawn = proof.drawn
        draws = draw_steps(order, drawn, MORE if drawn else min(FIRST, max(steps, _LEAST)))
        number = record.number
        policies = [proof.policy if arm else proof.default for arm, _ in draws]
        samples = yield from ask_all(policies, record, "proof")
        for index, ((arm, share), sample) in enumerate(zip(draws, samples, strict=True)):
            proof.add(sample, arm, share, number + index)
        go_on = proof.promising and (proof.sigma > NOISY or proof.at_meetings)
        more = max(steps, PROMISING_STEPS) if go_on else steps
        if proof.problem or proof.proven() is not None or len(drawn) + MORE > more:
            return proof


def draw_steps(order: random.Random, drawn: Sequence[Step], count: int) -> list[tuple[int, float]]:
    """Arms of the next steps, with the probability of arm 1 in each. The arm with fewer steps is likelier."""
    ahead = sum(1 if step.arm else -1 for step in drawn)
    draws = []
    for _ in range(count):
        share = 0.5 - min(max(BALANCE * ahead, -MOST_BALANCE), MOST_BALANCE)
        arm = int(order.random() < share)
        ahead += 1 if arm else -1
        draws.append((arm, share))
    return draws


def earlier(default: Policy, record: Record) -> list[Step]:
    """Earlier steps under the default, which give the level."""
    index = record.policies.index(default) if default in record.policies else -1
    known = [s for s in record.steps if s[2] == index and s[1] > 0 and s[3] != "profile"]
    return [Step(math.log(ms), 0, 0.0, number) for number, ms, _, _ in known[-32:] if math.isfinite(ms)]
