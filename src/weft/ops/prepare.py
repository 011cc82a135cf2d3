"""Prepares a call: the sizes of the problem, the agreement of all ranks, the runner.

Each kind of call is prepared once and cached with the group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from weft.errors import UsageError, WeftError
from weft.ops.call import Call
from weft.ops.choose import Choice, choose
from weft.ops.operands import Layout, Operands, check_operands
from weft.ops.program import Program
from weft.ops.schedule import Problem, Schedule, build, split
from weft.ops.teams import RankFacts, Team, TeamAgreement, team_of

Tensors = Sequence[torch.Tensor]


class ScheduleRunner(Protocol):
    """Runs one schedule, on the caller's current stream."""

    program: Program
    exchanges: bool
    """Whether a RuntimeError here may mean that a peer failed."""

    def run(self, tensors: Tensors) -> None:
        """Run on the caller's tensors, in the order of `Operands.names`."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that all ranks agreed on, with its runner and scratch memory."""

    team: Team
    call: Call
    facts: RankFacts
    schedule: Schedule
    runner: ScheduleRunner
    out_shapes: tuple[tuple[int, int], ...]
    out_dtype: torch.dtype
    choice: Choice
    agreement: TeamAgreement

    def run(self, tensors: Tensors) -> None:
        try:
            self.runner.run(tensors)
        except WeftError:
            raise
        except Exception as error:
            own = isinstance(error, torch.cuda.OutOfMemoryError) or not isinstance(error, RuntimeError)
            if own or not self.runner.exchanges:
                reason = (str(error).splitlines() or [""])[0]
                self.team.tell(self.call.operation, WeftError(f"{type(error).__name__}: {reason}"))
                raise
            raise self.team.explain(self.facts, error) from error


def prepared_call(
    call: Call,
    xs: Tensors,
    ws: Tensors,
    group: Any,
    scales: Tensors = (),
    layouts: tuple[Layout, ...] = (),
) -> PreparedCall:
    """The prepared call, from the cache if possible. Counts the call. Each x is two-dimensional.

    `layouts`: those of each x that the call fills itself (`Operands.layouts`).
    """
    team = team_of(group)
    team.calls += 1
    x = xs[0]
    key = (
        call,
        x.dtype,
        x.device,
        *[each.shape for each in xs],
        *[(w.shape, w.stride(), w.dtype) for w in ws],
        *[(scale.shape, scale.dtype) for scale in scales],
        *layouts,
    )
    prepared: PreparedCall | None = team.prepared.get(key)
    if prepared is None:
        prepared = _prepare(team, call, xs, ws, scales, layouts)
        team.keep(key, prepared)
    team.used(key, prepared)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        team.hold(prepared)
    return prepared


def _prepare(
    team: Team, call: Call, xs: Tensors, ws: Tensors, scales: Tensors, layouts: tuple[Layout, ...]
) -> PreparedCall:
    try:
        check_operands(call, xs, ws, scales)
        problem = problem_of(call, xs, ws, team.rank, team.size)
        asked = choose(call, problem, xs[0], team)
        facts = _facts(call, problem, xs[0], asked, scales)
    except WeftError as error:
        team.refuse(call.operation, error)
        raise
    agreement = team.agreement(_kind(call, problem, facts), facts)
    choice = Choice(*agreement.everyone[0]["own choice"])
    problem = replace(problem, pieces=choice.pieces)
    schedule = build(call.operation, choice.schedule, problem, team.rank)
    operands = Operands.of(call, xs, ws, scales, layouts)
    with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
        runner = _runner(schedule, choice, agreement, operands, team)
    rows, columns = schedule.buffers["out"]
    widths = (columns,) if call.scatters else operands.widths
    shapes = tuple((rows, width) for width in widths)
    return PreparedCall(team, call, facts, schedule, runner, shapes, operands.out_dtype, choice, agreement)


