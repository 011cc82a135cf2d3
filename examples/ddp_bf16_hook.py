"""DDP with the bf16 communication hook: float32 weights and gradients, half the bytes on the wire.

torchrun --nproc-per-node 2 examples/ddp_bf16_hook.py
"""

from __future__ import annotations

import torch
from common import arguments, loop, start, tokens
from model import GPT, loss_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments(__doc__).parse_args()
    device = start(args)
    with device:  # create the weights on the device
        net = GPT(args)
    model = DistributedDataParallel(net)
    # torch supports the bf16 hook only with NCCL, so gloo gets the fp16 hook.
    model.register_comm_hook(None, bf16_compress_hook if device.type == "cuda" else fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    batches = tokens(args, device)

    def step(number: int) -> torch.Tensor:
        batch = batches[number % len(batches)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    loop(step, args)


if __name__ == "__main__":
    main()
