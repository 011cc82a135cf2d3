"""Build the compute operation of a Workload as a callable, for a GPU or a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from weft.errors import UnavailableError, UsageError
from weft.execute.payload import torch_dtype
from weft.workload import Compute

ComputeCall = Callable[[], object]
"""Runs the compute of one iteration."""
SEED = 1729
"""Seed of the random inputs."""


def build_compute(compute: Compute, device: Any, lane: int = 0) -> ComputeCall:
    """The callable that runs one iteration. Every lane (stream) has its own tensors.

    Inputs are random, because a GPU runs faster on zeros than on real data.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(SEED + lane)

    def rand(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=torch_dtype(compute.dtype))

    once = _BUILDERS[compute.kind](compute, rand)
    if compute.repeat == 1:
        return once

    def several() -> None:
        for _ in range(compute.repeat):
            once()

    return several


def _gemm(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    m, n, k = compute.shape
    a, b = rand(m, k), rand(k, n)
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    return lambda: torch.mm(a, b, out=c)


def _triton_gemm(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    m, n, k = compute.shape
    a, b = rand(m, k), rand(k, n)
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    return _launcher(compute, a, b, c, compute.grid or compute.tiles())


def _triton_mlp(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    tokens, hidden, inner = compute.shape
    x, up, down = rand(tokens, hidden), rand(hidden, inner), rand(inner, hidden)
    up *= hidden**-0.5
    middle = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    tile = compute.tile or (64, 64, 64)
    grids = [(-(-width // tile[1]), -(-tokens // tile[0])) for width in (inner, hidden)]
    first = _launcher(compute, x, up, middle, grids[0], gelu=True)
    second = _launcher(compute, middle, down, out, grids[1])

    def both() -> None:
        first()
        second()

    return both


def _launcher(
    compute: Compute, a: Any, b: Any, c: Any, grid: tuple[int, int], *, gelu: bool = False
) -> ComputeCall:
    try:
        from weft.execute.kernels import launch_gemm
    except ImportError:
        raise UnavailableError(f"{compute.kind} needs Triton: pip install triton, or use gemm") from None
    tile = compute.tile or (64, 64, 64)
    return lambda: launch_gemm(
        a,
        b,
        c,
        tile=tile,
        grid=grid,
        warps=compute.warps,
        stages=compute.stages,
        gelu=gelu,
        vector=compute.kind == "tile_gemm",
    )


def _layer_norm(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    rows, columns = compute.shape
    x, weight, bias = rand(rows, columns), rand(columns), rand(columns)
    return lambda: torch.nn.functional.layer_norm(x, (columns,), weight, bias)


def _softmax(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    x = rand(*compute.shape)
    return lambda: torch.softmax(x, -1)


def _gelu(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    x = rand(*compute.shape)
    return lambda: torch.nn.functional.gelu(x)


def _attention(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    q, k, v = (rand(*compute.shape) for _ in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _conv(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    import torch

    batch, channels, height, width, filters, size = compute.shape
    layout = {"memory_format": torch.channels_last}
    x = rand(batch, channels, height, width).contiguous(**layout)
    weight = rand(filters, channels, size, size).contiguous(**layout)
    return lambda: torch.nn.functional.conv2d(x, weight, padding=size // 2)


def _callable(compute: Compute, rand: Callable[..., Any]) -> ComputeCall:
    if compute.call is not None:
        return compute.call
    module, _, name = compute.target.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"compute {compute.target!r} cannot be loaded ({error}); write module:function"
        ) from None
    if not callable(made):
        raise UsageError(f"compute {compute.target!r} must return a callable; it is called in each iteration")
    return made  # type: ignore[no-any-return]


_BUILDERS: dict[str, Callable[[Compute, Callable[..., Any]], ComputeCall]] = {
    "gemm": _gemm,
    "triton_gemm": _triton_gemm,
    "tile_gemm": _triton_gemm,
    "triton_mlp": _triton_mlp,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "gelu": _gelu,
    "attention": _attention,
    "conv": _conv,
    "callable": _callable,
}
