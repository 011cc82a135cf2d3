"""What a run would take if its collectives were faster: every span moved as far as what it waited for allows.

A span starts when the span before it on its stream and its launch are over; a collective also waits for its
input, and a launch for the GPU span that the CPU waited for before it. Where none of these explains a start,
it waited for the work that ended last. Each span keeps the delay that it had after the last of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.timeline import Kind, Ns, intersect, union
from weft.trace.collectives import Collectives
from weft.trace.critical import predecessors, stream_predecessors, waited_for
from weft.trace.ready import EVENT_NS, dependency_spans
from weft.trace.record import UNKNOWN_NS, Trace


@dataclass(frozen=True)
class FasterRun:
    """Nanoseconds of the whole trace."""

    saved_ns: int
    """By how much the last span ends earlier."""
    overlap_ns: int
    """How long compute and communication still overlap."""


def with_faster_collectives(trace: Trace, found: Collectives, entered_ns: Ns, ratio: float) -> FasterRun:
    """The run with every collective `ratio` times as fast, and compute as fast as it was.

    `entered_ns`: when the last rank entered each collective; what passes before that is no faster.
    """
    timeline = trace.timeline
    if not len(timeline):
        return FasterRun(0, 0)
    start, end = timeline.start_ns, timeline.end_ns
    length = end - start
    work = end[found.span] - np.clip(entered_ns, start[found.span], end[found.span])
    length[found.span] -= (work * (1 - 1 / ratio)).astype(np.int64)
    by_end = np.argsort(end, kind="stable")
    on_stream = stream_predecessors(timeline)
    bound = predecessors(trace)
    host = waited_for(trace, by_end, trace.launch_ns)
    host = np.where(end[np.maximum(host, 0)] <= trace.launch_ns, host, -1)
    data = np.full(len(timeline), -1, dtype=np.int64)
    data[found.span] = dependency_spans(trace, found)
    columns = (on_stream, bound, data, host, trace.launch_ns, start, length)
    old_end: list[int] = end.tolist()
    new_start: list[int] = []
    new_end: list[int] = []
    for i, (before, last, of_data, of_host, launch, begun, lasts) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        waited = [(old_end[span], new_end[span]) for span in (before, of_data) if 0 <= span < i]
        if launch != UNKNOWN_NS:
            waited.append((launch, launch + (new_end[of_host] - old_end[of_host] if 0 <= of_host < i else 0)))
        waited = [(old, new) for old, new in waited if old <= begun]
        if 0 <= last < i and old_end[last] <= begun and all(begun - old > EVENT_NS for old, _ in waited):
            waited.append((old_end[last], new_end[last]))
        at = begun
        if waited:
            at += max(new for _, new in waited) - max(old for old, _ in waited)
        new_start.append(at)
        new_end.append(at + lasts)
    starts, ends = np.array(new_start, dtype=np.int64), np.array(new_end, dtype=np.int64)
    comm, compute = (timeline.kind == kind for kind in (Kind.COMM, Kind.COMPUTE))
    overlap = intersect(union(starts[comm], ends[comm]), union(starts[compute], ends[compute]))
    return FasterRun(int(end.max() - ends.max()), overlap.total_ns)
