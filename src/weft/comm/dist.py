"""The collectives of torch.distributed, one rank per process: NCCL or RCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import datetime
import os
from typing import Any

from weft.errors import UnavailableError, UsageError

_TIMEOUT_S = 120


def start_group(device: str) -> tuple[int, int]:
    """Join the process group that torchrun describes, unless already joined; returns rank and size."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise UsageError(f"{', '.join(missing)} not set: start with torchrun --nproc-per-node N")
        if device == "cuda":
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if not torch.cuda.is_available() or torch.cuda.device_count() <= local:
                raise UnavailableError(
                    f"local rank {local} has no GPU of its own ({torch.cuda.device_count()} here); start "
                    "fewer ranks, or use ghost ranks on one GPU: weft bench without torchrun"
                )
            torch.cuda.set_device(local)
        timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


class Groups:
    """Process groups by CTA limit and priority, created on first use; in the same order on all ranks."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._groups: dict[tuple[int | None, str], Any] = {(None, "default"): None}

    def get(self, max_ctas: int | None, priority: str) -> Any:
        key = (max_ctas, priority)
        if self._device != "cuda":
            return None  # gloo has neither control
        if key not in self._groups:
            import torch.distributed as dist

            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
            if max_ctas is not None:
                options.config.max_ctas = max_ctas
                options.config.min_ctas = 1
            self._groups[key] = dist.new_group(pg_options=options)
        return self._groups[key]


def issue(collective: str, send: Any, recv: Any, group: Any) -> Any:
    """Start a collective; returns the work to wait for.

    torch reduces in place, so an all-reduce takes the maximum over the ranks' `recv`, which the caller fills.
    With the maximum, repeating the call on the same buffer does not change the result.
    """
    import torch.distributed as dist

    if collective == "all_reduce":
        return dist.all_reduce(recv, op=dist.ReduceOp.MAX, group=group, async_op=True)
    if collective == "all_gather":
        gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # torch 2.13 renamed it
        return gather(recv, send, group=group, async_op=True)
    if collective == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(recv, send, group=group, async_op=True)
    return dist.all_to_all_single(recv, send, group=group, async_op=True)
