"""Which schedule and which engine an operation uses: what was asked for, else what the shape suggests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import UsageError
from weft.ops.steps import Problem
from weft.policy import ENGINES, SCHEDULES

if TYPE_CHECKING:
    from weft.ops.plan import Call
    from weft.ops.teams import Team

SMALL_FLOPS = 2e9  # a product below this takes microseconds: cutting it costs more than it hides


class Choice(NamedTuple):
    schedule: str
    engine: str
    pieces: int | None


def choose(call: Call, problem: Problem, x: Any, team: Team) -> Choice:
    """The schedule, engine and pieces of a call. A name that is not known is refused."""
    if call.schedule is not None and call.schedule not in SCHEDULES:
        raise UsageError(f"schedule {call.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
    if call.engine is not None and call.engine not in ENGINES:
        raise UsageError(f"engine {call.engine!r} is not known; use one of {', '.join(ENGINES)}")
    if call.pieces is not None and call.pieces < 1:
        raise UsageError(f"pieces {call.pieces!r} is not possible; use a whole number from 1")
    engine = call.engine or _engine(x, team)
    return Choice(call.schedule or _schedule(call.operation, problem), engine, call.pieces)


def _engine(x: Any, team: Team) -> str:
    if x.device.type != "cuda" or team.size == 1:
        return "sm"
    return "dma"


def _schedule(operation: str, problem: Problem) -> str:
    if problem.ranks == 1 or 2 * problem.m * problem.n * problem.k < SMALL_FLOPS:
        return "serial"
    return "hetero-fused-1d"
