"""Reduces the number of spans: runs of tiny neighbours become one density span, long spans stay unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Kind, Ns, Timeline, subtract

# A density span covers at most this many thresholds, so that a long run of tiny kernels keeps its profile.
_BIN = 16
_MAX_EXPONENT = 62


@dataclass(frozen=True)
class Spans:
    """Columns of drawn spans, sorted by lane and start. `first` is the index of the longest original span."""

    lane: Ns
    start: Ns
    end: Ns
    first: Ns
    count: Ns
    """Number of original spans in this one; 1 means it is exact."""
    busy: Ns
    """Total nanoseconds of the original spans; less than this span's length if there were gaps."""

    def __len__(self) -> int:
        return len(self.start)


def decimate(start: Ns, end: Ns, lane: Ns, budget: int) -> tuple[Spans, int]:
    """At most `budget` spans if possible, and the threshold in ns below which spans merged (0: none did).

    Neighbours in the same lane merge if both, and the gap between them, are shorter than the threshold.
    """
    order = np.lexsort((start, lane))
    start, end, lane = start[order], end[order], lane[order]
    if len(start) <= budget:
        return Spans(lane, start, end, order, np.ones_like(start), end - start), 0
    low, high = 0, _MAX_EXPONENT  # the number of groups never grows with the threshold
    while low < high:
        middle = (low + high) // 2
        if int(_opens_group(start, end, lane, 1 << middle).sum()) <= budget:
            high = middle
        else:
            low = middle + 1
    threshold = 1 << low
    return _merged(start, end, lane, order, _opens_group(start, end, lane, threshold)), threshold


def _opens_group(start: Ns, end: Ns, lane: Ns, threshold: int) -> npt.NDArray[np.bool_]:
    """Which spans begin a new group."""
    tiny = end - start < threshold
    bins = start // min(threshold * _BIN, 1 << _MAX_EXPONENT)
    opens = np.ones(len(start), dtype=bool)
    opens[1:] = (
        (lane[1:] != lane[:-1])
        | ~tiny[1:]
        | ~tiny[:-1]
        | (start[1:] - end[:-1] >= threshold)
        | (bins[1:] != bins[:-1])
    )
    return opens


def _merged(start: Ns, end: Ns, lane: Ns, order: Ns, opens: npt.NDArray[np.bool_]) -> Spans:
    at = np.flatnonzero(opens)
    count = np.diff(np.append(at, len(start)))
    length = end - start
    last = np.maximum.reduceat(end, at)
    busy = np.minimum(np.add.reduceat(length, at), last - start[at])
    group = np.repeat(np.arange(len(at)), count)
    longest = np.lexsort((length, group))[at + count - 1]
    return Spans(lane[at], start[at], last, order[longest], count, busy)


def exposed_spans(timeline: Timeline) -> tuple[Ns, Ns, Ns]:
    """Start, end and collective (span index, or -1) of each interval with communication but no compute."""
    exposed = subtract(timeline.covered(Kind.COMM), timeline.covered(Kind.COMPUTE))
    comm = np.flatnonzero(timeline.kind == Kind.COMM)
    comm = comm[np.argsort(timeline.start_ns[comm], kind="stable")]
    owner = np.full(len(exposed.start), -1, dtype=np.int64)
    at = np.searchsorted(timeline.start_ns[comm], exposed.start, side="right") - 1
    for back in range(16):  # the latest collective still running; more than a few are never in flight
        candidate = np.maximum(at - back, 0)
        runs = (owner < 0) & (at >= back)
        runs[runs] = timeline.end_ns[comm[candidate[runs]]] > exposed.start[runs]
        owner[runs] = comm[candidate[runs]]
    return exposed.start, exposed.end, owner
