"""DDP with the PowerSGD communication hook: each gradient matrix is sent as two thin factors.

torchrun --nproc-per-node 2 examples/ddp_powersgd.py
"""

from __future__ import annotations

import torch
from common import arguments, loop, start, tokens
from model import GPT, loss_of
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rank", type=int, default=2, help="columns of the factors")
    args = parser.parse_args()
    device = start(args)
    with device:  # create the weights on the device
        net = GPT(args)
    model = DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=args.rank, start_powerSGD_iter=2, random_seed=args.seed
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
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
