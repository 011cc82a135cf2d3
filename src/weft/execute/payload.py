"""What the ranks send and what they must receive: small whole numbers, which every dtype adds exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.execute.base import WrongResultError
from weft.workload import Workload

PERIOD = 7  # does not divide the parts of usual sizes, so a part in the wrong place shows
SAMPLED = 4096


def torch_dtype(name: str) -> Any:
    """torch's dtype of that short name."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def sizes(workload: Workload) -> tuple[int, int]:
    """Elements of a rank's send and receive buffer."""
    whole, part = workload.elements, workload.elements // workload.ranks
    return {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(
        workload.collective, (whole, whole)
    )


def value(rank: int, index: Any) -> Any:
    """Element `index` of what a rank sends; at most PERIOD + 3, so 16 ranks add up exactly in bf16."""
    return (index + 3 * rank) % PERIOD + rank % 4


def make_send(workload: Workload, rank: int, device: Any) -> Any:
    """A rank's send buffer."""
    import torch

    count = sizes(workload)[0]
    buffer = torch.empty(count, dtype=torch_dtype(workload.compute.dtype), device=device)
    step = 1 << 26  # in pieces: index arithmetic in 64 bits would need four times the buffer
    for start in range(0, count, step):
        index = torch.arange(start, min(start + step, count), device=device)
        buffer[start : start + len(index)] = value(rank, index).to(buffer.dtype)
    return buffer


def expected(workload: Workload, rank: int, index: Any, op: str = "sum") -> Any:
    """What a rank must find at `index` (a tensor of positions) of its receive buffer, as float64.

    `op` is what an all-reduce does, `sum` or `max`.
    """
    import torch

    ranks, part = workload.ranks, workload.elements // workload.ranks
    if workload.collective == "all_reduce":
        parts = torch.stack([value(r, index) for r in range(ranks)])
        total = parts.sum(0) if op == "sum" else parts.amax(0)
    elif workload.collective == "reduce_scatter":
        total = sum(value(r, index + rank * part) for r in range(ranks))
    elif workload.collective == "all_gather":
        total = value(index // part, index % part)
    else:
        total = value(index // part, index % part + rank * part)
    return total.to(torch.float64)


def sample_positions(workload: Workload, seed: int, device: Any) -> Any:
    """Positions of a receive buffer to look at: both ends, the seams between parts, and random ones."""
    import torch

    count, part = sizes(workload)[1], max(1, workload.elements // workload.ranks)
    seams = torch.arange(0, count + 1, part)[: SAMPLED // 4]
    some = torch.randint(0, count, (min(SAMPLED, count),), generator=torch.Generator().manual_seed(seed))
    every = torch.cat([some, seams, seams - 1]).clamp(0, count - 1)
    return torch.unique(every).to(device)


@dataclass
class Buffers:
    """Send and receive buffers of all ranks, and where to look for the right result."""

    send: list[Any]
    recv: list[Any]
    positions: Any
    wanted: list[Any]

    @classmethod
    def make(cls, workload: Workload, device: Any) -> Buffers:
        """Buffers of all ranks on one device; what is received is NaN until it is."""
        import torch

        ranks = range(workload.ranks)
        send = [make_send(workload, rank, device) for rank in ranks]
        count = sizes(workload)[1]
        recv = [torch.full((count,), math.nan, dtype=send[0].dtype, device=device) for _ in ranks]
        positions = sample_positions(workload, 0, device)
        wanted = [expected(workload, rank, positions).to(send[0].dtype) for rank in ranks]
        return cls(send, recv, positions, wanted)

    def poison(self) -> None:
        """Overwrite what will be looked at."""
        for buffer in self.recv:
            buffer[self.positions] = math.nan

    def check(self, workload: Workload) -> None:
        """Raise if a rank did not receive what it must."""
        for rank, (buffer, wanted) in enumerate(zip(self.recv, self.wanted, strict=True)):
            got = buffer[self.positions]
            if not bool((got == wanted).all()):
                where = int((got != wanted).nonzero()[0])
                raise WrongResultError(
                    f"{workload}: {workload.collective} gave rank {rank} {float(got[where])} at element "
                    f"{int(self.positions[where])} where {float(wanted[where])} is right"
                )
