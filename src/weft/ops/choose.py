"""Chooses the schedule and engine of an operation.

In order of precedence: the call's own `schedule` and `engine`, or its policy's; a verdict in the store,
measured on this kind of machine (`weft.ops.tune`); the pick from the sizes alone. Rank 0 decides for all.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.comm.dma import HostPeers
from weft.comm.paced_peers import PacedPeers
from weft.errors import UsageError, WeftError
from weft.ops.steps import Problem
from weft.policy import ENGINES, SCHEDULES

if TYPE_CHECKING:
    from weft.ops.call import Call
    from weft.ops.teams import Team

SMALL_FLOPS = 2e9  # CPU only: cutting a smaller GEMM costs more than it hides
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ACCUMULATES = "uniform-fused-2d"
_SAID: set[str] = set()


class Choice(NamedTuple):
    schedule: str
    engine: str
    pieces: int | None


def choose(call: Call, problem: Problem, x: Any, team: Team) -> Choice:
    """The schedule, engine and pieces of a call. Raises UsageError for unknown names."""
    if call.schedule is not None and call.schedule not in SCHEDULES:
        raise UsageError(f"schedule {call.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
    if call.engine is not None and call.engine not in ENGINES:
        raise UsageError(f"engine {call.engine!r} is not known; use one of {', '.join(ENGINES)}")
    if call.pieces is not None and call.pieces < 1:
        raise UsageError(f"pieces {call.pieces!r} is not valid; use an integer from 1")
    if call.schedule == ACCUMULATES and _is_fp8(x) and not call.scatters:
        raise UsageError(f"schedule {ACCUMULATES} adds up over K, which fp8 cannot; leave the schedule open")
    if call.schedule is not None:
        return Choice(call.schedule, call.engine or _usual_engine(call.schedule, x, team), call.pieces)
    found = _found(call, problem, x, team)
    return Choice(found.schedule, call.engine or found.engine, call.pieces or found.pieces)


def _usual_engine(schedule: str, x: Any, team: Team) -> str:
    """The engine for a schedule that the caller set; independent of sizes, which may differ between ranks."""
    library = schedule == "serial" and not isinstance(team.group, HostPeers)
    library = library or (isinstance(team.group, PacedPeers) and not team.group.copies)
    return "sm" if library or x.device.type != "cuda" else "dma"


def _found(call: Call, problem: Problem, x: Any, team: Team) -> Choice:
    if problem.ranks == 1:
        return Choice("serial", "sm", None)
    measured = _stored(call.operation, problem, x, team)
    if measured is not None:
        return measured
    if x.device.type != "cuda":
        small = 2 * problem.m * problem.n * problem.k < SMALL_FLOPS
        return Choice("serial" if small else "hetero-fused-1d", "sm", None)
    return _picked(call, problem, x, team)


def workload(operation: str, problem: Problem, dtype: Any, group: Any) -> str:
    """The name under which the store keeps a verdict on an operation."""
    where = "host peers" if isinstance(group, HostPeers) else "ranks"
    where = f"peers of {group.node.name}" if isinstance(group, PacedPeers) else where
    kind = str(dtype).removeprefix("torch.")
    return f"weft.ops {operation} {problem.m}x{problem.n}x{problem.k} {kind} {problem.ranks} {where}"


def _stored(operation: str, problem: Problem, x: Any, team: Team) -> Choice | None:
    """The choice of a stored verdict; None without one. If the store cannot be read, warns once."""
    from weft.tuning.store import Store, here

    try:
        entry = Store().get(here(workload(operation, problem, x.dtype, team.group)))
    except WeftError as error:
        say_once(f"weft.ops: no stored verdicts: {error}")
        return None
    if entry is None or entry.stale or entry.policy.schedule is None:
        return None
    pieces = entry.verdict.get("pieces")
    return Choice(entry.policy.schedule, entry.policy.engine, pieces if isinstance(pieces, int) else None)


def _picked(call: Call, problem: Problem, x: Any, team: Team) -> Choice:
    from weft.ops.pick import pick

    topology, gpu = "host" if isinstance(team.group, HostPeers) else "", _profile_name(x.device)
    engines = (call.engine,) if call.engine else ("dma", "sm")
    if isinstance(team.group, PacedPeers):
        topology, gpu = "", team.group.node.gpu
        engines = engines if call.engine or team.group.copies else ("sm",)
    k, kind = problem.k, _DTYPES.get(str(x.dtype).removeprefix("torch."), "bf16")
    if _is_fp8(x):
        k = max(1, k // 2)  # fp8 has half the bytes and half the time of bf16, like half the K
    sizes = (problem.m, problem.n, k, problem.ranks)
    found = pick(call.operation, *sizes, kind, gpu, topology, engines=engines)
    if found.schedule == ACCUMULATES and _is_fp8(x) and not call.scatters:
        return Choice("hetero-unfused-1d", found.engine, None)
    return Choice(found.schedule, found.engine, None)


def _is_fp8(x: Any) -> bool:
    return "float8" in str(x.dtype)


def _profile_name(device: Any) -> str:
    import torch

    from weft.sim.profile import by_title

    try:
        return by_title(torch.cuda.get_device_name(device)).name
    except WeftError as error:
        say_once(f"weft.ops: {error}; schedules are picked as for an h100")
        return "h100"


def pick_arguments(x: Any) -> tuple[str, str]:
    """The dtype and the GPU of a tensor, under the names that `pick` uses."""
    return _DTYPES.get(str(x.dtype).removeprefix("torch."), "bf16"), _profile_name(x.device)


def say_once(text: str) -> None:
    """Warn with this text, unless this process already did."""
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
