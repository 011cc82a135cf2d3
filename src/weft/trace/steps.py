"""Figures per step of the program, where the trace marks steps (`ProfilerStep#N`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weft.timeline import Figures, Timeline
from weft.trace.kineto import UNKNOWN_NS, Step, Trace


@dataclass(frozen=True)
class StepFigures:
    """One step on the GPU: from its first span to the first span of the next step."""

    name: str
    start_ns: int
    figures: Figures


def step_figures(trace: Trace) -> tuple[StepFigures, ...]:
    """Cuts the timeline at the first span that each step launched.

    Steps share the timeline out without gap or overlap, so their figures add up to those of all steps; the
    last one is kept, up to the last span. Steps without any GPU work are left out.
    """
    begun = [
        (step, start) for step in _outermost(trace.steps) if (start := _first_span(trace, step)) is not None
    ]
    if not begun:
        return ()
    begun.sort(key=lambda item: item[1])
    ends = [start for _, start in begun[1:]] + [int(trace.timeline.end_ns.max())]
    return tuple(
        StepFigures(step.name, start, clip(trace.timeline, start, end).figures())
        for (step, start), end in zip(begun, ends, strict=True)
        if end > start
    )


def _outermost(steps: tuple[Step, ...]) -> list[Step]:
    """Steps in order of time, one per name: several threads may repeat the mark."""
    seen: dict[str, Step] = {}
    for step in sorted(steps, key=lambda s: (s.start_ns, -s.end_ns)):
        seen.setdefault(step.name, step)
    return list(seen.values())


def _first_span(trace: Trace, step: Step) -> int | None:
    """The start of the first span launched in the step; by its own start where no launch is known."""
    start = trace.timeline.start_ns
    when = np.where(trace.launch_ns != UNKNOWN_NS, trace.launch_ns, start)
    mine = start[(when >= step.start_ns) & (when < step.end_ns)]
    return int(mine.min()) if len(mine) else None


def clip(timeline: Timeline, low: int, high: int) -> Timeline:
    """The part of a timeline in [low, high), in nanoseconds; spans are cut at the edges."""
    keep = (timeline.start_ns < high) & (timeline.end_ns > low)
    return replace(
        timeline,
        start_ns=np.maximum(timeline.start_ns[keep], low),
        end_ns=np.minimum(timeline.end_ns[keep], high),
        stream=timeline.stream[keep],
        kind=timeline.kind[keep],
        name=timeline.name[keep],
        resources={key: column[keep] for key, column in timeline.resources.items()},
    )
