"""The data types of a schedule: the sizes of a problem, regions of buffers, steps."""

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
    """Total rows: of the gathered x, of the result to scatter, or of this rank's x before an all-to-all."""
    n: int
    """Columns of this rank's w. It may differ between ranks, except in a reduce-scatter."""
    k: int
    """Columns of x and rows of w. It may differ between ranks only in a reduce-scatter."""
    ranks: int
    itemsize: int = 2
    """Bytes of one element."""
    pieces: int | None = None
    """Pieces per shard in the finer schedules; None: as many as ranks."""
    rows: tuple[int, ...] | None = None
    """Rows of each rank's shard; all-to-all: rows that each rank sends to this one. None: an even split."""
    sent: tuple[int, ...] | None = None
    """All-to-all only: rows that this rank sends to each. None: an even split of m."""
    direct: bool = False
    """Whether a fused matmul runs as one matmul per part, instead of permuting rows for a single matmul."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "ranks", "itemsize"):
            value = getattr(self, name)
            least = 0 if name == "m" and self.rows is not None else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} {value!r} is not valid; use an integer from {least}")
        if self.pieces is not None and self.pieces < 1:
            raise UsageError(f"pieces {self.pieces!r} is not valid; use an integer from 1")
        for name in ("rows", "sent"):
            counts = getattr(self, name)
            if counts is not None and (len(counts) != self.ranks or min(counts) < 0):
                raise UsageError(f"{name} {counts!r} must have {self.ranks} numbers from 0, one per rank")

    @property
    def cuts(self) -> int:
        """Number of pieces into which the finer schedules cut a shard."""
        return self.pieces or self.ranks


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a buffer; sizes in elements."""

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
    """Send `source` to a peer, whose `Recv` of the same round receives it."""

    id: str
    round: int
    peer: int
    source: Region
    after: tuple[str, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive what a peer's `Send` of the same round sends. If copies are pulled, this step is the copy."""

    id: str
    round: int
    peer: int
    target: Region
    after: tuple[str, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy each source to its target on this rank, to stage or permute rows."""

    id: str
    round: int
    sources: tuple[Region, ...]
    targets: tuple[Region, ...]
    after: tuple[str, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Matmul:
    """One GEMM: the stacked parts of `a` times `b`. Writes the parts of `c`, or adds to them if `accumulate`.

    Without `Problem.direct`, several parts form at most two groups of evenly spaced, equal ones (see `runs`).
    """

    id: str
    round: int
    a: tuple[Region, ...]
    b: Region
    c: tuple[Region, ...]
    accumulate: bool
    after: tuple[str, ...]
    bytes: int
    """Bytes read and written if each operand is accessed once."""
    flops: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N, K of the GEMM."""
        return sum(part.rows for part in self.a), self.b.cols, self.b.rows


@dataclass(frozen=True, slots=True)
class Add:
    """Write the sum of the sources, one from each rank in rank order, to `target`; rounded once."""

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
    """The steps of one rank for one operation."""

    operation: str
    name: str
    problem: Problem
    rank: int
    steps: tuple[Step, ...]
    buffers: dict[str, tuple[int, int]]
    """Rows and columns of every buffer. `x`, `w` and `out` are the caller's; all others are scratch."""

    @cached_property
    def sends(self) -> dict[tuple[int, int], Send]:
        """The sends, by peer and round."""
        return {(step.peer, step.round): step for step in self.steps if isinstance(step, Send)}

    @cached_property
    def recvs(self) -> dict[tuple[int, int], Recv]:
        """The receives, by peer and round."""
        return {(step.peer, step.round): step for step in self.steps if isinstance(step, Recv)}

    @property
    def scatters(self) -> bool:
        return self.operation == "matmul_reduce_scatter"

    @property
    def matmuls(self) -> list[Matmul]:
        return [step for step in self.steps if isinstance(step, Matmul)]

    @property
    def rounds(self) -> int:
        """Number of communication rounds."""
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
        """Number of peers from which this rank receives in a round."""
        return sum(1 for _, at in self.recvs if at == round_)


def runs(a: Sequence[Region], c: Sequence[Region]) -> list[tuple[int, int]]:
    """Groups (first, end) of consecutive parts of equal size that are evenly spaced in both `a` and `c`."""
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
