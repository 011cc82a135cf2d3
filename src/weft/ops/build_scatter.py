"""Builds schedules that multiply rows of x, then move and add the partial results: reduce-scatter."""

from __future__ import annotations

from weft.ops.builder import Builder, cut, join, offsets, shards
from weft.ops.steps import Add, Problem, Region, runs


class Scatter(Builder):
    """Builder for reduce-scatter: multiplies rows of x, moves the partial results and adds them."""

    def __init__(self, operation: str, name: str, problem: Problem, rank: int) -> None:
        super().__init__(operation, name, problem, rank)
        self.rows = shards(problem)
        self.at = offsets(self.rows)
        self.mine = self.rows[rank]
        self.buffers |= {
            "x": (problem.m, problem.k),
            "w": (problem.k, problem.n),
            "out": (self.mine, problem.n),
        }

    def x(self, peer: int, start: int = 0, rows: int | None = None) -> Region:
        count = self.rows[peer] - start if rows is None else rows
        return Region("x", self.at[peer] + start, count, 0, self.problem.k)

    def inbox(self, source: int, start: int = 0, rows: int | None = None) -> Region:
        """The inbox region for the partial result of this rank's rows that comes from `source`."""
        count = self.mine - start if rows is None else rows
        return Region("inbox", source * self.mine + start, count, 0, self.problem.n)

    def add(self, round_: int, sources: list[Region], target: Region, after: tuple[str, ...]) -> None:
        if target.rows:
            flops = (len(sources) - 1) * target.size
            moved = self._bytes(*sources, target)
            self.steps.append(Add(f"add.r{round_}", round_, tuple(sources), target, after, moved, flops))

    def open_inbox(self) -> None:
        self.buffer("inbox", self.problem.ranks * self.mine, self.problem.n)

    def own(self) -> tuple[str, ...]:
        return self.matmul("matmul.own", 0, [self.x(self.rank)], self.w(), [self.inbox(self.rank)], ())

    def everyone(self, start: int = 0, rows: int | None = None) -> list[Region]:
        return [self.inbox(source, start, rows) for source in range(self.problem.ranks)]

    def serial(self) -> None:
        m, n = self.problem.m, self.problem.n
        self.open_inbox()
        home = self.buffer("partial", m, n)
        done = self.matmul(
            "matmul.r0", 0, [Region("x", 0, m, 0, self.problem.k)], self.w(), [Region(home, 0, m, 0, n)], ()
        )
        after: tuple[str, ...] = ()
        for peer in self.peers:
            self.send(0, peer, Region(home, self.at[peer], self.rows[peer], 0, n), done, lane=peer)
            after += self.recv(0, peer, self.inbox(peer), lane=peer)
        kept = Region(home, self.at[self.rank], self.mine, 0, n)
        after += self.copy("copy.own", 0, [kept], [self.inbox(self.rank)], done)
        self.add(0, self.everyone(), self.out(0, self.mine), after)

    def shard(self) -> None:
        self.open_inbox()
        after: tuple[str, ...] = ()
        for i, destination in enumerate(self.peers):
            source = (self.rank - i - 1) % self.problem.ranks
            home = self.buffer(f"partial.{i}", self.rows[destination], self.problem.n)
            place = Region(home, 0, self.rows[destination], 0, self.problem.n)
            done = self.matmul(f"matmul.r{i}.p{destination}", i, [self.x(destination)], self.w(), [place], ())
            self.send(i, destination, place, done)
            after += self.recv(i, source, self.inbox(source))
        after += self.own()
        self.add(0, self.everyone(), self.out(0, self.mine), after)

    def columns(self) -> None:
        m, mine, ranks = self.problem.m, self.mine, self.problem.ranks
        sums: list[tuple[int, list[Region], Region, tuple[str, ...]]] = []
        for i, (col, cols) in enumerate(cut(self.problem.n, min(self.problem.cuts, self.problem.n))):
            home = self.buffer(f"partial.{i}", m, cols)
            box = self.buffer(f"inbox.{i}", ranks * mine, cols)
            slots = [Region(box, source * mine, mine, 0, cols) for source in range(ranks)]
            whole = Region("x", 0, m, 0, self.problem.k)
            done = self.matmul(
                f"matmul.r{i}", i, [whole], self.w(0, None, col, cols), [Region(home, 0, m, 0, cols)], ()
            )
            after: tuple[str, ...] = ()
            for peer in self.peers:
                self.send(i, peer, Region(home, self.at[peer], self.rows[peer], 0, cols), done, lane=peer)
                after += self.recv(i, peer, slots[peer], lane=peer)
            kept = Region(home, self.at[self.rank], mine, 0, cols)
            after += self.copy(f"copy.r{i}", i, [kept], [slots[self.rank]], done)
            sums.append((i, slots, Region("out", 0, mine, col, cols), after))
        # Sums come last: one that waits for its transfer would delay the next GEMM.
        for each in sums:
            self.add(*each)

    def pieces(self) -> None:
        cuts = self.problem.cuts
        self.open_inbox()
        parts = [cut(rows, cuts) for rows in self.rows]
        landed = [self._round(i, [part[i] for part in parts]) for i in range(cuts)]
        own = self.own() if self.hetero else ()
        for i, after in enumerate(landed):
            start, rows = parts[self.rank][i]
            self.add(i, self.everyone(start, rows), self.out(start, rows), after + own)

    def _round(self, i: int, parts: list[tuple[int, int]]) -> tuple[str, ...]:
        """Multiply one piece for each destination and exchange the pieces.

        Returns the steps that this rank's sum waits for.
        """
        n = self.problem.n
        to = [peer for peer in range(self.problem.ranks) if peer != self.rank or not self.hetero]
        counts = [parts[peer][1] for peer in to]
        places = offsets(counts)
        home = self.buffer(f"partial.{i}", places[-1], n)
        partials = {
            peer: Region(home, at, rows, 0, n) for peer, at, rows in zip(to, places, counts, strict=False)
        }
        done = self._multiply(i, {peer: self.x(peer, *parts[peer]) for peer in to}, partials)
        after: tuple[str, ...] = ()
        start, rows = parts[self.rank]
        for peer in self.peers:
            self.send(i, peer, partials[peer], done[peer], lane=peer)
            after += self.recv(i, peer, self.inbox(peer, start, rows), lane=peer)
        if not self.hetero:
            kept = self.inbox(self.rank, start, rows)
            after += self.copy(f"copy.r{i}", i, [partials[self.rank]], [kept], done[self.rank])
        return after

    def _multiply(
        self, i: int, sources: dict[int, Region], partials: dict[int, Region]
    ) -> dict[int, tuple[str, ...]]:
        """Multiply as one GEMM or one per peer; returns the steps that each destination's part waits for."""
        if not self.fused:
            return {
                peer: self.matmul(f"matmul.r{i}.p{peer}", i, [sources[peer]], self.w(), [partials[peer]], ())
                for peer in self._by_turn(list(sources))
            }
        full = [peer for peer in sources if sources[peer].rows]
        a, c = join([sources[peer] for peer in full], [partials[peer] for peer in full])
        after: tuple[str, ...] = ()
        if not self.problem.direct and len(runs(a, c)) > 2:
            total = sum(part.rows for part in a)
            scratch = self.buffer(f"scratch.{i}", total, self.problem.k)
            places = offsets([part.rows for part in a])
            staged = [
                Region(scratch, at, part.rows, 0, self.problem.k) for at, part in zip(places, a, strict=False)
            ]
            after = self.copy(f"permute.r{i}", i, list(a), staged)
            a, c = join(staged, list(c))
        done = self.matmul(f"matmul.r{i}", i, list(a), self.w(), list(c), after)
        return dict.fromkeys(sources, done)

    def _by_turn(self, to: list[int]) -> list[int]:
        """Order from the next rank on, so that the ranks do not all send to the same one at the same time."""
        return sorted(to, key=lambda peer: (peer - self.rank - 1) % self.problem.ranks)
