"""Timeline: what ran on a GPU and when, from a profiler trace, a live run or the simulator.

All times are integer nanoseconds, so that sums and overlaps are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ns = npt.NDArray[np.int64]


class Kind(IntEnum):
    """Class of a span. Copies and fills are memory; peer-to-peer copies are communication."""

    COMPUTE = 0
    COMM = 1
    MEMORY = 2


class Intervals(NamedTuple):
    """Sorted, disjoint half-open intervals [start, end)."""

    start: Ns
    end: Ns

    @property
    def total_ns(self) -> int:
        """Sum of the lengths in nanoseconds."""
        return int((self.end - self.start).sum())


def union(start: Ns, end: Ns) -> Intervals:
    """The disjoint union of arbitrary intervals; empty ones are dropped."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return Intervals(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], end[last])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The intersection of two disjoint unions."""
    lo = np.searchsorted(b.end, a.start, side="right")
    hi = np.searchsorted(b.start, a.end, side="left")
    counts = np.maximum(hi - lo, 0)
    of_a = np.repeat(np.arange(len(a.start)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    of_b = np.repeat(lo, counts) + within
    return Intervals(np.maximum(a.start[of_a], b.start[of_b]), np.minimum(a.end[of_a], b.end[of_b]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The part of `a` that is not in `b`."""
    shared = intersect(a, b)
    start = np.sort(np.concatenate((a.start, shared.end)))
    end = np.sort(np.concatenate((a.end, shared.start)))
    keep = end > start
    return Intervals(start[keep], end[keep])


@dataclass(frozen=True, eq=False)
class Timeline:
    """Columnar spans of one GPU. All columns have the same length; `name` indexes into `names`."""

    start_ns: Ns
    end_ns: Ns
    stream: npt.NDArray[np.int64]
    kind: npt.NDArray[np.uint8]
    name: npt.NDArray[np.int32]
    names: tuple[str, ...]
    resources: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """One column each, -1 where unknown: `blocks`, `threads` (per block), `registers` (per thread),
    `shared_bytes` (per block), `bytes` (moved)."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def covered(self, *kinds: Kind) -> Intervals:
        """The intervals in which at least one span of these kinds runs (of any kind if none is given)."""
        mask = np.isin(self.kind, kinds) if kinds else np.ones(len(self), dtype=bool)
        return union(self.start_ns[mask], self.end_ns[mask])

    def figures(self) -> OverlapFigures:
        """Times of compute, communication and their overlap."""
        if not len(self):
            return OverlapFigures(0, 0, 0, 0, 0, 0)
        compute, comm = self.covered(Kind.COMPUTE), self.covered(Kind.COMM)
        span = int(self.end_ns.max() - self.start_ns.min())
        return OverlapFigures(
            span_ns=span,
            compute_ns=compute.total_ns,
            comm_ns=comm.total_ns,
            overlap_ns=intersect(compute, comm).total_ns,
            memory_ns=self.covered(Kind.MEMORY).total_ns,
            idle_ns=span - self.covered().total_ns,
        )


@dataclass(frozen=True)
class OverlapFigures:
    """Times of a Timeline in nanoseconds, each the length of a union of spans."""

    span_ns: int
    compute_ns: int
    comm_ns: int
    overlap_ns: int
    memory_ns: int
    idle_ns: int

    @property
    def exposed_ns(self) -> int:
        """Communication during which no compute kernel runs."""
        return self.comm_ns - self.overlap_ns

    @property
    def overlap_pct(self) -> float:
        """Percentage of communication that overlaps compute; 0 if there is no communication."""
        return 100.0 * self.overlap_ns / self.comm_ns if self.comm_ns else 0.0
