"""The operations as custom operators, which are opaque to torch.compile: it sees shapes, not schedules.

Meta and fake tensors use these operators too, to get the shapes of results without moving data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.ops.autograd import backward_of
from weft.ops.call import Call, out_rows
from weft.ops.operands import check_operands, out_dtype
from weft.ops.run import run_call
from weft.ops.teams import group_named, team_name, team_of


@torch.compiler.assume_constant_result  # type: ignore[misc,unused-ignore,untyped-decorator]
def place_in(name: str) -> str:
    """The `group` argument of the operators: a group's name, with this rank's place in it.

    The sizes of results depend on the rank, and Inductor's cache finds graphs by their text. Without the
    place, the cache could return a graph compiled by another rank, or in a job of another size.
    """
    team = team_of(group_named(name))
    return f"{team.rank} of {team.size} in {name}"


def _group_at(place: str) -> Any:
    return group_named(place.split(" in ", 1)[1])


@torch.library.custom_op("weft::fused_matmul", mutates_args=())  # type: ignore[misc,unused-ignore,untyped-decorator]
def fused_matmul(
    x: torch.Tensor,
    ws: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    call: str,
    group: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
) -> list[torch.Tensor]:
    asked = Call.decode(call, rows, sent)
    made = run_call(asked, (x,), ws, _group_at(group), scales=scales)
    if not asked.return_gathered:
        return made.outs
    gathered = made.gathered()
    return [*made.outs, gathered.view(*made.outs[0].shape[:-1], gathered.shape[-1])]


@fused_matmul.register_fake  # type: ignore[misc,unused-ignore,untyped-decorator]
def _(
    x: torch.Tensor,
    ws: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    call: str,
    group: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
) -> list[torch.Tensor]:
    asked = Call.decode(call, rows, sent)
    check_operands(asked, (x,), ws, scales)
    team = team_of(_group_at(group))
    shape = (out_rows(asked, x.shape, team.rank, team.size), *x.shape[1:-1])
    dtype = out_dtype(asked, x.dtype)
    made = [x.new_empty((*shape, w.shape[1]), dtype=dtype) for w in ws]
    return [*made, x.new_empty((*shape, x.shape[-1]))] if asked.return_gathered else made


@torch.library.custom_op("weft::fused_matmul_backward", mutates_args=())  # type: ignore[misc,unused-ignore,untyped-decorator]
def fused_matmul_backward(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor,
    ws: Sequence[torch.Tensor],
    call: str,
    group: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """The gradient of x and of each w; gradients that are not needed are empty tensors."""
    asked, (needs_x, *needs_w) = Call.decode(call, rows, sent), needs
    dx, dws = backward_of(asked, grads, x, ws, _group_at(group), (needs_x, needs_w))
    return [
        like.new_empty(0) if grad is None else grad.contiguous()
        for like, grad in zip((x, *ws), (dx, *dws), strict=True)
    ]


@fused_matmul_backward.register_fake  # type: ignore[misc,unused-ignore,untyped-decorator]
def _(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor,
    ws: Sequence[torch.Tensor],
    call: str,
    group: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    return [like.new_empty(like.shape if need else (0,)) for like, need in zip((x, *ws), needs, strict=True)]


@torch.library.custom_op("weft::fused_matmuls_reduce_scatter", mutates_args=())  # type: ignore[misc,unused-ignore,untyped-decorator]
def fused_matmuls_reduce_scatter(
    xs: Sequence[torch.Tensor],
    ws: Sequence[torch.Tensor],
    call: str,
    group: str,
    rows: Sequence[int] | None,
) -> torch.Tensor:
    """Sum several matmuls over all ranks, as the gradient of a gather with several weights needs.

    This operator has no gradient: it is for graphs that already contain the backward pass.
    """
    made: torch.Tensor = run_call(Call.decode(call, rows, None), xs, ws, _group_at(group)).outs[0]
    return made


@fused_matmuls_reduce_scatter.register_fake  # type: ignore[misc,unused-ignore,untyped-decorator]
def _(
    xs: Sequence[torch.Tensor],
    ws: Sequence[torch.Tensor],
    call: str,
    group: str,
    rows: Sequence[int] | None,
) -> torch.Tensor:
    asked = Call.decode(call, rows, None)
    check_operands(asked, xs, ws)
    team = team_of(_group_at(group))
    first = xs[0]
    shape = (out_rows(asked, first.shape, team.rank, team.size), *first.shape[1:-1], ws[0].shape[1])
    return first.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, ws, scales, *ctx.more = inputs
    ctx.save_for_backward(x, *ws)
    ctx.scales = len(scales)


def _differentiate(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    x, *ws = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
    made = fused_matmul_backward([grad.contiguous() for grad in grads], x, ws, *ctx.more, needs)
    dx, *dws = [grad if need else None for grad, need in zip(made, needs, strict=True)]
    return dx, dws, [None] * ctx.scales, *(None for _ in ctx.more)


fused_matmul.register_autograd(_differentiate, setup_context=_remember)


def compiled(
    call: Call, x: torch.Tensor, ws: Sequence[torch.Tensor], group: Any, scales: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a call through the custom operator; torch.compile traces this function."""
    made: list[torch.Tensor] = fused_matmul(
        x, list(ws), list(scales), call.encode(), place_in(team_name(group)), call.rows, call.sent
    )
    return made
