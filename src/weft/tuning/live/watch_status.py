"""WatchStatus: what a job's watch has done so far, and whether the job runs as the claim promised.

A proof compares steps. A job may still not run as promised: a data loader that only just keeps up makes later
steps wait for as long as earlier ones have gained, or the steps themselves change. The claim's interval then
also includes what the job has shown since. If later checks of the whole policy show less than its proof,
because the job or its machine has changed, the claim itself becomes smaller. It never becomes larger, because
the steps of a check say less about a job than the blocks of a proof.
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

LATELY = 64  # fewest trials for the recent time of a step, and most probes for the recent effects
END = 256  # most trials for the recent time of a step
LEAST_EFFECTS = 5
LEAST_CHECKED = 4  # fewest steps of checks under each policy
_NORMAL = 1.4826  # converts a median absolute deviation to a standard deviation
_MEDIAN = 1.2533  # standard error of a median, relative to that of a mean
Z = 2.0
_LEAST_ERROR = 1e-4
PAUSE = (
    3.0  # times the median step: longer steps hold a pause of the program, such as an evaluation, if alike
)
ALIKE = 0.15  # largest relative scatter of pauses; if they differ more, they may be waits for data
NO_GAIN_PCT = -1.0  # waits alone lower the gain's interval at most to this


class ProbeEffects:
    """By how much each probe of the default was slower than the steps around it, and the step after it too.

    All values are differences of log times.
    """

    def __init__(self) -> None:
        self.own: deque[float] = deque(maxlen=LATELY)
        self.later: deque[float] = deque(maxlen=LATELY)
        self.restart()

    def restart(self) -> None:
        """Discard the open probe, because other steps come in between."""
        self._before: deque[float] = deque(maxlen=NEIGHBORS)
        self._open: list[float] = []

    def add(self, log_ms: float, *, probe: bool) -> None:
        """Add the log time of a step under the policy, or of a probe of the default."""
        if self._open or (probe and len(self._before) == NEIGHBORS):
            if probe and self._open:  # another probe too soon: neither has steps around it to compare with
                self.restart()
                return
            self._open.append(log_ms)
            if len(self._open) == 2 + NEIGHBORS:
                own, later, *after = self._open
                around = [*self._before, *after]
                if max(own, later, *around) - median(around) < math.log(PAUSE):  # none contains a pause
                    self.own.append(own - fmean(around))
                    self.later.append(later - fmean(around))
                self._open, self._before = [], deque(after, maxlen=NEIGHBORS)
        elif not probe:
            self._before.append(log_ms)


@dataclass
class WatchStatus:
    """What the watch has done so far, for the report."""

    outcome: TunedJob
    """Outcome of the last search."""
    in_force: Policy
    steps: int = 0
    ms: float = 0.0
    """Time of these steps."""
    probes: int = 0
    checks: int = 0
    searches: int = 0
    reverted: str = ""
    """Why the job reverted to the default; empty if it did not."""
    released_ms: float = 0.0
    """How long the job has waited for the release of what the last search created."""
    proving: bool = False
    """Whether a proof that the search left open continues, or its effect is being measured."""
    policy_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    default_ms: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    effects: ProbeEffects = field(default_factory=ProbeEffects)
    checked: deque[Step] = field(default_factory=lambda: deque(maxlen=256))
    """The latest draws of checks of the whole policy since the last search."""

    def found(self, outcome: TunedJob) -> None:
        """Adopt another search's outcome. What was measured before it says nothing about this outcome."""
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
        """Recent mean ms of a step if it is off the promised time by over a quarter of the gain; or None."""
        best, default, times = self.outcome.best_ms, self.outcome.default_ms, self._recent()
        if not self.outcome.kept or self.reverted or best is None or default is None or len(times) < LATELY:
            return None
        ms = max(fmean(times), median(times) + self._stall_ms)
        return ms if abs(ms - best) > abs(default - best) / 4 else None

    @property
    def gain_pct(self) -> float:
        """The claimed gain: the proof's, or less if later checks have shown less."""
        return min(self.outcome.gain_pct, max(0.0, self._with_checks[0]))

    @property
    def _with_checks(self) -> tuple[float, float]:
        """The gain from proof and checks, weighted by their precision, and the lower end of its interval."""
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
        """The claim's interval, widened by what the job has shown since if that is not what was promised."""
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
        """Mean wait per step. It takes all steps, as rare waits need more of them than the time of a step."""
        times = self._counted
        blocks = [times[at : at + LATELY] for at in range(0, len(times), LATELY)]
        # Block by block: the pace of the job may have changed.
        return sum(sum(block) - len(block) * median(block) for block in blocks) / max(1, len(times))

    def _may_only_wait(self, lately_ms: float) -> bool:
        """Whether steps may gain only time that they then spend waiting.

        If so, most steps are as fast as promised and some wait, or a slower step makes the next one faster.
        """
        own, own_error = _middle(self.effects.own)
        later, error = _middle(self.effects.later)
        best, default = self.outcome.best_ms or 0.0, self.outcome.default_ms or 0.0
        stalls = max(self._stall_ms, lately_ms - median(self._recent())) > (default - best) / 4
        return stalls or not later - Z * error > -own / 2 + Z * own_error / 2


def without_pauses(times: Sequence[float]) -> list[float]:
    """Step times without pauses: steps that are much longer and about equally long."""
    usual = median(times)
    pauses = [ms - usual for ms in times if ms > PAUSE * usual]
    if not pauses:
        return list(times)
    middle = median(pauses)
    alike = _NORMAL * median(abs(ms - middle) for ms in pauses) <= ALIKE * middle
    return [ms for ms in times if ms <= PAUSE * usual] if alike else list(times)


def _middle(values: deque[float]) -> tuple[float, float]:
    """The median and its standard error; (0, infinite) for fewer than LEAST_EFFECTS values."""
    if len(values) < LEAST_EFFECTS:
        return 0.0, math.inf
    middle = median(values)
    scatter = _NORMAL * median(abs(value - middle) for value in values)
    return middle, _MEDIAN * scatter / math.sqrt(len(values))


def _less_pct(effect: float) -> float:
    return -100 * math.expm1(-effect)


def _effect(less_pct: float) -> float:
    return -math.log1p(-less_pct / 100)
