"""Figures per step of the program, if the trace marks steps (`ProfilerStep#N`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weft.timeline import OverlapFigures, Timeline
from weft.trace.record import UNKNOWN_NS, Step, Trace


@dataclass(frozen=True)
class StepFigures:
    """One step on the GPU: from its first span to the first span of the next step."""

    name: str
    start_ns: int
    figures: OverlapFigures


def step_figures(trace: Trace) -> tuple[StepFigures, ...]:
    """Cuts the timeline at the first span that each step launched.

    Steps divide the timeline without gaps or overlap, so their figures add up to those of all steps. The last
    step lasts until the last span ends. Steps without GPU work are left out.
    """
    steps = _outermost(trace.steps)
    begun = sorted(
        (start, step.name)
        for step, start in zip(steps, _first_spans(trace, steps), strict=True)
        if start is not None
    )
    if not begun:
        return ()
    timeline = trace.timeline
    latest_end = np.maximum.accumulate(timeline.end_ns)
    ends = [start for start, _ in begun[1:]] + [int(latest_end[-1])]
    out = []
    for (start, name), end in zip(begun, ends, strict=True):
        # Spans are sorted by start, so those of a step lie close together.
        low = int(np.searchsorted(latest_end, start, side="right"))
        high = int(np.searchsorted(timeline.start_ns, end, side="left"))
        if end > start:
            out.append(StepFigures(name, start, clip_step(timeline, start, end, slice(low, high)).figures()))
    return tuple(out)


def _outermost(steps: tuple[Step, ...]) -> list[Step]:
    """Steps in order of time, one per name: several threads may mark the same step."""
    seen: dict[str, Step] = {}
    for step in sorted(steps, key=lambda s: (s.start_ns, -s.end_ns)):
        seen.setdefault(step.name, step)
    return list(seen.values())


def _first_spans(trace: Trace, steps: list[Step]) -> list[int | None]:
    """Start of the first span launched in each step; None if there is none. A span without launch time counts
    by its own start."""
    start = trace.timeline.start_ns
    when = np.where(trace.launch_ns != UNKNOWN_NS, trace.launch_ns, start)
    order = np.argsort(when, kind="stable")
    when, start = when[order], start[order]
    out: list[int | None] = []
    for step in steps:
        low, high = np.searchsorted(when, (step.start_ns, step.end_ns)).tolist()
        out.append(int(start[low:high].min()) if high > low else None)
    return out


def clip_step(timeline: Timeline, low: int, high: int, where: slice = slice(None)) -> Timeline:
    """The part of a timeline in [low, high), in nanoseconds; spans are cut at the edges.

    `where` may limit the spans to consider.
    """
    start, end = timeline.start_ns[where], timeline.end_ns[where]
    keep = (start < high) & (end > low)
    return replace(
        timeline,
        start_ns=np.maximum(start[keep], low),
        end_ns=np.minimum(end[keep], high),
        stream=timeline.stream[where][keep],
        kind=timeline.kind[where][keep],
        name=timeline.name[where][keep],
        resources={key: column[where][keep] for key, column in timeline.resources.items()},
    )
