"""The trials of a watch: how they run, what they cost, and how long they are."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import median

from weft.policy import Policy
from weft.tuning.live.trial import Record, Sample, Trial, ask
from weft.tuning.live.trial_length import RECENT, lengths, refitted
from weft.tuning.live.watch_budget import WatchBudget
from weft.tuning.live.watch_cycle import KNOWN, WatchCycle
from weft.tuning.live.watch_plan import Planned
from weft.tuning.live.watch_status import WatchStatus

BETWEEN_REFITS = 64  # trials that must have run for each change of the trials' length


class WatchTrials:
    """Runs the trials of a watch, within its budget.

    `each`: steps per trial. `ahead`: trials decided in advance. `order`: makes the random draws.
    """

    def __init__(
        self,
        default: Policy,
        budget: float,
        ahead: int,
        each: int,
        order: random.Random,
        status: WatchStatus,
        record: Record,
    ) -> None:
        self.default, self.order, self.record = default, order, record
        self.ahead, self.each = ahead, each
        self.own = status.outcome.default
        """The job's own default, whose framework controls may differ from those in force."""
        at_meetings = status.in_force.models != self.own.models
        self.budget = WatchBudget(budget, each, at_meetings, max(0.0, status.outcome.cost_ms))
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.trials = self.refits = 0
        self.idle = False
        """Whether no policy is in force: trials are then longer, so that the watch costs next to nothing."""
        self.status = status
        self.checked: list[float] | None = None
        """Log times of steps under the policy in its last check; None: expect the times of the proof."""
        self.say = ""
        self.cycle, self.cycle_changed = self._cycle_so_far(), False

    def announce(self, line: str) -> None:
        """Print a line with the next trial."""
        self.say = line

    def watched(
        self, policy: Policy, then: Sequence[Policy], purpose: str
    ) -> Generator[Trial, Sample, Sample]:
        """Run a trial of the watch, for which no rank waits.

        Its time does not depend on its place in the job's cycle, except in a proof, which takes measured
        times.
        """
        number, self.cycle_changed = self._number, False
        sample = yield from self.ask(Trial(policy, self.each, then=tuple(then), light=True), purpose)
        if purpose == "proof" or not 0 < sample.ms < math.inf:
            return sample
        even = self.cycle.even(sample, number)
        self.cycle.note(sample.ms, number)
        self.cycle_changed = purpose in ("watch", "probe") and self.cycle.learn()  # never within a check
        return even

    @property
    def _number(self) -> int:
        """The number of the next trial, as if all trials had as many steps as it has."""
        return self.record.number // self.each

    def _cycle_so_far(self) -> WatchCycle:
        """The cycle of the job's last steps, if they were timed one by one, as trials are now."""
        last = self.record.steps[-KNOWN[1] :] if self.each == 1 else []
        first = self.record.number - len(last)
        single = all(step.number == number for number, step in enumerate(last, first))
        times = [self.record.usual_ms(step) for step in last] if single else []
        return WatchCycle(times, first) if all(0 < ms < math.inf for ms in times) else WatchCycle()

    def ask(self, trial: Trial, purpose: str) -> Generator[Trial, Sample, Sample]:
        """Yield a trial, with the announced line if there is one, and count its sample."""
        if self.say:
            trial, self.say = replace(trial, say=self.say), ""
        sample = yield from ask(trial, self.record, purpose)
        if not self.trials:  # before the first trial, what the search had created was released
            self.status.released_ms = sample.paused_ms
        self.trials += 1
        if 0 < sample.ms < math.inf:
            self.recent.append(sample.ms)
        ms = sample.ms * trial.steps if math.isfinite(sample.ms) else 0.0
        self.status.steps += trial.steps
        self.status.ms += ms
        default = trial.policy == self.own or (trial.policy == self.default != self.status.in_force)
        spent = default and purpose in ("probe", "check", "wait")
        self.budget.ran(trial.steps, ms, sample.paused_ms, spent=spent)
        self.status.probes += spent and purpose == "probe"
        if purpose != "proof":  # a proof's steps alternate, unlike those of an undisturbed job
            (self.status.default_ms if default else self.status.policy_ms).append(sample.ms)
        return sample

    def new_lengths(self) -> tuple[int, int] | None:
        """New `each` and `ahead` if others fit the job better, else None. Ranks must meet for a change, so a
        job whose steps vary all the time gets them rarely."""
        if self.refits * BETWEEN_REFITS > self.trials:
            return None
        return refitted(self.each, self.recent, idle=self.idle)

    def refit(self, each: int, ahead: int) -> None:
        """Set new trial lengths."""
        self.each, self.ahead = each, ahead
        if not self.idle:
            self.budget.refit(each)
        self.checked = []
        self.refits += 1
        self.recent.clear()
        self.cycle = WatchCycle()

    def relax(self, idle: bool) -> None:
        """Set trial lengths for a job without a policy (`idle`), or with one in force. No trial may be
        decided yet."""
        if idle != self.idle:
            self.idle = idle
            self._fit(median(self.recent) if self.recent else self.status.outcome.default_ms)

    def start_over(self, step_ms: float | None) -> None:
        """Start over after a search: earlier times and trial lengths may fit another pace."""
        self.idle = False
        self.recent.clear()
        self._fit(step_ms)

    def _fit(self, step_ms: float | None) -> None:
        """Set trial lengths for this step time; None or 0 (unknown) keeps them."""
        if step_ms:
            self.each, self.ahead = lengths(step_ms, idle=self.idle)
        if not self.idle:
            self.budget.refit(self.each)
        self.cycle = self._cycle_so_far()

    def run_decided(self, plan: deque[Planned]) -> Generator[Trial, Sample, None]:
        """Run only the steps that are already decided."""
        rest = list(plan)[: self.ahead]
        while rest:
            step = rest.pop(0)
            yield from self.watched(step.policy, [one.policy for one in rest], step.purpose)
