"""Session: one rank's part in the tuning of a job. Called at the end of every step.

It depends on neither torch nor NCCL: Controls change the process, and an Agreement coordinates the ranks.
Steps are timed from boundary to boundary by marks that the device passes; nothing waits for them until a plan
is over. So a step takes as long as without tuning, and launches still run ahead of the device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.errors import UnavailableError
from weft.policy import Policy
from weft.ranks import ABANDON, Agreement, Decision, Report
from weft.shim.apply import PREPARE_S
from weft.tuning.live.conductor import Conductor
from weft.tuning.live.interrupts import of_the_program
from weft.tuning.live.process_controls import Controls
from weft.tuning.live.trial import POLICY_STALLED, PROGRAM_PAUSED
from weft.tuning.live.trial_length import LAG
from weft.tuning.live.tuned_job import stopped
from weft.tuning.live.watch_reports import CopyReports, Lockstep
from weft.tuning.live.watchdog import Guard

LEAST_DEADLINE_S = 5.0
DEADLINE = 10.0  # times the usual step: how long other ranks may take to reach the boundary
STALL = 10.0  # times the usual step: how long each step of a trial may take
LEAST_STALL_S = 5.0
RESCUED = 0.25  # share of the allowed time: a trial that ends later after its rescue had another problem
_log = logging.getLogger("weft.live")


class _Mark(NamedTuple):
    """A point of the program."""

    device: Any
    copied: int
    """Bytes copied from the host so far."""


class Session:
    """The tuning of a job, on one rank. `conductor` makes the decisions if this rank leads.

    `on_result` receives each search's result on every rank: the document of `weft run --stats`, key `tuning`.
    `on_end` receives the final result, once. `on_say` receives lines for the user.
    """

    def __init__(
        self,
        controls: Controls,
        agreement: Agreement,
        conductor: Conductor,
        on_end: Callable[[dict[str, Any]], None],
        on_result: Callable[[dict[str, Any]], None] = lambda result: None,
        on_say: Callable[[str], None] = lambda line: None,
        *,
        least_stall_s: float = LEAST_STALL_S,
        least_deadline_s: float = LEAST_DEADLINE_S,
    ) -> None:
        self.controls, self.agreement = controls, agreement
        self.on_end, self.on_result, self.on_say = on_end, on_result, on_say
        self.over = False
        self._conductor = conductor
        self._guard, self._least_stall_s = Guard(controls.harmless), least_stall_s
        self._allowed_s, self._least_deadline_s = 0.0, least_deadline_s
        self._plan: list[Policy] = []
        self._known: dict[str, Policy] = {}
        self._light = self._learn = False
        self._policy = controls.default
        self._rescued = False
        """Whether the guard has reverted a policy, so that `_policy` may not be in force."""
        self._problem = ""
        self._since: _Mark | None = None
        self._end: _Mark | None = None
        self._marks: list[tuple[_Mark | None, _Mark, _Mark, int]] = []
        """Timed steps: end of the step before a pause (None: no pause), begin, end, and number of steps."""
        self._each = self._left = 1
        self._copies, self._lockstep = CopyReports(agreement, controls.copied_bytes), Lockstep()
        self._before: _Mark | None = None
        self._total, self._usual_ms = 0, 0.0

    @property
    def watching(self) -> bool:
        """Whether the search is over and the job is only watched."""
        return self._light

    @property
    def policy(self) -> Policy:
        """The policy in force on this rank."""
        return self._policy

    @property
    def changed(self) -> bool:
        """Whether the policy in force differs from the job's default."""
        return self._policy != self.controls.default

    def begin(self) -> None:
        """Meet the other ranks for the first time, at the end of a step."""
        next(self._conductor)
        self.controls.synchronize()
        self._meet(self._report())

    @property
    def untimed_steps(self) -> int:
        """Steps of the watch that have ended on the leader, but whose times the conductor does not have."""
        if not self._light or self.over:
            return 0
        return sum(steps for *_, steps in self._marks) + self._each - self._left

    @property
    def free_steps(self) -> int:
        """How many of the next steps `step` would only count."""
        return self._left - 1 if self._light and not self.over else 0

    @property
    def may_leave(self) -> bool:
        """Whether, if this rank left at the end of this step, the others would end there too, under the same
        policy: true if all ranks meet there or hear from this one."""
        return not self._plan and self._left <= 1 and (not self._light or self.agreement.leads)

    def step(self, count: int = 1) -> None:
        """Handle the end of `count` steps, of which all but the last were free (`free_steps`)."""
        if self.over:
            return
        self._total += count
        self._left -= count
        if self._left > 0:
            return
        self._left = self._each
        if not self._light or self.agreement.leads:
            end = self._mark()
            assert self._since is not None
            self._marks.append((self._before, self._since, end, self._each))
            self._before, self._since, self._end = None, end, end
        else:
            self._end = None  # this step's end is not marked, so no pause can be timed from it
            self._copies.trial_ended(self._each, len(self._plan))
        if self._plan:
            self._next()
        elif self._light:
            self._follow_leader()
        else:
            self._meet(self._report())

    def stop(self, reason: str) -> None:
        """End the tuning on this rank alone, at any point; the others miss its report and end too.

        What was created stays, because the device must not be touched now.
        """
        self._finish(stopped(reason, steps=self._total), self._alone(), release=False)

    def leave(self, result: dict[str, Any]) -> None:
        """End the watch on this rank with `result`; the program does the same on all ranks."""
        self._finish(result, self._alone(), release=False)

    def _alone(self) -> Policy:
        """The default, as far as one rank can apply it alone: controls that concern all ranks stay."""
        now = self._policy
        return replace(self.controls.default, max_ctas=now.max_ctas, comm_rules=now.comm_rules, **now.models)

    # --- reports ------------------------------------------------------------------------------------------

    def _report(self) -> Report:
        """A report on all steps since the last one. Waits for the device."""
        self.controls.synchronize()
        self._copies.clear()
        times, copied, paused_ms = self._times(len(self._marks))
        stall = self._stall()
        if times and self._policy == self.controls.default:
            self._usual_ms = times[-1]
            self.agreement.deadline_s = max(self._least_deadline_s, DEADLINE * times[-1] / 1e3)
        clock = {"steps tuned": self._total, **self.controls.clock()}
        report = {"ms": times, "copied": copied, "paused_ms": paused_ms}
        report |= {"problem": stall or self._problem, "clock": clock}
        report["preparable"] = self.controls.preparable()
        if self._learn:
            report["facts"] = self.controls.facts(len(times)).to_dict()
        return report

    def _stall(self) -> str:
        """Why the trial was rescued: POLICY_STALLED if reverting its policy helped, else PROGRAM_PAUSED.

        Empty if it was not rescued.
        """
        late_s = self._guard.disarm()
        if late_s is None:
            return ""
        self._rescued = True
        return POLICY_STALLED if late_s <= RESCUED * self._allowed_s else PROGRAM_PAUSED

    def _mark(self) -> _Mark:
        return _Mark(self.controls.mark(), self.controls.copied_bytes())

    def _paused_ms(self) -> float:
        """Ms since the end of the last step, if that is marked."""
        return 0.0 if self._end is None else self.controls.between_ms(self._end.device, self.controls.mark())

    def _times(self, count: int) -> tuple[list[float], list[float], float]:
        """Remove the first `count` marks: ms and bytes copied per step of each, and the ms outside steps."""
        done, self._marks = self._marks[:count], self._marks[count:]

        def between(start: _Mark, end: _Mark) -> float:
            return self.controls.between_ms(start.device, end.device)

        paused_ms = sum(between(before, start) for before, start, *_ in done if before is not None)
        times = [between(start, end) / steps for _, start, end, steps in done]
        return times, [(end.copied - start.copied) / steps for _, start, end, steps in done], paused_ms

    # --- decisions ----------------------------------------------------------------------------------------

    def _meet(self, report: Report) -> None:
        """Exchange reports and carry out decisions until the job may continue."""
        what = ""
        while True:
            extra_s = PREPARE_S if what == "prepare" else 0.0
            decision = self.agreement.exchange(report, self._decide, extra_s=extra_s)
            what = decision["do"]
            if what in ("prepare", "settle"):
                report = {"problem": self._attempt(decision)}
                if what == "settle":
                    report["paused_ms"] = self._paused_ms()
            elif what == "report":
                report = self._report()
            else:
                self._since = None  # the ranks waited for each other: start timing anew
                return self._obey(decision)

    def _follow_leader(self) -> None:
        """In the watch: the leader decides what comes next, from the steps that the device has finished."""
        clock = self.controls.clock()
        known = len(self._marks) - LAG if self.agreement.leads else 0
        times, copied, paused_ms = self._times(max(0, known))
        report = {"ms": times, "copied": copied, "paused_ms": paused_ms, "problem": ""}
        others, decide = self._copies.of_others(len(copied)), self._decide
        decision = self.agreement.announce(
            report, lambda reports: {**decide([*reports, *others]), "clock": clock}
        )
        if self._lockstep.lost(decision.get("clock", {}), clock):
            reason = f"rank {self.agreement.rank} is not at the same step as the first rank"
            self.agreement.leave(reason)
            return self.stop(reason)
        if decision["do"] == "report":
            return self._meet(self._report())
        if decision["do"] in ("prepare", "settle"):  # only decided once all times are known
            self.controls.synchronize()
            return self._meet({"problem": self._attempt(decision)})
        return self._obey(decision)

    def _decide(self, reports: Sequence[Report]) -> Decision:
        try:
            return self._conductor.send(list(reports))
        except Exception as error:  # an error in weft: the job continues unchanged
            _log.debug("the conductor failed", exc_info=True)
            return {**ABANDON, "reason": f"{type(error).__name__}: {error}"}

    def _obey(self, decision: Decision) -> None:
        what = decision["do"]
        if what == "run":
            self._run(decision)
        elif what == "end":
            self._finish(decision["result"], Policy.from_dict(decision["policy"]))
        else:
            # A rank that has left may keep controls that concern all ranks; it can no longer change them.
            policy = Policy.from_dict(decision["policy"]) if "policy" in decision else self._alone()
            self._finish(stopped(decision["reason"], steps=self._total), policy)

    def _attempt(self, decision: Decision) -> str:
        """Prepare or settle on a policy; returns why that failed, or an empty string."""
        before = self._policy
        try:
            if decision["do"] == "prepare":
                policy = Policy.from_dict(decision["policy"])
                self.controls.prepare(policy, decision["keys"])
                # If this rank cannot apply it, all ranks learn that now and not in the middle of a plan.
                self._apply(policy)
                self._apply(before)
            else:
                self._apply(Policy.from_dict(decision["policy"]))
                if decision["release"]:
                    self.controls.release()
                if decision["result"] is not None:
                    self.on_result(decision["result"])
        except Exception as error:
            if of_the_program(error):
                raise
            _log.debug("%s failed", decision["do"], exc_info=True)
            self._undo(before)
            return str(error) or type(error).__name__
        return ""

    def _apply(self, policy: Policy) -> None:
        self.controls.apply(policy)
        self._policy, self._rescued = policy, False

    def _undo(self, before: Policy) -> None:
        """Revert to `before`: parts of the failed policy that concern all ranks may be in force here."""
        try:
            self._apply(before)
        except Exception:
            _log.debug("the policy before could not be restored", exc_info=True)

    def _run(self, decision: Decision) -> None:
        policies = [self._read(policy) for policy in decision["policies"]]
        self._plan = [policies[index] for index in decision["order"]]
        self._light, self._learn, self._problem = decision["light"], decision["learn"], ""
        self._each = self._left = decision["each"]
        self._copies.ask(self._light and decision["inputs"])
        for line in decision["say"]:
            self.on_say(line)
        if self._learn:
            self.controls.learn()
        if self._light:
            self._guard.stop()
        else:
            self._since = None  # the ranks waited for each other: start timing anew
            if set(self._plan) != {self.controls.default}:
                usual_s = self._usual_ms / 1e3
                self._allowed_s = max(self._least_stall_s, STALL * usual_s * len(self._plan))
                self._guard.arm(self._allowed_s)
        self._next()

    def _read(self, document: dict[str, Any]) -> Policy:
        """Parse a decision's policy, with a cache: the watch repeats the same few policies."""
        key = json.dumps(document)
        if key not in self._known:
            self._known[key] = Policy.from_dict(document)
        return self._known[key]

    def _next(self) -> None:
        """Continue with the next step of the plan."""
        policy = self._plan.pop(0)
        if policy != self._policy or self._rescued:
            try:
                self._apply(policy)
            except Exception as error:
                # The other ranks are already running: report this at the next boundary, where all can revert.
                _log.debug("a policy could not be applied", exc_info=True)
                self._problem = str(error) or type(error).__name__
            self._since = None
        if self._since is None and (not self._light or self.agreement.leads):
            self._before, self._since = self._end, self._mark()

    def _finish(self, result: dict[str, Any], policy: Policy, release: bool = True) -> None:
        self.over = True
        self._guard.stop()
        try:
            self._apply_last(policy)
            if release:
                self.controls.release()
        except Exception:
            _log.debug("the last policy could not be applied", exc_info=True)
        self.on_end(result)

    def _apply_last(self, policy: Policy) -> None:
        """Apply the policy that stays; without its framework controls if the models cannot be changed now.

        The program may have changed its models since a trial began, for example with a communication hook of
        DDP: its buckets then stay as they are, which changes no result, and everything else is still undone.
        """
        try:
            self._apply(policy)
        except UnavailableError:
            if policy.models == self._policy.models:
                raise
            _log.debug("the models keep their controls", exc_info=True)
            self._apply(replace(policy, **self._policy.models))
