"""A tensor-parallel feed-forward on two ranks that share a GPU; it does not import weft.

`ops_adopted.py FOLDER WIDTH eager|compiled`: forward without gradients under torch's styles, or forward and backward
through torch.compile, next to the whole layer on the same GPU. The group is gloo, which cannot gather GPU tensors
(pytorch/pytorch#152645: SIGSEGV): the program runs only because weft replaces every collective in it.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

RANKS, BATCH = 2, 2


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    assert error < 3e-2, f"{what}: off by {error:.2g} of the largest value"


def main(rank: int, folder: str, width: int, how: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=90),
    )
    mesh = init_device_mesh("cuda", (RANKS,))
    torch.manual_seed(0)
    whole = FeedForward(width).cuda().bfloat16()
    x = torch.randn(BATCH, 2 * width, width, device="cuda").bfloat16()
    grad = torch.randn(BATCH, 2 * width, width, device="cuda").bfloat16()
    divided = FeedForward(width).cuda().bfloat16()
    divided.load_state_dict(whole.state_dict())
    plan = {
        "": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for name, style in plan.items():  # every rank has all weights, so nothing is sent
        parallelize_module(divided.get_submodule(name), mesh, style, src_data_rank=None)
    part = x.chunk(RANKS, 1)[rank].contiguous()
    if how == "eager":
        with torch.no_grad():
            wanted = whole(x).chunk(RANKS, 1)[rank]
            for _ in range(3):
                close(divided(part), wanted, "result")
    else:
        mine, theirs = part.requires_grad_(), x.requires_grad_()
        compiled = torch.compile(nn.Sequential(divided), fullgraph=True)  # the input's hook is in its graph
        wanted = whole(theirs)
        wanted.backward(grad)
        for _ in range(2):
            mine.grad = None
            divided.zero_grad()
            made = compiled(mine)
            made.backward(grad.chunk(RANKS, 1)[rank].contiguous())
            close(made, wanted.chunk(RANKS, 1)[rank], "result")
            close(mine.grad, theirs.grad.chunk(RANKS, 1)[rank], "gradient of the input")
        for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
            got = divided.get_submodule(name).weight.grad.to_local()
            want = whole.get_submodule(name).weight.grad.chunk(RANKS, dim)[rank]
            close(got, want, f"gradient of {name}")
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"{how} at width {width} equals the whole layer", flush=True)


if __name__ == "__main__":
    import multiprocessing

    arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    other = multiprocessing.get_context("spawn").Process(target=main, args=(1, *arguments))
    other.start()
    os.environ["RANK"] = "0"
    main(0, *arguments)
    other.join()
    sys.exit(other.exitcode)
