"""The critical path of a rank: the chain of compute, communication and CPU time that the span consists of.

The path is walked back from the last GPU span. Each span started when the last thing it waited for was over:
the span before it on its stream, other work that ended just then, or its launch. A launch waited for the CPU,
and the CPU at times for the GPU. What is exposed and not on this path costs no time: hiding it would shorten
nothing, because something else takes as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Intervals, Kind, Ns, subtract, union
from weft.trace.attribute import REASONS, Attribution
from weft.trace.collectives import Collectives
from weft.trace.covered import Measure
from weft.trace.ready import EVENT_NS, launch_latency_ns, queue_full
from weft.trace.record import UNKNOWN_NS, Trace

STREAM_GAP_NS = 3_000
"""A span that starts within this of the end of the one before it on its stream waited for that one."""

_HOST = -1
_START = -2


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """Where the time between the first and the last GPU span went. Nanoseconds; they add up to the span."""

    compute_ns: int
    comm_ns: int
    memory_ns: int
    host_ns: int
    """The GPU waited for the CPU to launch the next work on the path."""
    gap_ns: int
    """Between a span and the one that waited for it: launch and event latency."""
    saved_ns: npt.NDArray[np.int64]
    """What of each collective's exposed time is on the path, per communication span and reason (REASONS):
    the time that the run would be shorter if that part were hidden, as long as no other path takes over."""

    @property
    def recoverable_ns(self) -> int:
        """Exposed communication on the path, for any reason."""
        return int(self.saved_ns.sum())

    def reasons(self) -> dict[str, int]:
        """Exposed nanoseconds on the path, by reason."""
        return dict(zip(REASONS, self.saved_ns.sum(axis=0).tolist(), strict=True))


def critical_path(trace: Trace, found: Collectives, why: Attribution) -> CriticalPath:
    """Walks the path of one rank and lays its exposed communication over it."""
    timeline = trace.timeline
    if not len(timeline):
        return CriticalPath(0, 0, 0, 0, 0, np.zeros((0, len(REASONS)), dtype=np.int64))
    walked, host, gap_ns = _walk(trace)
    begun, until = timeline.start_ns[walked[:, 0]], walked[:, 1]
    kinds = timeline.kind[walked[:, 0]]
    lengths = {kind: int((until - begun)[kinds == kind].sum()) for kind in Kind}
    on_comm = union(begun[kinds == Kind.COMM], until[kinds == Kind.COMM])
    on_host = _intervals(host)
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
    """Exposed time of each collective on the path; what the CPU delays counts where the CPU is on it."""
    timeline = trace.timeline
    end = timeline.end_ns[found.span]
    compute = timeline.covered(Kind.COMPUTE)
    comm = Measure(subtract(on_comm, compute)).between(why.owned_from_ns, end)
    cpu = Measure(subtract(on_host, compute)).between(why.owned_from_ns, end)
    exposed = np.maximum(why.exposed_ns, 1)
    by_cpu = np.array([reason in ("launched_late", "queue_full") for reason in REASONS])
    part = np.where(by_cpu[None, :], (comm + cpu)[:, None], comm[:, None]) / exposed[:, None]
    return np.rint(why.reason_ns * np.minimum(part, 1.0)).astype(np.int64)


def _intervals(pieces: list[tuple[int, int]]) -> Intervals:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return union(columns[:, 0], columns[:, 1])


def _walk(trace: Trace) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]], int]:
    """The path on the GPU as rows (span, until when), its pieces on the CPU, and the gaps in between."""
    timeline = trace.timeline
    # Views, not lists: a million spans as Python's integers would take a hundred megabytes.
    start, end, before, launch = (
        np.ascontiguousarray(column).view(np.uint8).data.cast("q")
        for column in (timeline.start_ns, timeline.end_ns, _predecessors(trace), trace.launch_ns)
    )
    order = np.argsort(timeline.end_ns, kind="stable")
    ends = timeline.end_ns[order]
    waits = union(
        np.concatenate((trace.blocking.start, queue_full(trace).start)),
        np.concatenate((trace.blocking.end, queue_full(trace).end)),
    )
    first = int(timeline.start_ns.min())
    walked: list[int] = []
    until: list[int] = []
    host: list[tuple[int, int]] = []
    gap = 0
    i = int(order[-1])
    now = end[i]
    passed = bytearray(len(start))  # spans of no length may seem to wait for each other
    while now > first and not passed[i]:
        passed[i] = 1
        if start[i] < now:
            walked.append(i)
            until.append(now)
            now = start[i]
        j = before[i]
        if j == _HOST:
            j = _waited_for(waits, order, ends, launch[i])
            since = max(end[j], first) if j >= 0 else first
            host.append((min(since, now), now))
        elif j >= 0 and end[j] < now:
            gap += now - end[j]
        if j < 0:
            break
        if end[j] < now:
            now = end[j]
        i = j
    pieces = np.array((walked, until), dtype=np.int64).T.reshape(-1, 2)
    return pieces, host, gap


def _waited_for(waits: Intervals, order: Ns, ends: Ns, launch: int) -> int:
    """The GPU span whose end let the CPU go on before a launch; -1 where it never waited."""
    at = int(np.searchsorted(waits.end, launch, side="right")) - 1
    if at < 0:
        return -1
    j = int(np.searchsorted(ends, waits.end[at], side="right")) - 1
    return int(order[j]) if j >= 0 and ends[j] >= waits.start[at] else -1


def _predecessors(trace: Trace) -> npt.NDArray[np.int64]:
    """What each span waited for last: a span, the CPU (_HOST), or nothing (_START)."""
    timeline = trace.timeline
    start, end, count = timeline.start_ns, timeline.end_ns, len(timeline)
    on_stream = np.full(count, _START, dtype=np.int64)
    order = np.lexsort((start, timeline.stream))
    same = timeline.stream[order[1:]] == timeline.stream[order[:-1]]
    on_stream[order[1:][same]] = order[:-1][same]
    by_end = np.argsort(end, kind="stable")
    at = np.searchsorted(end[by_end], start, side="right") - 1
    ended = np.where(at >= 0, by_end[np.maximum(at, 0)], _START)
    ended = np.where(ended == np.arange(count), on_stream, ended)  # a span of no length ends as it starts
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
