"""Builds schedules in which rows of x are moved, then multiplied: all-gather and all-to-all."""

from __future__ import annotations

from weft.errors import UsageError
from weft.ops.builder import Builder, cut, join, offsets, shards, split
from weft.ops.steps import Problem, Region, runs


class Gather(Builder):
    """Builder for all-gather and all-to-all: moves rows of x, then multiplies them."""

    def __init__(self, operation: str, name: str, problem: Problem, rank: int) -> None:
        super().__init__(operation, name, problem, rank)
        ranks = problem.ranks
        if operation == "all_gather_matmul":
            self.incoming = shards(problem)
            own = self.incoming[rank]
            self.sent_at, self.sent, x_rows = [0] * ranks, (own,) * ranks, own
        else:
            self.sent = split(problem.m, ranks) if problem.sent is None else problem.sent
            if sum(self.sent) != problem.m:
                raise UsageError(f"sent {self.sent} add up to {sum(self.sent)}, not to m = {problem.m}")
            self.incoming = (self.sent[rank],) * ranks if problem.rows is None else problem.rows
            if self.incoming[rank] != self.sent[rank]:
                raise UsageError(
                    f"rank {rank} sends itself {self.sent[rank]} rows and expects {self.incoming[rank]}"
                )
            self.sent_at, x_rows = offsets(self.sent), problem.m
        self.at = offsets(self.incoming)
        self.buffers |= {
            "x": (x_rows, problem.k),
            "w": (problem.k, problem.n),
            "out": (self.at[-1], problem.n),
        }

    def x(self, peer: int, start: int = 0, rows: int | None = None) -> Region:
        """Rows of x for a peer or this rank, from `start` of its block; `rows` None: to the block's end."""
        count = self.sent[peer] - start if rows is None else rows
        return Region("x", self.sent_at[peer] + start, count, 0, self.problem.k)

    def own(self) -> None:
        place = self.out(self.at[self.rank], self.incoming[self.rank])
        self.matmul("matmul.own", 0, [self.x(self.rank)], self.w(), [place], ())

    def serial(self) -> None:
        home = self.buffer("gather", self.at[-1], self.problem.k)
        after: tuple[str, ...] = ()
        for peer in self.peers:
            self.send(0, peer, self.x(peer), lane=peer)
            place = Region(home, self.at[peer], self.incoming[peer], 0, self.problem.k)
            after += self.recv(0, peer, place, lane=peer)
        mine = Region(home, self.at[self.rank], self.incoming[self.rank], 0, self.problem.k)
        after += self.copy("copy.own", 0, [self.x(self.rank)], [mine])
        whole = Region(home, 0, self.at[-1], 0, self.problem.k)
        self.matmul("matmul.r0", 0, [whole], self.w(), [self.out(0, self.at[-1])], after)

    def shard(self) -> None:
        self.own()
        for i, source in enumerate(self.peers):
            destination = (self.rank - i - 1) % self.problem.ranks
            self.send(i, destination, self.x(destination))
            home = self.buffer(f"gather.{i}", self.incoming[source], self.problem.k)
            place = Region(home, 0, self.incoming[source], 0, self.problem.k)
            after = self.recv(i, source, place)
            target = self.out(self.at[source], place.rows)
            self.matmul(f"matmul.r{i}.p{source}", i, [place], self.w(), [target], after)

    def columns(self) -> None:
        m = self.at[-1]
        before: tuple[str, ...] = ()
        for i, (col, cols) in enumerate(cut(self.problem.k, min(self.problem.cuts, self.problem.k))):
            home, after = self.buffer(f"gather.{i}", m, cols), before
            for peer in self.peers:
                given = self.x(peer)
                self.send(i, peer, Region("x", given.row, given.rows, col, cols), lane=peer)
                after += self.recv(
                    i, peer, Region(home, self.at[peer], self.incoming[peer], 0, cols), lane=peer
                )
            kept = self.x(self.rank)
            source = Region("x", kept.row, kept.rows, col, cols)
            target = Region(home, self.at[self.rank], kept.rows, 0, cols)
            after += self.copy(f"copy.r{i}", i, [source], [target])
            before = self.matmul(
                f"matmul.r{i}",
                i,
                [Region(home, 0, m, 0, cols)],
                self.w(col, cols),
                [self.out(0, m)],
                after,
                i > 0,
            )

    def pieces(self) -> None:
        cuts = self.problem.cuts
        if self.hetero:
            self.own()
        sources = [peer for peer in range(self.problem.ranks) if peer != self.rank or not self.hetero]
        outgoing = [cut(rows, cuts) for rows in self.sent]
        arriving = [cut(rows, cuts) for rows in self.incoming]
        for i in range(cuts):
            for peer in self.peers:
                self.send(i, peer, self.x(peer, *outgoing[peer][i]), lane=peer)
            self._round(i, sources, [arriving[peer][i] for peer in sources], outgoing[self.rank][i])

    def _round(
        self, i: int, sources: list[int], arriving: list[tuple[int, int]], kept: tuple[int, int]
    ) -> None:
        """Receive one piece from each source and multiply the pieces."""
        counts = [rows for _, rows in arriving]
        places = offsets(counts)
        home = self.buffer(f"gather.{i}", places[-1], self.problem.k)
        parts = [Region(home, at, rows, 0, self.problem.k) for at, rows in zip(places, counts, strict=False)]
        results = [
            self.out(self.at[peer] + start, rows)
            for peer, (start, rows) in zip(sources, arriving, strict=True)
        ]
        after: list[tuple[str, ...]] = [()] * len(sources)
        for peer in [*self.peers, *([] if self.hetero else [self.rank])]:
            slot = sources.index(peer)
            if peer == self.rank:
                after[slot] = self.copy(f"copy.r{i}", i, [self.x(peer, *kept)], [parts[slot]])
            else:
                after[slot] = self.recv(i, peer, parts[slot], lane=peer)
        if not self.fused:
            for peer, part, result, wait in zip(sources, parts, results, after, strict=True):
                self.matmul(f"matmul.r{i}.p{peer}", i, [part], self.w(), [result], wait)
            return
        waits = tuple(name for names in after for name in names)
        full = [(part, result) for part, result in zip(parts, results, strict=True) if part.rows]
        a, c = join([part for part, _ in full], [result for _, result in full])
        if self.problem.direct or len(runs(a, c)) <= 2:
            self.matmul(f"matmul.r{i}", i, list(a), self.w(), list(c), waits)
            return
        scratch = self.buffer(f"scratch.{i}", places[-1], self.problem.n)
        whole = Region(home, 0, places[-1], 0, self.problem.k)
        made = Region(scratch, 0, places[-1], 0, self.problem.n)
        done = self.matmul(f"matmul.r{i}", i, [whole], self.w(), [made], waits)
        pieces = [
            Region(scratch, at, rows, 0, self.problem.n) for at, rows in zip(places, counts, strict=False)
        ]
        self.copy(f"permute.r{i}", i, pieces, results, done)
