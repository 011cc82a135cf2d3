"""Links, which move bytes between a GPU and its peers by copy engines or SMs.

| link | engine | peers |
| --- | --- | --- |
| `HostLink` | dma, sm | data in pinned host memory (`weft.comm.dma.HostPeers`) |
| `paced_link.PacedLink` | dma, sm | data on this GPU, at the rate of a node (`weft.comm.paced_peers`) |
| `SymmetricLink` | dma | other GPUs, through torch symmetric memory |
| `NcclLink` | sm | other GPUs, through NCCL |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.comm.dma import Block, Copies, HostPeers
from weft.comm.symmetric import layout
from weft.errors import UsageError
from weft.ops.program import Program
from weft.ops.run_streams import Transfer
from weft.ops.schedule import build, split
from weft.ops.steps import Add, Recv, Region, Schedule, Send


def region_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[region.row : region.row + region.rows, region.col : region.col + region.cols]


def peer_schedule(schedule: Schedule, peer: int, sent: Sequence[int] | None = None) -> Schedule:
    """A peer's schedule of the same operation. `sent`: rows it sends to each rank, for an all-to-all."""
    mine = schedule.problem
    rows = mine.rows
    if schedule.operation == "all_to_all_matmul":
        sent = tuple(sent or split(mine.m, mine.ranks))
        rows = (sent[peer],) * mine.ranks  # a placeholder: only the peer's sends are used
    problem = replace(
        mine, m=sum(sent) if sent else mine.m, rows=rows, sent=None if sent is None else tuple(sent)
    )
    return build(schedule.operation, schedule.name, problem, peer)


