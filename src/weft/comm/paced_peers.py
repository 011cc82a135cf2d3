"""PacedPeers: peers on a node as data on this GPU, whose transfers take the time of the node's links.

The data of a peer does not change, so it is copied to its destination once, before the first call. A
transfer then only takes time: by copy engines it is a delay without CTAs (weft.comm.paced_delay), by SMs a
paced kernel with the CTAs and the memory traffic of the node's send and receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from weft.comm.dma import HostPeers
from weft.comm.node import load_node
from weft.comm.paced_launch import PacedLauncher
from weft.comm.paced_plan import PlannedKernel, RankCall
from weft.errors import UsageError
from weft.gpu.driver import load_driver


class PacedPeers(HostPeers):
    """A group like `HostPeers` in which this process is one rank of a node.

    `held`: as in `HostPeers`, but it stays on the GPU and must not change. `node`: a node profile, by name or
    file. Results equal those of `HostPeers` with the same data.
    """

    def __init__(self, held: Sequence[torch.Tensor | None], node: str, rank: int = 0) -> None:
        self.node = load_node(node)
        if len(held) > self.node.ranks:
            raise UsageError(f"{len(held)} ranks: {self.node.name} has {self.node.ranks}")
        super().__init__(held, rank)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @property
    def copies(self) -> bool:
        """Whether copy engines reach these peers."""
        return self.node.copy_engines is not None and self.size() <= self.node.domain

    def copy_us(self, nbytes: int) -> float:
        """Microseconds of a copy at the copy engines' full rate. Raises UsageError if there are none."""
        rate = self.node.copy_engines
        if rate is None or not self.copies:
            raise UsageError(
                f"{self.size()} ranks of {self.node.name} are not reached by copy engines; use engine='sm'"
            )
        return nbytes / rate.gb_s / 1e3

    def kernel(self, nbytes: int, peers: int, stream: int) -> Callable[[], None]:
        """A function that launches the send and receive of `nbytes` in all with `peers` peers on a stream."""
        ranks = self.size()
        kind = "all_to_all" if peers > 1 else "send_recv"
        size = nbytes * ranks // (ranks - 1) if peers > 1 else nbytes
        call = RankCall("send", 0, 0, nbytes, "", 0, 0, self.rank(), ranks, stream, 0)
        planned = PlannedKernel(kind, size, "copy8", (), call)
        part = self.node.collective(kind, size, ranks=ranks)
        ready = _launcher().ready(planned, part)

        def launch() -> None:
            for one in ready:
                one.launch(0.0)

        return launch


@cache
def _launcher() -> PacedLauncher:
    return PacedLauncher(load_driver())
