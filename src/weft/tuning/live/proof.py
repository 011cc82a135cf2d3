"""Proof: is a policy faster than the default? In fresh steps, each under one of the two, drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from weft.measure.sequential import Coins, Step, estimate, interval
from weft.policy import Policy
from weft.tuning.live.trial import Record, Sample, Trial, ask_all

LEVEL = 0.012
"""Most probability, over a whole search, of keeping a policy that changes nothing. Further searches of the
same job get less each, so that it is at most 2% over its life."""
KNOWN_LEVEL = 0.25  # of that, for the check of what an earlier run found
FOR_KNOWN = 24  # steps for that check
PROOF_STEPS = (18, 26)  # kept for a proof: at least and at most
FIRST, MORE, LEAST = 12, 4, 8  # steps decided in advance
EACH = 4  # steps under each policy, at least
NOISY = 0.018  # scatter of a step from which a search may use more steps
PROMISING_STEPS = 48  # of a proof that looks promising, in a noisy job, when its steps are used up
PROMISING = 0.3  # capital of the test
WORTH = 0.005  # a smaller gain is not worth a change
HOPELESS_Z = 2.5
LEAST_EFFECT, MOST_EFFECT = 0.01, 0.4


@dataclass(frozen=True)
class Claim:
    """What a proof has shown. Effects are logarithms of default time over policy time."""

    policy: Policy
    proven: bool
    default_ms: tuple[float, ...]
    policy_ms: tuple[float, ...]
    effect: float = 0.0
    ends: tuple[float, float] = (0.0, 0.0)
    """95% confidence interval, valid at any stopping time."""
    problem: str = ""
    """Why the policy may not be used at all."""

    @property
    def less(self) -> tuple[float, float, float]:
        """Share of a step's time that is saved: the estimate and the ends of its interval."""
        gain, low, high = (-math.expm1(-value) for value in (self.effect, *self.ends))
        return gain, low, high


def prove(
    default: Policy,
    policy: Policy,
    steps: int,
    *,
    level: float,
    lead: float,
    sigma: float,
    periods: Sequence[int],
    order: random.Random,
    record: Record,
) -> Generator[Trial, Sample, Claim]:
    """The policy and the default in random order until the answer is clear, or `steps` are used up.

    `level`: most probability of a proof where the two do not differ. `lead`: the effect to expect.
    """
    effects, before, drawn = _effects(lead), _before(default, record), list[Step]()
    coins = Coins(effects, periods)
    for step in before:
        coins.add(step)
    times: dict[Policy, list[float]] = {default: [], policy: []}
    while True:
        arms = [int(order.random() < 0.5) for _ in range(MORE if drawn else min(FIRST, max(steps, LEAST)))]
        number = record.number
        samples = yield from ask_all([policy if arm else default for arm in arms], record, "proof")
        problem = next((sample.problem for sample in samples if sample.problem), "")
        if problem:
            return Claim(policy, False, tuple(times[default]), tuple(times[policy]), problem=problem)
        for index, (arm, sample) in enumerate(zip(arms, samples, strict=True)):
            step = Step(math.log(max(sample.ms, 1e-6)), arm, 0.5, number + index)
            coins.add(step)
            drawn.append(step)
            times[policy if arm else default].append(sample.ms)
        done = _verdict(coins.capital, drawn, steps, level, sigma, periods)
        if done is not None:
            effect = estimate(drawn, max(periods))
            ends = interval([*before, *drawn], effect, effects, periods)
            proven = done and effect > WORTH and ends[0] > 0
            return Claim(policy, proven, tuple(times[default]), tuple(times[policy]), effect, ends)


def _verdict(
    capital: float, drawn: Sequence[Step], steps: int, level: float, sigma: float, periods: Sequence[int]
) -> bool | None:
    """Whether it is proven; None: go on."""
    count = len(drawn)
    changed = sum(step.arm for step in drawn)
    enough = min(changed, count - changed) >= EACH
    if capital >= 1 / level and enough:
        return True
    effect = estimate(drawn, max(periods))
    error = sigma * math.sqrt(1 / max(1, changed) + 1 / max(1, count - changed))
    if enough and effect + HOPELESS_Z * error < WORTH:
        return False
    promising = sigma > NOISY and capital > PROMISING and effect > WORTH
    return False if count + MORE > (max(steps, PROMISING_STEPS) if promising else steps) else None


def _effects(lead: float) -> tuple[float, ...]:
    """What to bet on: about the effect that the race has shown."""
    middle = min(max(lead, 2 * LEAST_EFFECT), MOST_EFFECT / 2)
    return middle / 2, middle, 2 * middle


def _before(default: Policy, record: Record) -> list[Step]:
    """Earlier steps under the default, which give the level."""
    index = record.policies.index(default) if default in record.policies else -1
    known = [s for s in record.steps if s[2] == index and s[1] > 0 and s[3] != "profile"]
    return [Step(math.log(ms), 0, 0.0, number) for number, ms, _, _ in known[-32:] if math.isfinite(ms)]
