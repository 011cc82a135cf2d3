"""Watch: checks for the life of the job that the chosen policy stays faster than the default.

`watch` is a generator with the protocol of `weft.tuning.live.search.tune`: it yields a Trial for every step
(or, if steps are short, for every `each` steps) and is sent a Sample for each. It runs until it is closed, or
returns if there is nothing to watch. `trial.policy` is the policy to apply; `trial.say` reports what was
decided. No synchronization is needed: every Trial names the policies of the next `ahead` trials in `then`,
and its Sample may come that much later. When it searches again, its trials are those of `tune`.

    watching = watch(outcome)
    trial = next(watching)
    while the job runs:
        trial = watching.send(Sample(ms))  # of one step under trial.policy

Framework controls change only at meetings of all ranks, so probes compare only a policy's other controls. A
policy with framework controls is checked as a whole, at meetings: when the pace changes, when its other
controls were reverted, and occasionally without a reason. Another search, after a change of pace, starts from
the job's own default.

While a policy is in force
- about one step in `1/budget`, at a random position, runs under the default. These probes detect a policy
  that has become slower than the default even if the job's own pace looks unchanged;
- a change of pace (a cumulative sum of clipped deviations) or suspicious probes lead to a check: a few steps
  whose policy, the one in force or the default, is drawn at random. If the budget has no check left, probes
  are half as frequent, and the policy is reverted if 7 of 8 of them are faster than the steps around them;
- a check that finds the policy slower reverts it: the job stays with the default unless a later search, if
  the budget allows one, finds something better.

Bounds. A policy that is no faster than the default is adopted with a probability of at most 2% over all
searches of a job (see LEVEL of `weft.tuning.live.proof`). A policy in force that becomes slower than the
default by 5%, at a scatter of 1%, is reverted within 50 steps in at least 998 of 1,000 simulated jobs for
each kind of drift (benchmarks/live/noise.py), even for a drift that only probes show.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import islice

from weft.measure.sequential import Step, estimate
from weft.policy import Policy
from weft.tuning.live.check import (
    CHECKED_AFTER_MEETING,
    MOST_CHECKED,
    SUSPICIOUS,
    MeetingCheck,
    doubt,
    refuted,
    why_slower,
)
from weft.tuning.live.options import Facts
from weft.tuning.live.pace import Pace
from weft.tuning.live.probes import Probes
from weft.tuning.live.proof import LEVEL, draw_steps, mean_sample
from weft.tuning.live.search import tune
from weft.tuning.live.trial import Record, Sample, Trial
from weft.tuning.live.tuned_job import TunedJob
from weft.tuning.live.watch_budget import CHECK
from weft.tuning.live.watch_plan import Planned, probed_block
from weft.tuning.live.watch_proof import ProofTrials
from weft.tuning.live.watch_status import WatchStatus

SHARE = 0.05  # share of the steps for probes, checks and further searches
AHEAD = 10  # trials that are decided in advance, before the results of earlier ones are known
BETWEEN_MEETINGS = 512  # trials until framework controls are checked without a reason; doubles each time
Watch = Generator[Trial, Sample, None]


def watch(
    outcome: TunedJob,
    *,
    budget: float = SHARE,
    ahead: int = AHEAD,
    each: int = 1,
    recall: Callable[[Facts], Policy | None] = lambda facts: None,
    seed: int = 0,
    record: Record | None = None,
    status: WatchStatus | None = None,
) -> Watch:
    """Watch a job that was tuned; see the module docstring for the protocol.

    `outcome`: what `tune` returned. `budget`: share of the steps that probes, checks and further searches may
    use. `ahead`: trials decided in advance. `each`: steps per trial. Both change when the step time changes a
    lot, once all decided trials have run. `record`, `status`: receive all that happens.
    """
    state = status or WatchStatus(outcome, outcome.policy)
    order = random.Random(f"{seed} {outcome.policy.label} {outcome.default_ms} {outcome.best_ms}")
    watching = _Watch(
        _reachable(outcome), budget, max(1, ahead), max(1, each), order, state, record or Record()
    )
    yield from watching.finish_proof()
    while True:
        why = yield from watching.until_it_may_search()
        if not why:
            return
        state.searches += 1
        level = LEVEL / (state.searches + 1) ** 2
        again = yield from tune(outcome.default, recall, seed=seed, level=level, record=watching.record)
        watching.searched(again)
        watching.announce(f"searched again, because {why}: {again.text}")
        if not again.still_open:
            yield from watching.release()
        yield from watching.finish_proof()


class _Watch(ProofTrials):
    """The state of a watch between searches."""

    meeting_due = meeting_interval = BETWEEN_MEETINGS

    def searched(self, outcome: TunedJob) -> None:
        """Adopt the outcome of another search."""
        self.budget.searched(outcome)
        self.status.found(outcome)
        self.default, self.checked = _reachable(outcome), None
        self.start_over(outcome.default_ms)

    def until_it_may_search(self) -> Generator[Trial, Sample, str]:
        """Watch until a search is due; returns why, or an empty string if there is nothing to watch."""
        refitted = False
        while self.status.in_force != self.default:
            refitted = yield from self._in_force(refitted)
        return (yield from self._idle())

    # --- a policy is in force -------------------------------------------------------------------------------

    def _in_force(self, refitted: bool) -> Generator[Trial, Sample, bool]:
        """Watch the policy in force until it is reverted or checked as a whole (returns False), or until
        trial lengths change (True). `refitted`: whether they have just changed; then begin with a check."""
        policy = self.status.in_force
        plan: deque[Planned] = deque()
        pace, coins, drawn = self._first_pace(), doubt(), list[Step]()
        probes = Probes()
        left = 0  # steps of a check still to come
        framework = policy.models != self.own.models  # has controls that single probes cannot compare
        if refitted and self._meeting_wanted(True):
            yield from self._check_at_meetings(plan)
            return False
        if refitted and self.budget.may_check():
            left = self._draw_check(plan, policy)
            self.status.checks += 1
        while True:
            if (lengths := self.new_lengths()) is not None:
                yield from self.run_decided(plan)
                self.refit(*lengths)
                return True
            while len(plan) < self.ahead + 1:
                plan.extend(self._fill(policy, checking=left > 0))
            step = plan.popleft()
            then = [one.policy for one in islice(plan, self.ahead)]
            number = self.record.number
            sample = yield from self.watched(step.policy, then, step.purpose)
            left -= step.purpose == "check"
            if self.cycle_changed:
                pace, coins, probes = Pace(), doubt(), Probes()
                self.status.effects.restart()
            if sample.problem or not 0 < sample.ms < math.inf:
                continue
            seen = Step(math.log(sample.ms), step.arm, step.share, number)
            coins.add(seen)
            if step.purpose == "check":
                drawn.append(seen)
                gain = estimate(drawn)
                last = len(drawn) >= MOST_CHECKED
                if refuted(gain, coins.capital, left=left, last=last):
                    yield from self._revert(plan, why_slower(gain, len(drawn)))
                    return False
                if left == 0 and gain < 0 and not last:
                    left = self._draw_check(plan, policy)
                elif left == 0:
                    pace, coins = Pace([one.log_ms for one in drawn if one.arm]), doubt()
                    probes = Probes()
            elif left == 0:
                changed = step.arm == 1 and pace.changed(seen.log_ms)
                # Judge only after a probe: until it comes, steps add capital that the probe may take away.
                suspicious = pace.faster(seen.log_ms) and step.arm == 0 and coins.capital >= SUSPICIOUS
                # One probe that is clearly faster than the policy justifies a check, not a decision.
                clear = step.arm == 0 and pace.well_below(seen.log_ms)
                probes.add(seen.log_ms, probe=step.arm == 0)
                self.status.effects.add(seen.log_ms, probe=step.arm == 0)
                # Changes of pace alone must leave one check for the probes, or a job with many uses them all.
                doubtful = suspicious or clear
                if framework and self._meeting_wanted(doubtful or changed):
                    yield from self._check_at_meetings(plan)
                    return False
                if (doubtful or changed) and self.budget.may_check(1 if doubtful else 2):
                    left, drawn = self._draw_check(plan, policy), []
                    coins.restart()
                    self.status.checks += 1
                elif probes.agree:
                    yield from self._revert(plan, "probes of the default were faster")
                    return False

    def _fill(self, policy: Policy, checking: bool) -> list[Planned]:
        """Steps to append to the plan; while a check is open, the default, which is always safe."""
        if checking:
            return [Planned(self.default, 0, 0.0, "wait")]
        return probed_block(policy, self.default, self.budget.probe_share, self.order)

    def _draw_check(self, plan: deque[Planned], policy: Policy) -> int:
        """Draw the check's steps, which follow those already decided; returns how many."""
        self.status.effects.restart()
        while len(plan) > self.ahead:
            plan.pop()
        for arm, share in draw_steps(self.order, (), CHECK):
            plan.append(Planned(policy if arm else self.default, arm, share, "check"))
        return CHECK

    def _first_pace(self) -> Pace:
        """The pace under the policy in force, from its steps in the last check or else in the proof."""
        if self.checked is not None or self.cycle.known:
            return Pace(self.checked or ())
        return Pace([math.log(ms) for ms in self._proof_ms(self.status.in_force)])

    def _proof_ms(self, policy: Policy) -> list[float]:
        tried = self.status.outcome.tried
        return next((one.proof_ms for one in tried if one.policy == policy), [])

    def _revert(self, plan: deque[Planned], why: str) -> Generator[Trial, Sample, None]:
        """Revert to the default, after running the steps already decided."""
        policy = self.status.in_force
        yield from self.run_decided(plan)
        self.status.in_force, self.status.reverted = self.default, why
        self.announce(f"{policy.label} was reverted; the job continues with the default: {why}")

    # --- framework controls are in force --------------------------------------------------------------------

    def _meeting_wanted(self, doubtful: bool, *, rarely: bool = True) -> bool:
        """Whether to check the policy as a whole: it is doubtful, or (with `rarely`) a check is due."""
        if self.status.in_force.models == self.own.models or self.budget.share <= 0:
            return False
        return (doubtful or (rarely and self.trials >= self.meeting_due)) and self.budget.may_meet()

    def _check_at_meetings(self, plan: deque[Planned]) -> Generator[Trial, Sample, bool]:
        """Check the policy against the job's own default, after the decided steps; returns whether it was
        reverted."""
        yield from self.run_decided(plan)
        policy, check, draws = self.status.in_force, MeetingCheck(self.order), 0
        self.status.effects.restart()
        self.status.checks += 1
        waited_ms, steps = 0.0, 0
        while (slower := check.slower(draws)) is None:
            arm, share = check.draw()
            one = policy if arm else self.own
            samples = []
            for run in range(CHECKED_AFTER_MEETING):
                number = self.record.number
                then = (one,) * (CHECKED_AFTER_MEETING - 1 - run)
                sample = yield from self.ask(Trial(one, then=then), "check")
                samples.append(self.cycle.even(sample, number) if self.each == 1 else sample)
            waited_ms += sum(sample.paused_ms for sample in samples)
            steps += CHECKED_AFTER_MEETING * arm
            check.add(mean_sample(samples, len(samples)), arm, share, number)
            draws += 1
        self.budget.met(steps, waited_ms)
        self.checked = check.first_policy_steps
        self.status.checked += check.drawn
        self.meeting_interval *= 2
        self.meeting_due = self.trials + self.meeting_interval
        if slower:
            self.default = self.status.in_force = self.own
            self.status.reverted = check.why
            self.announce(f"{policy.label} was reverted; the job continues with the default: {check.why}")
        else:
            yield from self.settle(policy)
        return slower

    # --- the default is in force ----------------------------------------------------------------------------

    def _idle(self) -> Generator[Trial, Sample, str]:
        """Watch a job under the default until a search is justified and affordable; returns the reason."""
        if not self.status.outcome.candidates_exist or self.budget.share <= 0:
            return ""
        why = "a policy was reverted" if self.status.reverted else ""
        if self.say:
            yield from self.settle(self.default)
        self.relax(self.status.in_force == self.own)
        pace = self._idle_pace()
        decided, changed = deque[Planned](), bool(why)
        while not (why and self.budget.may_search()):
            if self._meeting_wanted(changed, rarely=not why):
                if (yield from self._check_at_meetings(decided)):
                    why = "a policy was reverted"
                    yield from self.settle(self.default)
                    self.relax(True)
                pace = self._idle_pace()
            decided = self._decided()
            sample = yield from self.watched(self.default, [self.default] * self.ahead, "watch")
            pace = Pace() if self.cycle_changed else pace
            changed = 0 < sample.ms < math.inf and pace.changed(math.log(sample.ms))
            if changed:
                why, pace = why or "the pace of the job changed", Pace()
            if (lengths := self.new_lengths()) is not None:
                why = why or "the pace of the job changed"
                yield from self.run_decided(decided)
                self.refit(*lengths)
                pace, decided, changed = Pace(), deque(), True
        yield from self.run_decided(decided)
        return why

    def _idle_pace(self) -> Pace:
        """The first pace without a policy; unknown if trials are longer, and so unlike those of the proof."""
        return Pace() if self.idle else self._first_pace()

    def _decided(self) -> deque[Planned]:
        """The steps under the default that are decided in advance."""
        return deque([Planned(self.default, 0, 0.0, "watch")] * self.ahead)


def _reachable(outcome: TunedJob) -> Policy:
    """The default, but with the framework controls in force, which cannot change without a meeting."""
    return replace(outcome.default, **outcome.policy.models)
