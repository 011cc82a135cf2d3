"""Runs one call without its gradient, from the caller's tensors to the results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from weft.errors import UsageError, WeftError
from weft.ops.call import Call
from weft.ops.collect import all_to_all, arrived, start_gather
from weft.ops.operands import Layout, kind
from weft.ops.prepare import PreparedCall, Tensors, prepared_call
from weft.ops.schedule import split
from weft.ops.teams import team_of


class Ran(NamedTuple):
    """The outcome of a call. A gather has a result for each weight, a reduce-scatter has one.

    Results have the shape of x except for the first and the last dimension.
    """

    outs: list[torch.Tensor]
    prepared: PreparedCall
    flats: Sequence[torch.Tensor]
    """Each x as a contiguous matrix."""

    def gathered(self) -> torch.Tensor:
        """All rows that were multiplied, in the order of the result, as one new matrix."""
        made = arrived(self.prepared.schedule, self.prepared.runner.program, self.flats[0])
        return made.clone() if made is self.flats[0] else made


def run_call(
    call: Call,
    xs: Tensors,
    ws: Tensors,
    group: Any = None,
    outs: Tensors | None = None,
    scales: Tensors = (),
) -> Ran:
    """Run an operation. A gather has one x and one or more w; a reduce-scatter has as many x as w."""
    flats, given, ws, prepared = prepare_call(call, xs, ws, group, scales, whole=outs is not None)
    if outs is None:
        results = [flats[0].new_empty(shape, dtype=prepared.out_dtype) for shape in prepared.out_shapes]
    else:
        try:
            results = _given(prepared, flats, xs[0], ws, outs)
        except WeftError as error:
            prepared.team.tell(call.operation, error)
            raise
    prepared.run((*flats, *ws, *results, *_for_all_rows(prepared, scales), *given))
    if outs is not None:
        return Ran(list(outs), prepared, flats)
    if xs[0].dim() != 2:
        shape = _shape(prepared, xs[0])
        results = [result.view(*shape, result.shape[1]) for result in results]
    return Ran(results, prepared, flats)


def prepare_call(
    call: Call, xs: Tensors, ws: Tensors, group: Any, scales: Tensors = (), *, whole: bool = False
) -> tuple[Tensors, Tensors, Tensors, PreparedCall]:
    """Returns each x as a contiguous matrix, the x that the call copies into these matrices, each w with one
    contiguous dimension, and the prepared call.

    If rows have another memory order (batch first), a reduce-scatter copies them just before the matmuls that
    read them, so that transfers need not wait for the last row. `whole`: copy them here instead.
    """
    flats: Sequence[torch.Tensor] = xs
    layouts: tuple[Layout, ...] = ()
    if xs[0].dim() != 2:
        try:
            call = _for_matrix(call, xs[0], group)
        except WeftError as error:
            refuse(call, group, error)
            raise
        if call.scatters and not whole:
            layouts = tuple((i, x.shape, x.stride()) for i, x in enumerate(xs) if _permuted(x))
        permuted = [i for i, *_ in layouts]
        flats = [
            x.new_empty(prod(x.shape[:-1]), x.shape[-1]) if i in permuted else x.reshape(-1, x.shape[-1])
            for i, x in enumerate(xs)
        ]
    flats = [flat.contiguous() for flat in flats]
    ws = [w if 1 in w.stride() else w.contiguous() for w in ws]
    given = [xs[i] for i, *_ in layouts]
    return flats, given, ws, prepared_call(call, flats, ws, group, scales, layouts)


def _permuted(x: torch.Tensor) -> bool:
    """Whether x is dense with contiguous rows in another order. A shape has few such layouts.

    Any other x is copied at once: each of its many layouts would need a prepared call with its own memory.
    """
    if x.is_contiguous() or x.stride(-1) != 1:
        return False
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    dense: bool = x.permute(order).is_contiguous()
    return dense


def refuse(call: Call, group: Any, error: WeftError) -> None:
    """Raise this error on every rank instead of making the call."""
    team = team_of(group)
    team.calls += 1
    team.refuse(call.operation, error)


def _for_matrix(call: Call, x: torch.Tensor, group: Any) -> Call:
    """The call for x as a matrix. An even split divides the first dimension of x, not the matrix rows."""
    if x.dim() < 2:
        raise UsageError(f"{call.operation}: A has {x.dim()} dimensions; it needs at least 2")
    team, inner = team_of(group), prod(x.shape[1:-1])
    if not inner:
        raise UsageError(
            f"{call.operation}: A is {tuple(x.shape)}; only the dimension that is gathered or "
            "scattered may be empty"
        )
    parts = tuple(count * inner for count in split(x.shape[0], team.size))
    if call.scatters and call.rows is None:
        return call._replace(rows=parts)
    if call.operation == "all_to_all_matmul" and call.sent is None and x.shape[0] % team.size:
        return call._replace(sent=parts, rows=(parts[team.rank],) * team.size)
    return call


def _for_all_rows(prepared: PreparedCall, scales: Tensors) -> list[torch.Tensor]:
    """The scales, contiguous. Scales of rows are exchanged like the rows themselves."""
    if not scales:
        return []
    first, problem = scales[0], prepared.schedule.problem
    if first.dim() > 1:
        first = first.reshape(-1, 1).contiguous()
        if prepared.call.operation == "all_gather_matmul":
            first = start_gather(first, problem.rows, prepared.team)()
        elif prepared.call.operation == "all_to_all_matmul":
            first = all_to_all(first, problem.sent or (), problem.rows or (), prepared.team)
    return [first, *(scale.contiguous() for scale in scales[1:])]


def _shape(prepared: PreparedCall, x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a result, without its columns."""
    inner, rows = prod(x.shape[1:-1]), prepared.out_shapes[0][0]
    if rows % inner:
        raise UsageError(
            f"{prepared.call.operation}: {rows} rows do not fit A's inner dimensions "
            f"{tuple(x.shape[1:-1])}; give the first dimension of each rank's part by rows"
        )
    return rows // inner, *x.shape[1:-1]


def _given(
    prepared: PreparedCall, flats: Tensors, x: torch.Tensor, ws: Tensors, outs: Tensors
) -> list[torch.Tensor]:
    """The caller's tensors for the results, checked and viewed as matrices."""
    operation = prepared.call.operation
    if len(outs) != len(prepared.out_shapes):
        raise UsageError(f"{operation}: out has {len(outs)} tensors for {len(prepared.out_shapes)} results")
    for out, (_, columns) in zip(outs, prepared.out_shapes, strict=True):
        if out.dtype != prepared.out_dtype or out.device != x.device:
            raise UsageError(f"{operation}: out is {kind(out)} and A is {kind(x)}; they must match")
        wanted = (*_shape(prepared, x), columns)
        if tuple(out.shape) != wanted or not out.is_contiguous():
            raise UsageError(
                f"{operation}: out has shape {tuple(out.shape)}"
                f"{'' if out.is_contiguous() else ' and is not contiguous'}; it must be contiguous, {wanted}"
            )
        named = [("A", flats[0]), *(("B", w) for w in ws), *(("out", o) for o in outs if o is not out)]
        for name, other in named:
            if _overlap(other, out):
                raise UsageError(f"{operation}: out shares memory with {name}; give it memory of its own")
    return [out.view(shape) for out, shape in zip(outs, prepared.out_shapes, strict=True)]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    (first, end), (other, last) = _span(a), _span(b)
    return first < last and other < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of addresses of a tensor."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
