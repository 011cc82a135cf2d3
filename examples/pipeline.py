"""Pipeline parallelism with torch.distributed.pipelining: each rank has some layers, in one or more stages.

torchrun --nproc-per-node 2 examples/pipeline.py --schedule 1F1B
torchrun --nproc-per-node 2 examples/pipeline.py --schedule Interleaved1F1B
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import arguments, dtype_of, loop, start, tokens
from model import GPT, loss_of
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class


class Part(torch.nn.Module):
    """The blocks of one stage. The first stage also has the embedding, the last one the head."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        each = -(-len(model.blocks) // count)
        self.blocks = model.blocks[index * each : (index + 1) * each]
        self.embed = torch.nn.ModuleList([model.embed, model.place] if index == 0 else [])
        self.head = torch.nn.ModuleList([model.norm, model.head] if index == count - 1 else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed:
            tokens, place = self.embed
            x = tokens(x) + place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        for layer in self.head:
            x = layer(x)
        return x


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedule", default="1F1B", help="GPipe, 1F1B, Interleaved1F1B, …")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.set_defaults(batch=4)  # one row for each microbatch
    args = parser.parse_args()
    device = start(args)
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(args.schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    count = 2 * world if several else world
    whole = GPT(args)
    parts = [Part(whole, index, count).to(device, dtype_of(device)) for index in range(rank, count, world)]

    def example(stage: int) -> torch.Tensor:
        """An example input of a stage. With known shapes, stages need not exchange them."""
        rows = (args.batch // args.microbatches, args.length)
        if stage == 0:
            return torch.zeros(rows, dtype=torch.int64, device=device)
        width = args.vocab if stage == count else args.width
        return torch.zeros((*rows, width), dtype=dtype_of(device), device=device, requires_grad=True)

    stages = [
        PipelineStage(part, index, count, device, (example(index),), (example(index + 1),))
        for index, part in zip(range(rank, count, world), parts, strict=True)
    ]
    schedule = kind(stages if several else stages[0], args.microbatches, loss_fn=loss_of)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, args.lr)
    batches = tokens(args, device, shared=True)

    def step(number: int) -> torch.Tensor:
        batch, losses = batches[number % len(batches)], []
        given = [batch[:, :-1].contiguous()] if rank == 0 else []
        last = {"target": batch[:, 1:], "losses": losses} if rank == world - 1 else {}
        optimizer.zero_grad()
        schedule.step(*given, **last)
        optimizer.step()
        # Only the last stage has a loss; other stages return the norm of a gradient instead.
        return torch.stack(losses).mean() if losses else parameters[-1].grad.float().norm()

    loop(step, args)


if __name__ == "__main__":
    main()
