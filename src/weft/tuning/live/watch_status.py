"""WatchStatus: what the watch of a job has done so far, and whether the job runs as the claim promised.

A proof compares steps. A job may still not run as promised: a data loader that only just keeps up makes later
steps wait for the time that earlier ones have gained, or the steps themselves change. The interval of a claim
then also includes what the job has shown since. Where later checks of the whole policy have shown less than
its proof, because the job or its machine has changed meanwhile, the claim itself becomes smaller; never
larger, as the steps of a check say less about a job than the blocks of a proof.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev, variance

from weft.measure.sequential import Step, estimate
from weft.policy import Policy
from weft.tuning.live.probes import NEIGHBORS
from weft.tuning.live.tuned_job import TunedJob

LATELY = 64  # trials that give the time of a step lately, at least, and at most so many probes
END = 256  # trials that give it, at most
LEAST_EFFECTS = 5
LEAST_CHECKED = 4  # steps of checks under each policy
_NORMAL = 1.4826  # from a median of absolute values to a standard deviation
_MEDIAN = 1.2533  # standard error of a median, relative to that of a mean
Z = 2.0
_LEAST_ERROR = 1e-4
PAUSE = (
    3.0  # times the median step: longer ones are pauses of the program, such as an evaluation, if they are
)
ALIKE = 0.15  # so alike (relative scatter of what they add); those that differ may be waits for data
NO_GAIN_PCT = -1.0  # the least that waiting steps can make of a gain


class ProbeEffects:
    """By how much the default makes a step slower, and the step after it: logarithms, by probe."""

    def __init__(self) -> None:
        self.own: deque[float] = deque(maxlen=LATELY)
        self.later: deque[float] = deque(maxlen=LATELY)
        self.restart()

    def restart(self) -> None:
        """Other steps come in between: no probe is open."""
        self._before: deque[float] = deque(maxlen=NEIGHBORS)
        self._open: list[float] = []

    def add(self, log_ms: float, *, probe: bool) -> None:
        """Note a step under the policy, or a probe of the default, as a logarithm."""
        if self._open or (probe and len(self._before) == NEIGHBORS):
            if probe and self._open:  # another one too soon: neither has a level
                self.restart()
                return
            self._open.append(log_ms)
            if len(self._open) == 2 + NEIGHBORS:
                own, later, *after = self._open
                around = [*self._before, *after]
                if max(own, later, *around) - median(around) < math.log(PAUSE):  # no pause among them
                    self.own.append(own - fmean(around))
                    self.later.append(later - fmean(around))
                self._open, self._before = [], deque(after, maxlen=NEIGHBORS)
        elif not probe:
            self._before.append(log_ms)


@dataclass
class WatchStatus:
    """What the watch has done so far, for the report."""

    outcome: TunedJob
    """Of the last search."""
    in_force: Policy
    steps: int = 0
    ms: float = 0.0
    """The time of those steps."""
    probes: int = 0
    checks: int = 0
    searches: int = 0
    reverted: str = ""
    """Why the job reverted to the default; empty: it did not."""
    released_ms: float = 0.0
    """What the job has waited for the release of what the last search made."""
    proving: bool = False
    """A proof that the search has left open goes on, or what it has shown is being measured."""
    policy_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    default_ms: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    effects: ProbeEffects = field(default_factory=ProbeEffects)
    checked: deque[Step] = field(default_factory=lambda: deque(maxlen=256))
    """The latest draws of checks of the whole policy since the last search."""

    def found(self, outcome: TunedJob) -> None:
        """Another search is over. What was seen before it says nothing about its outcome."""
        self.outcome, self.in_force, self.reverted = outcome, outcome.policy, ""
        self.released_ms = 0.0
        self.policy_ms.clear()
        self.default_ms.clear()
        self.checked.clear()
        self.effects = ProbeEffects()

    def to_dict(self) -> dict[str, object]:
        """The key `watch` of the result."""
        return {
            "steps": self.steps,
            "probes": self.probes,
            "checks": self.checks,
            "searches": self.searches,
            "reverted": self.reverted,
            "in_force": self.in_force.to_dict(),
            "default_ms": round(median(self.default_ms), 4) if self.default_ms else None,
            "policy_ms": round(median(self._recent()), 4) if self.policy_ms else None,
        }

    @property
    def lately_ms(self) -> float | None:
        """The mean time of a step at the end, if it is off the promised one by a quarter of the gain."""
        best, default, times = self.outcome.best_ms, self.outcome.default_ms, self._recent()
        if not self.outcome.kept or self.reverted or best is None or default is None or len(times) < LATELY:
            return None
        ms = max(fmean(times), median(times) + self._stall_ms)
        return ms if abs(ms - best) > abs(default - best) / 4 else None

    @property
    def gain_pct(self) -> float:
        """The gain that is claimed: the proof's, or with what checks have shown since where that is less."""
        return min(self.outcome.gain_pct, max(0.0, self._with_checks[0]))

    @property
    def _with_checks(self) -> tuple[float, float]:
        """The gain by the proof and all checks, each with the weight of its precision, and its lower end."""
        gain, (low, high) = self.outcome.gain_pct, self.outcome.ci_pct
        arms = [[step.log_ms for step in self.checked if step.arm == arm] for arm in (0, 1)]
        if not self.outcome.kept or self.reverted or min(map(len, arms)) < LEAST_CHECKED:
            return gain, low
        checks = math.sqrt(sum(variance(times) / len(times) for times in arms))
        proof = (_effect(high) - _effect(low)) / (2 * Z)
        weights = [1 / max(error, _LEAST_ERROR) ** 2 for error in (proof, checks)]
        effect = (weights[0] * _effect(gain) + weights[1] * estimate(tuple(self.checked))) / sum(weights)
        return _less_pct(effect), _less_pct(effect - Z / math.sqrt(sum(weights)))

    @property
    def ci_pct(self) -> tuple[float, float]:
        """The interval of the claim, with what the job has shown since if it is off what was promised."""
        low, high = self.outcome.ci_pct
        if self.gain_pct < self.outcome.gain_pct:
            low = min(low, self._with_checks[1])
        lately_ms, default_ms = self.lately_ms, self.outcome.default_ms
        if lately_ms is None or not default_ms:
            return low, high
        now, error = _middle(self.effects.own)
        ends = [low, high, *(_less_pct(now + side * Z * error) for side in (-1, 1) if math.isfinite(error))]
        if self._may_only_wait(lately_ms):
            times = self._recent()
            most_ms = lately_ms + Z * stdev(times) / math.sqrt(len(times))
            ends.append(max(NO_GAIN_PCT, 100 * (1 - most_ms / default_ms)))
        return min(ends), max(ends)

    def _recent(self) -> list[float]:
        """The last steps under the policy, without pauses of the program."""
        return self._counted[-END:]

    @property
    def _counted(self) -> list[float]:
        times = [ms for ms in self.policy_ms if math.isfinite(ms)]
        return without_pauses(times) if times else []

    @property
    def _stall_ms(self) -> float:
        """What a step has waited on average. Rare waits need more steps than the time of a step does."""
        times = self._counted
        blocks = [times[at : at + LATELY] for at in range(0, len(times), LATELY)]
        # Block by block: the pace of the job may have changed.
        return sum(sum(block) - len(block) * median(block) for block in blocks) / max(1, len(times))

    def _may_only_wait(self, lately_ms: float) -> bool:
        """Whether steps may win nothing but time to wait.

        Then most steps are as fast as promised and some wait; or a slower step makes the next one faster.
        """
        own, own_error = _middle(self.effects.own)
        later, error = _middle(self.effects.later)
        best, default = self.outcome.best_ms or 0.0, self.outcome.default_ms or 0.0
        stalls = max(self._stall_ms, lately_ms - median(self._recent())) > (default - best) / 4
        return stalls or not later - Z * error > -own / 2 + Z * own_error / 2


def without_pauses(times: Sequence[float]) -> list[float]:
    """Times of steps, without those that are much longer if they have about the same length."""
    usual = median(times)
    pauses = [ms - usual for ms in times if ms > PAUSE * usual]
    if not pauses:
        return list(times)
    middle = median(pauses)
    alike = _NORMAL * median(abs(ms - middle) for ms in pauses) <= ALIKE * middle
    return [ms for ms in times if ms <= PAUSE * usual] if alike else list(times)


def _middle(values: deque[float]) -> tuple[float, float]:
    """The median, with its standard error."""
    if len(values) < LEAST_EFFECTS:
        return 0.0, math.inf
    middle = median(values)
    scatter = _NORMAL * median(abs(value - middle) for value in values)
    return middle, _MEDIAN * scatter / math.sqrt(len(values))


def _less_pct(effect: float) -> float:
    return -100 * math.expm1(-effect)


def _effect(less_pct: float) -> float:
    return -math.log1p(-less_pct / 100)
