"""Reductions of ghost ranks: weft's names for torch's operations, and the part the collective cannot do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.comm.ghost_lane import Lane, on_stream
from weft.comm.paced import sums_type
from weft.errors import UsageError

_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "MAX": "max",
    "MIN": "min",
    "PRODUCT": "product",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}


_OF_BOOLS = {"sum": "max", "product": "min"}
"""Replacements for booleans: a sum is their OR, a product their AND, as in torch's NCCL groups."""


def reduction(opts: Any, dtype: Any) -> tuple[str, Any]:
    """weft's name of a reduction, and the factor of a PREMUL_SUM (None for other reductions).

    `opts`: a torch ReduceOp, or a call's options that contain one; None: SUM. `dtype`: of the tensors. In a
    PREMUL_SUM each rank multiplies its data by the factor. The mean times ranks and factor gives the same
    result and cannot overflow, so PREMUL_SUM is named `avg`.
    """
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    for known, name in _NAMES.items():
        if op == getattr(dist.ReduceOp, known):
            return _OF_BOOLS.get(name, name) if dtype == torch.bool else name, None
    if op == dist.ReduceOp.PREMUL_SUM:
        return "avg", op.__getstate__()[1]
    raise UsageError(f"the ghost backend has no reduction {op}; use {', '.join(_NAMES)} or PREMUL_SUM")


def reduce_ranks(lane: Lane, kind: str, send: Any, recv: Any, op: str, mirror: bool) -> None:
    """Issue an `all_reduce` or `reduce_scatter`.

    All ranks have equal data, so a bitwise reduction returns that data, as `max` does; an XOR over an even
    number of ranks is zero instead, see `complete_reduction`.
    """
    bitwise = op in ("band", "bor", "bxor")
    if bitwise and lane.streams:
        raise UsageError(f"NCCL has no bitwise reduction {op.upper()}; use SUM, AVG, MAX, MIN or PRODUCT")
    if bitwise and not mirror:
        raise UsageError("bitwise reductions need ghosts with rank 0's data: leave WEFT_GHOST_MIRROR out")
    getattr(lane.ranks, kind)(send, recv, lane.streams, "max" if bitwise else op)


def complete_reduction(lane: Lane, own: int, ranks: int, out: Any, op: str, factor: Any) -> None:
    """Apply what the collective did not: the factor, XOR, and sums or products a paced kernel lacks."""
    paced = lane.own is not None
    powers = paced and op == "product"
    sums = paced and op == "sum" and not sums_type(out.dtype)
    clears = op == "bxor" and ranks % 2 == 0
    if factor is None and not (powers or sums or clears):
        return
    with on_stream(lane.streams[own] if lane.streams else None):
        if factor is not None:
            out.mul_(factor * ranks)
        elif clears:
            out.zero_()
        elif powers:
            out.pow_(ranks)
        else:
            out.mul_(ranks)
