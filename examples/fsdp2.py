"""FSDP2: each block's weights are gathered just before they are used, its gradients reduce-scattered.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import torch
from common import arguments, dtype_of, loop, start, tokens
from model import GPT, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from triton_linear import TritonLinear


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument(
        "--triton", action="store_true", help="compute the blocks' GEMMs with a Triton kernel"
    )
    args = parser.parse_args()
    device = start(args)
    linear = TritonLinear if args.triton else torch.nn.Linear
    with device:  # create the weights on the device
        model = GPT(args, linear).to(dtype_of(device))
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in model.blocks:
        if args.compile:
            block.compile(backend=args.compiler)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    batches = tokens(args, device)

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
