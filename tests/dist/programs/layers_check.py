"""A two-layer MLP, plain and tensor-parallel, and under torch.compile; used by ops_ranks.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from weft.ops import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceColumnwise,
    SequenceRowwise,
    all_gather_matmul,
    all_to_all_matmul,
    matmul_reduce_scatter,
)
from weft.ops.schedule import split


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def check(rank, ranks, close):
    torch.manual_seed(5)
    width, inner, tokens = 6, 7 + ranks, 2 * ranks
    whole = Mlp(width, inner)
    x = torch.randn(tokens, 3, width)
    want = whole(x)
    want.square().sum().backward()
    mine = slice(rank * 2, rank * 2 + 2)

    by_plan = parallelize_module(
        _fresh(whole),
        init_device_mesh("cpu", (ranks,)),
        {"up": SequenceColumnwise(schedule="shard"), "down": SequenceRowwise()},
    )
    by_hand = _fresh(whole)
    by_hand.up = ColumnParallelLinear.from_linear(whole.up)
    by_hand.down = RowParallelLinear.from_linear(whole.down, schedule="uniform-fused-2d")
    for model in (by_plan, by_hand):
        model.zero_grad()
        got = model(x[mine])
        close(got.detach(), want[mine].detach().double(), torch.float32, "mlp")
        got.square().sum().backward()
        counts = split(inner, ranks)
        pairs = [
            (model.up.weight.grad, whole.up.weight.grad.split(counts)[rank]),
            (model.up.bias.grad, whole.up.bias.grad.split(counts)[rank]),
            (model.down.weight.grad, whole.down.weight.grad.split(counts, 1)[rank]),
            (model.down.bias.grad, whole.down.bias.grad),
        ]
        for grad, expected in pairs:
            close(grad, expected.double(), torch.float32, "gradient of the mlp")
    twin = copy.deepcopy(by_plan)
    with torch.autocast("cpu", torch.bfloat16):
        got = twin(x[mine])
        plain = whole(x)[mine]
    assert got.dtype == plain.dtype == torch.bfloat16
    close(got.detach(), plain.detach().double(), torch.bfloat16, "mlp, autocast")
    got.sum().backward()
    fresh = ColumnParallelLinear(width, inner, bias=False)
    assert fresh.weight.shape == (split(inner, ranks)[rank], width)


def _fresh(whole):
    made = copy.deepcopy(whole)
    made.zero_grad()
    return made


def check_compiled(rank, ranks, close):
    """The same values and gradients under torch.compile, with no graph break."""
    torch._dynamo.config.cache_size_limit = 64
    for operation in (all_gather_matmul, matmul_reduce_scatter, all_to_all_matmul):
        for group in (None, dist.group.WORLD) if operation is all_gather_matmul else (None,):

            def layer(x, w, operation=operation, group=group):
                return operation(torch.sin(x), w, group, schedule="hetero-fused-1d").relu()

            random = torch.Generator().manual_seed(rank)
            compiled_layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
            for rows in (2 * ranks, 3 * ranks, 5 * ranks):  # from the second on, sizes are symbolic
                x, w = torch.randn(rows, 4, generator=random), torch.randn(4, 5, generator=random)
                results = []
                for function in (layer, compiled_layer):
                    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
                    y = function(x, w)
                    y.square().sum().backward()
                    results.append((y.detach(), x.grad, w.grad))
                for eager, compiled in zip(*results, strict=True):
                    close(compiled, eager.double(), torch.float32, f"{operation.__name__} compiled")
