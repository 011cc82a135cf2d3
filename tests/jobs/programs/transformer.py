"""A small Llama-like model with torchtitan's names, and torch's own recipe for its tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import checkpoint


class Settings(NamedTuple):
    vocabulary: int
    width: int
    inner: int
    heads: int
    key_heads: int
    blocks: int
    tied: bool = False


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.head_dim, self.groups = s.width // s.heads, s.heads // s.key_heads
        self.wq = nn.Linear(s.width, s.width, bias=True)
        self.wk = nn.Linear(s.width, s.key_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(s.width, s.key_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(s.width, s.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(made.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.width, s.inner, bias=False)
        self.w2 = nn.Linear(s.inner, s.width, bias=True)
        self.w3 = nn.Linear(s.width, s.inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(s), FeedForward(s)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(s.width), nn.RMSNorm(s.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    checkpointing = False

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.blocks))
        self.norm = nn.RMSNorm(s.width)
        self.output = nn.Linear(s.width, s.vocabulary, bias=False)
        if s.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.output(self.norm(x))


def torch_plan(prefix: str, blocks: int, names: dict[str, tuple[str, ...]]) -> dict[str, object]:
    """torch's own styles for the blocks of a model: the recipe of torchtitan."""
    made: dict[str, object] = {}
    sharded = {"output_layouts": Shard(1), "use_local_output": False}
    for block in range(blocks):
        path = f"{prefix}layers.{block}."
        for name in names["norms"]:
            made[path + name] = SequenceParallel()
        for name in names["attention"]:
            made[path + name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        for name in names["feed_forward"]:
            made[path + name] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        for name in names["columns"]:
            made[path + name] = ColwiseParallel()
        for name in names["rows"]:
            made[path + name] = RowwiseParallel(**sharded)
    return made
