"""Tensors, reductions and results as torch.distributed passes them, for the ghost group's methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from weft.errors import UsageError


class ReceivedFrom(dist.Work):  # type: ignore[misc,unused-ignore]
    """A receive from any rank, and which rank it was. Method names are torch's."""

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


def reduction_name(op: Any) -> str:
    """weft's name of a torch ReduceOp; raises UsageError for those that ghosts do not have."""
    for name, known in (
        ("sum", "SUM"),
        ("avg", "AVG"),
        ("max", "MAX"),
        ("min", "MIN"),
        ("product", "PRODUCT"),
    ):
        if op == getattr(dist.ReduceOp, known):
            return name
    raise UsageError(f"the ghost backend has no reduction {op}; use SUM, AVG, MAX, MIN or PRODUCT")


def flat_view(tensor: Any) -> Any:
    """The elements in the order of memory; as in NCCL, a tensor without gaps need not be contiguous."""
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
        if not tensor.is_contiguous():
            raise UsageError("the ghost backend takes tensors without gaps; call .contiguous() first")
    return tensor.detach().view(-1)


def split_rows(tensor: Any, sizes: Sequence[int] | None, count: int) -> list[Any]:
    """The parts of an all-to-all: of these numbers of rows, or `count` equal ones."""
    rows = list(sizes) if sizes else [len(tensor) // count] * count
    if sum(rows) != len(tensor):
        raise UsageError(f"all-to-all of {len(tensor)} rows cannot be split as {rows}")
    return list(tensor.split(rows))
