"""Inference under tensor parallelism: forward passes in a loop, no optimizer, two all-reduces per block.

torchrun --nproc-per-node 2 examples/inference.py
"""

from __future__ import annotations

import torch
from common import arguments, dtype_of, loop, start, tokens
from model import GPT
from tensor_parallel import cut
from torch.distributed.device_mesh import init_device_mesh


@torch.inference_mode()
def main() -> None:
    args = arguments(__doc__).parse_args()
    device = start(args)
    with torch.inference_mode(False), device:  # create the weights on the device
        model = GPT(args).to(dtype_of(device)).eval()
        cut(model, init_device_mesh(device.type, (torch.distributed.get_world_size(),)))
    batches = tokens(args, device, shared=True)

    def step(number: int) -> torch.Tensor:
        """Predict every next token. Returns the mean logit in place of a loss."""
        logits = model(batches[number % len(batches)][:, :-1])
        return logits.float().mean()

    loop(step, args)


if __name__ == "__main__":
    main()
