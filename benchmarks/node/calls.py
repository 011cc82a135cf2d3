"""Makes the torch.distributed calls of training programs as rank 0 of ghost ranks, and checks the results.

    python -m weft.comm.ghost --node dgx-h100 benchmarks/node/calls.py

Runs on a GPU if there is one. Prints `calls: N of N` and ends with 1 if a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers(count: int) -> torch.Tensor:
    return torch.arange(float(count), device=DEVICE) + 1


def premul_sum() -> bool:
    dist.all_reduce(x := numbers(1 << 16), op=dist._make_nccl_premul_sum(0.5))
    part = torch.empty(1 << 12, device=DEVICE)
    dist.reduce_scatter_tensor(
        part, numbers(dist.get_world_size() << 12), op=dist._make_nccl_premul_sum(0.25)
    )
    n = dist.get_world_size()
    return torch.equal(x, numbers(1 << 16) * n / 2) and torch.equal(part, numbers(1 << 12) * n / 4)


def split() -> bool:
    group = dist.split_group(None, [[0, 1], list(range(2, dist.get_world_size()))])
    dist.all_reduce(x := numbers(1000), group=group)
    return torch.equal(x, numbers(1000) * 2)


def waits() -> bool:
    work = dist.all_reduce(x := numbers(1 << 20), async_op=True)
    work.wait(timedelta(seconds=60))
    return torch.equal(x, numbers(1 << 20) * dist.get_world_size())


def gathers() -> bool:
    n = dist.get_world_size()
    work = dist.all_gather([torch.empty(64, device=DEVICE) for _ in range(n)], numbers(64), async_op=True)
    work.wait()
    return all(torch.equal(part, numbers(64)) for part in work.get_future().value()[0])


def optimizer_state() -> bool:
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).to(DEVICE)
    optimizer = ZeroRedundancyOptimizer(layers.parameters(), torch.optim.Adam, lr=0.1)
    layers(torch.ones(4, 64, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()
    return len(optimizer.state_dict()["state"]) == 16


def main() -> None:
    dist.init_process_group("nccl")
    calls: tuple[Callable[[], bool], ...] = (premul_sum, split, waits, gathers, optimizer_state)
    right = [call() for call in calls]
    print(f"calls: {sum(right)} of {len(calls)} on {DEVICE.type}")
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
