"""Ghost-group calls that move tensors between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.comm.ghost_issue import IssuingGroup, outside_graphs
from weft.comm.ghost_lane import Lane
from weft.comm.ghost_tensors import (
    ReceivedFrom,
    check_shares,
    checked_parts,
    checked_rank,
    flat_view,
    in_list,
    in_lists,
    root_rank,
    split_rows,
)
from weft.errors import UsageError


@outside_graphs
class ExchangingGroup(IssuingGroup):
    """Send and receive, all-to-all, scatter and gather. Method names are torch's."""

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        tensors, peer = in_list(tensors), checked_rank(peer, self._count)

        def issue(lane: Lane) -> None:
            moves = [(self._own, flat_view(t), peer, lane.scratch(peer, t, t.numel())) for t in tensors]
            lane.ranks.exchange(moves, lane.streams)

        return self._run_pair(issue, tensors)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        tensors, peer = in_list(tensors), checked_rank(peer, self._count)

        def issue(lane: Lane) -> None:
            moves = [
                (peer, lane.scratch(peer, t, t.numel(), "send"), self._own, flat_view(t)) for t in tensors
            ]
            lane.ranks.exchange(moves, lane.streams)

        return self._run_pair(issue, tensors)

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Any:
        """Receive from the first ghost, because all ghosts are always ready."""
        source = int(self._own == 0)
        return ReceivedFrom(self.recv(tensors, source, tag), source)

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None, keep: Sequence[Any] = ()
    ) -> Any:
        for parts in (outputs, inputs):
            checked_parts(parts, self._count)
        check_shares(outputs[self._own], inputs[self._own])

        def issue(lane: Lane) -> None:
            moves = [(self._own, flat_view(inputs[self._own]), self._own, flat_view(outputs[self._own]))]
            for ghost in (rank for rank in range(self._count) if rank != self._own):
                give, take = flat_view(inputs[ghost]), flat_view(outputs[ghost])
                moves.append((self._own, give, ghost, lane.scratch(ghost, give, give.numel())))
                # A ghost sends rank 0 the part that rank 0 keeps for itself, or if that part is empty, the
                # part that rank 0 sends to this ghost. If the sizes differ, and without mirroring, it sends
                # scratch data.
                own = flat_view(inputs[self._own])
                own = own if own.numel() else give
                fits = self._options.mirror and own.numel() == take.numel()
                moves.append(
                    (ghost, own if fits else lane.scratch(ghost, take, take.numel(), "send"), self._own, take)
                )
                if lane.own is not None:
                    continue  # transfers between ghosts are not simulated
                for other in (rank for rank in range(self._count) if rank not in (self._own, ghost)):
                    size = flat_view(inputs[other]).numel()
                    source = lane.scratch(ghost, give, size, "send")
                    moves.append((ghost, source, other, lane.scratch(other, give, size, f"from{ghost}")))
            lane.ranks.exchange(moves, lane.streams)

        return self._run(issue, outputs, [*inputs, *keep])

    def all_to_all_single(
        self,
        output: Any,
        given: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        if self._options.node and given.is_cuda and not output_split_sizes and not input_split_sizes:
            return self._run(lambda lane: self._exchange_equal(lane, output, given), [output], [given])
        taken = split_rows(output, output_split_sizes, self._count)
        sent = split_rows(given, input_split_sizes, self._count)
        return self.alltoall(taken, sent, opts, keep=[output, given])

    def _exchange_equal(self, lane: Lane, output: Any, given: Any) -> None:
        """Issue an all-to-all of equal parts for one rank of a node."""
        if given.numel() % self._count or given.numel() != output.numel():
            raise UsageError(
                f"all-to-all of {given.numel()} elements cannot be split into {self._count} parts"
            )
        send, recv = (self._mine(flat_view(side), lambda rank: None) for side in (given, output))
        lane.ranks.all_to_all(send, recv, lane.streams)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, inputs, root = in_list(outputs), in_lists(inputs), checked_rank(root_rank(opts), self._count)
        if root == self._own:
            check_shares(outputs[0], checked_parts(inputs[0], self._count)[root])

        def issue(lane: Lane) -> None:
            out = flat_view(outputs[0])
            if root != self._own:
                lane.ranks.exchange(
                    [(root, lane.scratch(root, out, out.numel(), "send"), self._own, out)], lane.streams
                )
                return
            parts = [flat_view(part) for part in inputs[0]]
            moves = self._mine(out, lambda rank: lane.scratch(rank, out, parts[rank].numel()))
            pairs = zip(parts, moves, strict=True)
            lane.ranks.exchange([(root, a, rank, b) for rank, (a, b) in enumerate(pairs)], lane.streams)

        return self._run(issue, outputs, inputs[0] if inputs else [])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, inputs, root = in_lists(outputs), in_list(inputs), checked_rank(root_rank(opts), self._count)
        if root == self._own:
            for part in checked_parts(outputs[0], self._count):
                check_shares(part, inputs[0])

        def issue(lane: Lane) -> None:
            given = flat_view(inputs[0])
            if root != self._own:
                into = lane.scratch(root, given, given.numel())
                lane.ranks.exchange([(self._own, given, root, into)], lane.streams)
                return
            moves = [(rank, given, root, flat_view(part)) for rank, part in enumerate(outputs[0])]
            lane.ranks.exchange(moves, lane.streams)

        return self._run(issue, outputs[0] if outputs else [], inputs, [list(one) for one in outputs])

    alltoall_base = all_to_all_single  # its name before torch 2.13
