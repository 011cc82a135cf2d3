"""The critical path of a rank: the chain of compute, communication and CPU time that its span consists of.

The path is walked backwards from the last GPU span. Each span started when the last thing it waited for was
over: the previous span on its stream, other work that ended just then, or its launch. A launch waited for the
CPU, and the CPU sometimes for the GPU. Exposed time off this path costs nothing: hiding it would not shorten
the step, because something else takes as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Intervals, Kind, Ns, Timeline, subtract, union
from weft.trace.attribute import REASONS, Attribution
from weft.trace.collectives import Collectives
from weft.trace.covered import Measure
from weft.trace.ready import EVENT_NS, launch_latency_ns, queue_full
from weft.trace.record import UNKNOWN_NS, Trace

STREAM_GAP_NS = 3_000
"""A span that starts within this time after the previous span on its stream waited for that span."""

_HOST = -1
_START = -2


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """Where the time between the first and the last GPU span went. Nanoseconds; they add up to the span."""

    compute_ns: int
    comm_ns: int
    memory_ns: int
    host_ns: int
    """Time in which the GPU waited for the CPU to launch the next work on the path."""
    gap_ns: int
    """Gaps between a span and the one that waited for it: launch and event latency."""
    saved_ns: npt.NDArray[np.int64]
    """Exposed time on the path, per communication span and reason (REASONS). Hiding it would shorten the run
    by as much, until another path becomes critical."""

    @property
    def recoverable_ns(self) -> int:
        """Exposed communication on the path, for any reason."""
        return int(self.saved_ns.sum())

    def reasons(self) -> dict[str, int]:
        """Exposed nanoseconds on the path, by reason."""
        return dict(zip(REASONS, self.saved_ns.sum(axis=0).tolist(), strict=True))


def critical_path(trace: Trace, found: Collectives, why: Attribution) -> CriticalPath:
    """Finds the critical path of one rank and the exposed communication on it."""
    timeline = trace.timeline
    if not len(timeline):
        return CriticalPath(0, 0, 0, 0, 0, np.zeros((0, len(REASONS)), dtype=np.int64))
    walked, on_host, gap_ns = _walk(trace)
    begun, until = timeline.start_ns[walked[:, 0]], walked[:, 1]
    kinds = timeline.kind[walked[:, 0]]
    lengths = {kind: int((until - begun)[kinds == kind].sum()) for kind in Kind}
    on_comm = union(begun[kinds == Kind.COMM], until[kinds == Kind.COMM])
    return CriticalPath(
        compute_ns=lengths[Kind.COMPUTE],
        comm_ns=lengths[Kind.COMM],
        memory_ns=lengths[Kind.MEMORY],
        host_ns=on_host.total_ns,
        gap_ns=gap_ns,
        saved_ns=_saved(trace, found, why, on_comm, on_host),
    )


def _saved(
    trace: Trace, found: Collectives, why: Attribution, on_comm: Intervals, on_host: Intervals
) -> npt.NDArray[np.int64]:
    """Exposed time of each collective on the path; CPU time on the path counts for delays by the CPU."""
    timeline = trace.timeline
    end = timeline.end_ns[found.span]
    compute = timeline.covered(Kind.COMPUTE)
    comm = Measure(subtract(on_comm, compute)).between(why.owned_from_ns, end)
    cpu = Measure(subtract(on_host, compute)).between(why.owned_from_ns, end)
    exposed = np.maximum(why.exposed_ns, 1)
    by_cpu = np.array([reason in ("launched_late", "queue_full") for reason in REASONS])
    part = np.where(by_cpu[None, :], (comm + cpu)[:, None], comm[:, None]) / exposed[:, None]
    return np.rint(why.reason_ns * np.minimum(part, 1.0)).astype(np.int64)


def _walk(trace: Trace) -> tuple[npt.NDArray[np.int64], Intervals, int]:
    """The path on the GPU as rows (span, time the path leaves it), its CPU intervals, and the gaps in ns."""
    timeline = trace.timeline
    start, end, count = timeline.start_ns, timeline.end_ns, len(timeline)
    by_end = np.argsort(end, kind="stable")
    before = predecessors(trace)
    on_host = before == _HOST
    before[on_host] = waited_for(trace, by_end, trace.launch_ns[on_host])
    first = int(start.min())
    path = _chain(int(by_end[-1]), np.append(np.where(before < 0, count, before), count))
    # Times at which the backward walk enters and leaves each span; they never increase.
    stops = np.minimum.accumulate(np.stack((end[path], start[path]), axis=1).reshape(-1))
    arrived, left = stops[::2], stops[1::2]
    path = path[: np.count_nonzero(arrived > first)]
    arrived, left = arrived[: len(path)], left[: len(path)]
    came_from = before[path]
    ended = np.where(came_from >= 0, end[np.maximum(came_from, 0)], first)
    by_host = on_host[path]
    since = np.minimum(np.maximum(ended, first), left)
    gaps = np.where(by_host | (came_from < 0), 0, np.maximum(left - ended, 0))
    ran = left < arrived
    pieces = np.stack((path[ran], arrived[ran]), axis=1)
    return pieces, union(since[by_host], left[by_host]), int(gaps.sum())


def _chain(first: int, following: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`first` and its successors, up to the last index (its own successor) or the first repeated element.

    By doubling: if the n-th successor of each element is known, a path of length n extends to 2 n.
    """
    last = len(following) - 1
    path: npt.NDArray[np.int64] = np.array([first], dtype=np.int64)
    jump = following
    while path[-1] != last and len(path) <= last:
        path = np.concatenate((path, jump[path]))
        jump = jump[jump]
    path = path[path != last]
    # Zero-length spans may seem to wait for each other.
    _, seen = np.unique(path, return_index=True)
    if len(seen) < len(path):
        again = np.ones(len(path), dtype=bool)
        again[seen] = False
        path = path[: int(np.argmax(again))]
    return path


