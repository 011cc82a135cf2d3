"""Look: a few steps of the running job through torch's profiler. What runs beside collectives, and how long?

Launches tell which kernels there are; only the profiler tells which of them the GPU runs beside a collective,
for the CPU launches far ahead. The profiler is torch's one and only: where the program uses it already,
nothing is looked at, and where the program wants it in the meantime, it gets it.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# What torch.autograd.profiler calls when a profiler begins.
_BEGINNINGS = ("_prepare_profiler", "_enable_profiler")


@dataclass(frozen=True)
class Seen:
    """What a step of the job does on the GPU, in ms."""

    span_ms: float
    comm_ms: float
    exposed_ms: float
    kernels: dict[str, tuple[float, float]]
    """By name: all of the kernel's time, and what of it is beside collectives."""


class Look:
    """A profiler that gives way."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._undo: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Watch from now on, if that is possible."""
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch has to say about profilers is not about the program
            import torch

            if _in_use():
                return
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
            self._profiler = profiler
            self._undo = _before_another(self.drop)

    def end(self, steps: int) -> Seen | None:
        """What was seen in so many steps; None where nothing could be."""
        profiler, self._profiler = self._profiler, None
        self._undo()
        if profiler is None:
            return None
        with suppress(Exception):
            profiler.stop()
            return seen_in(profiler, steps)
        return None

    def drop(self) -> None:
        """Stop watching, if it is still on; nothing comes of it."""
        profiler, self._profiler = self._profiler, None
        self._undo()
        if profiler is not None:
            with suppress(Exception):
                profiler.stop()


def _in_use() -> bool:
    """Whether the program profiles now. While its profiler warms up, only the object itself says so."""
    import torch
    from torch.autograd import profiler as module

    if torch.autograd._profiler_enabled() or getattr(module, "_is_profiler_enabled", False):
        return True
    own, warming = torch.profiler.profile, torch.profiler.ProfilerAction.WARMUP
    return any(issubclass(type(one), own) and one.current_action is warming for one in gc.get_objects())


def _before_another(stop: Callable[[], None]) -> Callable[[], None]:
    """Have `stop` called before the program begins a profiler of its own; returns what undoes that."""
    from torch.autograd import profiler as module

    real = {name: getattr(module, name) for name in _BEGINNINGS}

    def giving_way(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begins(*args: Any, **kwargs: Any) -> Any:
            stop()
            return begin(*args, **kwargs)

        return begins

    for name, begin in real.items():
        setattr(module, name, giving_way(begin))

    def undo() -> None:
        for name, begin in real.items():
            setattr(module, name, begin)

    return undo


def seen_in(profiler: Any, steps: int) -> Seen | None:
    """The figures of a stopped profiler."""
    from weft.execute.spans import timeline_of
    from weft.timeline import Kind, intersect, union

    timeline = timeline_of(profiler)
    if not len(timeline):
        return None
    figures, comm = timeline.figures(), timeline.covered(Kind.COMM)
    ms = 1e-6 / steps
    kernels: dict[str, tuple[float, float]] = {}
    for index, name in enumerate(timeline.names):
        mine = timeline.name == index
        if timeline.kind[mine][0] == Kind.COMPUTE:
            spent = union(timeline.start_ns[mine], timeline.end_ns[mine])
            kernels[name] = (spent.total_ns * ms, intersect(spent, comm).total_ns * ms)
    found = (figures.span_ns * ms, figures.comm_ns * ms, figures.exposed_ns * ms)
    return Seen(*found, kernels) if all(math.isfinite(value) for value in found) else None
