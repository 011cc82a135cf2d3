"""Which cores the processes of a run get: the threads that launch kernels have a physical core each for themselves.

A thread runs at little more than half its speed while the other hardware thread of its core is busy, and the
processes that get ready meanwhile are busy all the time. Virtual machines may not tell which two belong
together, so that is tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache

FEW = 8  # cores with which nothing is pinned
TRIED_S = 0.08
SLOWED = 0.8  # speed of a thread beside a busy one of the same core, at most


@dataclass(frozen=True)
class Layout:
    """Sets of hardware threads; empty where there are too few to choose from."""

    main: frozenset[int]
    """The program's own thread; nothing else runs on that core."""
    backward: frozenset[int]
    """The thread of autograd, likewise."""
    others: frozenset[int]
    """Data loaders and all other threads."""
    waiting: frozenset[int]
    """Processes that get ready while others are measured."""

    @property
    def running(self) -> frozenset[int]:
        """All but those of the processes that get ready."""
        return self.main | self.backward | self.others


@cache
def layout() -> Layout:
    """The layout of this machine; takes a second or two."""
    threads = sorted(os.sched_getaffinity(0))
    if len(threads) < FEW:
        everything = frozenset(threads)
        return Layout(everything, everything, everything, everything)
    cores = physical(threads)
    waiting = max(1, len(cores) // 4)
    sets = (cores[0][:1], cores[1][:1], *(sum(part, ()) for part in (cores[2:-waiting], cores[-waiting:])))
    return Layout(*map(frozenset, sets))


def physical(threads: list[int]) -> list[tuple[int, ...]]:
    """The hardware threads of each physical core."""
    partner = _partner(threads)
    half = len(threads) // 2
    if partner == threads[1]:
        return [tuple(threads[at : at + 2]) for at in range(0, len(threads), 2)]
    if partner == threads[half]:
        return list(zip(threads[:half], threads[half:], strict=False))
    return [(thread,) for thread in threads]


def _partner(threads: list[int]) -> int | None:
    """The hardware thread that slows the first one down most, if it does so clearly."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {threads[0]})
        speeds = {thread: _speed_beside(thread) for thread in threads[1:]}
    finally:
        os.sched_setaffinity(0, before)
    slowest = min(speeds, key=speeds.__getitem__)
    usual = sorted(speeds.values())[len(speeds) // 2]
    return slowest if speeds[slowest] < SLOWED * usual else None


def _speed_beside(thread: int) -> float:
    code = f"import os\nos.sched_setaffinity(0, {{{thread}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        best = max(_loops(TRIED_S / 4) for _ in range(4))
        busy.kill()
    return best


def _loops(seconds: float) -> float:
    loops, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        loops += 1
    return loops / seconds
