"""A one-rank DDP job on a real NCCL. Runs until the file `stop` appears; writes its own step times."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"], RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda(), bucket_cap_mb=20
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times, deadline = [], time.monotonic() + 60
    while not Path("stop").exists() and time.monotonic() < deadline:
        begin = time.monotonic()
        model(torch.randn(4096, 2048, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(1e3 * (time.monotonic() - begin))
    Path("own.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
