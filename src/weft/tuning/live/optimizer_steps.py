"""Hooks on a torch program's optimizers: called after each step, on the thread on which steps end."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LONGEST_FREE_S = 1.0  # limit on free steps, so that `weft top` still shows steps that became slow
MOST_PARTS = 256
WHOLE = 4  # some versions of DeepSpeed step the first part, or all, once more before training
COUNTED = 16  # a power of two: of this many free steps, the hook counts all but one by itself


class OwnThread:
    """The process (not a fork of it) and the thread on which steps end.

    That is the first thread that calls `here`; once it has ended, the next thread that calls. A program may
    train each epoch on a new thread. Whether the new thread reuses the old one's identifier differs between
    ranks, so identifiers alone must not decide.
    """

    def __init__(self) -> None:
        self._process: int | None = None
        self._ident = 0
        self._thread: threading.Thread | None = None

    def here(self) -> bool:
        """Whether this is that process and thread."""
        ident = threading.get_ident()
        if self._process is None:
            self._process = os.getpid()
        if self._ident != ident and self._process == os.getpid() and not self._alive():
            self._ident, self._thread = ident, threading.current_thread()
        return self._ident == ident and self._process == os.getpid()

    def elsewhere(self) -> bool:
        """Whether this is another thread of that process while the first one still runs."""
        return self._process == os.getpid() and self._ident != threading.get_ident() and self._alive()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


class OptimizerNumbers:
    """Numbers optimizers in the order of their first steps, so that all ranks use the same numbers.

    Some libraries step one optimizer several times for a step of the job, each time with other parameters:
    DeepSpeed with ZeRO does so for each parameter group or part of one. An optimizer has a number for each
    of up to MOST_PARTS first parameters, until it steps the same ones WHOLE times in a row: others may follow
    later (BAdam trains another layer every 100 steps), but each call is then a step of the job.

    On some ranks a new object may have the `id` of a deleted one: only those ranks would count its first
    steps, and the ranks would later change policies at different steps.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Parts] = {}
        self._last = 0

    def of(self, optimizer: Any) -> int:
        """The number of an optimizer with the parameters that it has now."""
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = _Parts(weakref.ref(optimizer))
        if known.whole:
            return known.first
        part = _first_parameter(optimizer)
        found = known.numbers.get(id(part))
        if found is None or found[0]() is not part:
            self._last += 1
            known.count += 1
            known.first = known.first or self._last
            found = known.numbers[id(part)] = weakref.ref(part), self._last
        known.in_a_row = known.in_a_row + 1 if part is known.latest() else 1
        known.latest = found[0]
        known.whole = known.in_a_row == WHOLE or known.count > MOST_PARTS
        return known.first if known.whole else found[1]


@dataclass
class _Parts:
    """An optimizer and the numbers of its first parameters."""

    optimizer: weakref.ref[Any]
    numbers: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)
    count: int = 0
    """How many numbers were given. Parameters that were deleted count, too: their places in memory may be
    used again on some ranks only."""
    first: int = 0
    """The first of the numbers; the only one if the optimizer steps as a whole."""
    latest: Callable[[], Any] = lambda: None
    """The first parameter at the latest step."""
    in_a_row: int = 0
    """How many times in a row it was this one."""
    whole: bool = False


def _first_parameter(optimizer: Any) -> Any:
    """The first of the parameters that an optimizer has now; the optimizer itself if it has none."""
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            return parameter
    return optimizer


class FreeSteps:
    """Steps of one optimizer that need no handling.

    They end early, on this rank alone, after LONGEST_FREE_S: skipped steps are then published and saved. If
    there are many, the hook counts most of them by itself (`counted`, see OptimizerHook): the program has
    evicted our code from the caches since the last step, so each Python call takes a microsecond or more.
    """

    def __init__(self) -> None:
        self.left = self._free = self._number = self._ident = 0
        self.counted = 0
        """Mask: the hook counts a step by itself if `left & counted` is not 0. With 0 it counts none."""
        self._until_s = 0.0
        self.optimizer: Callable[[], Any] = lambda: None

    def begin(self, optimizer: Any, number: int, free: int, *, each_in_python: bool = False) -> None:
        """Make the next `free` steps of this optimizer, on this thread, free steps.

        `number`: the optimizer's number. `each_in_python`: the hook counts none of them by itself.
        """
        if free > 0:
            if self.optimizer() is not optimizer:
                self.optimizer = weakref.ref(optimizer)
            self.counted = 0 if each_in_python or free < COUNTED else COUNTED - 1
            self.left = self._free = free
            self._number, self._ident = number, threading.get_ident()
            self._until_s = time.monotonic() + LONGEST_FREE_S

    def take(self, optimizer: Any) -> bool:
        """Count this step if it is free; returns whether it is."""
        if not self.left or optimizer is not self.optimizer() or threading.get_ident() != self._ident:
            return False
        if time.monotonic() > self._until_s:
            return False
        self.left -= 1  # the only write: if a signal handler raises, the step is counted or not begun
        return True

    @property
    def taken(self) -> int:
        """How many free steps were taken since `begin`."""
        return self._free - self.left

    def end(self) -> tuple[int, int]:
        """End the free steps; returns how many were taken, and the optimizer's number."""
        taken = self.taken
        self._free = self.left = 0
        return taken, self._number


class OptimizerHook:
    """Calls `stepped` with each optimizer that has stepped, until removed; counts some free steps itself."""

    def __init__(self, stepped: Callable[[Any], None], free: FreeSteps | None = None) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        compiling = torch.compiler.is_dynamo_compiling  # the cheapest such check
        steps = free or FreeSteps()

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if compiling():  # a compiled optimizer is not detected
                return
            if steps.left & steps.counted and optimizer is steps.optimizer():
                steps.left -= 1
            else:
                stepped(optimizer)

        self._hook = register_optimizer_step_post_hook(hook)

    def remove(self) -> None:
        """Remove the hook if it is the last one, else leave it: torch may be iterating over its hooks, and
        would raise if one before the last were removed."""
        from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

        if next(reversed(hooks), None) == self._hook.id:
            self._hook.remove()
