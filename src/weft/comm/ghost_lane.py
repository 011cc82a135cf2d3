"""Resources of a group's ghost ranks on one device: communicators, streams, scratch memory and options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.comm.local import LocalRanks
from weft.comm.node import NODE_VARIABLE
from weft.errors import UsageError

DEFAULT_CTAS = 12
"""CTAs of a collective per rank."""


@dataclass(frozen=True)
class GhostOptions:
    """Options of the ghost ranks."""

    max_ctas: int | None = DEFAULT_CTAS
    """CTAs of a collective per rank. All ranks share one GPU, so NCCL's default would be too many."""
    high_priority: bool = False
    """Run collectives on high-priority streams."""
    mirror: bool = True
    """Ghosts contribute rank 0's data. Without it they contribute zeros: an in-place all-reduce then needs no
    copy of its input, and averages are divided by R."""
    node: str | None = None
    """A node profile: collectives use one rank's CTAs and take as long as on that node."""
    stride: int = 1
    """GPUs of the node from one rank of the group to the next."""

    def __post_init__(self) -> None:
        if self.node and not self.mirror:
            raise UsageError("WEFT_GHOST_MIRROR=0 is not for ghosts of a node: they have rank 0's data")

    @classmethod
    def from_environment(cls) -> GhostOptions:
        """Options from WEFT_NODE, WEFT_GHOST_CTAS, _PRIORITY (`high`), _MIRROR (`0`: off).

        Each rank of a node has its own GPU, so without WEFT_GHOST_CTAS NCCL's own number of CTAs applies.
        """
        env = os.environ
        node = env.get(NODE_VARIABLE) or None
        ctas = env.get("WEFT_GHOST_CTAS", "" if node else str(DEFAULT_CTAS)).strip()
        if ctas and not (ctas.isdecimal() and int(ctas) > 0):
            raise UsageError(f"WEFT_GHOST_CTAS {ctas!r} is not valid; use 1 or more CTAs")
        return cls(
            int(ctas) if ctas else None,
            env.get("WEFT_GHOST_PRIORITY", "default") == "high",
            env.get("WEFT_GHOST_MIRROR", "1") != "0",
            node,
        )


class Lane:
    """The communicators, streams and scratch memory of one group on one device.

    `own`: the only rank that exists here, where the ghosts are those of a node profile and have no buffers.
    """

    def __init__(
        self, ranks: Any, streams: Sequence[Any] | None, device: Any, own: int | None = None
    ) -> None:
        self.ranks, self.streams, self.device, self.own = ranks, streams, device, own
        self.distinct = list(dict.fromkeys(streams or ()))
        self._scratch: dict[tuple[int, str], Any] = {}

    def scratch(self, rank: int, like: Any, count: int, role: str = "recv") -> Any:
        """A ghost rank's buffer of `count` elements; nothing depends on its contents."""
        if self.own not in (None, rank):
            return None
        key, size = (rank, role), count * like.element_size()
        held = self._scratch.get(key)
        if held is None or held.numel() < size:
            with on_stream(self.streams[rank] if self.streams else None):
                held = torch.zeros(max(size, 1024), dtype=torch.uint8, device=self.device)
            if self.streams:  # other ranks' streams may read it, and growing is rare
                self.streams[rank].synchronize()
            self._scratch[key] = held
        return held[:size].view(like.dtype)


def on_stream(stream: Any) -> Any:
    """Context in which launches go to a stream; None: no change."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def make_ghost_lane(device: Any, size: int, own: int, options: GhostOptions) -> Lane:
    """The lane of a group of `size` ranks on a device, of which this process is rank `own`."""
    if device.type != "cuda":
        return Lane(LocalRanks(size), None, device)
    if options.node is not None:
        return _node_lane(device, size, own, options)
    from weft.comm import nccl
    from weft.workload import Workload, check_resident

    if options.max_ctas is not None:
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        check_resident(Workload(name="ghost ranks", ranks=size), options.max_ctas, sm_count)
    with torch.cuda.device(device):
        ranks = nccl.NcclRanks(nccl.load_nccl(), size, options.max_ctas)
    return Lane(ranks, [_stream(device, options) for _ in range(size)], device)


def _node_lane(device: Any, size: int, own: int, options: GhostOptions) -> Lane:
    """One rank of a node on one stream: NCCL is not needed."""
    from weft.comm import nccl

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the context exists
        ranks = nccl.NcclRanks(_paced_library(str(options.node)), size, options.max_ctas, own=own)
        ranks.library.call("weft_paced_spread", ranks.communicator(own), options.stride)
    return Lane(ranks, [_stream(device, options)] * size, device, own)


@cache
def _paced_library(node: str) -> Any:
    from weft.comm.node import load_node
    from weft.comm.paced import load_paced

    return load_paced(load_node(node))


def _stream(device: Any, options: GhostOptions) -> Any:
    return torch.cuda.Stream(device, priority=-1 if options.high_priority else 0)
