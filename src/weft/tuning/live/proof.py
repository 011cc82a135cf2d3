"""Proof: tests whether a policy beats the default, in fresh steps that run under one of them at random."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from weft.measure.sequential import WIDEST, Coins, Step, confidence_interval, estimate
from weft.policy import Policy
from weft.tuning.live.trial import Record, Sample, Trial, ask_all

LEVEL = 0.012
"""Largest probability, over a whole search, of keeping a policy that changes nothing. Each further search of
the same job gets a lower level, so that the probability is at most 2% over the job's life."""
KNOWN_LEVEL = 0.25  # share of LEVEL for the check of an earlier run's policy
FOR_KNOWN = 24  # steps for that check
PROOF_STEPS = (18, 26)  # fewest and most steps reserved for a proof
FIRST, MORE, _LEAST = 12, 4, 8  # draws decided in advance: the first ones, each later batch, and the fewest
EACH = 4  # fewest steps under each policy
BALANCE, MOST_BALANCE = 0.08, 0.3  # probability that an arm loses for each step it is ahead, and its limit
STEPS_AFTER_MEETING, _COUNTED = 4, 2  # steps per draw at meetings; the mean of the last _COUNTED counts
BLOCK, _COUNTED_OF_BLOCK = 12, 8  # approximately the same for blocks, once the policy is proven
_MANY = 6
USUAL_BLOCKS, MOST_BLOCKS = 20, 48  # MOST_BLOCKS if the error exceeds _LARGE_ERROR of the effect
_LARGE_ERROR = 1 / 8
_NEIGHBORS = 1.2  # differences between neighboring blocks scatter more than those between all
_PRECISE_ERROR = 0.005, 0.05  # standard error at which blocks suffice: absolute, or as share of the effect
NOISY = 0.018  # relative scatter of a step above which a search may use more steps
PROMISING_DRAWS = 64  # most draws of a proof that looks promising when its steps are used up
PROMISING_AT_MEETINGS = 128  # the same if each draw needs a meeting: the watch cannot continue such a proof
_PROMISING = 0.1  # test capital above which a proof looks promising
WORTH = 0.005  # a smaller gain is not worth a change
HOPELESS_Z = 2.5
LATER_LEVEL = 0.8  # confidence required before an effect on the next step is taken into account
LEAST_EFFECT, MOST_EFFECT = 0.01, 0.4


@dataclass(frozen=True)
class Claim:
    """What a proof has shown. Effects are log(default time / policy time)."""

    proven: bool
    effect: float = 0.0
    ends: tuple[float, float] = (0.0, 0.0)
    """95% confidence interval."""

    @property
    def less_pct(self) -> tuple[float, float, float]:
        """Percentage of a step's time saved: the estimate and the ends of its interval."""
        gain, low, high = (-100 * math.expm1(-value) for value in (self.effect, *self.ends))
        return gain, low, high

    @property
    def interval_text(self) -> str:
        """The interval of `less_pct`, without an end that these steps do not limit."""
        _, low, high = self.less_pct
        below, above = (abs(end - self.effect) < 0.99 * WIDEST for end in self.ends)
        if below and above:
            return f"(95%: {low:.1f} to {high:.1f})"
        return f"(95%: at most {high:.1f})" if above else "(too uneven to tell)"


