"""The operations as custom operators, which torch.compile keeps whole: it sees shapes, not schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import UsageError
from weft.ops.autograd import backward_of
from weft.ops.plan import Call, out_rows
from weft.ops.run import run
from weft.ops.teams import group_named, name_of, team_of


@torch.library.custom_op("weft::fused_matmul", mutates_args=())  # type: ignore[misc,unused-ignore,untyped-decorator]
def fused_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    operation: str,
    group: str,
    rows: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
) -> torch.Tensor:
    return run(_call(operation, rows, sent, schedule, engine, pieces), x, w, group_named(group))


@fused_matmul.register_fake  # type: ignore[misc,unused-ignore,untyped-decorator]
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    operation: str,
    group: str,
    rows: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
    schedule: str | None = None,
    engine: str | None = None,
    pieces: int | None = None,
) -> torch.Tensor:
    if x.shape[-1] != w.shape[0]:
        raise UsageError(
            f"{operation}: x has {x.shape[-1]} columns and w has {w.shape[0]} rows; they must be equal"
        )
    team = team_of(group_named(group))
    first = out_rows(operation, x.shape, rows, team.rank, team.size)
    return x.new_empty((first, *x.shape[1:-1], w.shape[1]))


@torch.library.custom_op("weft::fused_matmul_backward", mutates_args=())  # type: ignore[misc,unused-ignore,untyped-decorator]
def fused_matmul_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    operation: str,
    group: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    schedule: str | None,
    engine: str | None,
    pieces: int | None,
    needs_x: bool,
    needs_w: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(operation, rows, sent, schedule, engine, pieces)
    dx, dw = backward_of(call, grad, x, w, group_named(group), (needs_x, needs_w))
    return (x.new_empty(0) if dx is None else dx), (w.new_empty(0) if dw is None else dw.contiguous())


@fused_matmul_backward.register_fake  # type: ignore[misc,unused-ignore,untyped-decorator]
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    operation: str,
    group: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    schedule: str | None,
    engine: str | None,
    pieces: int | None,
    needs_x: bool,
    needs_w: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if needs_x else (0,)), w.new_empty(w.shape if needs_w else (0,))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, *ctx.more = inputs
    ctx.save_for_backward(x, w)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w = ctx.needs_input_grad[:2]
    dx, dw = fused_matmul_backward(grad.contiguous(), x, w, *ctx.more, needs_x, needs_w)
    return (dx if needs_x else None), (dw if needs_w else None), *(None for _ in ctx.more)


fused_matmul.register_autograd(_differentiate, setup_context=_remember)


def compiled(
    operation: str,
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    schedule: str | None,
    engine: str | None,
    pieces: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """What torch.compile traces."""
    named = name_of(group)
    made: torch.Tensor = fused_matmul(x, w, operation, named, rows, sent, schedule, engine, pieces)
    if out is None:
        return made
    if out.shape != made.shape or out.dtype != made.dtype:
        raise UsageError(
            f"{operation}: out is {tuple(out.shape)} {out.dtype}; it must be {tuple(made.shape)} {made.dtype}"
        )
    return out.copy_(made)


def _call(
    operation: str,
    rows: Sequence[int] | None,
    sent: Sequence[int] | None,
    schedule: str | None,
    engine: str | None,
    pieces: int | None,
) -> Call:
    return Call(
        operation,
        None if rows is None else tuple(rows),
        None if sent is None else tuple(sent),
        schedule,
        engine,
        pieces,
    )
