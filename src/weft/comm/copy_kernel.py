"""A copy kernel in Triton: the counterpart on SMs of a copy by a copy engine. Needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CTAS = 16  # about as many as NCCL uses on a Hopper node
MOST_COLUMNS = 8192
WARPS = 16


@triton.jit  # type: ignore[misc,unused-ignore,untyped-decorator]
def weft_copy(
    source: tl.tensor,
    target: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    source_pitch: tl.tensor,
    target_pitch: tl.tensor,
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    """Copy rows of equal length, one section of a row at a time."""
    stretches = tl.cdiv(cols, COLUMNS)
    for i in range(tl.program_id(0), rows * stretches, tl.num_programs(0)):
        row = tl.cast(i // stretches, tl.int64)
        place = (i % stretches) * COLUMNS + tl.arange(0, COLUMNS)
        inside = place < cols
        taken = tl.load(source + row * source_pitch + place, mask=inside)
        tl.store(target + row * target_pitch + place, taken, mask=inside)


def launch_copy(source: Any, target: Any, stream: Any) -> None:
    """Copy a matrix on a stream. The rows of both matrices must be contiguous."""
    rows, cols = target.shape
    with torch.cuda.stream(stream):
        weft_copy[(CTAS,)](
            source,
            target,
            rows,
            cols,
            source.stride(0),
            target.stride(0),
            COLUMNS=min(MOST_COLUMNS, triton.next_power_of_2(cols)),
            num_warps=WARPS,
        )
