"""DistributedDataParallel: gradients are all-reduced in buckets during the backward pass.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
from common import arguments, dtype_of, loop, start, tokens
from model import GPT, loss_of
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments(__doc__).parse_args()
    device = start(args)
    with device:  # create the weights on the device
        net = GPT(args).to(dtype_of(device))
    model = DistributedDataParallel(net)
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
