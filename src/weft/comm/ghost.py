"""A torch.distributed backend with ghost ranks: one process is rank 0 of R on one GPU, with real collectives.

    python -m weft.comm.ghost --ranks 2 train.py …        # an unmodified DDP or FSDP2 script

The other R-1 ranks exist only as NCCL ranks on the same GPU. They join every collective with their own
buffers and, by default, with the data of rank 0, as if every rank had the same batch: an averaged gradient
then equals rank 0's, and training proceeds as on one GPU, with the communication of R ranks. FSDP2 gathers
R copies of rank 0's shard: the model differs, but has the right shape and cost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from weft.comm.ghost_group import BACKEND, GhostGroup, GhostOptions
from weft.errors import UsageError

__all__ = ["BACKEND", "GhostGroup", "GhostOptions", "impersonate", "init", "register"]


def register(options: GhostOptions | None = None) -> None:
    """Register the backend with torch.distributed under the name `ghost`."""
    if BACKEND.upper() in dist.Backend._plugins:
        return

    def create(common: Any, given: Any) -> GhostGroup:
        chosen = given if isinstance(given, GhostOptions) else options or GhostOptions.from_environment()
        return GhostGroup(common.group_rank, common.group_size, chosen)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def init(ranks: int, options: GhostOptions | None = None) -> None:
    """Make this process rank 0 of `ranks`; the other ranks are ghosts."""
    if ranks < 2:
        raise UsageError(f"ranks {ranks} is not valid; use 2 or more")
    register(options)
    dist.init_process_group(BACKEND, rank=0, world_size=ranks, store=dist.HashStore())


def impersonate(ranks: int) -> None:
    """Make an unmodified script rank 0 of `ranks`, whatever backend it requests."""
    real = dist.init_process_group
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    register()

    def init_as_ghost(*_: Any, **__: Any) -> None:
        real(BACKEND, rank=0, world_size=ranks, store=dist.HashStore())

    dist.init_process_group = init_as_ghost
    dist.distributed_c10d.init_process_group = init_as_ghost


def run_script(arguments: Sequence[str]) -> None:
    """Run a script as rank 0; `arguments`: `--ranks R SCRIPT ARGUMENTS…`."""
    import runpy

    if len(arguments) < 3 or arguments[0] != "--ranks" or not arguments[1].isdecimal():
        raise UsageError("usage: python -m weft.comm.ghost --ranks R script.py [arguments]")
    impersonate(int(arguments[1]))
    sys.argv = list(arguments[2:])
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[2]))  # noqa: PTH100, PTH120 (as python does)
    runpy.run_path(arguments[2], run_name="__main__")


if __name__ == "__main__":
    # Run as a script, this module is __main__; the backend must be registered by the importable module.
    from weft.comm import ghost

    try:
        ghost.run_script(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"weft: {error}")
