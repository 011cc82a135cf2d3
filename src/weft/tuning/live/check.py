"""Check: has a policy become slower than the default? In a few steps, each under one of the two, drawn.

Framework controls change only where all ranks meet, so a policy that has some cannot be probed within steps
that were decided in advance. It is checked at meetings, by the mean of the two steps after each: the first
waits for its launches, and the second, whose launches are ahead by then, takes less than usual.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from weft.measure.sequential import Coins, Step, estimate
from weft.tuning.live.proof import draw_steps
from weft.tuning.live.trial import Sample

SUSPICIOUS = 4.0  # capital of the test against the policy that leads to a check
CLEAR = 40.0  # capital of the test that ends a check early
LIKELY = 4.0  # enough when its steps are used up; with less the check continues, up to this many steps:
MOST_CHECKED = 36
AT_LAST = 2.0  # enough then
SLOWER = (-0.025, -0.06, -0.15)
MET, MOST_MET = 10, 20  # draws of a check at meetings
CHECKED_AFTER_MEETING = 2  # steps, whose mean counts
MEETING_STEPS = MET * CHECKED_AFTER_MEETING


def doubt() -> Coins:
    """A test for "the policy is slower than the default" that never runs out of capital."""
    return Coins(SLOWER, windows=(8,), renewed=True)


def refuted(gain: float, capital: float, *, left: int, last: bool) -> bool:
    """Whether a check has shown that the policy is slower. `left`: steps to come; `last`: no more follow."""
    return gain < 0 and capital >= (AT_LAST if last else CLEAR if left else LIKELY)


def why_slower(gain: float, steps: int) -> str:
    return f"it took {100 * math.expm1(-gain):.1f}% more time than the default in a check of {steps} steps"


@dataclass
class MeetingCheck:
    """The draws and results of a check at meetings."""

    order: random.Random
    drawn: list[Step] = field(default_factory=list)
    problem: str = ""
    """Why the policy may not be used at all."""

    def __post_init__(self) -> None:
        self.coins = doubt()

    def draw(self) -> tuple[int, float]:
        """The arm of the next step (1: the policy), and the probability of arm 1."""
        return draw_steps(self.order, self.drawn, 1)[0]

    def add(self, sample: Sample, arm: int, share: float, number: int) -> None:
        """Note a drawn step; one that cannot be measured counts for nothing."""
        self.problem = self.problem or (sample.problem if arm else "")
        if not sample.problem and 0 < sample.ms < math.inf:
            step = Step(math.log(sample.ms), arm, share, number)
            self.coins.add(step)
            self.drawn.append(step)

    def slower(self, draws: int) -> bool | None:
        """Whether the policy is slower, after so many draws; None: not clear yet."""
        if self.problem:
            return True
        gain, last = estimate(self.drawn), draws >= MOST_MET
        if refuted(gain, self.coins.capital, left=MET - draws if draws < MET else 0, last=last):
            return True
        return False if last or (draws >= MET and gain >= 0) else None

    @property
    def first_policy_steps(self) -> list[float]:
        """Logarithms of the policy's steps in the first half: a pace that changes after them is noticed."""
        return [step.log_ms for step in self.drawn if step.arm][: MET // 2]

    @property
    def why(self) -> str:
        return self.problem or why_slower(estimate(self.drawn), len(self.drawn))
