"""Seeded generators of fused operations: one to fit the pick, another with its own ranges to judge it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from weft.ops.case import Case
from weft.ops.schedule import OPERATIONS
from weft.sim.fabric import TOPOLOGIES

FIT_SEED, CHECK_SEED = 20261115, 730001
FIT_GPUS = ("h100", "mi300x", "a100", "b200")
CHECK_GPUS = ("h100", "h200", "a100", "a100-80gb", "a40", "b200", "mi250x", "mi300x")


def _log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def fit_cases(count: int, seed: int = FIT_SEED) -> Iterator[Case]:
    """Shapes for the fit: any size, four GPUs."""
    draw = random.Random(f"fit {seed}")
    for _ in range(count):
        yield Case(
            operation=draw.choice(OPERATIONS),
            m=_log_uniform(draw, 256, 262144),
            n=_log_uniform(draw, 256, 32768),
            k=_log_uniform(draw, 256, 32768),
            ranks=draw.randint(2, 16),
            dtype=draw.choice(("bf16", "fp16", "fp32")),
            gpu=draw.choice(FIT_GPUS),
            topology=draw.choice(TOPOLOGIES),
        )


def check_cases(count: int, seed: int = CHECK_SEED) -> Iterator[Case]:
    """Unseen shapes: log-uniform M, N, K, half of them multiples of 128, every preset and topology."""
    draw = random.Random(f"check {seed}")
    for i in range(count):
        sizes = [
            _log_uniform(draw, 128, 1 << 18),
            _log_uniform(draw, 128, 1 << 16),
            _log_uniform(draw, 128, 1 << 16),
        ]
        if draw.random() < 0.5:
            sizes = [-(-size // 128) * 128 for size in sizes]
        yield Case(
            operation=OPERATIONS[i // len(TOPOLOGIES) % len(OPERATIONS)],
            m=sizes[0],
            n=sizes[1],
            k=sizes[2],
            ranks=draw.randint(2, 16),
            dtype=draw.choice(("bf16", "fp16", "fp32")),
            gpu=draw.choice(CHECK_GPUS),
            topology=TOPOLOGIES[i % len(TOPOLOGIES)],
        )
