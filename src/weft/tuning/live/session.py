"""Session: one rank's part in the tuning of a job. At the end of every step it is called; it does the rest.

It knows neither torch nor NCCL: what can be changed comes as controls, and how ranks agree as an Agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from weft.policy import Policy
from weft.ranks import ABANDON, Agreement, Decision, Report
from weft.shim.apply import PREPARE_S
from weft.tuning.live.conductor import Conductor
from weft.tuning.live.options import Facts
from weft.tuning.live.outcome import stopped
from weft.tuning.live.watchdog import Guard

LEAST_DEADLINE_S = 5.0
DEADLINE = 10.0  # times the usual step, for the other ranks to come to the boundary
STALL = 10.0  # times the usual step, for a trial
LEAST_STALL_S = 5.0


class Controls(Protocol):
    """What can be changed in a process. Everything but `harmless` is called at step boundaries only."""

    default: Policy
    """What the process runs under when it is left alone."""

    def learn(self) -> None:
        """Count launches from now on."""

    def facts(self, steps: int) -> Facts:
        """What was seen in the `steps` steps since `learn`."""

    def prepare(self, ctas: int) -> None:
        """Make policies with so many CTAs possible, within PREPARE_S, or raise. Called on all ranks."""

    def apply(self, policy: Policy) -> None:
        """Run what follows under this policy; raises where it cannot be."""

    def harmless(self) -> None:
        """Go back to what cannot hurt, on this rank alone, at any moment and on any thread."""

    def release(self) -> None:
        """Give back what the policy in force does not need."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""

    def now(self) -> float:
        """Seconds, by the clock that times steps."""

    def clock(self) -> dict[str, int]:
        """Counts that must be equal on all ranks that report them."""


class Session:
    """The tuning of a job, on one rank. `conductor` decides, where this rank leads.

    `on_end` gets the result, once, on every rank: the document of `weft run --stats`, key `tuning`.
    """

    def __init__(
        self,
        controls: Controls,
        agreement: Agreement,
        conductor: Conductor,
        on_end: Callable[[dict[str, Any]], None],
        *,
        least_stall_s: float = LEAST_STALL_S,
    ) -> None:
        self.controls, self.agreement, self.on_end = controls, agreement, on_end
        self.over = False
        self._conductor = conductor
        self._guard, self._least_stall_s = Guard(controls.harmless), least_stall_s
        self._trial: Decision = {"steps": 0, "learn": False}
        self._policy = controls.default
        self._problem = ""
        self._since, self._steps, self._total, self._usual_ms = 0.0, 0, 0, 0.0

    def begin(self) -> None:
        """Meet the other ranks for the first time, at the end of a step."""
        next(self._conductor)
        self.controls.synchronize()
        self._meet(self._report(ms=0.0))

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        self._total += 1
        if self.over or self._steps < self._trial["steps"]:
            return
        self.controls.synchronize()
        ms = 1e3 * (self.controls.now() - self._since) / self._steps
        late = self._guard.disarm()
        if self._policy == self.controls.default:
            self._usual_ms = ms
            self.agreement.deadline_s = max(LEAST_DEADLINE_S, DEADLINE * ms / 1e3)
        report = self._report(ms, "stalled" if late else self._problem)
        if self._trial["learn"]:
            report["facts"] = self.controls.facts(self._steps).to_dict()
        self._meet(report)

    def stop(self, reason: str) -> None:
        """End the tuning on this rank alone, at any point; the others will miss its word and end too.

        What was made stays, as the device may not be touched now.
        """
        self._finish(stopped(reason, steps=self._total), self.controls.default, release=False)

    def _report(self, ms: float, problem: str = "") -> Report:
        clock = {"steps tuned": self._total, **self.controls.clock()}
        return {"ms": ms, "problem": problem, "clock": clock}

    def _meet(self, report: Report) -> None:
        """Exchange reports and do what is decided, until the job may run on."""
        what = ""
        while True:
            extra_s = PREPARE_S if what == "prepare" else 0.0
            decision = self.agreement.exchange(report, self._decide, extra_s=extra_s)
            what = decision["do"]
            if what == "run":
                return self._run(decision)
            if what == "end":
                return self._finish(decision["result"], Policy.from_dict(decision["policy"]))
            if what == "abandon":
                return self._finish(stopped(decision["reason"], steps=self._total), self.controls.default)
            report = {"problem": self._attempt(decision)}

    def _decide(self, reports: Sequence[Report]) -> Decision:
        try:
            return self._conductor.send(list(reports))
        except Exception as error:  # a mistake of ours: the job goes on as it was
            return {**ABANDON, "reason": f"{type(error).__name__}: {error}"}

    def _attempt(self, decision: Decision) -> str:
        """Prepare communicators, or apply a policy; why it could not be, or nothing."""
        try:
            if decision["do"] == "prepare":
                self.controls.prepare(decision["ctas"])
            else:
                self._apply(Policy.from_dict(decision["policy"]))
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _apply(self, policy: Policy) -> None:
        self.controls.apply(policy)
        self._policy = policy

    def _run(self, decision: Decision) -> None:
        policy = Policy.from_dict(decision["policy"])
        # The others run already: what goes wrong is reported at the next boundary, where all can go back.
        self._problem = self._attempt(decision) if policy != self._policy else ""
        if decision["learn"]:
            self.controls.learn()
        if policy != self.controls.default:
            usual_s = self._usual_ms / 1e3
            self._guard.arm(max(self._least_stall_s, STALL * usual_s * decision["steps"]))
        self._trial, self._steps = decision, 0
        self._since = self.controls.now()

    def _finish(self, result: dict[str, Any], policy: Policy, release: bool = True) -> None:
        self.over = True
        self._guard.stop()
        with suppress(Exception):
            self._apply(policy)
            if release:
                self.controls.release()
        self.on_end(result)
