"""Tracing: finds the steps of a torch program that `weft run --trace` records. Torch's autoload starts it.

A step ends with an optimizer step or, if no optimizer steps, where the sequence of collectives repeats
(`weft.tuning.live.steps`). If neither is found, the shim traces by time. An error in this module ends the
search for steps, never the program.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from weft.shim import binding, communicators, tracer
from weft.tuning.live.optimizer_steps import OptimizerHook, OptimizerNumbers, OwnThread
from weft.tuning.live.steps import Steps, period

_log = logging.getLogger("weft.tracer")

CALLS_BETWEEN_CHECKS = 64  # collectives between two checks for a period, if no optimizer steps
TRACED_PERIODS = 6
MOST_CHECKS = 100


class StepTracer:
    """Records `length` steps after the first `after` steps. Called at the end of every step."""

    def __init__(self, after: int, length: int) -> None:
        self._after, self._length = after, length
        self._steps = Steps()
        self._thread = OwnThread()
        self._ended = 0  # steps so far, including those before the period was found
        self._events = 0
        self._recorded: int | None = None  # None before recording begins
        self.over = False

    @property
    def by_optimizer(self) -> bool:
        """Whether an optimizer has stepped: then collectives do not define the steps."""
        return self._steps.seen

    def event(self, which: Any) -> None:
        """Handle an optimizer step, which may end a step of the program."""
        if self.over or not self._thread.here():
            return
        self._events += 1
        if self._steps.ends_with(which):
            self._ended = max(self._ended + 1, self._events // (self._steps.length or 1))
            self.step_ended()

    def calls_repeated(self, steps: int) -> None:
        """Handle the end of a period of collectives, the `steps`-th so far."""
        if not self.over and self._thread.here() and not self.by_optimizer:
            self._ended = max(self._ended + 1, steps)
            self.step_ended()

    def step_ended(self) -> None:
        if self._recorded is not None:
            self._record()
        elif self._ended >= self._after:
            self._begin()
        elif self._ended == self._after - 1:
            tracer.watch_tracer()

    def _begin(self) -> None:
        if not tracer.tracer_available():
            return
        if not tracer.steps_known():  # the shim already traces by time
            self.over = True
        elif tracer.start():  # else the tracer is in use, for example by the tuner: retry at a later step
            self._recorded = 0

    def _record(self) -> None:
        tracer.mark()
        self._recorded = (self._recorded or 0) + 1
        if self._recorded >= self._length:
            self.over = True
            tracer.pause()
            # The GPU is still running these steps: wait for it on another thread than the program's.
            threading.Thread(target=tracer.finish, name="weft-trace", daemon=True).start()


def start() -> None:
    """Entry point: runs during torch's import, in every process of a job under `weft run --trace`."""
    after_s, length_s, _ = os.environ["WEFT_TRACE"].split()
    traced = StepTracer(int(float(after_s)), int(float(length_s)))
    tracer.steps_come()
    _watch_optimizers(traced)


def _watch_optimizers(traced: StepTracer) -> None:
    numbers = OptimizerNumbers()

    def stepped(optimizer: Any) -> None:
        try:
            traced.event(numbers.of(optimizer))
            if traced.over:
                hook.remove()
        except Exception:
            _log.debug("the search for steps ends", exc_info=True)
            traced.over = True

    hook = OptimizerHook(stepped)
    if not os.environ.get("WEFT_TUNE"):  # else the tuner listens to collectives itself
        _watch_collectives(traced)


def _watch_collectives(traced: StepTracer) -> None:
    """Watch collectives, for inference programs, once a process group and so communicators exist."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    real = dist.init_process_group
    places = (dist, dist.distributed_c10d)

    def with_group(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        try:
            for place in places:
                if place.init_process_group is with_group:
                    place.init_process_group = real
            if binding.injected():
                communicators.on_call(_Listener(traced).called, every=CALLS_BETWEEN_CHECKS)
        except Exception:
            _log.debug("collectives cannot be observed", exc_info=True)
        return made

    for place in places:
        place.init_process_group = with_group


class _Listener:
    """Finds the period of the collectives, as long as no optimizer steps."""

    def __init__(self, traced: StepTracer) -> None:
        self._traced, self._checks = traced, 0

    def called(self, key: str, count: int) -> None:
        self._checks += 1
        if self._traced.over or self._traced.by_optimizer or self._checks > MOST_CHECKS:
            communicators.on_call(None)
            return
        calls = [(call.operation, call.bytes) for call in communicators.calls() if call.key == key]
        length = period(calls, TRACED_PERIODS)
        if length is not None:
            self._length = length
            communicators.on_call(self.repeated, key, every=length)

    def repeated(self, key: str, count: int) -> None:
        if self._traced.over or self._traced.by_optimizer:
            communicators.on_call(None)
        else:
            self._traced.calls_repeated(count // self._length)
