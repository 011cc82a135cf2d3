"""Base class that collects one rank's steps, and helpers to cut and join regions."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import UsageError
from weft.ops.steps import Copy, Matmul, Problem, Recv, Region, Schedule, Send, Step


def shards(problem: Problem) -> tuple[int, ...]:
    """Rows of each rank's shard (all-gather, reduce-scatter)."""
    if problem.rows is None:
        return split(problem.m, problem.ranks)
    if sum(problem.rows) != problem.m:
        raise UsageError(f"rows {problem.rows} add up to {sum(problem.rows)}, not to m = {problem.m}")
    return problem.rows


def split(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into parts that differ by at most one, larger ones first."""
    small, larger = divmod(total, parts)
    return tuple(small + (part < larger) for part in range(parts))


def offsets(counts: Sequence[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def cut(total: int, parts: int) -> list[tuple[int, int]]:
    counts = split(total, parts)
    return list(zip(offsets(counts), counts, strict=False))


def join(a: list[Region], c: list[Region]) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Merge consecutive parts that are adjacent both in `a` and in `c`."""
    joined: list[tuple[Region, Region]] = []
    for left, right in zip(a, c, strict=True):
        if joined and _adjacent(joined[-1][0], left) and _adjacent(joined[-1][1], right):
            joined[-1] = (_longer(joined[-1][0], left), _longer(joined[-1][1], right))
        else:
            joined.append((left, right))
    return tuple(pair[0] for pair in joined), tuple(pair[1] for pair in joined)


def _adjacent(one: Region, other: Region) -> bool:
    return (one.buffer, one.row + one.rows, one.col, one.cols) == (
        other.buffer,
        other.row,
        other.col,
        other.cols,
    )


def _longer(one: Region, other: Region) -> Region:
    return Region(one.buffer, one.row, one.rows + other.rows, one.col, one.cols)


class Builder:
    """Collects the steps of one rank."""

    def __init__(self, operation: str, name: str, problem: Problem, rank: int) -> None:
        self.operation, self.name, self.problem, self.rank = operation, name, problem, rank
        self.peers = [(rank + i) % problem.ranks for i in range(1, problem.ranks)]
        self.hetero = name.startswith("hetero")
        self.fused = "unfused" not in name
        self.steps: list[Step] = []
        self.buffers: dict[str, tuple[int, int]] = {}
        self._last: dict[tuple[str, int], str] = {}  # the last transfer in each direction on each lane

    def schedule(self) -> Schedule:
        if self.problem.ranks == 1:
            whole = Region("x", 0, self.buffers["x"][0], 0, self.problem.k)
            self.matmul("matmul.own", 0, [whole], self.w(), [self.out(0, whole.rows)], ())
        elif self.name == "serial":
            self.serial()
        elif self.name == "shard":
            self.shard()
        elif self.name == "uniform-fused-2d":
            self.columns()
        else:
            self.pieces()
        steps = tuple(self.steps)
        return Schedule(self.operation, self.name, self.problem, self.rank, steps, self.buffers)

    def serial(self) -> None:
        raise NotImplementedError

    def shard(self) -> None:
        raise NotImplementedError

    def columns(self) -> None:
        raise NotImplementedError

    def pieces(self) -> None:
        raise NotImplementedError

    def buffer(self, name: str, rows: int, cols: int) -> str:
        self.buffers[name] = (rows, cols)
        return name

    def w(self, row: int = 0, rows: int | None = None, col: int = 0, cols: int | None = None) -> Region:
        k, n = self.problem.k, self.problem.n
        return Region("w", row, k - row if rows is None else rows, col, n - col if cols is None else cols)

    def out(self, row: int, rows: int) -> Region:
        return Region("out", row, rows, 0, self.problem.n)

    def send(
        self, round_: int, peer: int, source: Region, after: tuple[str, ...] = (), lane: int = 0
    ) -> None:
        if source.rows:
            name = f"send.r{round_}.p{peer}"
            waits = after + self._chain("send", lane, name)
            self.steps.append(Send(name, round_, peer, source, waits, self._bytes(source)))

    def recv(self, round_: int, peer: int, target: Region, lane: int = 0) -> tuple[str, ...]:
        """Receive a region; returns the step to wait for, empty if the region has no rows."""
        if not target.rows:
            return ()
        name = f"recv.r{round_}.p{peer}"
        self.steps.append(
            Recv(name, round_, peer, target, self._chain("recv", lane, name), self._bytes(target))
        )
        return (name,)

    def _chain(self, kind: str, lane: int, name: str) -> tuple[str, ...]:
        before = self._last.get((kind, lane))
        self._last[kind, lane] = name
        return () if before is None else (before,)

    def copy(
        self,
        name: str,
        round_: int,
        sources: list[Region],
        targets: list[Region],
        after: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s.rows]
        if not pairs:
            return ()
        froms, tos = tuple(s for s, _ in pairs), tuple(t for _, t in pairs)
        self.steps.append(Copy(name, round_, froms, tos, after, 2 * self._bytes(*froms)))
        return (name,)

    def matmul(
        self,
        name: str,
        round_: int,
        a: list[Region],
        b: Region,
        c: list[Region],
        after: tuple[str, ...],
        accumulate: bool = False,
    ) -> tuple[str, ...]:
        pairs = [(left, right) for left, right in zip(a, c, strict=True) if left.rows]
        if not pairs:
            return ()
        parts_a, parts_c = join([left for left, _ in pairs], [right for _, right in pairs])
        rows = sum(part.rows for part in parts_a)
        moved = self._bytes(*parts_a, b, *parts_c) + (self._bytes(*parts_c) if accumulate else 0)
        flops = 2 * rows * b.rows * b.cols
        self.steps.append(Matmul(name, round_, parts_a, b, parts_c, accumulate, after, moved, flops))
        return (name,)

    def _bytes(self, *regions: Region) -> int:
        return self.problem.itemsize * sum(region.size for region in regions)
