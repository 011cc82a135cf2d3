"""The price of overlap: how much longer the same kernel takes while a collective runs than alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.kernels import MATRIX_KERNEL
from weft.timeline import Kind, Ns, Timeline
from weft.trace.covered import Measure

BESIDE = 0.5
"""A kernel counts as overlapping if at least this share of it does, and as alone if none of it does."""

MIN_SPANS = 2
"""A median needs at least this many spans on each side."""

MIXED = 1.5
"""Spans of one kernel that vary more than this (90th over 10th percentile) do different work, ..."""

JITTER_NS = 5_000
"""... unless the percentiles differ by less than this: the shortest kernels vary by as much anyway."""


@dataclass(frozen=True)
class KernelPrice:
    """One kernel (same name, grid and block size). Medians in nanoseconds."""

    name: str
    beside: int
    alone: int
    beside_ns: int
    alone_ns: int

    @property
    def lost_ns(self) -> int:
        """Extra time of all overlapping spans over running alone; 0 if they were not slower.

        This is the one definition of the price: sums over kernels add these, so a total is never less than
        one of its rows.
        """
        return max(self.beside * (self.beside_ns - self.alone_ns), 0)

    @property
    def slowdown_pct(self) -> float:
        return 100.0 * (self.beside_ns / self.alone_ns - 1) if self.alone_ns else 0.0


def price_of_overlap(timeline: Timeline, sms: int | None = None) -> list[KernelPrice]:
    """Kernels that ran both concurrently with a collective and alone, the costliest first.

    Leaves out kernels whose name and shape do not determine their work: a persistent GEMM has at most `sms`
    blocks, one per SM, for matrices of any size.
    """
    at = np.flatnonzero((timeline.kind == Kind.COMPUTE) & (timeline.end_ns > timeline.start_ns))
    if sms is not None:
        matrix = np.array([MATRIX_KERNEL.search(name) is not None for name in timeline.names], dtype=bool)
        at = at[~(matrix[timeline.name[at]] & (timeline.resources["blocks"][at] <= sms))]
    comm = Measure(timeline.covered(Kind.COMM))
    start, end = timeline.start_ns[at], timeline.end_ns[at]
    shared = comm.between(start, end)
    length = end - start
    beside, alone = shared >= BESIDE * length, shared == 0
    keys = np.stack([timeline.name[at], *(timeline.resources[k][at] for k in ("blocks", "threads"))], axis=1)
    use = beside | alone
    order = np.lexsort((*(keys[use][:, i] for i in range(3)),))
    keys, length, beside = keys[use][order], length[use][order], beside[use][order]
    if not len(keys):
        return []
    breaks = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
    out = []
    for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(keys)], strict=True):
        with_comm = length[low:high][beside[low:high]]
        without = length[low:high][~beside[low:high]]
        if min(len(with_comm), len(without)) < MIN_SPANS or _mixed(with_comm) or _mixed(without):
            continue
        medians = (int(np.median(part)) for part in (with_comm, without))
        out.append(KernelPrice(timeline.names[int(keys[low, 0])], len(with_comm), len(without), *medians))
    return sorted(out, key=lambda price: -price.lost_ns)


def _mixed(lengths: Ns) -> bool:
    short, long = np.percentile(lengths, (10, 90))
    return bool(long > MIXED * short and long > short + JITTER_NS)
