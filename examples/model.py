"""A small GPT. The projection of q, k and v stores each head contiguously, so it can be sharded by heads."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = linear(width, 3 * width, bias=False)
        self.out = linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3 * self.head_width).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.up = linear(width, 4 * width, bias=False)
        self.down = linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, linear)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.width)
        self.place = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, linear) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
