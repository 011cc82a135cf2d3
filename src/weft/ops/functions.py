"""The operations: a collective and the product that depends on it, as one call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from weft.errors import UsageError
from weft.ops.autograd import AllGatherMatmul, AllToAllMatmul, MatmulReduceScatter
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
    """Gather x along its first dimension from all ranks and multiply it by w: `all_gather(x_shard) @ w`.

    x_shard: … by k, contiguous or not; w: k by n, this rank's own (tensor parallelism: its columns).
    rows: first dimension of every rank's shard, where they differ.
    schedule, engine, pieces: see `weft explore`; left out, they follow from the shape. `policy` sets the first
    two as well. out: where the result goes; no gradient flows through a call with it.
    """
    call = _call("all_gather_matmul", x_shard, rows, None, schedule, engine, pieces, policy)
    return _apply(AllGatherMatmul, call, x_shard, w, group, out)


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
    """Multiply, add up over all ranks, keep this rank's rows: `reduce_scatter(x @ w)` along the first dimension.

    x: … by k, w: k by n, both this rank's own (tensor parallelism: its columns of x, its rows of w). The ranks'
    products are added in fp32 and rounded once. rows: how many of the first dimension each rank keeps; left
    out, they are split evenly, the first ranks taking one more.
    """
    call = _call("matmul_reduce_scatter", x, rows, None, schedule, engine, pieces, policy)
    return _apply(MatmulReduceScatter, call, x, w, group, out)


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
    """Send each rank its block of x's rows and multiply what arrives: `all_to_all(x) @ w` (expert parallelism).

    input_splits: rows for each rank; output_splits: rows from each rank, as in `torch.distributed`. Left out, x
    is split evenly, and every rank must have as many rows.
    """
    if (input_splits is None) != (output_splits is None):
        raise UsageError("all_to_all_matmul: give both input_splits and output_splits, or neither")
    call = _call("all_to_all_matmul", x, output_splits, input_splits, schedule, engine, pieces, policy)
    return _apply(AllToAllMatmul, call, x, w, group, out)


def _call(
    operation: str,
    x: torch.Tensor,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    schedule: str | None,
    engine: str | None,
    pieces: int | None,
    policy: Policy | None,
) -> Call:
    if policy is not None:
        schedule, engine = schedule or policy.schedule, engine or policy.engine
    if rows is None and sent is None:
        return Call(operation, None, None, schedule, engine, pieces)
    inner = prod(x.shape[1:-1])
    return Call(
        operation,
        None if rows is None else tuple(count * inner for count in rows),
        None if sent is None else tuple(count * inner for count in sent),
        schedule,
        engine,
        pieces,
    )


def _apply(
    function: Any, call: Call, x: torch.Tensor, w: torch.Tensor, group: Any, out: torch.Tensor | None
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        from weft.ops.compiled import compiled

        return compiled(call, x, w, group, out)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        if out is not None:
            raise UsageError(f"{call.operation}: out= has no gradient; leave it out, or use torch.no_grad()")
        made: torch.Tensor = function.apply(x, w, group, call)
        return made
    return run(call, x, w, group, out)