@dataclass
class Proof:
    """A running proof. `level`: largest probability of success if the policies do not differ.

    `lead`: the expected effect. `sigma`: relative scatter of a step. `periods`: cycle lengths of the job, in
    steps. `before`: earlier steps under the default.
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
    """Why the policy may not be used at all; empty if it may."""
    first: Claim | None = None
    """The claim at the moment of proof; None before. Effects look largest then, so measuring goes on."""
    reached: bool = False
    """Whether the capital has ever reached what a proof needs; its later value does not matter."""
    blocks: list[Step] = field(default_factory=list)
    """Blocks of consecutive steps under one policy, measured after the proof; each Step holds a block's mean.
    Single steps may show more than a job gains: on an H200, 9.8% when the job gained 5.4%."""

    def __post_init__(self) -> None:
        middle = min(max(self.lead, 2 * LEAST_EFFECT), MOST_EFFECT / 2)
        self.effects = middle / 2, middle, 2 * middle
        self.coins = Coins(self.effects, self.periods)
        for step in self.before:
            self.coins.add(step)

    def add(self, sample: Sample, arm: int, share: float, number: int) -> None:
        """Add a drawn step or block."""
        self.problem = self.problem or sample.problem
        if not self.problem:
            step = Step(math.log(max(sample.ms, 1e-6)), arm, share, number)
            if self.in_blocks:
                self.blocks.append(step)
            else:
                self.coins.add(step)
                self.drawn.append(step)
                self.reached = self.reached or (self._both_known and self.coins.capital >= 1 / self.level)

    def times(self, arm: int) -> list[float]:
        """Times in ms of the blocks, or else the steps, under the policy (arm 1) or the default (arm 0)."""
        return [math.exp(step.log_ms) for step in self.blocks or self.drawn if step.arm == arm]

    @property
    def effect(self) -> float:
        return estimate(self.drawn, max(self.periods))

    @property
    def at_meetings(self) -> bool:
        """Whether switching between policy and default needs a meeting of all ranks."""
        return self.policy.models != self.default.models

    @property
    def in_blocks(self) -> bool:
        """Whether the policy is proven, so that its effect is now measured in blocks of steps."""
        return self.first is not None

    @property
    def run(self) -> tuple[int, int]:
        """Steps per draw, and how many of them (the last ones) count; of a block, whole cycles count."""
        if self.in_blocks:
            period = max(self.periods)
            counted = period * max(1, round(_COUNTED_OF_BLOCK / period))
            return BLOCK - _COUNTED_OF_BLOCK + counted, counted
        # After a meeting the device is idle, so the first step takes longer than in a running job; the next
        # one, whose launches are ahead by then, takes less.
        return (STEPS_AFTER_MEETING, _COUNTED) if self.at_meetings else (1, 1)

    @property
    def measured(self) -> bool:
        """Whether a proven policy's effect is known well enough, has vanished, or no block is left."""
        assert self.first is not None
        if self.problem:
            return True
        count, changed = len(self.blocks), sum(step.arm for step in self.blocks)
        (effect, half), error = self._by_blocks(), self.block_error()
        if count + MORE > (MOST_BLOCKS if error > _LARGE_ERROR * abs(effect) else USUAL_BLOCKS):
            return True
        least, share = _PRECISE_ERROR
        clear = error <= max(least, share * self.first.effect) or effect + half < 0
        return clear and min(changed, count - changed) >= EACH

    @property
    def promising(self) -> bool:
        """Whether more steps are likely enough to lead to a proof."""
        return not self.problem and self.coins.capital > _PROMISING and self.effect > WORTH

    @property
    def _both_known(self) -> bool:
        """Whether both arms have enough steps."""
        changed = sum(step.arm for step in self.drawn)
        return min(changed, len(self.drawn) - changed) >= EACH

    def proven(self) -> bool | None:
        """True if the policy is proven, False if a proof is hopeless, None if it is open."""
        if self.problem or self.first is not None:
            return not self.problem
        if self.reached or not self._both_known:
            return self.reached or None
        count, changed = len(self.drawn), sum(step.arm for step in self.drawn)
        error = self.sigma * math.sqrt(1 / changed + 1 / (count - changed))
        return False if self.effect + HOPELESS_Z * error < WORTH else None

    def claim(self) -> Claim:
        """What has been shown so far for a job that stays under the policy."""
        if self.first is not None and not self.blocks and not self.problem:
            return self.first  # recomputing it takes tens of milliseconds
        if not self.blocks or self.first is None:
            effect = self.effect
            ends = confidence_interval([*self.before, *self.drawn], effect, self.effects, self.periods)
            later, later_ends = self._on_the_next_step(effect)
            effect, ends = effect + later, (ends[0] + later_ends[0], ends[1] + later_ends[1])
            return Claim(self.proven() is True and effect > WORTH and ends[0] > 0, effect, ends)
        effect, half = self._by_blocks()
        proven, ends = self.proven() is True and effect > WORTH, (effect - half, effect + half)
        if abs(effect) > half or self.at_meetings or self.problem:
            return Claim(proven and effect > half, effect, ends)
        # The blocks are too uneven to decide, but the proof's steps are not: claim the smaller of both
        # effects, or the proof's alone if blocks could not show an effect of its size.
        if half > self.first.effect:
            return self.first
        low, high = min(ends[0], self.first.ends[0]), max(ends[1], self.first.ends[1])
        return Claim(proven, min(effect, self.first.effect), (low, high))

    def block_error(self) -> float:
        """Standard error of the effect that the blocks show."""
        arms = [[step.log_ms for step in self.blocks if step.arm == arm] for arm in (0, 1)]
        if min(map(len, arms)) < 2:
            return math.inf
        return math.sqrt(sum(statistics.variance(times) / len(times) for times in arms))

    @property
    def _effect_of_blocks(self) -> float:
        """A mean: if a cycle of the job gives its blocks two levels, a median would pick one of them."""
        return estimate(self.blocks, middle=statistics.fmean)

    def _by_blocks(self) -> tuple[float, float]:
        """The effect, and half its 95% interval by Student's t distribution (Cornish-Fisher expansion).

        The number of blocks depends on their scatter, not on their effect: measuring did not stop when the
        effect looked largest. So the interval need not hold at any stopping time; that would take many more
        blocks.
        """
        free = max(len(self.blocks) - 2, 1)
        return self._effect_of_blocks, _NEIGHBORS * (
            1.96 + 2.372 / free + 2.82 / free**2
        ) * self.block_error()

    def _on_the_next_step(self, effect: float) -> tuple[float, tuple[float, float]]:
        """The effect of a step's policy on the next step's time, and its interval; zeros unless it is clear.

        A step that ends early may just make the next one wait for data, or leave it work to finish. The draw
        of the step before is as random as a step's own, so the same statistics apply.
        """
        arms = {step.number: step for step in self.drawn}
        after = [
            Step(step.log_ms + effect * step.arm, last.arm, last.share, step.number)
            for step in self.drawn
            if (last := arms.get(step.number - 1))
        ]
        if min(sum(one.arm for one in after), sum(1 - one.arm for one in after)) < EACH:
            return 0.0, (0.0, 0.0)
        later = estimate(after, max(self.periods))
        low, high = confidence_interval(
            [*self.before, *after], later, self.effects, self.periods, LATER_LEVEL
        )
        return (later, (low, high)) if low > 0 or high < 0 else (0.0, (0.0, 0.0))


