"""How much faster collectives would shorten a run: each span moves as early as its dependencies allow.

A span starts after its launch and after the previous span on its stream; a collective also waits for its
input, and a launch for the GPU span that the CPU waited for before it. If none of these explains a start, the
span waited for the work that ended last. Each span keeps its delay after the last of these. The CPU runs at
its speed without a profiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.timeline import Kind, Ns, intersect, union
from weft.trace.collectives import Collectives
from weft.trace.critical import predecessors, stream_predecessors, waited_for
from weft.trace.ready import EVENT_NS, dependency_spans
from weft.trace.record import UNKNOWN_NS, Trace

_MOST_SPANS = 200_000
"""A longer trace is extrapolated from its first spans."""


@dataclass(frozen=True)
class FasterRun:
    """The effect of faster collectives, in nanoseconds over the whole trace."""

    saved_ns: int
    """How much earlier the last span ends."""
    overlap_ns: int
    """How long compute and communication still overlap."""


def with_faster_collectives(trace: Trace, found: Collectives, entered_ns: Ns, ratio: float) -> FasterRun:
    """The run with every collective `ratio` times as fast, and compute at its measured speed.

    `entered_ns`: when the last rank entered each collective; the time before that does not shrink.
    """
    timeline = trace.timeline
    if not len(timeline):
        return FasterRun(0, 0)
    start, end = timeline.start_ns, timeline.end_ns
    length = end - start
    work = end[found.span] - np.clip(entered_ns, start[found.span], end[found.span])
    part = slice(0, _MOST_SPANS)
    before = int((_moved(trace, found, length, part) + length[part]).max())
    length[found.span] -= (work * (1 - 1 / ratio)).astype(np.int64)
    starts = _moved(trace, found, length, part)
    ends = starts + length[part]
    comm, compute = (timeline.kind[part] == kind for kind in (Kind.COMM, Kind.COMPUTE))
    overlap = intersect(union(starts[comm], ends[comm]), union(starts[compute], ends[compute]))
    last, first = int(end[part].max()), int(start[0])
    scale = (int(end.max()) - first) / max(last - first, 1)
    return FasterRun(round(scale * (before - int(ends.max()))), round(scale * overlap.total_ns))


def _moved(trace: Trace, found: Collectives, length: Ns, part: slice) -> Ns:
    """When each span in `part` would start if spans had these lengths."""
    end = trace.timeline.end_ns
    host = waited_for(trace, np.argsort(end, kind="stable"), trace.launch_ns)
    host = np.where(end[np.maximum(host, 0)] <= trace.launch_ns, host, -1)
    data = np.full(len(end), -1, dtype=np.int64)
    data[found.span] = dependency_spans(trace, found)
    columns = (
        *(stream_predecessors(trace.timeline), predecessors(trace), data, host),
        *(trace.launch_ns, trace.timeline.start_ns, length),
    )
    known = trace.launch_ns[trace.launch_ns != UNKNOWN_NS]
    first = int(known.min()) if len(known) else 0
    old_end: list[int] = end[part].tolist()
    new_end: list[int] = []
    moved: list[int] = []
    for i, (before, last, of_data, of_host, launch, begun, lasts) in enumerate(
        zip(*(column[part].tolist() for column in columns), strict=True)
    ):
        waited = [(old_end[span], new_end[span]) for span in (before, of_data) if 0 <= span < i]
        if launch != UNKNOWN_NS:
            old, new = (old_end[of_host], new_end[of_host]) if 0 <= of_host < i else (first, first)
            waited.append((launch, new + round((launch - old) / trace.host_slowed)))
        waited = [(old, new) for old, new in waited if old <= begun]
        if 0 <= last < i and old_end[last] <= begun and all(begun - old > EVENT_NS for old, _ in waited):
            waited.append((old_end[last], new_end[last]))
        at = begun
        if waited:
            at += max(new for _, new in waited) - max(old for old, _ in waited)
        moved.append(at)
        new_end.append(at + lasts)
    return np.array(moved, dtype=np.int64)
