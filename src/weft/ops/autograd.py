"""Gradients of the operations.

All-gather and reduce-scatter are each other's gradient. The gradient of w needs the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from weft.ops.call import Call
from weft.ops.collect import all_to_all, start_gather
from weft.ops.prepare import PreparedCall, Tensors
from weft.ops.run import prepare_call, run_call

Gradients: TypeAlias = tuple[torch.Tensor | None, list[torch.Tensor | None]]
"""The gradient of x (or None), and the gradient of each w (or None)."""


class Fused(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """Any of the operations. For the gradient of w it saves x, or the gathered rows if they are available."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, group: Any, x: torch.Tensor, *ws: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = run_call(call, (x,), ws, group)
        results = tuple(made.outs)
        kept: torch.Tensor | None = made.flats[0]
        ctx.whole = call.return_gathered or (call.operation == "all_to_all_matmul")
        if ctx.whole:
            wanted = call.return_gathered or any(ctx.needs_input_grad[3:])
            kept = made.gathered() if wanted else None
        if call.return_gathered and kept is not None:
            results = (*results, kept.view(*results[0].shape[:-1], kept.shape[-1]))
        ctx.save_for_backward(kept, *ws)
        ctx.prepared, ctx.shape = made.prepared, x.shape
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable  # type: ignore[misc,unused-ignore,untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        kept, *ws = ctx.saved_tensors
        needs = (ctx.needs_input_grad[2], ctx.needs_input_grad[3:])
        dx, dws = backward(ctx.prepared, grads, kept, ctx.whole, ws, ctx.shape, needs)
        return None, None, dx, *dws


def backward(
    prepared: PreparedCall,
    grads: Sequence[torch.Tensor | None],
    kept: torch.Tensor | None,
    whole: bool,
    ws: Tensors,
    shape: Sequence[int],
    needs: tuple[bool, Sequence[bool]],
) -> Gradients:
    """The gradients of x and every w. `kept`: all rows that were multiplied if `whole`, else x."""
    shapes = prepared.out_shapes
    if prepared.call.return_gathered:
        *grads, of_gathered = grads
    else:
        of_gathered = None
    if all(grad is None for grad in grads):
        dx, dws = None, [None] * len(ws)
    else:
        rows = next(grad.shape[:-1] for grad in grads if grad is not None)
        every = [
            w.new_zeros(*rows, w.shape[1]) if grad is None else grad
            for grad, w in zip(grads, ws, strict=True)
        ]
        needs_w = [need and grad is not None for need, grad in zip(needs[1], grads, strict=True)]
        asked = _Backward(prepared, every, kept, whole, ws, needs[0], needs_w)
        dx, dws = BACKWARDS[prepared.call.operation](asked)
    if of_gathered is not None and needs[0]:
        returned = _sum_over_ranks(
            prepared, of_gathered.reshape(shapes[0][0], prepared.schedule.problem.k).contiguous()
        )
        dx = returned if dx is None else dx.view(returned.shape) + returned
    return (None if dx is None else dx.view(shape)), dws


@dataclass(frozen=True, slots=True)
class _Backward:
    """The inputs of one call's backward pass."""

    prepared: PreparedCall
    grads: Tensors
    """Gradient of each result, in the result's shape and any memory order."""
    kept: torch.Tensor | None
    whole: bool
    """Whether `kept` holds all rows that were multiplied, rather than x."""
    ws: Tensors
    needs_x: bool
    needs_w: Sequence[bool]

    def matrices(self) -> list[torch.Tensor]:
        """The gradients of the results as contiguous matrices."""
        shapes = self.prepared.out_shapes
        return [grad.reshape(made).contiguous() for grad, made in zip(self.grads, shapes, strict=True)]

    def gradients_of_w(self, rows: torch.Tensor | None, grads: Tensors) -> list[torch.Tensor | None]:
        """The gradient of each w. `rows`: all rows that were multiplied; `grads`: as matrices."""
        return [
            None if rows is None or not need else rows.t() @ grad
            for grad, need in zip(grads, self.needs_w, strict=True)
        ]


def _all_gather_matmul(of: _Backward) -> Gradients:
    """Gathers x again for the gradient of w, concurrently with the matmuls for the gradient of x."""
    prepared, kept = of.prepared, of.kept
    assert kept is not None
    rows, team = prepared.schedule.problem.rows, prepared.team
    gathering: Callable[[], torch.Tensor] = lambda: kept  # noqa: E731
    if any(of.needs_w) and not of.whole:
        gathering = start_gather(kept, rows, team)
    if of.needs_x:
        call = prepared.call.backward("matmul_reduce_scatter", rows)
        made = run_call(call, of.grads, [w.t() for w in of.ws], team.group)
        dx, grads = made.outs[0], made.flats
    else:
        dx, grads = None, of.matrices()
    gathered = gathering() if any(of.needs_w) else None
    return dx, of.gradients_of_w(gathered, grads)


def _matmul_reduce_scatter(of: _Backward) -> Gradients:
    """Gathers the gradient once, for both x and w."""
    assert of.kept is not None
    call = of.prepared.call.backward("all_gather_matmul", of.prepared.schedule.problem.rows)
    made = run_call(call, of.matrices(), [of.ws[0].t()], of.prepared.team.group)
    dw = of.kept.t() @ made.gathered() if of.needs_w[0] else None
    return (made.outs[0] if of.needs_x else None), [dw]


def _all_to_all_matmul(of: _Backward) -> Gradients:
    """Multiplies, then sends the blocks back to the ranks they came from."""
    problem, dx, grads = of.prepared.schedule.problem, None, of.matrices()
    if of.needs_x:
        blocks = grads[0] @ of.ws[0].t()
        for grad, w in zip(grads[1:], of.ws[1:], strict=True):
            blocks = torch.addmm(blocks, grad, w.t())
        dx = all_to_all(blocks, problem.rows or (), problem.sent or (), of.prepared.team)
    return dx, of.gradients_of_w(of.kept, grads)


def _sum_over_ranks(prepared: PreparedCall, grad: torch.Tensor) -> torch.Tensor:
    """Sum the gradient of the gathered x over the ranks, for this rank's rows."""
    problem, team = prepared.schedule.problem, prepared.team
    rows = problem.rows or ()
    if prepared.call.operation == "all_to_all_matmul":
        return all_to_all(grad, rows, problem.sent or (), team)
    mine = rows[team.rank]
    parts = all_to_all(grad, rows, (mine,) * team.size, team)
    return parts.view(team.size, mine, problem.k).sum(0)


def backward_of(
    call: Call,
    grads: Sequence[torch.Tensor | None],
    x: torch.Tensor,
    ws: Tensors,
    group: Any,
    needs: tuple[bool, Sequence[bool]],
) -> Gradients:
    """The gradients of a call from its inputs alone; repeats the all-to-all to get the rows it received."""
    (flat,), given, ws, prepared = prepare_call(call, (x,), ws, group)
    if given:
        flat = x.reshape(flat.shape)  # the forward matmuls, which would copy the rows, do not run here
    kept: torch.Tensor | None = flat
    whole = call.operation == "all_to_all_matmul"
    if whole:
        problem = prepared.schedule.problem
        sent, received = problem.sent or (), problem.rows or ()
        kept = all_to_all(flat, sent, received, prepared.team) if any(needs[1]) else None
    return backward(prepared, grads, kept, whole, ws, x.shape, needs)


BACKWARDS: dict[str, Callable[..., Gradients]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "all_to_all_matmul": _all_to_all_matmul,
}
