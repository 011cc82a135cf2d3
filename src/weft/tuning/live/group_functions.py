"""Wraps the functions of torch.distributed that create and destroy process groups while a job is tuned."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from typing import Any


def _nothing(*args: Any, **options: Any) -> None: ...


def wrap_group_function(name: str, *, before: Any = _nothing, after: Any = _nothing) -> Any:
    """Wrap a function of torch.distributed; returns a function that removes the wrapper."""
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh

    real = getattr(dist, name)

    @wraps(real)
    def wrapped(*args: Any, **options: Any) -> Any:
        with suppress(Exception):
            before(*args, **options)
        returned = real(*args, **options)
        with suppress(Exception):
            after(*args, **options)
        return returned

    places = [place for place in (dist, dist.distributed_c10d, device_mesh) if hasattr(place, name)]
    for place in places:
        setattr(place, name, wrapped)

    def restore() -> None:
        for place in places:
            if getattr(place, name) is wrapped:
                setattr(place, name, real)

    return restore
