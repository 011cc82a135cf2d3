"""The process group with ghost ranks: each torch.distributed call is issued for all ranks on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from weft.comm.ghost_lane import GhostOptions, Lane, make_ghost_lane, on_stream
from weft.comm.ghost_reduce import complete_reduction, reduce_ranks, reduction
from weft.comm.ghost_tensors import (
    ReceivedFrom,
    checked_parts,
    checked_rank,
    finished,
    flat_view,
    in_list,
    in_lists,
    root_rank,
    split_rows,
)
from weft.comm.node import load_node
from weft.errors import UsageError

BACKEND = "ghost"
"""Name of the backend in torch.distributed."""


class GhostGroup(dist.ProcessGroup):  # type: ignore[misc,unused-ignore]
    """A process group in which this process is one rank and the others are ghost ranks.

    Methods have the names and arguments of torch.distributed.ProcessGroup.
    """

    silent = True  # there are no other processes to agree with (weft.ops)

    def __init__(
        self,
        rank: int,
        size: int,
        options: GhostOptions,
        make_lane: Callable[[Any, int, int, GhostOptions], Lane] = make_ghost_lane,
    ) -> None:
        super().__init__(rank, size)
        self._own, self._count, self._options = rank, size, options
        self._name: Any = None
        self._issued = 0
        self._make_lane, self._lanes = make_lane, dict[Any, Lane]()
        self._pairs: list[tuple[Callable[[Lane], None], Sequence[Any]]] | None = None

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._own

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: Any) -> Any:
        return self

    @property
    def why_no_copies(self) -> str:
        """Why copy engines cannot serve collectives of this group; empty where they can."""
        if self._options.node is None:
            return "ghost ranks share one GPU, within which copies run on SMs; use a node profile"
        node = load_node(self._options.node)
        if node.copy_engines is None or self._count > node.domain:
            return f"{self._count} ranks of {node.name} have no collectives by copy engines"
        return ""

    @property
    def group_name(self) -> Any:
        return self._name or dist.distributed_c10d._world.pg_names[self]

    def shutdown(self) -> None:
        """torch removes the name next, and reads it once more after that."""
        self._name = dist.distributed_c10d._world.pg_names.get(self)

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    @property
    def pg_name(self) -> Any:
        return self.group_name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, (op, factor) = in_list(tensors), reduction(opts)

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
        def issue(lane: Lane) -> None:
            # The input is not overwritten, even where it is part of the output.
            flat, whole = flat_view(given), flat_view(output)
            send = self._mine(flat, lambda rank: self._ghost_view(lane, flat))
            recv = self._mine(whole, lambda rank: lane.scratch(rank, whole, whole.numel()))
            lane.ranks.all_gather(send, recv, lane.streams)

        return self._run(issue, [output], [given])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, inputs = in_lists(outputs), in_list(inputs)
        for parts in outputs:
            checked_parts(parts, self._count)

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
        """`outputs`: for each rank, one tensor for each input."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        op, factor = reduction(opts)

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
        """An all-to-all of equal parts on one rank of a node."""
        if given.numel() % self._count or given.numel() != output.numel():
            raise UsageError(
                f"all-to-all of {given.numel()} elements cannot be split into {self._count} parts"
            )
        send, recv = (self._mine(flat_view(side), lambda rank: None) for side in (given, output))
        lane.ranks.all_to_all(send, recv, lane.streams)

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None, keep: Sequence[Any] = ()
    ) -> Any:
        for parts in (outputs, inputs):
            checked_parts(parts, self._count)

        def issue(lane: Lane) -> None:
            moves = [(self._own, flat_view(inputs[self._own]), self._own, flat_view(outputs[self._own]))]
            for ghost in (rank for rank in range(self._count) if rank != self._own):
                give, take = flat_view(inputs[ghost]), flat_view(outputs[ghost])
                moves.append((self._own, give, ghost, lane.scratch(ghost, give, give.numel())))
                # A ghost sends rank 0 what rank 0 keeps for itself, if the sizes match; if it keeps nothing,
                # what rank 0 sends to the ghost.
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

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs, inputs, root = in_list(outputs), in_lists(inputs), checked_rank(root_rank(opts), self._count)
        if root == self._own:
            checked_parts(inputs[0], self._count)

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
            checked_parts(outputs[0], self._count)

        def issue(lane: Lane) -> None:
            given = flat_view(inputs[0])
            if root != self._own:
                into = lane.scratch(root, given, given.numel())
                lane.ranks.exchange([(self._own, given, root, into)], lane.streams)
                return
            moves = [(rank, given, root, flat_view(part)) for rank, part in enumerate(outputs[0])]
            lane.ranks.exchange(moves, lane.streams)

        return self._run(issue, outputs[0] if outputs else [], inputs, [list(one) for one in outputs])

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
        """All ghosts are ready: the first one sends."""
        source = int(self._own == 0)
        return ReceivedFrom(self.recv(tensors, source, tag), source)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        return [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        return [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)][-1]

    def barrier(self, opts: Any = None) -> Any:
        return finished([])  # ghost ranks are always ready

    def _start_coalescing(self, device: Any = None) -> None:
        self._pairs = []

    def _end_coalescing(self, device: Any = None) -> Any:
        """Issue the sends and receives since `_start_coalescing`; a node's rank runs them as one kernel."""
        pairs, self._pairs = self._pairs, None
        if not pairs:
            return finished([])

        def issue(lane: Lane) -> None:
            with lane.ranks.library.group() if lane.own is not None else contextlib.nullcontext():
                for one, _ in pairs:
                    one(lane)

        return self._run(issue, [tensor for _, tensors in pairs for tensor in tensors])

    def together(self, issue: Callable[[], object]) -> list[Any]:
        """Issue the sends and receives that `issue` makes as one exchange."""
        self._start_coalescing()
        try:
            issue()
        except BaseException:
            self._pairs = None
            raise
        return [self._end_coalescing()]

    def _run_pair(self, issue: Callable[[Lane], None], tensors: Sequence[Any]) -> Any:
        """Issue a send or a receive, now or when its batch is complete."""
        if self._pairs is None:
            return self._run(issue, tensors)
        self._pairs.append((issue, tensors))
        return finished(list(tensors))

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _mine(self, own: Any, ghost: Callable[[int], Any]) -> list[Any]:
        """One entry per rank: this process's, and the ghosts'."""
        return [own if rank == self._own else ghost(rank) for rank in range(self._count)]

    def _ghost_view(self, lane: Lane, flat: Any) -> Any:
        """Ghost input where rank 0's input is not overwritten: the same tensor, or zeros."""
        return flat if self._options.mirror else lane.scratch(self._own, flat, flat.numel(), "zeros")

    def _ghost_input(self, lane: Lane, flat: Any) -> Any:
        """Ghost input where the operation overwrites rank 0's input: a copy of it, or zeros."""
        return self._copy(lane, flat) if self._options.mirror else self._ghost_view(lane, flat)

    def _copy(self, lane: Lane, flat: Any) -> Any:
        if lane.own is not None:
            return flat  # a paced collective has no other rank's input
        into = lane.scratch(self._own, flat, flat.numel(), "mirror")
        with on_stream(lane.streams[self._own] if lane.streams else None):
            into.copy_(flat)
        if lane.streams:
            for stream in lane.streams:
                stream.wait_stream(lane.streams[self._own])
        return into

    def _run(
        self,
        issue: Callable[[Lane], None],
        outputs: Sequence[Any],
        inputs: Sequence[Any] = (),
        result: list[Any] | None = None,
    ) -> Any:
        """Issue on the group's streams, after the work of the caller's stream; returns a torch Work.

        `result`: the value of its future, if that is not the outputs.
        """
        self._issued += 1
        value = list(outputs) if result is None else result
        device = (outputs or inputs)[0].device
        if device not in self._lanes:
            self._lanes[device] = self._make_lane(device, self._count, self._own, self._options)
        lane = self._lanes[device]
        if not lane.streams:
            issue(lane)
            return finished(value)
        main = lane.streams[self._own]
        for stream in lane.distinct:
            stream.wait_stream(torch.cuda.current_stream(device))
        issue(lane)
        for stream in lane.distinct:
            if stream is not main:
                main.wait_stream(stream)  # so that scratch memory is free when the next collective starts
        for tensor in (*outputs, *inputs):
            tensor.record_stream(main)
        with torch.cuda.stream(main):
            return finished(value, device)


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat([part.reshape(-1) for part in parts])


# torch calls these from C++, also from a compiled forward pass; torch.compile must not trace into them.
_BY_TORCH = ("_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing")
for _name, _method in list(vars(GhostGroup).items()):
    _public = not _name.startswith("_") and _name not in ("size", "rank", "getBackendName")
    if callable(_method) and (_public or _name in _BY_TORCH):
        setattr(GhostGroup, _name, _disable_dynamo(_method))
