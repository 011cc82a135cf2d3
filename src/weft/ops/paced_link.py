"""The link to peers of a node profile (`weft.comm.paced_peers`): transfers take as long as on that node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm.dma import Copies
from weft.comm.paced_peers import PacedPeers
from weft.gpu.presets import GPU_PRESETS
from weft.ops.links import HostLink
from weft.ops.program import Program
from weft.ops.run_streams import Transfer
from weft.ops.steps import Recv, Schedule, Send
from weft.sim.fabric import default_topology


class PacedLink(HostLink):
    """Peers are data on this GPU. The data that they send is put in place when the operation is prepared.

    With copy engines, each step is a delay at the full rate of the engines; if each peer has its own link
    (mesh), each round is one delay at the rate of a link. With SMs, a round is one kernel, as with NCCL.
    """

    def __init__(
        self,
        schedule: Schedule,
        peers: PacedPeers,
        engine: str,
        driver: Copies,
        lanes: Sequence[Any],
        delay: Callable[[int, int], int],
    ) -> None:
        """`delay`: (stream, nanoseconds) delays a stream and returns a CUDA error code."""
        super().__init__(schedule, peers, engine, driver, lanes)
        self._paced, self._delay = peers, delay
        spec = GPU_PRESETS.get(peers.node.gpu)
        self._mesh = spec is not None and default_topology(spec) == "mesh"
        self._issued: set[tuple[int, int]] = set()

    def end(self, program: Program) -> Transfer | None:
        """Wait until all data is in place, so that the first call may use any stream."""
        if program.device.type == "cuda":
            torch.cuda.current_stream(program.device).synchronize()
        return None

    def send(self, step: Send, program: Program) -> Transfer | None:
        if self._engine == "dma" and self._gathers:
            return None  # peers pull
        return self._paced_step(step)

    def recv(self, step: Recv, program: Program) -> Transfer | None:
        target, source, after = self._arriving(step, program)
        target.copy_(source)
        made = self._paced_step(step)
        made.after = (*made.after, *after)
        return made

    def _paced_step(self, step: Send | Recv) -> Transfer:
        """A transfer that takes a step's time. If a round is timed as a whole, its first step takes all."""
        lane = 0 if self._engine == "sm" or isinstance(step, Recv) else 1
        if self._engine == "dma" and not self._mesh:
            return Transfer(lane, [self._held_up(lane, self._paced.copy_us(step.bytes))])
        if (lane, step.round) in self._issued:
            return Transfer(lane)
        self._issued.add((lane, step.round))
        sends, recvs = self._of_round(self._schedule.sends, step), self._of_round(self._schedule.recvs, step)
        after = tuple(name for one in sends for name in one.after)
        if self._engine == "dma":
            links = self._paced.size() - 1
            most = max(one.bytes for one in (recvs if isinstance(step, Recv) else sends))
            return Transfer(lane, [self._held_up(lane, links * self._paced.copy_us(most))], after=after)
        moved = max(sum(one.bytes for one in side) for side in (sends, recvs))
        peers = {one.peer for one in (*sends, *recvs)}
        launch = self._paced.kernel(moved, len(peers), self.lanes[lane])
        return Transfer(lane, call=lambda _: launch(), after=after)

    @staticmethod
    def _of_round(steps: dict[tuple[int, int], Any], step: Send | Recv) -> list[Any]:
        return [one for (_, number), one in steps.items() if number == step.round]

    def _held_up(self, lane: int, us: float) -> tuple[Callable[..., int], tuple[int, int]]:
        return self._delay, (self.lanes[lane], round(1e3 * us))
