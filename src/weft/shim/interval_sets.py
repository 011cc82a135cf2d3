"""Sets of time intervals: unions, lengths and intersections."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

TimeSpan = tuple[int, int]


def union_spans(intervals: Iterable[TimeSpan]) -> list[TimeSpan]:
    """The union of the intervals, as disjoint intervals in order."""
    merged: list[TimeSpan] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[TimeSpan]) -> int:
    return sum(end - start for start, end in intervals)


def common(first: Sequence[TimeSpan], second: Sequence[TimeSpan]) -> int:
    """The length of the intersection. Both arguments must be disjoint and in order."""
    starts = [start for start, _ in second]
    shared = 0
    for start, end in first:
        at = max(0, bisect_right(starts, start) - 1)
        while at < len(second) and second[at][0] < end:
            shared += max(0, min(end, second[at][1]) - max(start, second[at][0]))
            at += 1
    return shared


def inside(at: int, intervals: Sequence[TimeSpan], starts: Sequence[int]) -> bool:
    """Whether the time `at` lies in one of the disjoint intervals, whose start times are `starts`."""
    i = bisect_right(starts, at) - 1
    return i >= 0 and at < intervals[i][1]