def prove(
    proof: Proof,
    steps: int,
    order: random.Random,
    record: Record,
    on_proven: Callable[[], None] = lambda: None,
) -> Generator[Trial, Sample, Proof]:
    """Run the policy and the default in random order until the answer is clear or `steps` are used up.

    A proven policy is measured further, in blocks of steps, until its effect is known well enough; compared
    with the default, that costs nothing. `on_proven` is called when there is a claim, before it is measured
    further, because the job may end meanwhile.
    """
    allowed = max(steps // 3, _LEAST) if proof.at_meetings else steps
    while True:
        yield from _draw(proof, allowed, order, record)
        count = len(proof.drawn)
        if proof.first is None and proof.proven():
            proof.first = proof.claim()
            if not proof.at_meetings:  # steps after meetings say less about a job: measure blocks first
                on_proven()
            continue
        if proof.first is not None and not proof.problem:
            if proof.measured:
                return proof
            on_proven()
            continue
        go_on = proof.promising and (proof.sigma > NOISY or proof.at_meetings)
        most = PROMISING_AT_MEETINGS if proof.at_meetings else PROMISING_DRAWS
        more = max(allowed, most) if go_on else allowed
        if proof.problem or proof.proven() is not None or count + MORE > more:
            return proof


def _draw(proof: Proof, allowed: int, order: random.Random, record: Record) -> Generator[Trial, Sample, None]:
    """Draw the next steps or blocks and run them."""
    drawn = proof.blocks if proof.in_blocks else proof.drawn
    first = 2 * EACH if proof.in_blocks else min(FIRST, max(allowed, _LEAST))
    draws = draw_steps(order, drawn, MORE if drawn else first)
    runs, counted = proof.run
    policies = [proof.policy if arm else proof.default for arm, _ in draws]
    together = runs > 1
    plans = [[policy] * runs for policy in policies] if together else [policies]
    measured: list[tuple[int, Sample]] = []
    for plan in plans:
        samples = yield from ask_all(plan, record, "proof")
        if together:
            samples = [mean_sample(samples, counted)]
        measured += list(enumerate(samples, record.number - len(samples)))
    for (arm, share), (number, sample) in zip(draws, measured, strict=True):
        proof.add(sample, arm, share, number)


def mean_sample(samples: Sequence[Sample], counted: int) -> Sample:
    """Several steps under one policy as one sample: mean time of the last `counted`, and any step's problem.

    If _MANY or more count, the longest and the shortest are left out: one may be an occasional stall.
    """
    problem = next((sample.problem for sample in samples if sample.problem), "")
    times = sorted(sample.ms for sample in samples[-counted:])
    if len(times) >= _MANY:
        times = times[1:-1]
    return replace(samples[-1], ms=statistics.fmean(times), problem=problem)


def draw_steps(order: random.Random, drawn: Sequence[Step], count: int) -> list[tuple[int, float]]:
    """Arms of the next steps, each with the probability of arm 1. The arm with fewer steps is more likely."""
    ahead = sum(1 if step.arm else -1 for step in drawn)
    draws = []
    for _ in range(count):
        share = 0.5 - min(max(BALANCE * ahead, -MOST_BALANCE), MOST_BALANCE)
        arm = int(order.random() < share)
        ahead += 1 if arm else -1
        draws.append((arm, share))
    return draws


def earlier(default: Policy, record: Record) -> list[Step]:
    """Earlier steps under the default, which determine the level."""
    index = record.policies.index(default) if default in record.policies else -1
    known = [
        step
        for step in record.steps
        if step.policy == index and 0 < step.ms < math.inf and step.purpose not in ("profile", "pause")
    ]
    return [Step(math.log(record.usual_ms(step)), 0, 0.0, step.number) for step in known[-32:]]
