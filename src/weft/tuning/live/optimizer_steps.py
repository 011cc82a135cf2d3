"""Hooks on a torch program's optimizers: called after each step, on the thread on which steps end."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

LONGEST_FREE_S = 1.0  # steps that became slow are still shown by `weft top`
COUNTED = 16  # of so many free steps, a power of two, the hook counts all but one by itself


class OwnThread:
    """The process (not a fork of it) and the thread that asked first, or the first one after its end.

    A program may train each epoch on a thread of its own. Whether the next one gets the identifier of the one
    that has ended differs between ranks, so that must not decide.
    """

    def __init__(self) -> None:
        self._process: int | None = None
        self._ident = 0
        self._thread: threading.Thread | None = None

    def here(self) -> bool:
        """Whether this is the one."""
        ident = threading.get_ident()
        if self._process is None:
            self._process = os.getpid()
        if self._ident != ident and self._process == os.getpid() and not self._alive():
            self._ident, self._thread = ident, threading.current_thread()
        return self._ident == ident and self._process == os.getpid()

    def elsewhere(self) -> bool:
        """Whether this is another thread of that process, while the one still runs."""
        return self._process == os.getpid() and self._ident != threading.get_ident() and self._alive()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


class OptimizerNumbers:
    """Numbers optimizers by their first step, so that all ranks of a job have the same numbers.

    The `id` of a new optimizer may be that of one that is gone, on some of the ranks: those would count its
    first steps and the others not, and later change policies at different steps.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._last = 0

    def of(self, optimizer: Any) -> int:
        """The number of this optimizer."""
        found = self._known.get(id(optimizer))
        if found is None or found[0]() is not optimizer:
            self._last += 1
            found = self._known[id(optimizer)] = weakref.ref(optimizer), self._last
        return found[1]


class FreeSteps:
    """Steps of one optimizer that need not be looked at.

    They end early where they take long, on this rank alone: what has been skipped is shown and saved then.
    Where there are many, a hook counts most of them by itself (`counted`, see OptimizerHook): since the step
    before, the program has filled the caches, and every further call of Python takes a microsecond or more.
    """

    def __init__(self) -> None:
        self.left = self._free = self._number = self._ident = 0
        self.counted = 0
        """Bits of `left` that are set for a step that the hook counts by itself; 0: it counts none."""
        self._until_s = 0.0
        self.optimizer: Callable[[], Any] = lambda: None

    def begin(self, optimizer: Any, number: int, free: int, *, each_looked_at: bool = False) -> None:
        """The next `free` steps of this optimizer, on this thread, are free. `number`: the optimizer's.

        `each_looked_at`: the hook counts none of them by itself.
        """
        if free > 0:
            if self.optimizer() is not optimizer:
                self.optimizer = weakref.ref(optimizer)
            self.counted = 0 if each_looked_at or free < COUNTED else COUNTED - 1
            self.left = self._free = free
            self._number, self._ident = number, threading.get_ident()
            self._until_s = time.monotonic() + LONGEST_FREE_S

    def take(self, optimizer: Any) -> bool:
        """Whether this step is free."""
        if not self.left or optimizer is not self.optimizer() or threading.get_ident() != self._ident:
            return False
        if time.monotonic() > self._until_s:
            return False
        self.left -= 1  # the only store: a signal handler that raises leaves the step counted, or not begun
        return True

    @property
    def taken(self) -> int:
        """How many were taken since `begin`."""
        return self._free - self.left

    def end(self) -> tuple[int, int]:
        """No more steps are free; how many were taken, and of which optimizer."""
        taken = self.taken
        self._free = self.left = 0
        return taken, self._number


class OptimizerHook:
    """Calls a function with each optimizer that has stepped, but for free steps, until it is removed."""

    def __init__(self, stepped: Callable[[Any], None], free: FreeSteps | None = None) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        compiling = torch.compiler.is_dynamo_compiling  # the cheapest of its kind
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
        """Torch is iterating over its hooks, and only the last may be removed: with a hook of the program
        after ours, torch would raise. Ours then stays."""
        from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

        if next(reversed(hooks), None) == self._hook.id:
            self._hook.remove()
