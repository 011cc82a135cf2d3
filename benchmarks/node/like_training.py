"""Does a training step on one GPU as rank 0 of a node gain from torch.compile what it gains on the node?

    python3 -m weft.comm.ghost --node dgx-h100 benchmarks/node/like_training.py --out FILE

torchtitan's Llama-3.1 8B on 8 H100 in bf16 (benchmarks/llama3_h100_202412, FSDP, selective activation
checkpointing, batch 2, sequences of 8192): 2.843 s a step in eager mode, 2.457 s compiled, 0.864 of it. Its
GPUs have 96 GB of HBM2e; an H200's memory is about twice as fast, which shortens memory-bound kernels, in
eager mode more than compiled. The model here has the same sizes and structure, in plain torch: blocks
of RMSNorm, grouped-query attention with rotary embeddings and SwiGLU, each in its own FSDP2 group, bf16
parameters, fp32 reductions, every second matmul and all attention outputs saved, fused AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as f
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PUBLISHED = {"eager_s": 2.843, "compiled_s": 2.457}


@dataclass(frozen=True)
class Sizes:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    vocabulary: int = 128256
    batch: int = 2
    tokens: int = 8192


TINY = Sizes(2, 64, 4, 2, 128, 256, 2, 32)


def rotary(tokens: int, size: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rates = 500_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.outer(torch.arange(tokens, device=device), rates).repeat_interleave(2, -1)
    return angles.cos()[:, None], angles.sin()[:, None]


def rotated(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    pairs = x.float().unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    return (x.float() * table[0] + turned * table[1]).to(x.dtype)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.size = sizes.width // sizes.heads
        self.first, self.second = (nn.RMSNorm(sizes.width, eps=1e-5) for _ in range(2))
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k, self.v = (nn.Linear(sizes.width, self.kv_heads * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        h = self.first(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.size)) for part in (self.q, self.k, self.v))
        q, k = rotated(q, table), rotated(k, table)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        h = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(f.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.out = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, table)
        return self.out(self.norm(x))


def selective() -> Any:
    """Selective checkpointing: save every second matmul and all attention outputs."""
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def contexts() -> Any:
        counts = {True: 0, False: 0}

        def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            again = bool(context.is_recompute)
            counts[again] += operation == aten.mm.default
            save = operation in attention or (operation == aten.mm.default and counts[again] % 2)
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def build(sizes: Sizes, device: str, backend: str | None) -> nn.Module:
    with torch.device("meta"):
        model = Llama(sizes)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.blocks):
        wrapped: Any = checkpoint_wrapper(block, context_fn=selective(), preserve_rng_state=False)
        if backend:
            wrapped = torch.compile(wrapped, backend=backend, fullgraph=True)
        fully_shard(wrapped, mp_policy=precision, reshard_after_forward=number < sizes.layers - 1)
        model.blocks[number] = wrapped
    fully_shard(model, mp_policy=precision)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model


def measure(sizes: Sizes, device: str, backend: str | None, steps: int) -> dict[str, Any]:
    started = time.monotonic()
    model = build(sizes, device, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return f.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss_function = torch.compile(loss_of, backend=backend) if backend else loss_of
    table = rotary(sizes.tokens, sizes.width // sizes.heads, device)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1), device=device)
    times, losses = [], []
    for number in range(steps + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_function(model(tokens[:, :-1], table), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))  # waits for the step
        if number >= 3:
            times.append(time.perf_counter() - begin)
    spent = time.monotonic() - started
    memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return {"step_s": statistics.median(times), "steps_s": times, "losses": losses[-2:], "spent_s": spent} | {
        "memory_gb": memory
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--tiny", action="store_true", help="Of no size: does it run at all?")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl")
    sizes = TINY if given.tiny else Sizes()
    found: dict[str, Any] = {"published": PUBLISHED, "sizes": vars(sizes), "ranks": dist.get_world_size()}
    found["gpu"] = torch.cuda.get_device_name() if device == "cuda" else device
    for name, backend in (("eager", None), ("compiled", given.backend)):
        found[name] = measure(sizes, device, backend, given.steps)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    ratio, published = (
        one["compiled"] / one["eager"]
        for one in (
            {name: found[name]["step_s"] for name in ("eager", "compiled")},
            {name: PUBLISHED[f"{name}_s"] for name in ("eager", "compiled")},
        )
    )
    found |= {
        "compiled_over_eager": ratio,
        "published_compiled_over_eager": published,
        "apart_pct": 100 * (ratio / published - 1),
        "absolute_apart_pct": {
            name: 100 * (found[name]["step_s"] / PUBLISHED[f"{name}_s"] - 1) for name in ("eager", "compiled")
        },
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
