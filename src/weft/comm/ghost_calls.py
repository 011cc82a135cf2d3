"""Replacements for functions of torch.distributed that the methods of a ghost group cannot serve.

torch reports only to its own groups which sends and receives form one batch. And the receiver of an object
first gets its size from the sender; a ghost rank has no objects and cannot send one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from weft.comm.ghost_group import GhostGroup
from weft.errors import UsageError


def adapt() -> None:
    """Replace these functions by versions that handle ghost groups; other groups still get torch's own."""
    _replace("batch_isend_irecv", _batch)
    _replace("broadcast_object_list", _broadcast_objects)
    _replace("scatter_object_list", _scatter_objects)
    _replace("recv_object_list", _receive_objects)
    _accept_timeouts()


def _accept_timeouts() -> None:
    """Ignore timeouts on the work of a ghost group: it supports none, and always completes."""
    real = dist.Work.wait

    @wraps(real)
    def wait(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return real(self, *args, **options)
        except RuntimeError as error:
            if "finite timeout not implemented" not in str(error):
                raise
            return real(self)

    dist.Work.wait = wait


def _replace(name: str, own: Callable[[Callable[..., Any], GhostGroup, dict[str, Any]], Any]) -> None:
    """Call `own` for ghost groups, with torch's function, the group and the arguments by name."""
    real = getattr(dist, name)
    signature = inspect.signature(real)

    @wraps(real)
    def called(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        group = _group_of(given)
        return own(real, group, given) if isinstance(group, GhostGroup) else real(*args, **options)

    replace_function(name, called)


def replace_function(name: str, own: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed, also in torch's own modules that imported it by name."""
    real = getattr(dist, name)
    for place, module in list(sys.modules.items()):
        if place.startswith("torch.distributed") and getattr(module, "__dict__", {}).get(name) is real:
            setattr(module, name, own)


def _group_of(given: dict[str, Any]) -> Any:
    first = next(iter(given.get("p2p_op_list") or ()), None)
    return getattr(first, "group", None) or given.get("group") or dist.group.WORLD


def _batch(real: Callable[..., Any], group: GhostGroup, given: dict[str, Any]) -> Any:
    return group.together(lambda: real(**given))


def _broadcast_objects(real: Callable[..., Any], group: GhostGroup, given: dict[str, Any]) -> None:
    """Broadcast this rank's objects whatever the source, because every rank has the same data."""
    real(**_from_here(group, given))


def _scatter_objects(real: Callable[..., Any], group: GhostGroup, given: dict[str, Any]) -> None:
    if not given.get("scatter_object_input_list"):
        raise UsageError("a ghost rank has no objects to scatter; use the rank of this process as the source")
    real(**_from_here(group, given))


def _receive_objects(real: Callable[..., Any], group: GhostGroup, given: dict[str, Any]) -> None:
    raise UsageError("a ghost rank has no objects to send; recv_object_list does not work with ghost ranks")


def _from_here(group: GhostGroup, given: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments, with this process as the source."""
    rest = {name: value for name, value in given.items() if name != "group_src"}
    return {**rest, "src": dist.get_global_rank(group, group.rank())}
