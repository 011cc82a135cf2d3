"""Check: tests whether a policy has become slower than the default, over a few randomly drawn steps of each.

Framework controls change only at a meeting of all ranks, so a policy with framework controls cannot be probed
within steps decided in advance. It is checked at meetings, by the mean of the two steps after each one: the
first waits for its launches; the second takes less time than usual because its launches are ahead by then.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from weft.measure.sequential import Coins, Step, estimate
from weft.tuning.live.proof import draw_steps
from weft.tuning.live.trial import Sample

SUSPICIOUS = 4.0  # test capital against the policy that starts a check
CLEAR = 40.0  # test capital that ends a check early
LIKELY = 4.0  # test capital that suffices once the planned steps are used up; with less, the check continues
MOST_CHECKED = 36  # most steps of a check that continues
AT_LAST = 2.0  # test capital that suffices after the last step
SLOWER = (-0.025, -0.06, -0.15)
MET, MOST_MET = 10, 20  # planned and most draws of a check at meetings
CHECKED_AFTER_MEETING = 2  # steps measured after each meeting; their mean counts
MEETING_STEPS = MET * CHECKED_AFTER_MEETING


def doubt() -> Coins:
    """A test for "the policy is slower than the default" that never runs out of capital."""
    return Coins(SLOWER, windows=(8,), renewed=True)


def refuted(gain: float, capital: float, *, left: int, last: bool) -> bool:
    """Whether a check has shown that the policy is slower.

    `left`: planned steps still to come. `last`: whether the check cannot be extended any further.
    """
    return gain < 0 and capital >= (AT_LAST if last else CLEAR if left else LIKELY)


def why_slower(gain: float, steps: int) -> str:
    return f"it took {100 * math.expm1(-gain):.1f}% more time than the default in a check of {steps} steps"


@dataclass
class MeetingCheck:
    """The draws and results of a check at meetings."""

    order: random.Random
    drawn: list[Step] = field(default_factory=list)
    problem: str = ""
    """Why the policy could not run; empty if it could."""

    def __post_init__(self) -> None:
        self.coins = doubt()

    def draw(self) -> tuple[int, float]:
        """The arm of the next step (1: the policy), and the probability of arm 1."""
        return draw_steps(self.order, self.drawn, 1)[0]

    def add(self, sample: Sample, arm: int, share: float, number: int) -> None:
        """Add a drawn step; a step that could not be measured is ignored."""
        self.problem = self.problem or (sample.problem if arm else "")
        if not sample.problem and 0 < sample.ms < math.inf:
            step = Step(math.log(sample.ms), arm, share, number)
            self.coins.add(step)
            self.drawn.append(step)

    def slower(self, draws: int) -> bool | None:
        """Whether the policy is slower after `draws` draws; None if that is not clear yet."""
        if self.problem:
            return True
        gain, last = estimate(self.drawn), draws >= MOST_MET
        if refuted(gain, self.coins.capital, left=MET - draws if draws < MET else 0, last=last):
            return True
        return False if last or (draws >= MET and gain >= 0) else None

    @property
    def first_policy_steps(self) -> list[float]:
        """Log ms of the policy's first steps; later changes of pace are detected against these."""
        return [step.log_ms for step in self.drawn if step.arm][: MET // 2]

    @property
    def why(self) -> str:
        return self.problem or why_slower(estimate(self.drawn), len(self.drawn))
