"""Estimates the time of a schedule from sizes alone, with two lanes that wait for each other: links and SMs.

The cost of a round of copies and of its GEMM is computed once; a loop goes over the rounds. Unlike
`simulate`, the estimate does not model that the copies of a round, or the ranks, drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.ops.builder import cut, join, offsets, split
from weft.ops.case import (
    DMA_TRAFFIC,
    ISSUE_S,
    KERNEL_S,
    ROW_BYTES,
    SM_COPY_SLOWED,
    SM_START_S,
    Case,
    gemm,
    gemm_with_copies,
    library_collective_s,
)
from weft.ops.steps import Region, runs
from weft.sim.fabric import fabric
from weft.sim.flow import slowed
from weft.workload import DTYPE_BYTES

DRIFT = {"pcie": 1.04}
"""Factor by which copies take longer if ranks have different routes and drift apart, by topology. Fitted by
benchmarks/ops/fit_pick.py."""


def seconds(case: Case, name: str, engine: str) -> float:
    """The time of a schedule with an engine."""
    lanes = _Lanes(case, engine)
    if name == "serial":
        return lanes.serial()
    if name == "shard":
        return lanes.scattered_shards() if lanes.scatter else lanes.gathered_shards()
    return lanes.scattered(name) if lanes.scatter else lanes.gathered(name)


@dataclass(frozen=True, slots=True)
class _Kernel:
    alone_s: float
    concurrent_s: float
    """Duration while copies move."""

    def end(self, start: float, moving_until: float) -> float:
        """When the kernel ends if copies slow it until `moving_until`."""
        if start >= moving_until:
            return start + self.alone_s
        if start + self.concurrent_s <= moving_until:
            return start + self.concurrent_s
        done = (moving_until - start) / self.concurrent_s
        return moving_until + (1 - done) * self.alone_s

    def mixed(self, other: _Kernel, more_s: float, share: float) -> _Kernel:
        """The mean of this kernel and of `other` plus `more_s`; `share` is the weight of the latter."""
        return _Kernel(
            self.alone_s + share * (other.alone_s + more_s - self.alone_s),
            self.concurrent_s + share * (other.concurrent_s + more_s - self.concurrent_s),
        )


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The rounds of a finer schedule, which are all alike."""

    count: int
    bytes: float
    """Bytes of a piece."""
    whole_s: float
    """Seconds of a round of copies that follows another round."""
    first_s: float
    """Seconds until the first copies of a round have arrived."""
    gemm: _Kernel
    """The GEMM of a round, or all of them if a round has several."""
    stage_s: float
    """Seconds of a round's local copy; 0 if there is none."""
    steps: int
    """Steps that the host issues in a round."""
    own: _Kernel | None
    """The GEMM of the local shard; None if the shard is part of the rounds."""


@dataclass(frozen=True, slots=True)
class _Loads:
    """Seconds per byte of a piece that all ranks copy at the same time."""

    single: tuple[float, ...]
    """From one peer, by its distance."""
    whole: float
    """From all peers, as many at a time as there are lanes; the mean over many rounds."""
    once: float
    """The same for a single round."""
    first: float
    """The first group of copies in a single round."""


@lru_cache(maxsize=2048)
def _loads(topology: str, ranks: int, gpu: str, lanes: int) -> _Loads:
    joined = fabric(topology, ranks, gpu)
    loads = []
    for distance in range(1, ranks):
        load = [0.0] * len(joined.capacity)
        for rank in range(ranks):
            for link in joined.routes[(rank + distance) % ranks][rank]:
                load[link] += 1 / joined.capacity[link]
        loads.append(load)
    drift = 1.0 if joined.period == 1 else DRIFT.get(topology, 1.0)
    single = tuple(drift * max(load) for load in loads)
    (at_once,) = _grouped(loads, ranks)
    if lanes >= ranks - 1:
        return _Loads(single, at_once, at_once, at_once)
    # Groups of copies continue across rounds: after `lanes` rounds, the pattern repeats.
    many, one = _grouped(loads * lanes, lanes), _grouped(loads, lanes)
    whole = sum(many) / lanes
    if topology == "ring":  # copies that share links proceed while others of their group still start
        whole = (whole + at_once) / 2
    return _Loads(single, whole, sum(one), one[0])


