"""Decides whether a fused operation is expected to be faster than the collective and the GEMM in sequence.

weft replaces a program's operations only if it expects a gain. The answer must be the same on all ranks: it
is rank 0's, or depends only on sizes that all ranks have in common.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.ops.call import Call
from weft.ops.choose import choose, pick_arguments
from weft.ops.operands import DTYPES
from weft.ops.steps import Problem
from weft.ops.teams import Team, group_named, team_of
from weft.shim.inject import BY_PICK, OPS_VARIABLE, REPLACE_ALL

_log = logging.getLogger("weft.ops")

EVERYWHERE = "hetero-fused-1d"
"""The schedule to use if everything is replaced."""
LEAST_TRANSFER_S = 20e-6
"""Shorter transfers are not replaced: they cannot gain more than a call costs on the CPU (docs/ops.md)."""


def replaces_all() -> bool:
    return os.environ.get(OPS_VARIABLE) == REPLACE_ALL


def replaces_on(device: torch.device) -> bool:
    """Whether anything is replaced on this device: CPUs only in the mode that replaces everything."""
    return replaces_all() or (device.type == "cuda" and os.environ.get(OPS_VARIABLE) == BY_PICK)


def forced_schedule() -> str | None:
    return EVERYWHERE if replaces_all() else None


def promised(team: Team, call: Call, problem: Problem, x: torch.Tensor) -> bool:
    """Whether rank 0 expects a gain. The first call for these sizes exchanges messages between all ranks."""
    if replaces_all():
        return x.dtype in DTYPES and _can_move(team, x)
    columns = problem.n if call.scatters else problem.k
    if not may_gain(call.operation, problem.m, columns, problem.ranks, x) or not _can_move(team, x):
        return False
    key = (call.operation, problem, x.dtype)
    found = team.promises.get(key)
    if found is None:
        team.calls += 1
        sizes = [problem.m, problem.n, problem.k]
        facts = {"operation": call.operation, "sizes": sizes, "own promise": _expects(call, problem, x, team)}
        found = team.promises[key] = bool(team.agree(facts)[0]["own promise"])
    return found


def _can_move(team: Team, x: torch.Tensor) -> bool:
    """Whether x can be moved between the ranks. If not, the program is left unchanged."""
    if x.device.type != "cuda" or team.size == 1:
        return True
    from weft.ops.engines import can_move

    return can_move(team, x.device)


def fits_graph(operation: str, rows: int, columns: int, ranks: int, x: Any, group: str) -> bool:
    """`may_gain` for a compiled graph. Its group must have NCCL, since ranks cannot communicate here."""
    if not may_gain(operation, rows, columns, ranks, x):
        return False
    if x.device.type != "cuda" or replaces_all():
        return True
    from weft.ops.engines import no_nccl

    team = team_of(group_named(group))
    lacking = no_nccl(team.group)
    team.unreachable = "" if lacking is None else str(lacking)
    return lacking is None


def graph_conditions() -> tuple[str | None, tuple[str, ...]]:
    """What `fits_graph` depends on besides the graph and weft's code: the mode, and groups without NCCL."""
    mode = os.environ.get(OPS_VARIABLE)
    if mode == REPLACE_ALL or not dist.is_available() or not dist.is_initialized():
        return mode, ()
    from weft.ops.engines import no_nccl

    groups = dist.distributed_c10d._world.pg_map
    return mode, tuple(sorted(str(each.group_name) for each in groups if no_nccl(each) is not None))


def _expects(call: Call, problem: Problem, x: torch.Tensor, team: Team) -> bool:
    try:
        return choose(call, problem, x, team).schedule != "serial"
    except WeftError as error:
        _log.debug("%s is not replaced: %s", call.operation, error)
        return False


def may_gain(operation: str, rows: int, columns: int, ranks: int, x: Any) -> bool:
    """Whether a transfer of `rows` by `columns` is long enough to be worth hiding, whatever the weight."""
    if x.dtype not in DTYPES:  # the operation would reject it
        return False
    if replaces_all():
        return True
    if not replaces_on(x.device) or ranks == 1:
        return False
    kind, gpu = pick_arguments(x)
    return _transfer_s(operation, int(rows), int(columns), ranks, kind, gpu) >= LEAST_TRANSFER_S


@lru_cache(maxsize=1024)
def _transfer_s(operation: str, rows: int, columns: int, ranks: int, dtype: str, gpu: str) -> float:
    from weft.ops.case import Case, library_collective_s

    try:
        case = Case(operation=operation, m=rows, n=columns, k=columns, ranks=ranks, dtype=dtype, gpu=gpu)
        return library_collective_s(case)
    except WeftError as error:
        _log.debug("%s is not replaced: %s", operation, error)
        return 0.0
