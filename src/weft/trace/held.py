"""Why no compute runs during an exposed interval: what holds the next compute kernel back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Intervals, Kind, Ns, subtract, union
from weft.trace.collectives import Collectives
from weft.trace.covered import Measure
from weft.trace.ready import EVENT_NS, launch_latency_ns, queue_full
from weft.trace.record import UNKNOWN_NS, Trace

MAIN_SHARE = 0.2
"""A stream with at least this share of the compute time counts as a compute stream."""


@dataclass(frozen=True, eq=False)
class Held:
    """Exposed nanoseconds of each communication span, by what held compute back."""

    by_host_ns: Ns
    """The next compute kernel had not been launched, and the CPU was free to launch it."""
    by_queue_ns: Ns
    """It had not been launched because the queue to the GPU was full."""
    by_collective_ns: Ns
    """It had been launched, or the CPU waited for the GPU: it needs the result of the collective."""
    by_nothing_ns: Ns
    """No compute follows, a copy on its stream held it back, or the trace does not show why it waited."""


def same_stream(trace: Trace, found: Collectives) -> npt.NDArray[np.bool_]:
    """Collectives on a compute stream: stream order lets nothing overlap with them.

    If there are several compute streams, the stream of the next compute kernel decides. A few small kernels
    on a collective's stream, such as copies in and out, do not make it a compute stream.
    """
    timeline = trace.timeline
    compute = np.flatnonzero(timeline.kind == Kind.COMPUTE)
    streams, which = np.unique(timeline.stream[compute], return_inverse=True)
    length = (timeline.end_ns - timeline.start_ns)[compute]
    busy = np.bincount(which.reshape(-1), weights=length, minlength=len(streams))
    main = streams[busy >= MAIN_SHARE * max(busy.sum(), 1)]
    compute = compute[np.isin(timeline.stream[compute], main)]
    own = timeline.stream[found.span]
    if not len(compute):
        return np.zeros(len(own), dtype=bool)
    following = np.searchsorted(timeline.start_ns[compute], timeline.end_ns[found.span])
    neighbour = timeline.stream[compute[np.minimum(following, len(compute) - 1)]]
    out: npt.NDArray[np.bool_] = neighbour == own
    return out


def held(trace: Trace, found: Collectives, owned_from: Ns, entered: Ns) -> Held:
    """Attributes each exposed interval after all ranks have entered, by the compute kernel that ends it."""
    timeline = trace.timeline
    end = timeline.end_ns[found.span]
    low = np.minimum(np.maximum(owned_from, entered), end)
    keep = np.flatnonzero(end > low)
    pieces = subtract(Intervals(low[keep], end[keep]), timeline.covered(Kind.COMPUTE))
    owner = keep[np.searchsorted(low[keep], pieces.start, side="right") - 1] if len(keep) else keep
    compute = np.flatnonzero(timeline.kind == Kind.COMPUTE)
    following = np.searchsorted(timeline.start_ns[compute], pieces.end)
    exists = following < len(compute)
    nobody = np.full(len(pieces.start), UNKNOWN_NS, dtype=np.int64)
    if len(compute):
        at = compute[np.minimum(following, len(compute) - 1)]
        launch = np.where(exists, trace.launch_ns[at], UNKNOWN_NS)
        begun = np.where(exists, timeline.start_ns[at], UNKNOWN_NS)
    else:
        launch = begun = nobody
    known = launch != UNKNOWN_NS
    until = np.where(
        known, np.clip(launch + launch_latency_ns(trace), pieces.start, pieces.end), pieces.start
    )
    in_queue = Measure(queue_full(trace)).between(pieces.start, until)
    waiting = Measure(subtract(trace.blocking, queue_full(trace))).between(pieces.start, until)
    by_host = (until - pieces.start) - in_queue - waiting
    rest = pieces.end - until
    needs = known | (exists & (begun - end[owner] <= EVENT_NS))
    # A copy on the stream of the next kernel delays that kernel, so the collective is not the reason.
    copying = np.zeros(len(rest), dtype=np.int64)
    for stream in np.unique(timeline.stream[at[exists]]).tolist() if len(compute) else []:
        copies = (timeline.kind == Kind.MEMORY) & (timeline.stream == stream)
        if copies.any():
            there = exists & (timeline.stream[at] == stream)
            running = Measure(union(timeline.start_ns[copies], timeline.end_ns[copies]))
            copying[there] = running.between(until[there], pieces.end[there])
    rest = rest - copying

    def total(column: Ns) -> Ns:
        summed = np.zeros(len(end), dtype=np.int64)
        np.add.at(summed, owner, column)
        return summed

    return Held(
        by_host_ns=total(by_host),
        by_queue_ns=total(in_queue),
        by_collective_ns=total(waiting + np.where(needs, rest, 0)),
        by_nothing_ns=total(copying + np.where(needs, 0, rest)),
    )


def idle(trace: Trace) -> Intervals:
    """Intervals between the first and the last span in which neither compute nor communication ran."""
    timeline = trace.timeline
    busy = timeline.covered(Kind.COMPUTE, Kind.COMM)
    if not len(timeline):
        return busy
    whole = union(timeline.start_ns.min()[None], timeline.end_ns.max()[None])
    return subtract(whole, busy)
