"""A small, ordinary and deterministic DDP training job. Rank 0 prints its losses as JSON."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048))  # noqa: E731
    model = DistributedDataParallel(nn.Sequential(*(layer() for _ in range(4))).cuda().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    losses = []
    for _ in range(int(os.environ.get("STEPS", "20"))):
        x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print("losses", json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
