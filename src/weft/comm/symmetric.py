"""Memory that every GPU of a group can read and write directly (torch symmetric memory), and its signals."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.errors import UnavailableError

ALIGNMENT = 256
BARRIERS = 2
CHANNELS = 16


class SymmetricBuffer:
    """One allocation of the same size on each rank. Creating it is a collective."""

    def __init__(self, size: int, device: torch.device, group: Any, timeout_s: float) -> None:
        try:
            from torch.distributed import _symmetric_memory as symmetric

            own = symmetric.empty(_round_up(size), dtype=torch.uint8, device=device)
            self._handle: Any = symmetric.rendezvous(own, group.group_name)
        except (ImportError, RuntimeError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnavailableError(f"no symmetric memory between these GPUs: {reason}") from None
        self._own, self._size = own, _round_up(size)
        self._timeout_ms = max(1, math.ceil(timeout_s * 1000))

    def matrix(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """A matrix in a rank's part of the buffer, at a byte offset."""
        size = rows * cols * dtype.itemsize
        whole: torch.Tensor = self._handle.get_buffer(rank, (self._size,), torch.uint8)
        return whole[offset : offset + size].view(dtype).view(rows, cols)

    def barrier(self, which: int) -> None:
        """On the current stream: wait until every rank has reached this barrier; fails after the timeout."""
        self._handle.barrier(channel=which, timeout_ms=self._timeout_ms)

    def signal(self, rank: int, message: int) -> None:
        """On the current stream: signal to a rank that earlier work on the stream is done."""
        self._handle.put_signal(rank, channel=BARRIERS + message % CHANNELS, timeout_ms=self._timeout_ms)

    def wait_signal(self, rank: int, message: int) -> None:
        """On the current stream: wait for a rank's signal."""
        self._handle.wait_signal(rank, channel=BARRIERS + message % CHANNELS, timeout_ms=self._timeout_ms)


def layout(shapes: list[tuple[int, int]], itemsize: int) -> tuple[list[int], int]:
    """Byte offsets of consecutive matrices, and their total size."""
    offsets, total = [], 0
    for rows, cols in shapes:
        offsets.append(total)
        total += _round_up(rows * cols * itemsize)
    return offsets, total


def _round_up(size: int) -> int:
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


def zero_cta_options() -> Any:
    """Options of a group whose NCCL collectives are copies by copy engines, which use no SM.

    NCCL 2.28 and newer copy for all-gather and all-to-all of registered buffers within an NVLink domain.
    None if ranks are ghosts: under comm.engine dma, each of their calls asks for zero CTAs.
    """
    import torch.distributed as dist

    if _ghosts():
        return None
    kind = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(kind, "NCCL_CTA_POLICY_ZERO", None)
    if kind is None or policy is None:
        raise UnavailableError("this torch has no zero-CTA collectives: it needs NCCL 2.28 or newer")
    options = kind.Options()
    options.config.cta_policy = policy
    return options


def zero_cta_group(ranks: list[int] | None = None, options: Any = None, **more: Any) -> Any:
    """A new group with `zero_cta_options`. A collective call.

    `options`: from `zero_cta_options`; None: made here. `more`: other arguments of
    `torch.distributed.new_group`.
    """
    import torch.distributed as dist

    if _ghosts():
        return dist.new_group(ranks, **more)
    options = zero_cta_options() if options is None else options
    return dist.new_group(ranks, backend="nccl", pg_options=options, **more)


def _ghosts() -> bool:
    import torch.distributed as dist

    return bool(dist.is_initialized() and dist.get_backend() == "ghost")
