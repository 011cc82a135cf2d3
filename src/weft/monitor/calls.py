"""Step times from the collective calls that the shim records for a process: the sequence repeats every step.

The shim always records these calls (`calls.PID.N` in the job's folder), so that a program in any language
has step times without a hook. A step begins with the first call of the period; its time is host time. If all
calls of a step are equal, as DDP's buckets may be, the gaps between them show where a step ends: that gap
takes at least a third of the step. A shorter gap counts as a pause of a program with one call per step, which
logs or evaluates every few steps; a longer pause of that kind would look like the end of a step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from weft.files import open_regular
from weft.shim import layout, nccl_binding
from weft.tuning.live.steps import period

_CALL = np.dtype(
    [
        *((name, "<u8") for name in ("number", "key", "bytes", "host_ns")),
        *((name, "<u4") for name in ("operation", "routed")),
    ]
)
_REPEATS = 6  # as in the tracer: a few equal calls are not yet a step
_SEARCH_EVERY_S = 5.0
_SEARCHED = 2048  # latest calls in which a period is searched for
_GAPS = 512  # latest gaps between calls in which a cycle is searched for
_EXPLAINED = 0.5  # share of the variance of the gaps' logarithms that a cycle must explain
_BETTER = 0.2  # share of their deviations that a longer cycle must explain beyond a shorter one
_BETWEEN_STEPS, _LONGER = 1 / 3, 2.0  # least share of a cycle, and multiple of its other gaps, of its longest
_LEAST_SCATTER = 1e-3  # standard deviation of the logarithms; gaps that vary less have no cycle


class CallFile:
    """The open file with a process's latest collective calls. Raises OSError or ValueError otherwise."""

    def __init__(self, path: Path) -> None:
        self.pid = int(path.name.split(".")[1])
        self._number = open_regular(path)
        self._buffer = bytearray(nccl_binding.CALLS * _CALL.itemsize)
        self._period: int | None = None
        self._searched_s, self._searched_calls = -_SEARCH_EVERY_S, 0

    def close(self) -> None:
        os.close(self._number)

    def step_times_ms(self) -> list[float]:
        """Times of the latest steps in ms, oldest first; empty if the calls do not repeat."""
        calls = self._calls()
        if len(calls) < 2 * _REPEATS:
            return []
        identity = calls["operation"].astype(np.uint64) ^ (calls["bytes"] << np.uint64(4))
        if self._period is not None and not _repeats(identity, self._period):
            self._period = None
        if self._search_is_due(int(calls["number"][-1])):
            self._period = _calls_of_a_period(identity[-_SEARCHED:], calls["host_ns"][-_SEARCHED:])
        if self._period is None:
            return []
        starts = calls["host_ns"][(len(calls) - 1) % self._period :: self._period]
        return [float(ns) / 1e6 for ns in np.diff(starts.astype(np.int64))]

    def calls_of_a_step(self) -> list[tuple[str, int]]:
        """Operation and bytes of the calls of one step; of all recorded calls if no step is found."""
        self.step_times_ms()
        calls = self._calls()[-self._period :] if self._period else self._calls()
        names = layout.NCCL_OPERATIONS
        return [(names[int(call["operation"])], int(call["bytes"])) for call in calls]

    def _calls(self) -> np.ndarray:
        """The calls on the communicator with the most calls, oldest first."""
        size = os.preadv(self._number, [self._buffer], 0)
        calls: np.ndarray = np.frombuffer(self._buffer, _CALL, size // _CALL.itemsize)
        calls = np.sort(calls[calls["number"] > 0], order="number")
        if not len(calls):
            return calls
        keys, counts = np.unique(calls["key"], return_counts=True)
        chosen: np.ndarray = calls[calls["key"] == keys[counts.argmax()]]
        return chosen

    def _search_is_due(self, made: int) -> bool:
        """Every few seconds while no period is known, and whenever the number of calls has doubled: the first
        few may be misleading."""
        now = time.monotonic()
        late = self._period is None and now - self._searched_s >= _SEARCH_EVERY_S
        if not late and made < 2 * self._searched_calls:
            return False
        self._searched_s, self._searched_calls = now, made
        return True


def _calls_of_a_period(identity: np.ndarray, host_ns: np.ndarray) -> int | None:
    found = period(identity.tolist(), _REPEATS)
    return found and found * _cycle(np.diff(host_ns.astype(np.int64)[::-found][::-1]))


def _cycle(gaps: np.ndarray) -> int:
    """Number of gaps after which their lengths repeat; 1 if they do not."""
    gaps = np.maximum(gaps[-_GAPS:], 1)
    logs = np.log(gaps)
    if logs.std() < _LEAST_SCATTER:
        return 1
    best, least = 1, 1.0
    for length in range(2, len(gaps) // _REPEATS + 1):
        table = logs[len(gaps) % length :].reshape(-1, length)
        by_chance = (length - 1) / (table.size - 1)
        explained = table.mean(axis=0).var() / max(table.var(), _LEAST_SCATTER**2) - by_chance
        if explained < _EXPLAINED:
            continue
        usual = np.median(table, axis=0)
        # Absolute values, not squares, so that a few long pauses of the program do not look like a cycle.
        left = by_chance + np.abs(table - usual).sum() / np.abs(table - np.median(table)).sum()
        if left <= least - _BETTER and _ends_a_step(np.sort(np.exp(usual))):
            best, least = length, left
    return best


def _ends_a_step(gaps: np.ndarray) -> bool:
    """Whether the last and longest of these sorted gaps is long enough to separate two steps."""
    return bool(gaps[-1] >= max(_BETWEEN_STEPS * gaps.sum(), _LONGER * np.median(gaps[:-1])))


def _repeats(identity: np.ndarray, length: int) -> bool:
    return len(identity) >= 2 * length and bool(
        np.array_equal(identity[-length:], identity[-2 * length : -length])
    )
