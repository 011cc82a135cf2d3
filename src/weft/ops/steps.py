"""What a schedule is made of: the sizes of a problem, regions of buffers, steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from weft.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of one operation, as one rank sees them."""

    m: int
    """Rows in all: of the gathered x, of the result to scatter, of this rank's x before an all-to-all."""
    n: int
    """Columns of this rank's w. Ranks may differ in it, except for a reduce-scatter."""
    k: int
    """Columns of x, rows of w. Ranks may differ in it for a reduce-scatter only."""
    ranks: int
    itemsize: int = 2
    """Bytes of one element."""
    pieces: int | None = None
    """Cuts of a shard in the finer schedules; None: as many as ranks."""
    rows: tuple[int, ...] | None = None
    """Rows of each rank's shard; all-to-all: rows that each rank sends to this one. None: split evenly."""
    sent: tuple[int, ...] | None = None
    """All-to-all only: rows that this rank sends to each. None: m split evenly."""
    direct: bool = False
    """Whether each part of a fused matmul is one of its own, instead of a permutation around one matmul."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "ranks", "itemsize"):
            value = getattr(self, name)
            least = 0 if name == "m" and self.rows is not None else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} {value!r} is not possible; use a whole number from {least}")
        if self.pieces is not None and self.pieces < 1:
            raise UsageError(f"pieces {self.pieces!r} is not possible; use a whole number from 1")
        for name in ("rows", "sent"):
            counts = getattr(self, name)
            if counts is not None and (len(counts) != self.ranks or min(counts) < 0):
                raise UsageError(f"{name} {counts!r} must have {self.ranks} numbers from 0, one per rank")

    @property
    def cuts(self) -> int:
        """Into how many pieces the finer schedules cut a shard."""
        return self.pieces or self.ranks


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a buffer, in elements."""

    buffer: str
    row: int
    rows: int
    col: int
    cols: int

    @property
    def size(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Send:
    """Give `source` to a peer, whose `Recv` of the same round takes it."""

    id: str
    round: int
    peer: int
    source: Region
    after: tuple[str, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """Take what a peer's `Send` of the same round gives; where copies are pulled, this is the copy."""

    id: str
    round: int
    peer: int
    target: Region
    after: tuple[str, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy each source to its target, on this rank: staging, or a permutation of rows."""

    id: str
    round: int
    sources: tuple[Region, ...]
    targets: tuple[Region, ...]
    after: tuple[str, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Matmul:
    """One GEMM: the parts of `a`, stacked, times `b`; its rows go to the parts of `c`, or are added there.

    There are several parts only where `runs` finds at most two groups of evenly spaced, equal ones.
    """

    id: str
    round: int
    a: tuple[Region, ...]
    b: Region
    c: tuple[Region, ...]
    accumulate: bool
    after: tuple[str, ...]
    bytes: int
    """Read and written, if each operand is touched once."""
    flops: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N, K of the GEMM."""
        return sum(part.rows for part in self.a), self.b.cols, self.b.rows


@dataclass(frozen=True, slots=True)
class Add:
    """`target` = the sum of the sources, one from each rank in rank order, rounded once."""

    id: str
    round: int
    sources: tuple[Region, ...]
    target: Region
    after: tuple[str, ...]
    bytes: int
    flops: int


Step: TypeAlias = Send | Recv | Copy | Matmul | Add


@dataclass(frozen=True)
class Schedule:
    """What one rank does for one operation."""

    operation: str
    name: str
    problem: Problem
    rank: int
    steps: tuple[Step, ...]
    buffers: dict[str, tuple[int, int]]
    """Rows and columns of every buffer. `x`, `w` and `out` are the caller's; the rest is scratch."""

    @cached_property
    def sends(self) -> dict[tuple[int, int], Send]:
        """By peer and round."""
        return {(step.peer, step.round): step for step in self.steps if isinstance(step, Send)}

    @cached_property
    def recvs(self) -> dict[tuple[int, int], Recv]:
        """By peer and round."""
        return {(step.peer, step.round): step for step in self.steps if isinstance(step, Recv)}

    @property
    def scatters(self) -> bool:
        return self.operation == "matmul_reduce_scatter"

    @property
    def matmuls(self) -> list[Matmul]:
        return [step for step in self.steps if isinstance(step, Matmul)]

    @property
    def rounds(self) -> int:
        """Rounds of communication."""
        return len({step.round for step in self.steps if isinstance(step, Send | Recv)})

    @property
    def received_bytes(self) -> int:
        return sum(step.bytes for step in self.recvs.values())

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.matmuls)

    @property
    def local_bytes(self) -> int:
        """Bytes copied on this rank to stage and permute."""
        return sum(step.bytes for step in self.steps if isinstance(step, Copy))

    def peers_at_once(self, round_: int) -> int:
        """Peers that this rank receives from in a round."""
        return sum(1 for _, at in self.recvs if at == round_)


def runs(a: Sequence[Region], c: Sequence[Region]) -> list[tuple[int, int]]:
    """Groups (first, end) of parts that have equal rows and are evenly spaced in `a` and in `c`."""
    found: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(a) + 1):
        if i < len(a) and _evenly(a, first, i) and _evenly(c, first, i):
            continue
        found.append((first, i))
        first = i
    return found


def _evenly(parts: Sequence[Region], first: int, i: int) -> bool:
    start, before, part = parts[first], parts[i - 1], parts[i]
    alike = (part.buffer, part.rows, part.col, part.cols) == (start.buffer, start.rows, start.col, start.cols)
    return alike and part.row - before.row == parts[first + 1].row - start.row
