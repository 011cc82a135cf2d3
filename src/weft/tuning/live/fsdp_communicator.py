"""Runs the reduce-scatters of FSDP2 parameter groups on a separate communicator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

GROUP = "_weft_reduce_scatter_group"
"""Attribute of an FSDP2 parameter group: its separate process group."""
_real: list[Any] = []
_named = itertools.count()


@contextmanager
def name_of_our_own() -> Iterator[None]:
    """Give groups created in this context a name that no other group has had or will have.

    torch names groups by their ranks and a running number. After a group is destroyed, the next one, the
    program's or ours, would get the same name and find the old one's addresses in the store.
    """
    import torch.distributed.distributed_c10d as c10d

    real = c10d._process_group_name
    number = next(_named)

    def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
        return f"weft_{number}_{real(ranks, use_hashed_name)}"

    c10d._process_group_name = name
    try:
        yield
    finally:
        c10d._process_group_name = real


def route_reduce_scatter() -> None:
    """Run the reduce-scatter of a group on its separate communicator, if it has one."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    if _real:
        return
    name = "_reduce_scatter_process_group"
    real = FSDPParamGroup.__dict__[name]
    _real.append(real)

    def process_group(group: Any) -> Any:
        return group.__dict__.get(GROUP) or real.fget(group)

    setattr(FSDPParamGroup, name, property(process_group))


def restore_reduce_scatter() -> None:
    """Run all reduce-scatters on FSDP2's own communicators."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    if _real:
        FSDPParamGroup._reduce_scatter_process_group = _real.pop()
