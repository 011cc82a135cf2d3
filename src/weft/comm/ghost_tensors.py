"""Checks and conversions of the arguments and results that torch.distributed exchanges with a ghost group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from weft.errors import UsageError


class ReceivedFrom(dist.Work):  # type: ignore[misc,unused-ignore]
    """The work of a receive from any rank, which reports the source. Method names are torch's."""

    def __init__(self, work: Any, source: int) -> None:
        super().__init__()
        self._work, self._source = work, source

    def wait(self, *args: Any) -> bool:
        return bool(self._work.wait(*args))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()

    def _source_rank(self) -> int:
        return self._source


def finished(result: list[Any], device: Any = None) -> Any:
    """A torch Work that completes when the current stream reaches this point."""
    future = torch.futures.Future(devices=[device] if device is not None else None)
    future.set_result(result)
    return _create_work_from_future(future)


def root_rank(opts: Any) -> int:
    """The root rank from a call's options, or from a plain number; None: 0."""
    return int(getattr(opts, "rootRank", opts or 0))


def in_list(tensors: Any) -> Sequence[Any]:
    """The tensors as a list: a process group's methods accept a list or one tensor."""
    return [tensors] if torch.is_tensor(tensors) else tensors


def in_lists(tensors: Any) -> Sequence[Sequence[Any]]:
    """The tensors as a list of lists: methods accept a list of lists or one list."""
    return [tensors] if tensors and torch.is_tensor(tensors[0]) else tensors


def flat_view(tensor: Any) -> Any:
    """A flat view in memory order. As in NCCL, a tensor without gaps need not be contiguous."""
    if tensor.layout != torch.strided:
        raise UsageError("the ghost backend takes dense tensors; call .to_dense() first")
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
        if not tensor.is_contiguous():
            raise UsageError("the ghost backend takes tensors without gaps; call .contiguous() first")
    return tensor.detach().view(-1)


def checked_rank(rank: int, size: int) -> int:
    """The rank of a root or peer. Raises UsageError if it is not in the group."""
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not in this group; it has ranks 0 to {size - 1}")
    return rank


def checked_parts(parts: Sequence[Any], size: int) -> Sequence[Any]:
    """The tensor list of a gather, scatter or all-to-all. Raises UsageError unless it has one per rank."""
    if len(parts) != size:
        raise UsageError(f"a list of {len(parts)} tensors for {size} ranks; give one for each rank")
    return parts


def check_shares(whole: Any, share: Any, count: int = 1) -> None:
    """Raise UsageError unless `whole` has the elements of `count` shares: NCCL would overrun a buffer."""
    if whole.numel() != count * share.numel() or whole.dtype != share.dtype:
        raise UsageError(
            f"{whole.numel()} elements of {whole.dtype} for {count} x {share.numel()} of {share.dtype}: "
            "ghost ranks have tensors of the same size and type as this rank"
        )


def split_rows(tensor: Any, sizes: Sequence[int] | None, count: int) -> list[Any]:
    """Split a tensor for an all-to-all into parts of `sizes` rows; None or empty: `count` equal parts."""
    rows = list(sizes) if sizes else [len(tensor) // count] * count
    if sum(rows) != len(tensor):
        raise UsageError(f"all-to-all of {len(tensor)} rows cannot be split as {rows}")
    return list(tensor.split(rows))
