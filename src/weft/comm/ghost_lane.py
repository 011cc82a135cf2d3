"""Lane: communicators, streams and scratch memory of a ghost group on one device; and its options."""

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
"""Default CTAs per rank of a collective."""


@dataclass(frozen=True)
class GhostOptions:
    """Options of the ghost ranks."""

    max_ctas: int | None = DEFAULT_CTAS
    """CTAs per rank of a collective; None: NCCL's default, which is too many when all ranks share a GPU."""
    high_priority: bool = False
    """Run collectives on high-priority streams."""
    mirror: bool = True
    """Whether ghosts contribute rank 0's data. If not, they contribute zeros: an in-place all-reduce then
    needs no copy of its input, and averages are 1/R of rank 0's values."""
    node: str | None = None
    """Node profile, by name or file: collectives use one rank's CTAs and take as long as on that node. None:
    real NCCL ranks."""
    stride: int = 1
    """Distance in GPUs from one rank of the group to the next."""

    def __post_init__(self) -> None:
        if self.node and not self.mirror:
            raise UsageError("WEFT_GHOST_MIRROR=0 is not for ghosts of a node: they have rank 0's data")

    @classmethod
    def from_environment(cls) -> GhostOptions:
        """Options from WEFT_NODE and WEFT_GHOST_CTAS, WEFT_GHOST_PRIORITY (`high`), WEFT_GHOST_MIRROR (`0`).

        Each rank of a node has its own GPU, so with a node the default number of CTAs is NCCL's own.
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

    `own`: with a node profile, the only rank that exists here; the ghosts then have no buffers. None: all
    ranks exist here.
    """

    def __init__(
        self, ranks: Any, streams: Sequence[Any] | None, device: Any, own: int | None = None
    ) -> None:
        self.ranks, self.streams, self.device, self.own = ranks, streams, device, own
        self.distinct = list(dict.fromkeys(streams or ()))
        self._scratch: dict[tuple[int, str], Any] = {}

    def scratch(self, rank: int, like: Any, count: int, role: str = "recv") -> Any:
        """A buffer of `count` elements for a rank; None for a rank that does not exist here.

        It is zeroed when allocated and kept for later calls with the same `rank` and `role`.
        """
        if self.own not in (None, rank):
            return None
        key, size = (rank, role), count * like.element_size()
        held = self._scratch.get(key)
        if held is None or held.numel() < size:
            with on_stream(self.streams[rank] if self.streams else None):
                held = torch.zeros(max(size, 1024), dtype=torch.uint8, device=self.device)
            if self.streams:  # other ranks' streams may read the buffer, and growing it is rare
                self.streams[rank].synchronize()
            self._scratch[key] = held
        return held[:size].view(like.dtype)


def on_stream(stream: Any) -> Any:
    """Context in which launches go to `stream`; None leaves the current stream."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def make_ghost_lane(device: Any, size: int, own: int, options: GhostOptions) -> Lane:
    """The lane on one device of a group of `size` ranks in which this process is rank `own`."""
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
    """A lane with one rank of a node on one stream. It does not need NCCL."""
    from weft.comm import nccl

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # ensures that the CUDA context exists
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
