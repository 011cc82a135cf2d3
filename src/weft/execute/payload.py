"""Data that ranks send and are expected to receive: small integers, which every dtype adds exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.execute.base import WrongResultError
from weft.workload import Workload

PERIOD = 7
"""Period of the data. It divides no common part size, so that a misplaced part is detected."""
SAMPLED = 4096
"""Number of random elements that are verified."""


def torch_dtype(name: str) -> Any:
    """The torch dtype with this short name."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def buffer_sizes(workload: Workload) -> tuple[int, int]:
    """Elements of a rank's send and receive buffers."""
    whole, part = workload.elements, workload.elements // workload.ranks
    return {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(
        workload.collective, (whole, whole)
    )


def value(rank: int, index: Any) -> Any:
    """Element `index` of a rank's send buffer: at most PERIOD + 2, so bf16 adds up 16 ranks exactly."""
    return (index + 3 * rank) % PERIOD + rank % 4


def make_send(workload: Workload, rank: int, device: Any) -> Any:
    """The send buffer of a rank."""
    import torch

    count = buffer_sizes(workload)[0]
    buffer = torch.empty(count, dtype=torch_dtype(workload.compute.dtype), device=device)
    step = 1 << 26  # in chunks: 64-bit indices would need four times the memory of the buffer
    for start in range(0, count, step):
        index = torch.arange(start, min(start + step, count), device=device)
        buffer[start : start + len(index)] = value(rank, index).to(buffer.dtype)
    return buffer


def expected_values(
    workload: Workload, rank: int, index: Any, op: str = "sum", *, mirrored: bool = False
) -> Any:
    """Expected values at `index` (a tensor of positions) of a rank's receive buffer, as float64.

    `op`: reduction of an all-reduce, `sum` or `max`. `mirrored`: every rank has the data of `rank`.
    """
    import torch

    ranks, part = workload.ranks, workload.elements // workload.ranks

    def sent(source: Any, at: Any) -> Any:
        return value(rank if mirrored else source, at)

    if workload.collective == "all_reduce":
        parts = torch.stack([sent(r, index) for r in range(ranks)])
        total = parts.sum(0) if op == "sum" else parts.amax(0)
    elif workload.collective == "reduce_scatter":
        total = sum(sent(r, index + rank * part) for r in range(ranks))
    elif workload.collective == "all_gather":
        total = sent(index // part, index % part)
    else:
        total = sent(index // part, index % part + rank * part)
    return total.to(torch.float64)


def sample_positions(workload: Workload, seed: int, device: Any) -> Any:
    """Positions of a receive buffer to verify: both ends, part boundaries, and random positions."""
    import torch

    count, part = buffer_sizes(workload)[1], max(1, workload.elements // workload.ranks)
    boundaries = torch.arange(0, count + 1, part)[: SAMPLED // 4]
    some = torch.randint(0, count, (min(SAMPLED, count),), generator=torch.Generator().manual_seed(seed))
    every = torch.cat([some, boundaries, boundaries - 1]).clamp(0, count - 1)
    return torch.unique(every).to(device)


@dataclass
class Buffers:
    """Buffers of the ranks in this process, with the positions to verify and their expected values."""

    send: list[Any]
    recv: list[Any]
    positions: Any
    wanted: list[Any]

    @classmethod
    def make(
        cls, workload: Workload, device: Any, ranks_here: int | None = None, *, mirrored: bool = False
    ) -> Buffers:
        """Buffers of all ranks, or of the first `ranks_here`; receive buffers are filled with NaN.

        `mirrored`: every rank has the data of the receiving rank.
        """
        import torch

        ranks = range(workload.ranks if ranks_here is None else ranks_here)
        send = [make_send(workload, rank, device) for rank in ranks]
        count = buffer_sizes(workload)[1]
        recv = [torch.full((count,), math.nan, dtype=send[0].dtype, device=device) for _ in ranks]
        positions = sample_positions(workload, 0, device)
        wanted = [
            expected_values(workload, rank, positions, mirrored=mirrored).to(send[0].dtype) for rank in ranks
        ]
        return cls(send, recv, positions, wanted)

    def poison(self) -> None:
        """Overwrite the positions that are verified with NaN."""
        for buffer in self.recv:
            buffer[self.positions] = math.nan

    def check(self, workload: Workload) -> None:
        """Raise WrongResultError if a rank received a wrong value."""
        for rank, (buffer, wanted) in enumerate(zip(self.recv, self.wanted, strict=True)):
            got = buffer[self.positions]
            if not bool((got == wanted).all()):
                where = int((got != wanted).nonzero()[0])
                raise WrongResultError(
                    f"{workload}: {workload.collective} gave rank {rank} {float(got[where])} at element "
                    f"{int(self.positions[where])} instead of {float(wanted[where])}"
                )
