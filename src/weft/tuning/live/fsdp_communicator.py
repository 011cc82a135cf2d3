"""Runs the reduce-scatters of FSDP2 parameter groups on a separate communicator."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

GROUP = "_weft_reduce_scatter_group"
"""Attribute of an FSDP2 parameter group: its separate process group."""
_real: list[Any] = []
_named: Counter[str] = Counter()
"""How many groups of each set of ranks have been named."""


@contextmanager
def name_of_our_own() -> Iterator[None]:
    """Give groups that this thread creates in this context a name that no other group has had or will have.

    torch names groups by their ranks and the number of groups that a rank is in. After a group is destroyed,
    the next one, the program's or ours, would get the same name and find the old one's addresses in the
    store. Ranks that are in different numbers of groups would wait for each other under different names.
    """
    import torch.distributed.distributed_c10d as c10d

    real, here = c10d._process_group_name, threading.get_ident()

    def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:
        if threading.get_ident() != here:  # a group of the program
            return real(ranks, use_hashed_name)
        mark = hashlib.sha256("_".join(map(str, ranks)).encode()).hexdigest()[:20]
        _named[mark] += 1
        return f"weft_{_named[mark]}_{mark}"

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
