"""Programs for benchmarks/tracer.py: each returns a function that runs one step on the current GPU.

The tracer's bars are defined on `launches`, `mixed` and `persistent`. Nothing was fitted to `layers`.
`anatomy` shows the cost of events by kind of kernel, with and without a collective in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from weft.comm import nccl

Step = Callable[[], None]


class Collective:
    """All-reduces of two ranks on streams of their own, as a framework overlaps them."""

    def __init__(self, megabytes: float, ctas: int = 8) -> None:
        count = int(megabytes * (1 << 20) // 2)
        self._ranks = nccl.NcclRanks(nccl.load_nccl(), 2, ctas)
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._send = [torch.ones(count, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self._recv = [torch.empty_like(part) for part in self._send]

    def begin(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        self._ranks.all_reduce(self._send, self._recv, self._streams)

    def end(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)


@triton.jit
def scaled(x, out, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)


def mixed() -> Step:
    comm = Collective(48)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16)
    image = torch.randn(32, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    flat = torch.randn(1 << 24, device="cuda")
    out = torch.empty_like(flat)

    def block(x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(x @ a)
        return F.layer_norm(x @ a, (4096,))

    block(a)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        block(a)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        block(a)

    def step() -> None:
        for _ in range(4):
            block(a)
            comm.begin()
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            F.conv2d(image, weights, padding=1)
            scaled[(triton.cdiv(flat.numel(), 1024),)](flat, out, flat.numel(), 1024)
            block(a)
            graph.replay()
        comm.end()

    return step


def persistent() -> Step:
    comm = Collective(96)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)

    def step() -> None:
        for _ in range(6):
            torch.mm(a, a, out=b)
            comm.begin()
        torch.mm(a, a, out=b)
        comm.end()

    return step


def launches() -> Step:
    comm = Collective(8)
    small = torch.ones(4096, device="cuda")

    def step() -> None:
        for i in range(3000):
            small.add_(1.0)
            if i % 300 == 150:
                comm.begin()
        comm.end()

    return step


def layers() -> Step:
    """Forward and backward of a small transformer; each layer's gradients are reduced while the next run."""
    torch.manual_seed(0)
    comm = Collective(24)
    stack = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in range(6)
    ).to("cuda", torch.bfloat16)
    x = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16)

    def reduce(*_: object) -> None:
        comm.begin()

    for layer in stack:
        layer.register_full_backward_hook(reduce)

    def step() -> None:
        y = x.clone().requires_grad_()
        for layer in stack:
            y = layer(y)
        y.float().square().mean().backward()
        comm.end()
        for parameter in stack.parameters():
            parameter.grad = None

    return step


@triton.jit
def spinning(out, cycles, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    at = tl.arange(0, BLOCK)
    x = at.to(tl.float32)
    for _ in range(cycles):
        x = x * 0.999 + 0.5
    tl.store(out + at, x, mask=x < -1.0)


self_times: list[Any] = []
"""The SelfTimed objects (tracer_self_timed.py) of `anatomy`."""


def anatomy() -> Step:
    from tracer_self_timed import SelfTimed

    self_times.append(SelfTimed())
    comm = Collective(256)
    flat, other = (torch.randn(1 << 24, device="cuda") for _ in range(2))
    small, tiny = torch.randn(1 << 18, device="cuda"), torch.randn(4096, device="cuda")
    square = {n: torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in (1024, 2048, 4096)}
    out = {n: torch.empty_like(a) for n, a in square.items()}
    q = torch.randn(4, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
    kinds: list[Step] = [
        lambda: tiny.add_(1.0),
        lambda: small.add_(1.0),
        lambda: flat.copy_(other),
        lambda: flat.sum(),
        *(lambda grid=grid: spinning[(grid,)](tiny, 20_000, 1024) for grid in (1, 132, 1056)),
        *(lambda n=n: torch.mm(square[n], square[n], out=out[n]) for n in square),
        lambda: F.layer_norm(square[4096], (4096,)),
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda: flat.zero_(),
    ]

    def step() -> None:
        for busy in (False, True):
            torch.cuda._sleep(3_000_000)  # until everything is queued
            for kind in kinds:
                if busy:
                    comm.begin()
                for _ in range(4):
                    kind()
            comm.end()
        torch.cuda._sleep(3_000_000)
        self_times[-1].launch()

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "launches": launches,
    "mixed": mixed,
    "persistent": persistent,
    "layers": layers,
    "anatomy": anatomy,
}
