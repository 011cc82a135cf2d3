"""Operands: maps the x, w and result of a schedule to the caller's tensors, with one or several weights.

A schedule has one x, one w and one result. Several weights after one gather are column blocks of w, and their
results are column blocks of the result. Several inputs of one reduce-scatter (the gradient of such a gather)
are column blocks of x, and their weights are row blocks of w. This module turns each matmul and copy of the
schedule into one for each weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import torch

from weft.errors import UsageError
from weft.ops.call import Call
from weft.ops.steps import Copy, Matmul, Region, Schedule

NARROW_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW_DTYPES)
"""Dtypes that operations multiply without scales."""
FP8_DTYPES = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))
Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a view."""
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Index of an x, and the size and strides of the caller's tensor for it."""


@dataclass(frozen=True)
class Operands:
    """Dtypes, strides and widths of the tensors of a call."""

    dtype: torch.dtype
    device: torch.device
    scatters: bool
    widths: tuple[int, ...]
    """Gather: columns of each w. Reduce-scatter: columns of each x."""
    w_strides: tuple[tuple[int, int], ...]
    out_dtype: torch.dtype
    scale_rows: bool | None = None
    """Whether there is a scale for each row of x, rather than one for all. None: no scales."""
    scale_columns: tuple[bool, ...] = ()
    """For each weight, whether there is a scale for each column."""
    fast_accum: bool = False
    layouts: tuple[Layout, ...] = ()
    """Reduce-scatter only: each x whose rows have another memory order and are copied before the matmuls."""

    @classmethod
    def of(
        cls,
        call: Call,
        xs: Sequence[torch.Tensor],
        ws: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        layouts: tuple[Layout, ...] = (),
    ) -> Operands:
        dtype = xs[0].dtype
        return cls(
            dtype=dtype,
            device=xs[0].device,
            scatters=call.scatters,
            widths=tuple(x.shape[1] for x in xs) if call.scatters else tuple(w.shape[1] for w in ws),
            w_strides=tuple((w.stride(0), w.stride(1)) for w in ws),
            out_dtype=out_dtype(call, dtype),
            scale_rows=scales[0].dim() > 1 if scales else None,
            scale_columns=tuple(scale.dim() > 1 for scale in scales[1:]),
            fast_accum=call.fast_accum,
            layouts=layouts,
        )

    @property
    def scaled(self) -> bool:
        return self.scale_rows is not None

    @property
    def moved_dtype(self) -> torch.dtype:
        """Dtype of the data that ranks exchange: rows of x, or partial results."""
        return self.out_dtype if self.scatters else self.dtype

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the caller's tensors, in the order in which they are bound."""
        numbers = range(len(self.widths))
        xs = self._numbered("x") if self.scatters else ("x",)
        outs = ("out",) if self.scatters else self._numbered("out")
        scales = ("scale.a", *(f"scale.b.{i}" for i in numbers)) if self.scaled else ()
        return *xs, *self._numbered("w"), *outs, *scales, *(given_name(xs[i]) for i, *_ in self.layouts)

    def _numbered(self, name: str) -> tuple[str, ...]:
        return (name,) if len(self.widths) == 1 else tuple(f"{name}.{i}" for i in range(len(self.widths)))

    def strides(self, schedule: Schedule) -> Iterator[tuple[str, tuple[int, int]]]:
        """Row and column strides of x, w and out. All but w are contiguous."""
        yield from zip(self._numbered("w"), self.w_strides, strict=True)
        whole, divided = ("out", "x") if self.scatters else ("x", "out")
        yield whole, (schedule.buffers[whole][1], 1)
        for name, width in zip(self._numbered(divided), self.widths, strict=True):
            yield name, (width, 1)

    def dtype_of(self, buffer: str) -> torch.dtype:
        """Dtype of a scratch buffer, which holds gathered or staged rows of x, or results."""
        holds_x = buffer.startswith("scratch" if self.scatters else "gather")
        return self.dtype if holds_x else self.out_dtype

    @cached_property
    def _columns(self) -> list[tuple[int, int]]:
        """First column and width of each weight's part."""
        return [(sum(self.widths[:i]), width) for i, width in enumerate(self.widths)]

    def _part(self, region: Region, i: int) -> Region:
        """The columns of weight `i` in a region of x (reduce-scatter), out (gather) or scratch."""
        start, width = self._columns[i]
        if region.buffer in ("x", "out"):
            return Region(self._numbered(region.buffer)[i], region.row, region.rows, 0, width)
        return Region(region.buffer, region.row, region.rows, start, width)

    def matmuls(self, step: Matmul) -> Iterator[tuple[tuple[Region, ...], Region, tuple[Region, ...]]]:
        """The matmuls of a step, one for each weight."""
        if len(self.widths) == 1:
            yield step.a, step.b, step.c
            return
        for i, (_, width) in enumerate(self._columns):
            name = self._numbered("w")[i]
            if self.scatters:
                a = tuple(self._part(region, i) for region in step.a)
                yield a, Region(name, 0, width, step.b.col, step.b.cols), step.c
            else:
                c = tuple(self._part(region, i) for region in step.c)
                yield step.a, Region(name, step.b.row, step.b.rows, 0, width), c

    def rows_given(
        self, first: int, rows: int
    ) -> Iterator[tuple[str, range, tuple[int, ...], tuple[int, ...]]]:
        """For each x in another order: its name, the range of its first dimension that holds these rows, its
        size and its strides."""
        for i, size, strides in self.layouts:
            inner = prod(size[1:-1])
            held = range(first // inner, -(-(first + rows) // inner))
            yield self._numbered("x")[i], held, size, strides

    def copies(self, step: Copy) -> Iterator[tuple[Sequence[Region], Sequence[Region]]]:
        """The copies of a step; one for each weight if they involve x (reduce-scatter) or out (gather)."""
        divided = "x" if self.scatters else "out"
        if len(self.widths) == 1 or divided not in (step.sources[0].buffer, step.targets[0].buffer):
            yield step.sources, step.targets
            return
        for i in range(len(self.widths)):
            yield [self._part(s, i) for s in step.sources], [self._part(t, i) for t in step.targets]

    def scale_of_rows(self, rows: Region) -> Strided:
        """The view of the scales of some rows of x, or of the single scale."""
        return ((rows.rows, 1), (1, 1), rows.row) if self.scale_rows else ((), (), 0)

    def scale_of_columns(self, b: Region) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
        """Name and view of the scales of some columns of a weight, or of its single scale."""
        i = 0 if b.buffer == "w" else int(b.buffer.removeprefix("w."))
        if not self.scale_columns[i]:
            return f"scale.b.{i}", (), (), 0
        return f"scale.b.{i}", (1, b.cols), (b.cols, 1), b.col


def given_name(x: str) -> str:
    """Name of the caller's tensor for an x whose rows have another memory order."""
    return f"{x}.given"


def out_dtype(call: Call, dtype: torch.dtype) -> torch.dtype:
    if call.out_dtype is not None:
        made: torch.dtype = getattr(torch, call.out_dtype)
        return made
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def check_operands(
    call: Call, xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
) -> None:
    """Raise UsageError for tensors that cannot be multiplied; the error names the sizes that do not fit."""
    for i, w in enumerate(ws):
        x = xs[i] if len(xs) > 1 else xs[0]
        if x.dim() < 2 or w.dim() != 2:
            raise UsageError(
                f"{call.operation}: A has {x.dim()} dimensions and B has {w.dim()}; A needs at least 2, "
                "B exactly 2"
            )
        if x.shape[-1] != w.shape[0]:
            raise UsageError(
                f"{call.operation}: A has {x.shape[-1]} columns and B has {w.shape[0]} rows; they must be "
                "equal"
            )
        if not w.shape[1]:
            raise UsageError(f"{call.operation}: B has no columns; leave it out")
        fp8 = x.dtype in FP8_DTYPES and w.dtype in FP8_DTYPES
        if (x.dtype != w.dtype and not fp8) or x.device != w.device:
            raise UsageError(
                f"{call.operation}: A is {kind(x)} and B is {kind(w)}; both must have one dtype on one device"
            )
    if xs[0].dtype in FP8_DTYPES:
        _check_scales(call, xs[0], ws, scales)
    elif xs[0].dtype not in DTYPES:
        raise UsageError(
            f"{call.operation}: dtype {xs[0].dtype} is not supported; use bfloat16, float16, float32, or fp8 "
            "with scales"
        )
    elif scales:
        raise UsageError(f"{call.operation}: scales are for fp8, and A is {kind(xs[0])}; leave them out")


def _check_scales(
    call: Call, x: torch.Tensor, ws: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> None:
    if len(scales) != 1 + len(ws):
        raise UsageError(f"{call.operation}: A is {kind(x)}; give A_scale and a B_scale for each weight")
    wanted = ((prod(x.shape[:-1]), 1), *((1, w.shape[1]) for w in ws))
    for name, scale, shape in zip(("A_scale", *["B_scale"] * len(ws)), scales, wanted, strict=True):
        if scale.dtype != torch.float32 or scale.device != x.device:
            raise UsageError(f"{call.operation}: {name} is {kind(scale)}; it must be float32 on {x.device}")
        matrix = (scale.numel() // scale.shape[-1], scale.shape[-1]) if scale.dim() > 1 else None
        if matrix != shape if matrix else scale.numel() != 1:
            raise UsageError(
                f"{call.operation}: {name} is {tuple(scale.shape)}; give one number, or {shape} for the "
                "rows of A and the columns of B"
            )
    if len({scale.dim() > 1 for scale in scales}) > 1:
        raise UsageError(f"{call.operation}: give one scale for each tensor, or all for rows and columns")
    if scales[0].dim() > 1 and x.device.type == "cpu" and not scales_rows_on_cpus():
        raise UsageError(
            f"{call.operation}: this torch has no fp8 scales of rows and columns on CPUs; give one scale for "
            "each tensor"
        )
    if any(w.stride(0) != 1 for w in ws if w.shape[0] > 1):
        raise UsageError(
            f"{call.operation}: an fp8 B must be column-major; give weight.t() of a contiguous weight"
        )


@cache
def scales_rows_on_cpus() -> bool:
    """Whether this torch has fp8 matmuls on CPUs with a scale for each row and column (2.11 does not)."""
    x, one = torch.zeros(16, 16).to(FP8_DTYPES[0]), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), one, one.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
