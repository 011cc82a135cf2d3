"""Schedules of a collective fused with a GEMM: lists of steps, as data. All runners use the same definition.

A schedule lists what one rank sends, receives, multiplies, copies and adds, and the order of these steps. It
says nothing about the time that a step takes.

| operation | x on each rank | moved | result on each rank |
| --- | --- | --- | --- |
| `all_gather_matmul` | its shard: some rows, k columns | rows of x | all m rows of x, times w |
| `all_to_all_matmul` | m rows, a block of them for each rank | rows of x | the blocks sent to it, times w |
| `matmul_reduce_scatter` | m rows, k columns | rows of x @ w | its rows of the sum over ranks of x @ w |

The names (`weft.policy.SCHEDULES`): `serial` moves everything, then multiplies (or multiplies, then moves);
`shard` moves one rank's whole shard per round, in ring order. The finer schedules cut each shard further, by
default into as many pieces as there are ranks, so that each round exchanges one piece with every peer at
once. `hetero`: the local shard is one large GEMM, which hides the first transfer (the last one of a
reduce-scatter); `uniform`: the local shard is cut like the others. `fused`: one GEMM per round; `unfused`:
one GEMM per peer. `1d` pieces are rows. `2d` pieces are columns: of k, accumulated in the result, or of n if
the result of the GEMM is what moves.

Steps that share a resource (the compute units, the link to one peer) run in list order. `after` names the
other steps that a step waits for; they are always earlier in the list.
"""

from __future__ import annotations

from weft.errors import UsageError
from weft.ops.build_gather import Gather
from weft.ops.build_scatter import Scatter
from weft.ops.builder import shards, split
from weft.ops.steps import Add, Copy, Matmul, Problem, Recv, Region, Schedule, Send, Step, runs
from weft.policy import SCHEDULES

__all__ = [
    "OPERATIONS",
    "Add",
    "Copy",
    "Matmul",
    "Problem",
    "Recv",
    "Region",
    "Schedule",
    "Send",
    "Step",
    "build",
    "runs",
    "shards",
    "split",
]

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul")


def build(operation: str, name: str, problem: Problem, rank: int) -> Schedule:
    """The schedule of one rank. All ranks' schedules have the same rounds, so sends and receives match."""
    if operation not in OPERATIONS:
        raise UsageError(f"operation {operation!r} is not known; use one of {', '.join(OPERATIONS)}")
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name!r} is not known; use one of {', '.join(SCHEDULES)}")
    if not 0 <= rank < problem.ranks:
        raise UsageError(f"rank {rank} is not one of {problem.ranks}")
    builder = Scatter if operation == "matmul_reduce_scatter" else Gather
    return builder(operation, name, problem, rank).schedule()
