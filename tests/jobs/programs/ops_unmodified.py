"""A tensor-parallel program that does not import weft: `ops_unmodified.py P STEPS eager|compiled`.

A small Llama-like model under torch's own styles, as torchtitan applies them, trained on P ranks over gloo next
to the plain model. It fails if losses or gradient norms differ.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from transformer import Settings, Transformer


def divide(model: nn.Module, mesh) -> nn.Module:
    """torchtitan's recipe, as of v0.2.2."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


def train(model: nn.Module, steps: int) -> list[tuple[float, float]]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def make() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(Settings(64, 32, 48, 4, 2, 2))


def flat(module: nn.Module, given: object, made: torch.Tensor) -> torch.Tensor:
    """torch's results are contiguous, so a program may view batch and tokens as one dimension."""
    return made.view(-1, made.shape[-1]).view(made.shape)


def main(rank: int, ranks: int, folder: str) -> None:
    steps, how = int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=ranks)
    model = divide(make(), init_device_mesh("cpu", (ranks,)))
    model.checkpointing = how == "eager"  # recompute activations in the backward pass
    if how == "compiled":
        for block in model.layers:
            block.compile()
    else:  # a checkpoint must save the same tensors when it runs again
        last = model.layers[-1]
        last.attention.wq.register_forward_hook(flat)
        last.forward = functools.partial(checkpoint, last.forward, use_reentrant=False)
    got, wanted = train(model, steps), train(make(), steps)
    for step, (ours, plain) in enumerate(zip(got, wanted, strict=True)):
        for what, a, b in zip(("loss", "gradient norm"), ours, plain, strict=True):
            assert abs(a - b) <= 1e-3 * abs(b), f"{what} of step {step} is {a}, not {b}"
    dist.destroy_process_group()
    if rank == 0:
        apart = max(abs(a - b) / b for (a, _), (b, _) in zip(got, wanted, strict=True))
        print(f"{steps} steps on {ranks} ranks, {how}: losses within {apart:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    count, children = int(sys.argv[1]), []
    with tempfile.TemporaryDirectory() as shared:
        for number in range(1, count):
            child = os.fork()
            if child == 0:
                main(number, count, shared)
                os._exit(0)
            children.append(child)
        main(0, count, shared)
        sys.exit(any(os.waitpid(child, 0)[1] for child in children))