def _kind(call: Call, problem: Problem, facts: RankFacts) -> str:
    """The kind of a call, on which the ranks agree once: the facts that they have in common.

    If the schedule follows from the sizes, the kind includes this rank's sizes. It never includes the given
    blocks of an all-to-all, which a rank may change alone; the schedule of the first call then stays.
    """
    common = {name: fact for name, fact in facts.items() if not name.startswith("own ")}
    if call.schedule is None:
        common["own size"] = problem.k if call.scatters else problem.n
    if call.operation == "all_to_all_matmul" and call.sent is None:
        common["own rows"] = problem.m
    return json.dumps(common)


def problem_of(call: Call, xs: Tensors, ws: Tensors, rank: int, ranks: int) -> Problem:
    """The sizes of a call, as this rank knows them."""
    rows = xs[0].shape[0]
    shape: dict[str, Any] = {
        "n": ws[0].shape[1] if call.scatters else sum(w.shape[1] for w in ws),
        "k": sum(x.shape[1] for x in xs),
        "ranks": ranks,
        "itemsize": 2 if call.scatters and xs[0].element_size() == 1 else xs[0].element_size(),
        "direct": xs[0].element_size() == 1,
    }
    for name in ("rows", "sent"):
        counts = getattr(call, name)
        if counts is not None and len(counts) != ranks:
            raise UsageError(f"{call.operation}: {len(counts)} counts were given for {ranks} ranks")
    if call.operation == "all_gather_matmul":
        counts = call.rows or (rows,) * ranks
        if counts[rank] != rows:
            raise UsageError(
                f"{call.operation}: rows says {counts[rank]} for rank {rank}, whose A has {rows} rows"
            )
        return Problem(m=sum(counts), rows=counts, **shape)
    if call.scatters:
        counts = call.rows or split(rows, ranks)
        if sum(counts) != rows:
            raise UsageError(f"{call.operation}: rows add up to {sum(counts)}, but A has {rows} rows")
        return Problem(m=rows, rows=counts, **shape)
    sent = call.sent or split(rows, ranks)
    if sum(sent) != rows:
        raise UsageError(f"{call.operation}: input_splits add up to {sum(sent)}, but A has {rows} rows")
    return Problem(m=rows, rows=call.rows or (sent[rank],) * ranks, sent=sent, **shape)


def _facts(call: Call, problem: Problem, x: torch.Tensor, choice: Choice, scales: Tensors) -> dict[str, Any]:
    """The facts about a call that must be equal on all ranks, except those named `own …`."""
    facts: dict[str, Any] = {
        "operation": call.operation,
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": x.device.type,
        "dimension": call.dim,
        "schedule": call.schedule or "left open",
        "engine": call.engine or "left open",
        "pieces": call.pieces or "left open",
        "result's dtype": call.out_dtype or "left open",
        "scales": "none" if not scales else "of rows" if scales[0].dim() > 1 else "of tensors",
        "own choice": [choice.schedule, choice.engine, choice.pieces],
    }
    if call.scatters:
        facts["columns of B"] = problem.n
        facts["rows"] = list(problem.rows or ())
    else:
        facts["columns of A"] = problem.k
        if call.operation == "all_gather_matmul":
            facts["rows"] = list(problem.rows or ())
        else:
            facts["blocks"] = "even" if call.sent is None else "given"
            facts["own sent"] = list(problem.sent or ())
            facts["own received"] = list(problem.rows or ())
    return facts


def _runner(
    schedule: Schedule, choice: Choice, agreement: TeamAgreement, operands: Operands, team: Team
) -> ScheduleRunner:
    if team.size == 1 or operands.device.type != "cuda":
        from weft.ops.run_messages import LocalRunner, MessageRunner

        program = Program(schedule, operands)
        if team.size == 1:
            return LocalRunner(schedule, program)
        return MessageRunner(schedule, program, team)
    from weft.ops.engines import stream_runner

    return stream_runner(schedule, choice.engine, agreement, operands, team)
