"""Gradients of the operations. What an all-gather brought together, a reduce-scatter takes apart, so each is
the other's backward; the gradient of w needs the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from weft.ops.collect import all_to_all, arrived, start_gather
from weft.ops.plan import Call, Plan
from weft.ops.run import prepare, run, run_planned


class Fused(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """Any of the operations. Kept for the gradient of w: x, or of an all-to-all what arrived."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: Any, call: Call) -> torch.Tensor:
        y, plan, kept = run_planned(call, x, w, group)
        if call.operation == "all_to_all_matmul":
            kept = arrived(plan.schedule, plan.executor.program, kept) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, w)
        ctx.plan, ctx.shape = plan, x.shape
        return y

    @staticmethod
    @once_differentiable  # type: ignore[misc,unused-ignore,untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = BACKWARDS[ctx.plan.call.operation]
        kept, w = ctx.saved_tensors
        return *gradients(ctx.plan, grad, kept, w, ctx.shape, ctx.needs_input_grad[:2]), None, None


def all_gather_matmul_backward(
    plan: Plan, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, shape: Any, needs: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and w. x is gathered again, beside the product that makes its own gradient."""
    grad = grad.reshape(plan.out_shape).contiguous()
    rows = plan.schedule.problem.rows
    gathering = start_gather(x, rows, plan.team) if needs[1] else None
    dx = (
        run(_backward("matmul_reduce_scatter", plan, rows), grad, w.t(), plan.team.group)
        if needs[0]
        else None
    )
    dw = gathering().t() @ grad if gathering else None
    return (None if dx is None else dx.view(shape)), dw


def matmul_reduce_scatter_backward(
    plan: Plan, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, shape: Any, needs: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and w. The gathered gradient serves both."""
    grad = grad.reshape(plan.out_shape).contiguous()
    rows = plan.schedule.problem.rows
    call = _backward("all_gather_matmul", plan, rows)
    dx, made, flat = run_planned(call, grad, w.t(), plan.team.group)
    whole = arrived(made.schedule, made.executor.program, flat) if needs[1] else None
    dw = None if whole is None else x.t() @ whole
    return (dx.view(shape) if needs[0] else None), dw


def all_to_all_matmul_backward(
    plan: Plan,
    grad: torch.Tensor,
    received: torch.Tensor | None,
    w: torch.Tensor,
    shape: Any,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and w: the product, then the blocks go back where they came from."""
    grad = grad.reshape(plan.out_shape).contiguous()
    problem = plan.schedule.problem
    dx = None
    if needs[0]:
        dx = all_to_all(grad @ w.t(), problem.rows or (), problem.sent or (), plan.team).view(shape)
    dw = None if received is None else received.t() @ grad
    return dx, dw


def backward_of(
    call: Call, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, group: Any, needs: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a call from its inputs alone; what an all-to-all brought is fetched once more."""
    flat, made, _ = prepare(call, x, w, group)
    kept: torch.Tensor | None = flat
    if call.operation == "all_to_all_matmul":
        problem = made.schedule.problem
        kept = all_to_all(flat, problem.sent or (), problem.rows or (), made.team) if needs[1] else None
    return BACKWARDS[call.operation](made, grad, kept, w, x.shape, needs)


BACKWARDS: dict[str, Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]] = {
    "all_gather_matmul": all_gather_matmul_backward,
    "matmul_reduce_scatter": matmul_reduce_scatter_backward,
    "all_to_all_matmul": all_to_all_matmul_backward,
}


def _backward(operation: str, plan: Plan, rows: tuple[int, ...] | None) -> Call:
    """The backward call: the schedule and engine that were asked for, or the shape's own."""
    call = plan.call
    return Call(operation, rows, None, call.schedule, call.engine, call.pieces)
