"""Live: tunes the job that this process is a rank of. Torch's autoload starts it under `weft run --tune`.

A process waits until the program has created a process group and its step is known, then takes part in the
tuning (`weft.tuning.live.session`). Afterwards the job is watched (`weft.tuning.live.watch`): a mark per step
and a decision every few steps. With `--tune-once`, only the policy stays in the program. An error in this
module ends the tuning, never the program.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.shim.inject import APPLY, TUNE_VARIABLE
from weft.tuning.live import settings
from weft.tuning.live.call_steps import CallSteps
from weft.tuning.live.group_functions import wrap_group_function
from weft.tuning.live.interrupts import of_the_program
from weft.tuning.live.job_output import JobOutput, warn
from weft.tuning.live.job_store import own_keys, within_process
from weft.tuning.live.optimizer_steps import FreeSteps, OptimizerHook, OptimizerNumbers, OwnThread
from weft.tuning.live.steps import Steps
from weft.tuning.live.tuned_job import final, stopped, unfinished
from weft.tuning.live.uneven_inputs import on_inputs_used_up

_log = logging.getLogger("weft.live")

EVENTS_WITHOUT_STEP = 4000  # optimizer steps without a period or a group, after which tuning stops
SAVED_S = (5.0, 60.0)  # seconds between saved states: first and longest interval


class Live:
    """The tuning of this process, from the import of torch to its end."""

    def __init__(self) -> None:
        self._thread = OwnThread()
        self._steps, self._numbers, self._events = Steps(), OptimizerNumbers(), 0
        self._event_at, self._between_s = time.monotonic(), 0.0
        self._calls = CallSteps(self._calls_repeated, lambda: self._over or self._steps.seen)
        self._session: Any = None
        self._free, self._changed = FreeSteps(), False
        self._over = self._by_calls = self._crowded = False
        self._output = JobOutput()
        self._group_process: int | None = None
        self._earlier: Any = None
        self._status: Any = None
        self._result: dict[str, Any] | None = None
        """Result of the last search; None before one has ended."""
        self._proven: Callable[[], Any] | None = None
        """Computes the outcome so far while a proven policy's gain is still measured; None otherwise."""
        self._reports: list[Callable[[], None]] | None = None
        """Reports to make once the process group is gone; None: report immediately."""
        self._save_after_s = SAVED_S[0]
        self._saved_at = time.monotonic()

    def watch(self) -> None:
        """Start looking for steps."""
        import torch.cuda

        self._cuda: Any = torch.cuda
        self._hook = OptimizerHook(self._optimizer_stepped, self._free)
        self._restore = [
            wrap_group_function("init_process_group", after=self._group_made),
            wrap_group_function("destroy_process_group", before=self._group_goes, after=self._group_gone),
        ]

    # --- where a step ends ------------------------------------------------------------------------------

    def _group_made(self, *args: Any, **options: Any) -> None:
        try:
            import torch.distributed as dist

            self._group_process = os.getpid()
            if self._output.rank is None and not self._over:
                self._output.rank = dist.get_rank()
                self._output.tell(stopped("no optimizer step and no repeating NCCL collective was found"))
                self._calls.watch()
        except Exception as error:
            self._stop(error)

    def _group_goes(self, group: Any = None) -> None:
        """End tuning: the group's store and communicators are going, and no later ones were prepared."""
        import torch.distributed as dist

        mine = self._group_process == os.getpid() and not self._over  # on any thread
        if self._session is None or not mine or group not in (None, dist.group.WORLD):
            return
        # Rank 0 serves the store. If it wrote files now, other ranks that create a new group meanwhile would
        # connect to the old store and then lose it.
        self._reports = []
        if found := self._proven_so_far():
            self._session.leave(found)
        else:
            self._leave("the program destroyed its process group before tuning finished")

    def _group_gone(self, group: Any = None) -> None:
        reports, self._reports = self._reports or [], None
        for report in reports:
            report()

    def _inputs_used_up(self) -> None:
        """Leave when this rank has no inputs left: the others go on and would miss it at the next meeting."""
        if self._session is None or not self._mine():
            return
        self._leave_others(f"rank {self._output.rank} had fewer inputs than others (Join)")

    def _leave_others(self, reason: str) -> None:
        """End the tuning on this rank, and on the others at the exchange where they would wait for it."""
        self._session.agreement.leave(reason)
        self._leave(reason)

    def _leave(self, reason: str) -> None:
        """End the tuning on this rank. The result of a search that is over remains."""
        if self._session is not None and (self._session.watching or self._result is not None):
            self._session.leave(self._final())
        else:
            self._give_up(reason)

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if self._free.take(optimizer):
            try:
                if self._changed:
                    self._leaves_at_capture()
            except BaseException as error:
                self._caught(error)
            return
        if self._by_calls:
            return
        if not self._mine():
            self._crowded |= self._thread.elsewhere()
            return
        if self._session is None:
            self._note_event()
        try:
            skipped, number = self._free.end()
            if skipped:
                self._steps.repeat(number, skipped)
                self._session.step(skipped)
            event = self._numbers.of(optimizer)
            ends = self._steps.ends_with(event)
            if ends:
                self._step_ended(optimizer, 1 + skipped)
            else:
                if skipped:
                    self._output.publish(self._session, ended=skipped, over=self._over)
                self._wait()
            if ends and self._session is not None and self._steps.length == 1:
                self._changed = self._session.changed
                free = self._session.free_steps
                self._free.begin(optimizer, event, free, each_in_python=self._changed)
        except BaseException as error:
            self._caught(error)

    def _leaves_at_capture(self) -> bool:
        """Leave if the step is being captured: a CUDA graph keeps its policy, and its steps are not seen."""
        capturing = self._cuda.is_initialized() and self._cuda.is_current_stream_capturing()
        if capturing:
            self._leave("the program captures its step in a CUDA graph")
        return bool(capturing)

    def _calls_repeated(self) -> None:
        if self._mine():
            self._by_calls = True
            if self._session is None:
                self._note_event()
            try:
                self._step_ended(None)
            except BaseException as error:
                self._caught(error)

    def _mine(self) -> bool:
        """Whether this is the process (not a fork of it) and the thread on which steps end."""
        return self._thread.here() and not self._over

    def _wait(self) -> None:
        self._events += 1
        if self._events > EVENTS_WITHOUT_STEP and self._session is not None:
            self._leave("the program's steps no longer repeat")
        elif self._events > EVENTS_WITHOUT_STEP:
            self._end(stopped("no repeating step was found"))

    # --- the tuning -------------------------------------------------------------------------------------

    def _step_ended(self, optimizer: Any, steps: int = 1) -> None:
        """Handle the end of `steps` steps, of which all but the last were free (see FreeSteps)."""
        # Steps may take less than a millisecond, so this path must not import or look up anything.
        session = self._session
        if self._leaves_at_capture():
            return
        if session is not None and self._crowded and session.may_leave:
            # When one thread ends a step, the other is at a different point of its own step on every rank.
            self._leave_others("several threads of the program step optimizers at the same time")
        elif session is not None:
            self._events = 0
            session.step()
            self._output.publish(session, ended=steps, over=self._over)
            if self._output.leads and time.monotonic() > self._saved_at + self._save_after_s:
                self._save()
        else:
            self._first_step(optimizer)

    def _note_event(self) -> None:
        now = time.monotonic()
        self._event_at, self._between_s = now, now - self._event_at

    def _first_step(self, optimizer: Any) -> None:
        import torch.distributed as dist

        if self._group_process not in (None, os.getpid()):
            self._over = True  # a fork of the rank that steps its own optimizer; the store is not for it
        elif dist.is_available() and dist.is_initialized():
            self._begin(optimizer)
            self._output.publish(self._session, ended=1, over=self._over)
        else:
            self._wait()

    def _begin(self, optimizer: Any) -> None:
        import torch.distributed as dist

        from weft.ranks import Agreement
        from weft.tuning.live.conductor import conduct
        from weft.tuning.live.ddp import unwatch_forward
        from weft.tuning.live.earlier import Earlier
        from weft.tuning.live.search import hold, tune
        from weft.tuning.live.session import Session
        from weft.tuning.live.trial import Record

        self._output.rank, world = dist.get_rank(), dist.get_world_size()
        if world < 2:
            self._end(stopped("the job has one rank and therefore no collectives"))
            return
        base = dist.distributed_c10d._get_default_store()
        ranks = (self._output.rank,) if within_process(base) else range(world)
        deadline_s = settings.first_deadline_s(self._between_s)
        try:
            keys = own_keys(base, self._output.rank, world)
        except Exception:  # for example torch's FakeStore, which stores nothing
            _log.debug("no keys of our own", exc_info=True)
            self._end(stopped("the job's rendezvous store cannot be used"))
            return
        agreement = Agreement(keys, self._output.rank, ranks, deadline_s)
        default = settings.start_policy()
        controls = settings.controls_here(default, world, optimizer)
        if isinstance(controls, str):
            self._end(stopped(controls))
            return
        self._output.record, self._earlier = Record(), Earlier(default, warn)
        method = tune(default, self._earlier.recall, record=self._output.record, on_proven=self._note_proven)
        budget = settings.watch_budget()
        if os.environ.get(TUNE_VARIABLE) == APPLY:
            method, budget, self._earlier = hold(default, self._output.record), 0.0, None
        found = {} if self._earlier is None else {"result": self._earlier.found}
        conductor = conduct(method, default, self._watch if budget > 0 else None, **found)
        self._output.leads = agreement.leads
        least = {"least_stall_s": settings.least_stall_s(), "least_deadline_s": settings.least_deadline_s()}
        self._session = Session(controls, agreement, conductor, self._end, self._found, self._said, **least)
        self._output.tell(stopped("the job ended before tuning was over"))
        if self._earlier is not None:
            self._output.say(f"tuning {world} ranks during the next steps")
        self._restore += [on_inputs_used_up(self._inputs_used_up), unwatch_forward]
        atexit.register(self._at_exit, os.getpid())
        self._session.begin()

    def _watch(self, outcome: Any, ahead: int, each: int) -> Any:
        """Create the watch that follows a search, on the leader."""
        from weft.tuning.live.watch import watch
        from weft.tuning.live.watch_status import WatchStatus

        self._status = WatchStatus(outcome, outcome.policy)
        # No `recall`: the first search has already tried the policy of an earlier job.
        return watch(
            outcome,
            budget=settings.watch_budget(),
            ahead=ahead,
            each=each,
            record=self._output.record,
            status=self._status,
        )

    def _note_proven(self, so_far: Callable[[], Any]) -> None:
        """Note that a policy is proven while its gain is still being measured."""
        self._proven = so_far

    def _proven_so_far(self) -> dict[str, Any] | None:
        """The result if the job ended now, provided a policy is proven and its search is not over."""
        outcome = self._proven() if self._proven is not None else None
        return unfinished(outcome) if outcome is not None and outcome.kept else None

    def _found(self, result: dict[str, Any]) -> None:
        """Report the result of a search; from now on the job is watched."""
        self._result, self._proven = result, None
        self._output.tell(result)
        self._output.write_record()
        self._output.say(f"tuning is over: {result['text']}")
        if self._output.leads:
            self._earlier.remember(result)

    def _said(self, line: str) -> None:
        """Print a line from the watch, and store its result so far."""
        self._output.say(line)
        if self._output.leads and self._status is not None:
            result = self._final()
            self._output.tell(result)
            self._earlier.follow(self._status, result)

    def _final(self) -> dict[str, Any]:
        """The result so far, including the watch."""
        if self._status is not None:
            untimed = self._session.untimed_steps if self._session is not None else 0
            return final(self._status, untimed + self._free.taken)
        return self._result or stopped("the job ended before tuning was over")

    def _save(self) -> None:
        """Save the state so far: a program that is killed or calls os._exit runs no exit handlers."""
        if self._session is None:
            return
        if found := self._final() if self._session.watching else self._proven_so_far():
            self._output.tell(found)
            if self._output.leads and self._status is not None:
                self._earlier.follow(self._status, found)
        self._output.write_record()
        self._save_after_s = min(2 * self._save_after_s, SAVED_S[1])
        self._saved_at = time.monotonic()

    def _at_exit(self, process: int) -> None:
        """Save the result when the program ends while it is tuned or watched."""
        if process == os.getpid():
            self._group_gone()  # not called yet if destroying the group failed
            with suppress(Exception):
                self._save()
                if self._session is not None and (found := self._proven_so_far()):
                    self._earlier.remember(found)

    def _end(self, result: dict[str, Any]) -> None:
        """End tuning: remove weft's hooks from the program and report."""
        known, self._over = self._result is not None, True
        self._output.publish(self._session, over=True)
        self._hook.remove()
        for restore in self._restore:
            restore()
        with suppress(Exception):
            self._calls.stop()
        began, self._session = self._session is not None, None
        report = partial(self._report_end, result, began=began, known=known)
        if self._reports is None:
            report()
        else:
            self._reports.append(report)

    def _report_end(self, result: dict[str, Any], *, began: bool, known: bool) -> None:
        """`began`: whether a search had begun. `known`: whether its result has already been reported."""
        self._output.tell(result)
        self._output.write_record()
        if self._earlier is None and began:
            self._output.say(result["text"])
        elif not known or result["state"] == "stopped":
            self._output.say(f"tuning is over: {result['text']}")
        if self._output.leads and not known and self._earlier is not None:
            self._earlier.remember(result)

    def _caught(self, error: BaseException) -> None:
        """An error of weft ends the tuning; one of the program ends it on this rank and is raised again."""
        if not of_the_program(error):
            self._stop(error)
            return
        with suppress(Exception):
            self._leave("the program was interrupted")
        raise error

    def _stop(self, error: BaseException) -> None:
        """After an error in weft: revert to the default, print one line, and end the tuning."""
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warn(f"tuning stops: {reason}")
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        session, self._over = self._session, True
        with suppress(Exception):
            if session is not None and not session.over:
                session.stop(reason)
            else:
                self._end(stopped(reason))


def start() -> None:
    """Entry point: runs during torch's import, in every process of a job under `weft run --tune`."""
    folder = os.environ.get("WEFT_JOB")
    if folder:
        with suppress(OSError):
            Path(folder, "tuning.loaded").touch()
    import torch.distributed as dist

    if dist.is_available():
        Live().watch()
