"""A whole training step as one CUDA graph, including its all-reduces. On a CPU the step runs without a graph.

torchrun --nproc-per-node 2 examples/cuda_graph.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import arguments, dtype_of, loop, start, tokens
from model import GPT, loss_of


def main() -> None:
    args = arguments(__doc__).parse_args()
    device = start(args)
    with device:  # create the weights on the device
        model = GPT(args).to(dtype_of(device))
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    batches = tokens(args, device)
    batch, works = batches[0].clone(), []

    def reduce(parameter: torch.Tensor) -> None:
        """Start the all-reduce of a gradient as soon as it is complete."""
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)

    def body() -> torch.Tensor:
        works.clear()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        (loss / dist.get_world_size()).backward()
        for work in works:
            work.wait()
        optimizer.step()
        return loss

    if device.type == "cpu":
        replay = body
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # warm up: allocations and connections must happen before the capture
                body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = body()

        def replay() -> torch.Tensor:
            graph.replay()
            return captured

    def step(number: int) -> torch.Tensor:
        batch.copy_(batches[number % len(batches)])
        return replay()

    loop(step, args)


if __name__ == "__main__":
    main()
