"""One call: its plan, its result, no gradient."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from weft.errors import UsageError, WeftError
from weft.ops.plan import Call, Plan, plan_for
from weft.ops.program import check_tensors
from weft.ops.schedule import split
from weft.ops.teams import team_of


def run(
    call: Call, x: torch.Tensor, w: torch.Tensor, group: Any = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run an operation and return its result, shaped like x but for the first and the last dimension."""
    return run_planned(call, x, w, group, out)[0]


def run_planned(
    call: Call, x: torch.Tensor, w: torch.Tensor, group: Any = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, Plan, torch.Tensor]:
    """The same, with the plan and x as the plan saw it."""
    flat, plan, w = prepare(call, x, w, group)
    if out is None:
        result = flat.new_empty(plan.out_shape)
    else:
        try:
            result = _given(call, plan, flat, x, w, out)
        except WeftError as error:
            plan.team.tell(call.operation, error)
            raise
    plan.run(flat, w, result)
    if out is not None:
        return out, plan, flat
    return (result if x.dim() == 2 else result.view(_shape(plan, x, w))), plan, flat


def prepare(
    call: Call, x: torch.Tensor, w: torch.Tensor, group: Any
) -> tuple[torch.Tensor, Plan, torch.Tensor]:
    """x as a contiguous matrix, the plan, and w with one contiguous dimension."""
    flat = x
    if x.dim() != 2:
        try:
            flat, call = _flatten(call, x, group)
        except WeftError as error:
            team = team_of(group)
            team.calls += 1
            team.refuse(call.operation, error)
            raise
    if not flat.is_contiguous():
        flat = flat.contiguous()
    if 1 not in w.stride():
        w = w.contiguous()
    return flat, plan_for(call, flat, w, group), w


def _flatten(call: Call, x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Call]:
    """x as a matrix. What is split evenly is the first dimension, not the rows of the matrix."""
    if x.dim() < 2:
        raise UsageError(f"{call.operation}: x has {x.dim()} dimensions; it needs at least 2")
    inner, ranks = prod(x.shape[1:-1]), team_of(group).size
    if not inner:
        raise UsageError(f"{call.operation}: x is {tuple(x.shape)}; only its first dimension may be empty")
    parts = tuple(count * inner for count in split(x.shape[0], ranks))
    if call.operation == "matmul_reduce_scatter" and call.rows is None:
        call = call._replace(rows=parts)
    elif call.operation == "all_to_all_matmul" and call.sent is None and x.shape[0] % ranks:
        call = call._replace(sent=parts, rows=(parts[team_of(group).rank],) * ranks)
    return x.reshape(-1, x.shape[-1]), call


def _shape(plan: Plan, x: torch.Tensor, w: torch.Tensor) -> tuple[int, ...]:
    inner = prod(x.shape[1:-1])
    if plan.out_shape[0] % inner:
        raise UsageError(
            f"{plan.call.operation}: {plan.out_shape[0]} rows do not fit x's inner dimensions "
            f"{tuple(x.shape[1:-1])}; give the first dimension of each rank's part by rows"
        )
    return (plan.out_shape[0] // inner, *x.shape[1:-1], w.shape[1])


def _given(
    call: Call, plan: Plan, flat: torch.Tensor, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    check_tensors(call.operation, flat, w, out)
    wanted = _shape(plan, x, w)
    if tuple(out.shape) != wanted or not out.is_contiguous():
        raise UsageError(
            f"{call.operation}: out has shape {tuple(out.shape)}"
            f"{'' if out.is_contiguous() else ' and is not contiguous'}; it must be contiguous, {wanted}"
        )
    for name, given in (("x", flat), ("w", w)):
        if _overlap(given, out):
            raise UsageError(f"{call.operation}: out shares memory with {name}; give it memory of its own")
    return out.view(plan.out_shape)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel() or a.device.type == "meta":
        return False
    (first, end), (other, last) = _span(a), _span(b)
    return first < last and other < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
