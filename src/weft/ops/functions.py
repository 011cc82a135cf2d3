"""The operations: a collective and the product that depends on it, as one call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from weft.errors import UsageError
from weft.ops.autograd import Fused
from weft.ops.plan import Call
from weft.ops.run import run
from weft.policy import Policy


def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    group: Any = None,
    *,
    rows: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
    policy: Policy | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather x along its first dimension from all ranks, multiply it by w: `all_gather(x_shard) @ w`.

    x_shard: … by k, contiguous or not; w: k by n, this rank's own (tensor parallelism: its columns).
    rows: first dimension of every rank's shard, where they differ.
    schedule, engine, pieces: see `weft explore`; left out, they follow from the shape. `policy` sets the
    first two as well. out: where the result goes; no gradient flows through a call with it.
    """
    options = (rows, None, schedule, engine, pieces, policy, out)
    return _apply("all_gather_matmul", x_shard, w, group, *options)


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any = None,
    *,
    rows: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
    policy: Policy | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply, add up over all ranks, keep this rank's rows: `reduce_scatter(x @ w)`, first dimension.

    x: … by k, w: k by n, both this rank's own (tensor parallelism: its columns of x, its rows of w). The
    ranks' products are added in fp32 and rounded once. rows: how many of the first dimension each rank keeps;
    left out, they are split evenly, the first ranks taking one more.
    """
    options = (rows, None, schedule, engine, pieces, policy, out)
    return _apply("matmul_reduce_scatter", x, w, group, *options)


def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any = None,
    *,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
    policy: Policy | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send each rank its block of x's rows and multiply what arrives: `all_to_all(x) @ w`, for experts.

    input_splits: rows for each rank; output_splits: rows from each rank, as in `torch.distributed`. Left out,
    x is split evenly, and every rank must have as many rows.
    """
    if (input_splits is None) != (output_splits is None):
        raise UsageError("all_to_all_matmul: give both input_splits and output_splits, or neither")
    options = (output_splits, input_splits, schedule, engine, pieces, policy, out)
    return _apply("all_to_all_matmul", x, w, group, *options)


def _apply(
    operation: str,
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    schedule: str | None,
    engine: str | None,
    pieces: int | None,
    policy: Policy | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if type(x) is not torch.Tensor or type(w) is not torch.Tensor:
        _check_kinds(operation, x, w)
    if policy is not None and (policy.schedule is not None or policy.engine == "dma"):  # else it says nothing
        schedule, engine = schedule or policy.schedule, engine or policy.engine
    if rows is not None or sent is not None:
        inner = prod(x.shape[1:-1])
        rows = None if rows is None else tuple(count * inner for count in rows)
        sent = None if sent is None else tuple(count * inner for count in sent)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = _cast(x, dtype), _cast(w, dtype)
    if torch.compiler.is_compiling():
        from weft.ops.compiled import compiled

        return compiled(operation, x, w, group, rows, sent, schedule, engine, pieces, out)
    call = Call(operation, rows, sent, schedule, engine, pieces)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        if out is not None:
            raise UsageError(f"{operation}: out= has no gradient; leave it out, or use torch.no_grad()")
        made: torch.Tensor = Fused.apply(x, w, group, call)
        return made
    return run(call, x, w, group, out)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast does it: whole numbers and fp64 stay."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _check_kinds(operation: str, x: Any, w: Any) -> None:
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{operation}: {name} must be a tensor, not {type(tensor).__name__}")
        if hasattr(tensor, "to_local"):
            raise UsageError(
                f"{operation}: {name} is a {type(tensor).__name__}; give this rank's part, {name}.to_local()"
            )