class HostLink:
    """Peers are data in pinned host memory: receives read from it, sends write to it.

    In a reduce-scatter, a peer's partial result of a round counts as ready when this rank's is, so a receive
    waits for this rank's.
    """

    def __init__(
        self, schedule: Schedule, peers: HostPeers, engine: str, driver: Copies, lanes: Sequence[Any]
    ) -> None:
        """`lanes`: two streams, one for each direction of the bus."""
        self.lanes: Sequence[int] = [lane.cuda_stream for lane in lanes]
        self._streams, self._schedule, self._peers = lanes, schedule, peers
        self._engine, self._driver = engine, driver
        self._gathers = schedule.operation != "matmul_reduce_scatter"
        self._places = {
            source: step.target for step in schedule.steps if isinstance(step, Add) for source in step.sources
        }
        self._theirs = (
            {peer: peer_schedule(schedule, peer) for peer in range(peers.size()) if peer != peers.rank()}
            if self._gathers
            else {}
        )
        self._check()

    def _check(self) -> None:
        for peer, held in enumerate(self._peers.held):
            if held is None:
                continue
            mine = self._schedule.buffers["out"]
            wanted = self._theirs[peer].buffers["x"] if self._gathers else mine
            if tuple(held.shape) != wanted:
                raise UsageError(
                    f"{self._schedule.operation}: host peer {peer} holds {tuple(held.shape)}, "
                    f"but rank {self._schedule.rank} expects {wanted}"
                )

    def begin(self, program: Program) -> Transfer | None:
        return None

    def end(self, program: Program) -> Transfer | None:
        return None

    def send(self, step: Send, program: Program) -> Transfer | None:
        if self._gathers:
            return None  # peers would pull it; host peers do not
        source = region_of(program.tensors[step.source.buffer], step.source)
        key = (self._schedule.name, self._schedule.problem, step.id)
        box = self._peers.outbox(key, step.source.rows, step.source.cols, source.dtype)
        return self._copy(1, box, source)

    def recv(self, step: Recv, program: Program) -> Transfer | None:
        target, source, after = self._arriving(step, program)
        made = self._copy(0, target, source)
        made.after = after
        return made

    def _arriving(self, step: Recv, program: Program) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
        """A message's target, its source at the peer, and the steps that must end before it is sent."""
        held = self._peers.held[step.peer]
        if held is None:
            raise UsageError(f"host peer {step.peer} holds nothing")
        target = region_of(program.tensors[step.target.buffer], step.target)
        if target.dtype != held.dtype:
            raise UsageError(
                f"{self._schedule.operation}: A is {target.dtype}, and host peers hold {held.dtype}; "
                "they must be alike"
            )
        if self._gathers:
            source = self._theirs[step.peer].sends[self._schedule.rank, step.round].source
            return target, region_of(held, source), ()
        mine = self._schedule.sends.get((step.peer, step.round))
        return target, region_of(held, self._places[step.target]), mine.after if mine else ()

    def _copy(self, lane: int, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        if self._engine == "dma":
            entry = self._driver.entry(Block.of(target), Block.of(source), self.lanes[lane])
            return Transfer(lane, [entry])
        from weft.comm.copy_kernel import launch_copy

        stream = self._streams[lane]
        return Transfer(lane, call=lambda _: launch_copy(source, target, stream))


class SymmetricLink:
    """Peers are GPUs whose memory this GPU can access; copy engines move the bytes.

    For a gather, ranks stage x in symmetric memory and peers pull their rows from there. Partial results are
    pushed into their owner's inbox, followed by a signal. After the barrier at the start, all inboxes are
    free (or all x staged); after the barrier at the end of a gather, all ranks have read what they need.
    """

    def __init__(
        self,
        schedule: Schedule,
        theirs: dict[int, Schedule],
        memory: Any,
        dtype: torch.dtype,
        driver: Copies,
        lanes: Sequence[Any],
    ) -> None:
        """`memory`: a weft.comm.symmetric.SymmetricBuffer of at least `symmetric_size` bytes."""
        self.lanes: Sequence[int] = [lane.cuda_stream for lane in lanes]
        self._streams, self._schedule, self._theirs = lanes, schedule, theirs
        self._memory, self._dtype, self._driver = memory, dtype, driver
        self._gathers = schedule.operation != "matmul_reduce_scatter"
        self._peers = [peer for peer in theirs if peer != schedule.rank]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The scratch buffers that are in symmetric memory."""
        if self._gathers:
            return {}
        rank = self._schedule.rank
        return {name: self._inbox(self._schedule, rank, name) for name in symmetric_buffers(self._schedule)}

    def _inbox(self, schedule: Schedule, rank: int, name: str) -> torch.Tensor:
        names = symmetric_buffers(schedule)
        offsets, _ = layout([schedule.buffers[each] for each in names], self._dtype.itemsize)
        place = offsets[names.index(name)]
        return self._matrix(rank, place, *schedule.buffers[name])

    def _matrix(self, rank: int, offset: int, rows: int, cols: int) -> torch.Tensor:
        made: torch.Tensor = self._memory.matrix(rank, offset, rows, cols, self._dtype)
        return made

    def _lane(self, peer: int) -> int:
        return self._peers.index(peer) % len(self.lanes)

    def begin(self, program: Program) -> Transfer | None:
        first, others = self._streams[0], self._streams[1:]
        rows, cols = self._schedule.buffers["x"]
        stage = None
        if self._gathers and rows:
            stage = program.view(Region("x", 0, rows, 0, cols))
            home = self._matrix(self._schedule.rank, 0, rows, cols)

        def call(slots: list[Any]) -> None:
            with torch.cuda.stream(first):
                if stage is not None:
                    home.copy_(slots[stage])
                self._memory.barrier(0)
            for lane in others:
                lane.wait_stream(first)

        return Transfer(0, call=call)

    def end(self, program: Program) -> Transfer | None:
        if not self._gathers:
            return None
        first, others = self._streams[0], self._streams[1:]

        def call(_: list[Any]) -> None:
            for lane in others:
                first.wait_stream(lane)
            with torch.cuda.stream(first):
                self._memory.barrier(1)

        return Transfer(0, call=call)

    def send(self, step: Send, program: Program) -> Transfer | None:
        if self._gathers:
            return None  # the peer pulls the data
        lane = self._lane(step.peer)
        target = self._theirs[step.peer].recvs[self._schedule.rank, step.round].target
        inbox = self._inbox(self._theirs[step.peer], step.peer, target.buffer)
        source = region_of(program.tensors[step.source.buffer], step.source)
        entry = self._driver.entry(Block.of(region_of(inbox, target)), Block.of(source), self.lanes[lane])

        def call(_: list[Any]) -> None:
            with torch.cuda.stream(self._streams[lane]):
                self._memory.signal(step.peer, step.round)

        return Transfer(lane, [entry], call)

    def recv(self, step: Recv, program: Program) -> Transfer | None:
        if not self._gathers:
            return Transfer(-1, call=lambda _: self._memory.wait_signal(step.peer, step.round))
        theirs = self._theirs[step.peer]
        source = theirs.sends[self._schedule.rank, step.round].source
        home = self._matrix(step.peer, 0, *theirs.buffers["x"])
        target = region_of(program.tensors[step.target.buffer], step.target)
        lane = self._lane(step.peer)
        entry = self._driver.entry(Block.of(target), Block.of(region_of(home, source)), self.lanes[lane])
        return Transfer(lane, [entry])


def symmetric_buffers(schedule: Schedule) -> list[str]:
    """The buffers that peers access: x for a gather, the inboxes for a reduce-scatter."""
    if schedule.operation != "matmul_reduce_scatter":
        return ["x"]
    return [name for name in schedule.buffers if name.startswith("inbox")]


def symmetric_size(schedules: dict[int, Schedule], itemsize: int) -> int:
    """Bytes of symmetric memory to allocate on each rank: the most that any rank needs."""
    return max(
        layout([schedule.buffers[name] for name in symmetric_buffers(schedule)], itemsize)[1]
        for schedule in schedules.values()
    )


class NcclLink:
    """Peers are ranks of a process group; each round is one group of sends and receives on SMs."""

    def __init__(self, schedule: Schedule, group: Any, lane: Any) -> None:
        self.lanes: Sequence[int] = [lane.cuda_stream]
        self._stream, self._group, self._schedule = lane, group, schedule
        self._issued: set[int] = set()

    def begin(self, program: Program) -> Transfer | None:
        return None

    def end(self, program: Program) -> Transfer | None:
        return None

    def send(self, step: Send, program: Program) -> Transfer | None:
        return self._round(step.round, program)

    def recv(self, step: Recv, program: Program) -> Transfer | None:
        return self._round(step.round, program)

    def _round(self, number: int, program: Program) -> Transfer:
        """The first step of a round moves the whole round: in every schedule, its transfers are adjacent."""
        if number in self._issued:
            return Transfer(0)
        self._issued.add(number)
        ranks, empty = range(self._schedule.problem.ranks), program.nothing()
        sends = [self._schedule.sends.get((peer, number)) for peer in ranks]
        recvs = [self._schedule.recvs.get((peer, number)) for peer in ranks]
        leaving = [empty if step is None else program.view(step.source) for step in sends]
        arriving = [empty if step is None else program.view(step.target) for step in recvs]
        after = tuple(name for step in sends if step for name in step.after)

        def call(slots: list[Any]) -> None:
            with torch.cuda.stream(self._stream):
                given = [slots[slot].contiguous() for slot in leaving]
                self._group.alltoall([slots[slot] for slot in arriving], given).wait()

        return Transfer(0, call=call, after=after)
