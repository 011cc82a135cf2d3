"""Interval arithmetic against counting nanosecond by nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.timeline import Intervals, Kind, OverlapFigures, Timeline, intersect, subtract, union

SPANS = st.lists(st.tuples(st.integers(-40, 60), st.integers(-3, 25)), max_size=14)
BASE = 1_700_000_000_123_456_789


def made(spans: list[tuple[int, int]]) -> Intervals:
    start = np.array([s for s, _ in spans], dtype=np.int64) + BASE
    return union(start, start + np.array([d for _, d in spans], dtype=np.int64))


def counted(spans: list[tuple[int, int]]) -> set[int]:
    return {t + BASE for s, d in spans for t in range(s, s + d)}


def points(intervals: Intervals) -> set[int]:
    return {
        t for s, e in zip(intervals.start.tolist(), intervals.end.tolist(), strict=True) for t in range(s, e)
    }


def is_disjoint(intervals: Intervals) -> bool:
    return bool(np.all(intervals.end > intervals.start) and np.all(intervals.start[1:] > intervals.end[:-1]))


@examples(300)
@given(SPANS, SPANS)
def test_union_intersection_and_difference(a, b):
    first, second = made(a), made(b)
    assert points(first) == counted(a)
    assert is_disjoint(first)
    assert first.total_ns == len(counted(a))
    assert points(intersect(first, second)) == counted(a) & counted(b)
    assert points(subtract(first, second)) == counted(a) - counted(b)


@examples(200)
@given(SPANS, SPANS, SPANS)
def test_figures(compute, comm, memory):
    spans = [
        (s, max(d, 0), k) for k, group in zip(Kind, (compute, comm, memory), strict=True) for s, d in group
    ]
    start = np.array([s for s, _, _ in spans], dtype=np.int64) + BASE
    timeline = Timeline(
        start_ns=start,
        end_ns=start + np.array([d for _, d, _ in spans], dtype=np.int64),
        stream=np.zeros(len(spans), dtype=np.int64),
        kind=np.array([k for _, _, k in spans], dtype=np.uint8),
        name=np.zeros(len(spans), dtype=np.int32),
        names=("k",),
    )
    figures = timeline.figures()
    on_compute, on_comm, on_memory = counted(compute), counted(comm), counted(memory)
    assert figures.compute_ns == len(on_compute)
    assert figures.overlap_ns == len(on_compute & on_comm)
    assert figures.exposed_ns == len(on_comm - on_compute)
    assert figures.memory_ns == len(on_memory)
    assert figures.idle_ns == figures.span_ns - len(on_compute | on_comm | on_memory)
    assert 0 <= figures.overlap_pct <= 100


def test_touching_intervals_become_one():
    intervals = union(np.array([0, 10, 30]), np.array([10, 20, 40]))
    assert intervals.start.tolist() == [0, 30]
    assert intervals.end.tolist() == [20, 40]


def test_an_empty_timeline_has_no_figures():
    nothing = np.array([], dtype=np.int64)
    timeline = Timeline(nothing, nothing, nothing, nothing.astype(np.uint8), nothing.astype(np.int32), ())
    assert timeline.figures() == OverlapFigures(0, 0, 0, 0, 0, 0)
    assert timeline.figures().overlap_pct == 0.0
    assert len(timeline) == 0
