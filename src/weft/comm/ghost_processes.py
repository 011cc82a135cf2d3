"""Calls by which a program starts or waits for the processes of other ranks; ghosts have no processes.

`torch.multiprocessing.spawn` with one process per rank runs rank 0 in this process. RPC needs the other
processes and is rejected. A store does not wait for them.
"""

from __future__ import annotations

import logging
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from weft.errors import UsageError

_log = logging.getLogger("weft.comm")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "python", "python3")
"""Programs that start other processes, which would not be ghosts."""
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def run_first_rank_here(counts: set[int]) -> None:
    """Make `spawn` run only rank 0, in this process, if the number of processes is in `counts`."""
    real = torch.multiprocessing.spawn

    @wraps(real)
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **more: Any) -> Any:
        if nprocs not in counts:
            _log.warning(
                "spawn starts %d processes, which do not become ghost ranks (this job has %d ranks)",
                nprocs,
                max(counts),
            )
            return real(fn, args, nprocs, join, *rest, **more)
        fn(0, *args)
        return None if join else SimpleNamespace(join=lambda timeout=None: True, processes=[])

    torch.multiprocessing.spawn = spawn


def reject_rpc(rpc: ModuleType) -> None:
    """Reject RPC: it waits for all ranks to connect, and ghosts cannot."""

    def init_rpc(name: str, *_: Any, **__: Any) -> None:
        raise UsageError(f"init_rpc({name!r}) needs the other ranks' processes, and ghost ranks have none")

    rpc.init_rpc = init_rpc  # type: ignore[attr-defined]


def make_stores_wait_for_nobody() -> None:
    """Create every TCPStore so that it does not wait for other ranks, since none will connect."""
    real = dist.TCPStore

    class GhostStore(real):  # type: ignore[misc,valid-type,unused-ignore]
        def __init__(self, host_name: str, port: int, *args: Any, **options: Any) -> None:
            for name, value in zip(("world_size", "is_master", "timeout"), args, strict=False):
                options.setdefault(name, value)
            more = dict(zip(("wait_for_workers", "multi_tenant"), args[3:], strict=False))
            options = {**options, **more, "is_master": True, "wait_for_workers": False}
            super().__init__(host_name, port, **options)

    for module in (dist, dist.distributed_c10d, dist.rendezvous.__globals__):
        home = module if isinstance(module, dict) else vars(module)
        if home.get("TCPStore") is real:
            home["TCPStore"] = GhostStore
