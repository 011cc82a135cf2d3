"""How a group with ghost ranks issues its calls: streams, batches, and the tensors of the ghosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from weft.comm.ghost_lane import GhostOptions, Lane, make_ghost_lane, on_stream
from weft.comm.ghost_tensors import finished
from weft.comm.node import load_node

BACKEND = "ghost"
"""Name of the backend in torch.distributed."""
_BY_TORCH = ("_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing")
_Group = TypeVar("_Group", bound=type)


def outside_graphs(group: _Group) -> _Group:
    """Keep torch.compile from tracing into methods that torch also calls from C++."""
    for name, method in list(vars(group).items()):
        public = not name.startswith("_") and name not in ("size", "rank", "getBackendName")
        if callable(method) and (public or name in _BY_TORCH):
            setattr(group, name, _disable_dynamo(method))
    return group


@outside_graphs
class IssuingGroup(dist.ProcessGroup):  # type: ignore[misc,unused-ignore]
    """The base of a ghost group, which all its calls share. Method names are torch's."""

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
        """Why copy engines cannot serve collectives of this group; empty if they can."""
        if self._options.node is None:
            return "ghost ranks share one GPU, within which copies run on SMs; use a node profile"
        node = load_node(self._options.node)
        if node.copy_engines is None or self._count * self._options.stride > node.domain:
            return f"{self._count} ranks of {node.name} have no collectives by copy engines"
        return ""

    @property
    def group_name(self) -> Any:
        return self._name or dist.distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> Any:
        return self.group_name

    def shutdown(self) -> None:
        """Keep the name: torch removes it next, and reads it once more after that."""
        self._name = dist.distributed_c10d._world.pg_names.get(self)

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def _run(
        self,
        issue: Callable[[Lane], None],
        outputs: Sequence[Any],
        inputs: Sequence[Any] = (),
        result: list[Any] | None = None,
    ) -> Any:
        """Issue a call on the group's streams, after the work on the caller's stream; returns a torch Work.

        `result`: the value of the Work's future; None: the outputs.
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

    def _start_coalescing(self, device: Any = None) -> None:
        self._pairs = []

    def _end_coalescing(self, device: Any = None) -> Any:
        """Issue the sends and receives since `_start_coalescing`; with a node profile as one kernel."""
        pairs, self._pairs = self._pairs, None
        if not pairs:
            return finished([])

        def issue(lane: Lane) -> None:
            with lane.ranks.library.group() if lane.own is not None else contextlib.nullcontext():
                for one, _ in pairs:
                    one(lane)

        return self._run(issue, [tensor for _, tensors in pairs for tensor in tensors])

    def together(self, issue: Callable[[], object]) -> list[Any]:
        """Call `issue`, and issue the sends and receives that it requests as one exchange."""
        self._start_coalescing()
        try:
            issue()
        except BaseException:
            self._pairs = None
            raise
        return [self._end_coalescing()]

    def _run_pair(self, issue: Callable[[Lane], None], tensors: Sequence[Any]) -> Any:
        """Issue a send or a receive now, or with its batch if one was started."""
        if self._pairs is None:
            return self._run(issue, tensors)
        self._pairs.append((issue, tensors))
        return finished(list(tensors))

    def _mine(self, own: Any, ghost: Callable[[int], Any]) -> list[Any]:
        """One entry per rank: `own` for this process, `ghost(rank)` for each ghost."""
        return [own if rank == self._own else ghost(rank) for rank in range(self._count)]

    def _ghost_view(self, lane: Lane, flat: Any) -> Any:
        """Ghost input for an operation that does not overwrite rank 0's input: the same tensor, or zeros."""
        return flat if self._options.mirror else lane.scratch(self._own, flat, flat.numel(), "zeros")

    def _ghost_input(self, lane: Lane, flat: Any) -> Any:
        """Ghost input for an operation that overwrites rank 0's input: a copy of it, or zeros."""
        return self._copy(lane, flat) if self._options.mirror else self._ghost_view(lane, flat)

    def _copy(self, lane: Lane, flat: Any) -> Any:
        if lane.own is not None:
            return flat  # a paced collective does not read the input of other ranks
        into = lane.scratch(self._own, flat, flat.numel(), "mirror")
        with on_stream(lane.streams[self._own] if lane.streams else None):
            into.copy_(flat)
        if lane.streams:
            for stream in lane.streams:
                stream.wait_stream(lane.streams[self._own])
        return into
