"""The process group with ghost ranks: each torch.distributed call is issued for all ranks on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.ghost_exchange import ExchangingGroup
from weft.comm.ghost_issue import outside_graphs
from weft.comm.ghost_lane import Lane, on_stream
from weft.comm.ghost_reduce import complete_reduction, reduce_ranks, reduction
from weft.comm.ghost_tensors import (
    check_shares,
    checked_parts,
    checked_rank,
    finished,
    flat_view,
    in_list,
    in_lists,
    root_rank,
)


@outside_graphs
class GhostGroup(ExchangingGroup):
    """A process group in which this process is one rank and the others are ghost ranks.

    Methods have the names and arguments of torch.distributed.ProcessGroup.
    """

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = in_list(tensors)
        op, factor = reduction(opts, tensors[0].dtype)

        def issue(lane: Lane) -> None:
            for tensor in tensors:
                flat = flat_view(tensor)
                others = self._ghost_input(lane, flat)
                send = self._mine(flat, lambda rank: others)  # noqa: B023 (called at once)
                recv = self._mine(flat, lambda rank: lane.scratch(rank, flat, flat.numel()))  # noqa: B023
                reduce_ranks(lane, "all_reduce", send, recv, op, self._options.mirror)
                complete_reduction(lane, self._own, self._count, flat, op, factor)

        return self._run(issue, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Any:
        root, how = checked_rank(root_rank(opts), self._count), op if isinstance(opts, int) else opts
        if root == self._own:
            return self.allreduce(tensors, how)
        copies = [tensor.clone() for tensor in in_list(tensors)]  # only the root's tensor changes
        return self.allreduce(copies, how)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        op, factor = reduction(opts, given.dtype)
        check_shares(given, output, self._count)

        def issue(lane: Lane) -> None:
            part, whole = flat_view(output), flat_view(given)
            shared = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            others = self._ghost_input(lane, whole) if shared else self._ghost_view(lane, whole)
            send = self._mine(whole, lambda rank: others)
            recv = self._mine(part, lambda rank: lane.scratch(rank, part, part.numel()))
            reduce_ranks(lane, "reduce_scatter", send, recv, op, self._options.mirror)
            complete_reduction(lane, self._own, self._count, part, op, factor)

        return self._run(issue, [output], [given])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [
            self.reduce_scatter_single(output, _joined(checked_parts(parts, self._count)), opts)
            for output, parts in zip(in_list(outputs), in_lists(inputs), strict=True)
        ]
        return works[-1]

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        return [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)][-1]

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors, root = in_list(tensors), checked_rank(root_rank(opts), self._count)

        def issue(lane: Lane) -> None:
            for tensor in tensors:
                flat = flat_view(tensor)
                source = flat if root == self._own else self._copy(lane, flat)
                send = self._mine(flat, lambda rank: source)  # noqa: B023
                recv = self._mine(flat, lambda rank: lane.scratch(rank, flat, flat.numel()))  # noqa: B023
                lane.ranks.broadcast(send, recv, lane.streams, root)

        return self._run(issue, tensors)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        check_shares(output, given, self._count)

        def issue(lane: Lane) -> None:
            # Ghosts can share the input: it is not overwritten, even if it is part of the output.
            flat, whole = flat_view(given), flat_view(output)
            send = self._mine(flat, lambda rank: self._ghost_view(lane, flat))
            recv = self._mine(whole, lambda rank: lane.scratch(rank, whole, whole.numel()))
            lane.ranks.all_gather(send, recv, lane.streams)

        return self._run(issue, [output], [given])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, inputs = in_lists(outputs), in_list(inputs)
        for parts, given in zip(outputs, inputs, strict=True):
            for part in checked_parts(parts, self._count):
                check_shares(part, given)

        def issue(lane: Lane) -> None:
            for parts, given in zip(outputs, inputs, strict=True):
                flat = flat_view(given)
                whole = lane.scratch(self._own, flat, flat.numel() * self._count, "gathered")
                send = self._mine(flat, lambda rank: self._ghost_view(lane, flat))  # noqa: B023
                recv = self._mine(whole, lambda rank: lane.scratch(rank, whole, whole.numel()))  # noqa: B023
                lane.ranks.all_gather(send, recv, lane.streams)
                with on_stream(lane.streams[self._own] if lane.streams else None):
                    for part, piece in zip(parts, whole.chunk(self._count), strict=True):
                        part.copy_(piece.view(part.shape))

        parts = [part for parts in outputs for part in parts]
        return self._run(issue, parts, inputs, [list(one) for one in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """`outputs` has one list per rank, with one tensor per input."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        return [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)][-1]

    def barrier(self, opts: Any = None) -> Any:
        return finished([])  # ghost ranks are always ready

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat([part.reshape(-1) for part in parts])
