"""Tensor parallelism with DTensor: each rank has some heads and part of the MLP; two all-reduces per block.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from __future__ import annotations

import torch
from common import arguments, dtype_of, loop, start, tokens
from model import GPT, loss_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def cut(model: GPT, mesh: DeviceMesh) -> None:
    """Shard every block over the ranks of `mesh`."""
    plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def main() -> None:
    args = arguments(__doc__).parse_args()
    device = start(args)
    with device:  # create the weights on the device
        model = GPT(args).to(dtype_of(device))
    cut(model, init_device_mesh(device.type, (torch.distributed.get_world_size(),)))
    # foreach updates do not accept DTensors and plain tensors together.
    optimizer = torch.optim.SGD(model.parameters(), args.lr, foreach=False)
    batches = tokens(args, device, shared=True)

    def step(number: int) -> torch.Tensor:
        batch = batches[number % len(batches)]
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    loop(step, args)


if __name__ == "__main__":
    main()
