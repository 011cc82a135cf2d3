"""The job of ddp.py with the CTAs of its all-reduce changed every few steps. Rank 0 prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.shim import communicators
from weft.shim.stats import snapshot

PHASES = (None, 4, 8, None, 8, 4)
STEPS = 8


def main() -> None:
    route = "--plain" not in sys.argv
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048))  # noqa: E731
    model = DistributedDataParallel(nn.Sequential(*(layer() for _ in range(4))).cuda().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    losses, phases, prepare_s = [], [], 0.0
    for number, limit in enumerate(PHASES):
        if route and number == 1:
            torch.cuda.synchronize()
            started = time.monotonic()
            communicators.prepare(4, 60)
            communicators.prepare(8, 60)
            prepare_s = time.monotonic() - started
        if route:
            communicators.route(limit)
        before, times = launches(), []
        for _ in range(STEPS):
            started = time.monotonic()
            x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            times.append(time.monotonic() - started)
        ctas = [ctas for name, (count, ctas) in launches().items() if count > before.get(name, (0, 0))[0]]
        step_ms = 1e3 * statistics.median(times[2:])
        phases.append({"limit": limit, "first_ms": 1e3 * times[0], "step_ms": step_ms, "ctas": ctas})
    if rank == 0:
        found = communicators.communicators() if route else []
        result = {
            "losses": losses,
            "phases": phases,
            "prepare_s": prepare_s,
            "communicators": [[c.key, c.size, c.max_ctas, c.collectives, c.why_not] for c in found],
            "calls": len(communicators.calls()) if route else 0,
        }
        print("result", json.dumps(result), flush=True)
    dist.destroy_process_group()


def launches() -> dict[str, tuple[int, int]]:
    """For each communication kernel, its launches so far and the CTAs of the latest one."""
    found = (kernel for kernel in snapshot()["kernels"] if kernel["kind"] == "comm")
    return {f"{k['name']} {k['threads']} {k['shared_bytes']}": (k["launches"], k["ctas"]) for k in found}


if __name__ == "__main__":
    main()
