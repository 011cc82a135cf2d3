"""When each collective could have started: its launch, what it waits for, and what delayed the launch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from weft.timeline import Intervals, Kind, Ns, union
from weft.trace.collectives import Collectives
from weft.trace.record import UNKNOWN_NS, Trace

MAX_LATENCY_NS = 20_000
"""A longer delay between a launch and a start is not launch latency."""

EVENT_NS = 10_000
"""A span that starts within this time after other work may have waited for it: events take time."""

BLOCKED_NS = 5_000
"""A launching call shorter than this did not wait for room in the queue, ..."""

BLOCKED_FACTOR = 3
"""... nor did one that took less than this many times as long as the fastest calls."""

FULL_SHARE = 0.9
"""The queue counts as full when it holds at least this share of its maximum length."""

MIN_DEPTH = 8
"""A queue that never held at least this many launches was never full."""


@lru_cache(maxsize=2)
def launch_latency_ns(trace: Trace) -> int:
    """The usual time from a launch to the start on an idle GPU: the 10th percentile over all spans."""
    known = trace.launch_ns != UNKNOWN_NS
    if not known.any():
        return 0
    wait = trace.timeline.start_ns[known] - trace.launch_ns[known]
    return int(np.clip(np.percentile(wait, 10), 0, MAX_LATENCY_NS))


def ready_times(trace: Trace, found: Collectives, start: Ns) -> tuple[Ns, Ns, Ns]:
    """When each span could have started by launch and data, by data alone, and when its data was ready.

    If the trace does not explain a start, the span counts as ready only then: nothing is blamed without
    evidence. The third is UNKNOWN_NS if the trace does not show what the collective depends on.
    """
    launch = trace.launch_ns[found.span]
    dependency = _dependency_end(trace, found)
    known = (launch != UNKNOWN_NS) & (launch <= start) & (dependency <= start) & ~_shared_launch(trace, found)
    latency = np.minimum(launch_latency_ns(trace), np.where(known, start - launch, 0))
    ready = np.where(known, np.maximum(launch + latency, dependency), start)
    # Without a known dependency, there is no evidence that an earlier launch was possible.
    by_data = np.where(known & (dependency != UNKNOWN_NS), dependency, ready)
    return ready, np.minimum(by_data, ready), np.where(dependency <= start, dependency, UNKNOWN_NS)


@lru_cache(maxsize=2)  # called by several parts of the analysis of one rank
def queue_full(trace: Trace) -> Intervals:
    """When the CPU could not launch because the queue to the GPU was full.

    A blocked call takes longer than the fastest ones, and returns when the queue is near its maximum length.
    During a call that is slow for another reason (loading a module, a busy CPU) the queue drains.
    """
    known = np.flatnonzero((trace.launch_ns != UNKNOWN_NS) & (trace.launch_end_ns > trace.launch_ns))
    order = known[np.argsort(trace.launch_ns[known], kind="stable")]
    begun, ended = trace.launch_ns[order], trace.launch_end_ns[order]
    if len(order) < MIN_DEPTH:
        return union(begun[:0], ended[:0])
    started = np.searchsorted(np.sort(trace.timeline.start_ns[order]), ended, side="right")
    pending = np.arange(len(order)) - started
    most = int(pending.max())
    took = ended - begun
    slow = took > max(BLOCKED_NS, BLOCKED_FACTOR * int(np.percentile(took, 1)))
    full = slow & (pending >= FULL_SHARE * most) & (most >= MIN_DEPTH)
    return union(begun[full], ended[full])


def _shared_launch(trace: Trace, found: Collectives) -> npt.NDArray[np.bool_]:
    """Spans launched together with others, as by a CUDA graph, in which the launch order is unknown."""
    values, inverse, counts = np.unique(trace.correlation, return_inverse=True, return_counts=True)
    shared = (counts > 1) & (values >= 0)
    out: npt.NDArray[np.bool_] = shared[inverse.reshape(-1)][found.span]
    return out


def dependency_spans(trace: Trace, found: Collectives) -> npt.NDArray[np.int64]:
    """The last span other than communication that each collective's thread launched before it; -1 if none."""
    timeline = trace.timeline
    order = np.lexsort((timeline.start_ns, trace.launch_ns, trace.thread))
    launched = trace.launch_ns[order] != UNKNOWN_NS
    order = order[launched]
    other = timeline.kind[order] != Kind.COMM
    place = np.where(other, np.arange(len(order)), -1)
    last = np.maximum.accumulate(place) if len(place) else place
    before = np.full(len(timeline), -1, dtype=np.int64)
    same = np.zeros(len(order), dtype=bool)
    same[last >= 0] = trace.thread[order[last[last >= 0]]] == trace.thread[order[last >= 0]]
    before[order[same]] = order[last[same]]
    of_comm: npt.NDArray[np.int64] = before[found.span]
    return of_comm


def _dependency_end(trace: Trace, found: Collectives) -> Ns:
    """End of the work that each collective had to wait for; UNKNOWN_NS if unknown.

    A recorded event wait identifies that work. Otherwise it is the last other work that the same CPU thread
    launched before, because a process group makes its stream wait for the caller's stream.
    """
    of_comm = dependency_spans(trace, found)
    out = np.where(of_comm >= 0, trace.timeline.end_ns[of_comm], UNKNOWN_NS)
    return _recorded_waits(trace, found, out) if len(trace.waits) else out


def _recorded_waits(trace: Trace, found: Collectives, guess: Ns) -> Ns:
    """Replaces the guess if the trace recorded which event the stream waited for.

    Correlation ids grow with each call, so work issued before the event was recorded has smaller ids.
    """
    timeline = trace.timeline
    waits = trace.waits[np.argsort(trace.waits[:, 0], kind="stable")]
    ends: dict[int, tuple[Ns, Ns]] = {}
    for stream in np.unique(waits[:, 3]).tolist():
        here = np.flatnonzero((timeline.stream == stream) & (trace.correlation >= 0))
        here = here[np.argsort(trace.correlation[here], kind="stable")]
        ends[stream] = (trace.correlation[here], np.maximum.accumulate(timeline.end_ns[here]))
    of_stream = {stream: waits[waits[:, 1] == stream] for stream in np.unique(waits[:, 1]).tolist()}
    out = guess.copy()
    for i, span in enumerate(found.span.tolist()):
        mine = of_stream.get(int(timeline.stream[span]))
        last = (
            -1 if mine is None else int(np.searchsorted(mine[:, 0], trace.launch_ns[span], side="right")) - 1
        )
        if mine is None or last < 0:
            continue
        correlation, end = ends[int(mine[last, 3])]
        before = int(np.searchsorted(correlation, mine[last, 2])) - 1
        if before >= 0 and end[before] <= timeline.start_ns[span]:
            out[i] = end[before]
    return out