def is_rough(case: Case) -> bool:
    """Whether copies drift apart in ways that the estimate does not model.

    This happens below several PCIe switches, where ranks have different routes, and on a ring whose GPUs have
    fewer DMA engines than peers. There, the true time lies between two bounds; the estimate is in the middle.
    """
    return case.fabric.period > 1 or (case.topology == "ring" and case.fabric.engines < case.ranks - 1)


def _grouped(loads: list[list[float]], lanes: int) -> list[float]:
    """The load of the most loaded link, for each group of `lanes` consecutive copies."""
    return [max(map(sum, zip(*loads[i : i + lanes], strict=True))) for i in range(0, len(loads), lanes)]


@lru_cache(maxsize=512)
def _permuted(m: int, ranks: int) -> tuple[float, float]:
    """The fraction of hetero-fused rounds that must permute rows for one GEMM: least and most of any rank.

    Rounds need this if shards differ in size: without the rank's own shard, the others are not evenly spaced.
    Pieces of a shard may differ in size too, so one round may need it and the next one not.
    """
    if m % ranks == 0:
        return 0.0, 0.0
    shares = [_permuted_on(m, ranks, own) for own in {0, ranks // 2, ranks - 1}]
    return min(shares), max(shares)


def _permuted_on(m: int, ranks: int, own: int) -> float:
    counts = split(m, ranks)
    at = offsets(counts)
    rounds = min(ranks, counts[0])
    pieces = [cut(count, rounds) for count in counts]
    moved = 0
    for i in range(rounds):
        peers = [
            (at[peer] + each[i][0], each[i][1])
            for peer, each in enumerate(pieces)
            if peer != own and each[i][1]
        ]
        apart = [Region("x", row, rows, 0, 1) for row, rows in peers]
        together = [
            Region("y", row, rows, 0, 1)
            for row, (_, rows) in zip(offsets([rows for _, rows in peers]), peers, strict=False)
        ]
        moved += len(runs(*join(apart, together))) > 2
    return moved / rounds


class _Lanes:
    """The lanes of one rank: its links and its SMs."""

    def __init__(self, case: Case, engine: str) -> None:
        figures, joined = case.costs.profile.figures, case.fabric
        self.case, self.sm = case, engine == "sm"
        self.peers, self.rows = case.ranks - 1, -(-case.m // case.ranks)
        self.scatter = case.operation == "matmul_reduce_scatter"
        self.columns = case.n if self.scatter else case.k
        self.size = DTYPE_BYTES[case.dtype]
        self.shard = float(self.rows * self.columns * self.size)
        self.event_s, self.gap_s = figures.event_gap_us * 1e-6, figures.stream_gap_us * 1e-6
        self.memory = figures.memory_tb_s * 1e12
        self.start_s = SM_START_S if self.sm else joined.copy_start_s
        lanes = self.peers if self.sm else joined.engines
        self.groups = max(1.0, self.peers / lanes)
        self.loads = _loads(case.topology, case.ranks, case.gpu, lanes)
        # If all ranks have equivalent routes, rank 0 represents them, and it has nothing to permute.
        uneven = case.operation != "all_to_all_matmul" and joined.period > 1
        self.permuted = _permuted(case.m, case.ranks) if uneven else (0.0, 0.0)
        self.least = SM_COPY_SLOWED / (figures.comm_ctas * figures.cta_gb_s * 1e9) if self.sm else 0.0
        self.traffic = figures.comm_traffic * figures.comm_miss if self.sm else 2 * DMA_TRAFFIC
        # Copies that share a link start in order of issue, so some move while others start.
        sharing = min(lanes, self.peers, self.loads.whole / max(self.loads.single))
        self.stagger_s = 0.0 if self.scatter else ISSUE_S * (sharing - 1)

    def serial(self) -> float:
        case = self.case
        whole = gemm(case, case.rows, case.n, case.k).seconds
        if self.sm:
            return ISSUE_S + library_collective_s(case) + whole + self.event_s
        moved = self._by_itself(self.shard) + self.event_s
        last = ISSUE_S * self.peers + self.start_s + self.shard * self.loads.single[-1] + self.event_s
        if not self.scatter:
            return max(ISSUE_S + moved, last, ISSUE_S * case.ranks) + whole
        return max(ISSUE_S + whole + moved, last + ISSUE_S) + self.event_s + self._sum_s(1)

    def _by_itself(self, piece: float) -> float:
        """Seconds of the first round of copies, with none before it."""
        later = (math.ceil(self.groups) - 1) * max(0.0, self.start_s - self.stagger_s)
        return self.start_s + later + piece * max(self.loads.once, self.peers * self.least)

    def _exchange(self, piece: float) -> tuple[float, float]:
        """Seconds of a round of copies that follows another round, and of its first copies."""
        idle = max(0.0, (self.event_s if self.groups == 1.0 else 0.0) + self.start_s - self.stagger_s)
        whole = idle * self.groups + piece * max(self.loads.whole, self.peers * self.least)
        first = self.start_s + piece * max(self.loads.first, self.peers / self.groups * self.least)
        return whole, first

    def _kernel(
        self,
        shape: tuple[int, int, int],
        busy: float,
        times: int = 1,
        *,
        parts: int = 1,
        accumulate: bool = False,
    ) -> _Kernel:
        """A GEMM, run `times` in a row; `busy`: bytes per second that this rank receives meanwhile."""
        alone = gemm(self.case, *shape, parts=parts, accumulate=accumulate)
        arithmetic = alone.compute_s
        if self.sm:
            arithmetic = gemm_with_copies(self.case, *shape, parts=parts, accumulate=accumulate).compute_s
        longer = slowed(arithmetic, alone.memory_bytes, self.traffic * busy, self.memory)
        gaps = (times - 1) * self.gap_s
        return _Kernel(times * alone.seconds + gaps, times * longer + gaps)

    def _local_s(self, moved: float) -> float:
        """Seconds of a local copy or sum with `moved` bytes of memory traffic."""
        return max(KERNEL_S, moved / self.memory)

    def _sum_s(self, rounds: int) -> float:
        return self._local_s(self.shard / rounds * (self.case.ranks + 1))

    def _rounds(self, name: str) -> _Rounds:
        case, ranks, n, k = self.case, self.case.ranks, self.case.n, self.case.k
        staged = "uniform" in name
        own = None
        if name == "uniform-fused-2d":
            count = min(ranks, self.columns)
            width = -(-self.columns // count)
            piece = float(self.rows * (width * self.size + ROW_BYTES))
            whole, first = self._exchange(piece)
            busy = piece * self.peers / whole
            shape = (case.rows, width, k) if self.scatter else (case.rows, n, width)
            one = self._kernel(shape, busy, accumulate=not self.scatter)
        else:
            count = min(ranks, self.rows)
            rows, piece = -(-self.rows // count), self.shard / count
            whole, first = self._exchange(piece)
            busy = piece * self.peers / whole
            parts = ranks if staged else self.peers
            if name == "hetero-unfused-1d":
                one = self._kernel((rows, n, k), busy, self.peers)
            else:
                one = self._kernel((parts * rows, n, k), busy, parts=parts)
                if name == "hetero-fused-1d" and self.permuted[1]:
                    joined = self._kernel((parts * rows, n, k), busy)
                    moved = self._local_s(2 * parts * rows * (k if self.scatter else n) * self.size)
                    found = [one.mixed(joined, moved + self.gap_s, share) for share in self.permuted]
                    one = max(found, key=lambda kernel: kernel.alone_s)
            if not staged:
                own = self._kernel((self.rows, n, k), busy)
        return _Rounds(
            count=count,
            bytes=piece,
            whole_s=whole,
            first_s=first,
            gemm=one,
            stage_s=self._local_s(2 * self.shard / count) + self.gap_s if staged else 0.0,
            steps=self.peers + (2 if staged else self.peers if name == "hetero-unfused-1d" else 1),
            own=own,
        )

    # All-gather and all-to-all: copies depend on nothing, GEMMs depend on copies.

    def gathered_shards(self) -> float:
        spent = [
            self.event_s + self.start_s + self.shard * max(load, self.least) for load in self.loads.single
        ]
        spent[0] -= self.event_s
        shape = (self.rows, self.case.n, self.case.k)
        one = self._kernel(shape, self.shard * self.peers / sum(spent))
        ends, now = [], 0.0
        for i, each in enumerate(spent):
            now = max(now, ISSUE_S * (2 + 2 * i)) + each
            ends.append(now)
        t = one.end(ISSUE_S, now)
        for i, end in enumerate(ends):
            t = one.end(max(t + self.gap_s, end + self.event_s, ISSUE_S * (3 + 2 * i)), now)
        return t

    def gathered(self, name: str) -> float:
        rounds = self._rounds(name)
        early = name == "hetero-unfused-1d"
        ahead = 0 if rounds.own is None else 1
        begins, ends, now = [], [], 0.0
        for i in range(rounds.count):
            start = max(now, ISSUE_S * (ahead + rounds.steps * i + self.peers))
            begins.append(start + rounds.first_s)
            now = start + (rounds.whole_s if i else self._by_itself(rounds.bytes))
            ends.append(now)
        t = 0.0 if rounds.own is None else rounds.own.end(ISSUE_S, now) + self.gap_s
        last_s = rounds.gemm.alone_s / self.peers
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            t = max(t, ISSUE_S * (ahead + rounds.steps * (i + 1)))
            t = max(t + rounds.stage_s, (begin if early else end) + self.event_s)
            t = rounds.gemm.end(t, now)
            t = max(t, end + self.event_s + last_s) if early else t
            t += self.gap_s
        return t - self.gap_s

    # Reduce-scatter: GEMMs depend on nothing, copies depend on GEMMs, sums depend on copies.

    def scattered_shards(self) -> float:
        spent = [self.start_s + self.shard * max(load, self.least) for load in self.loads.single]
        shape = (self.rows, self.case.n, self.case.k)
        one = self._kernel(shape, self.shard * self.peers / sum(spent))
        t, moved, _ = self._scatter(one, spent, steps=2)
        t = one.end(t, moved)
        return max(t + self.gap_s, moved + self.event_s) + self._sum_s(1)

    def scattered(self, name: str) -> float:
        rounds = self._rounds(name)
        chained = self.event_s if self.groups == 1.0 else 0.0
        spent = [rounds.whole_s - chained] * rounds.count
        one, early = rounds.gemm, 0.0
        if name == "hetero-unfused-1d":
            early = (self.peers - 1) / self.peers * one.alone_s
            one = self._trickled(rounds)
        t, moved, ends = self._scatter(one, spent, steps=rounds.steps, stage_s=rounds.stage_s, early_s=early)
        if rounds.own is not None:
            t = rounds.own.end(t, moved) + self.gap_s
        for end in ends:
            t = max(t, end + self.event_s) + self._sum_s(rounds.count) + self.gap_s
        return t - self.gap_s

    def _trickled(self, rounds: _Rounds) -> _Kernel:
        """A round's GEMMs if each starts its own copy when it ends: copies are spread over the round."""
        case, one = self.case, rounds.gemm
        if rounds.whole_s < one.alone_s / self.peers:
            return one
        busy = rounds.bytes * self.peers / max(rounds.whole_s, one.alone_s)
        rows = -(-self.rows // rounds.count)
        slow = self._kernel((rows, case.n, case.k), busy, self.peers).concurrent_s
        return _Kernel(slow, slow)

    def _scatter(
        self,
        one: _Kernel,
        spent: Sequence[float],
        *,
        steps: int,
        stage_s: float = 0.0,
        early_s: float = 0.0,
    ) -> tuple[float, float, list[float]]:
        """When the SMs are free, when the links are free, and when the copies of each round have arrived.

        `stage_s`: time of the local copy after each GEMM; `early_s`: how long before the end of a round's
        GEMMs the first parts can be sent.
        """
        t, moved, ends = 0.0, 0.0, []
        for i, each in enumerate(spent):
            t = one.end(max(t, ISSUE_S * (1 + steps * i)), moved)
            ready = t + self.event_s
            begun = max(moved + self.event_s if moved else 0.0, ready - early_s)
            moved = max(begun + each, ready + each / self.peers if early_s else 0.0)
            ends.append(moved)
            t += stage_s + self.gap_s
        return t, moved, ends