def waited_for(trace: Trace, by_end: npt.NDArray[np.intp], launch: Ns) -> npt.NDArray[np.int64]:
    """The GPU span whose end released the CPU before each launch; _START if the CPU did not wait."""
    waits = union(
        np.concatenate((trace.blocking.start, queue_full(trace).start)),
        np.concatenate((trace.blocking.end, queue_full(trace).end)),
    )
    if not len(waits.end):
        return np.full(len(launch), _START, dtype=np.int64)
    ends = trace.timeline.end_ns[by_end]
    at = np.searchsorted(waits.end, launch, side="right") - 1
    span = np.searchsorted(ends, waits.end[np.maximum(at, 0)], side="right") - 1
    known = (at >= 0) & (span >= 0) & (ends[np.maximum(span, 0)] >= waits.start[np.maximum(at, 0)])
    return np.where(known, by_end[np.maximum(span, 0)], _START)


def predecessors(trace: Trace) -> npt.NDArray[np.int64]:
    """The last thing each span waited for: a span, the CPU (_HOST), or nothing (_START)."""
    timeline = trace.timeline
    start, end, count = timeline.start_ns, timeline.end_ns, len(timeline)
    on_stream = stream_predecessors(timeline)
    by_end = np.argsort(end, kind="stable")
    at = np.searchsorted(end[by_end], start, side="right") - 1
    ended = np.where(at >= 0, by_end[np.maximum(at, 0)], _START)
    ended = np.where(ended == np.arange(count), on_stream, ended)  # a zero-length span ends as it starts
    gap_stream = np.where(on_stream >= 0, start - end[np.maximum(on_stream, 0)], np.iinfo(np.int64).max)
    gap_ended = np.where(ended >= 0, start - end[np.maximum(ended, 0)], np.iinfo(np.int64).max)
    known = (trace.launch_ns != UNKNOWN_NS) & (trace.launch_ns <= start)
    since = np.where(known, start - trace.launch_ns, np.iinfo(np.int64).max)
    prompt = since <= max(2 * launch_latency_ns(trace), EVENT_NS)
    late = known & (trace.launch_ns >= end[np.maximum(ended, 0)]) & (ended >= 0)
    choice = np.where(gap_ended <= EVENT_NS, ended, np.where(known & (prompt | late), _HOST, ended))
    choice = np.where(prompt & (gap_ended > STREAM_GAP_NS), _HOST, choice)
    choice = np.where((gap_stream >= 0) & (gap_stream <= STREAM_GAP_NS), on_stream, choice)
    return np.where((choice >= 0) & (end[np.maximum(choice, 0)] > start), ended, choice)


def stream_predecessors(timeline: Timeline) -> npt.NDArray[np.int64]:
    """The previous span on each span's stream; _START for the first."""
    out = np.full(len(timeline), _START, dtype=np.int64)
    order = np.lexsort((timeline.start_ns, timeline.stream))
    same = timeline.stream[order[1:]] == timeline.stream[order[:-1]]
    out[order[1:][same]] = order[:-1][same]
    return out
