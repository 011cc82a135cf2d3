"""From a call to what runs: the sizes of the problem, the agreement of all ranks, the executor. Made once per
kind of call and kept with the group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from weft.errors import UsageError, WeftError
from weft.ops.choose import Choice, choose
from weft.ops.program import Program, check_tensors
from weft.ops.schedule import Problem, Schedule, build, split
from weft.ops.teams import Agreement, Facts, Team, team_of


class Executor(Protocol):
    """Runs one schedule, on the caller's current stream."""

    program: Program
    exchanges: bool
    """Whether a RuntimeError here may mean that a peer failed."""

    def run(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None: ...


class Call(NamedTuple):
    """What a caller asked for, besides the tensors."""

    operation: str
    rows: tuple[int, ...] | None = None
    sent: tuple[int, ...] | None = None
    schedule: str | None = None
    engine: str | None = None
    pieces: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    team: Team
    call: Call
    facts: Facts
    schedule: Schedule
    executor: Executor
    out_shape: tuple[int, int]
    choice: Choice
    agreement: Agreement

    def run(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        try:
            self.executor.run(x, w, out)
        except WeftError:
            raise
        except RuntimeError as error:
            if not self.executor.exchanges or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise self.team.explain(self.facts, error) from error


def plan_for(call: Call, x: torch.Tensor, w: torch.Tensor, group: Any) -> Plan:
    """The plan of a call; x is two-dimensional. Counts the call."""
    team = team_of(group)
    team.calls += 1
    key = (call, x.shape, w.shape, w.stride(), x.dtype, w.dtype, x.device)
    plan: Plan | None = team.plans.get(key)
    if plan is None:
        plan = _make(team, call, x, w)
        team.keep(key, plan)
    team.used(key, plan)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        team.hold(plan)
    return plan


def _make(team: Team, call: Call, x: torch.Tensor, w: torch.Tensor) -> Plan:
    try:
        check_tensors(call.operation, x, w, None)
        problem = problem_of(call, x, w, team.rank, team.size)
        asked = choose(call, problem, x, team)
        facts = _facts(call, problem, x, asked)
    except WeftError as error:
        team.refuse(call.operation, error)
        raise
    agreement = team.agreement(_kind(call, problem, facts), facts)
    choice = Choice(*agreement.everyone[0]["own choice"])
    schedule = build(call.operation, choice.schedule, _with_pieces(problem, choice.pieces), team.rank)
    with torch.inference_mode(False):  # scratch made there could not be written elsewhere
        executor = _executor(schedule, choice, agreement, x, w, team)
    return Plan(team, call, facts, schedule, executor, schedule.buffers["out"], choice, agreement)


def _kind(call: Call, problem: Problem, facts: Facts) -> str:
    """What makes a call one that the ranks have to agree on: what they have in common.

    Where the schedule follows from the sizes, so do those sizes; but not the blocks of an all-to-all, which
    each rank may change alone: there the schedule of the first call stays.
    """
    common = {name: fact for name, fact in facts.items() if not name.startswith("own ")}
    if call.schedule is None:
        common["own size"] = problem.k if call.operation == "matmul_reduce_scatter" else problem.n
    if call.operation == "all_to_all_matmul" and call.sent is None:
        common["own rows"] = problem.m
    return json.dumps(common)


def problem_of(call: Call, x: torch.Tensor, w: torch.Tensor, rank: int, ranks: int) -> Problem:
    """The sizes of a call, from what this rank knows."""
    rows, itemsize = x.shape[0], x.element_size()
    shape = {"n": w.shape[1], "k": w.shape[0], "ranks": ranks, "itemsize": itemsize}
    for name in ("rows", "sent"):
        counts = getattr(call, name)
        if counts is not None and len(counts) != ranks:
            raise UsageError(f"{call.operation}: {len(counts)} counts were given for {ranks} ranks")
    if call.operation == "all_gather_matmul":
        counts = call.rows or (rows,) * ranks
        if counts[rank] != rows:
            raise UsageError(
                f"{call.operation}: rows says {counts[rank]} for rank {rank}, whose x has {rows} rows"
            )
        return Problem(m=sum(counts), rows=counts, **shape)
    if call.operation == "matmul_reduce_scatter":
        counts = call.rows or split(rows, ranks)
        if sum(counts) != rows:
            raise UsageError(f"{call.operation}: rows add up to {sum(counts)}, but x has {rows} rows")
        return Problem(m=rows, rows=counts, **shape)
    sent = call.sent or split(rows, ranks)
    if sum(sent) != rows:
        raise UsageError(f"{call.operation}: input_splits add up to {sum(sent)}, but x has {rows} rows")
    return Problem(m=rows, rows=call.rows or (sent[rank],) * ranks, sent=sent, **shape)


def out_rows(operation: str, shape: Sequence[int], rows: Sequence[int] | None, rank: int, ranks: int) -> int:
    """The first dimension of the result, for an x of this shape. `rows` counts rows of the flattened x."""
    first = shape[0]
    inner = prod(shape[1:-1])
    if rows is not None:
        counted = rows[rank] if operation == "matmul_reduce_scatter" else sum(rows)
        return counted // inner
    if operation == "all_gather_matmul":
        return first * ranks
    mine = (first + ranks - 1 - rank) // ranks  # as `split` has it, for sizes known and symbolic
    return mine if operation == "matmul_reduce_scatter" else mine * ranks


def _facts(call: Call, problem: Problem, x: torch.Tensor, choice: Choice) -> dict[str, Any]:
    """What all ranks must have in common; `own …` is each rank's own."""
    facts: dict[str, Any] = {
        "operation": call.operation,
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": x.device.type,
        "schedule": call.schedule or "left open",
        "engine": call.engine or "left open",
        "pieces": call.pieces or "left open",
        "own choice": [choice.schedule, choice.engine, choice.pieces],
    }
    if call.operation == "matmul_reduce_scatter":
        facts["columns of w"] = problem.n
        facts["rows"] = list(problem.rows or ())
    else:
        facts["columns of x"] = problem.k
        if call.operation == "all_gather_matmul":
            facts["rows"] = list(problem.rows or ())
        else:
            facts["blocks"] = "even" if call.sent is None else "given"
            facts["own sent"] = list(problem.sent or ())
            facts["own received"] = list(problem.rows or ())
    return facts


def _with_pieces(problem: Problem, pieces: int | None) -> Problem:
    return Problem(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        ranks=problem.ranks,
        itemsize=problem.itemsize,
        pieces=pieces,
        rows=problem.rows,
        sent=problem.sent,
    )


def _executor(
    schedule: Schedule,
    choice: Choice,
    agreement: Agreement,
    x: torch.Tensor,
    w: torch.Tensor,
    team: Team,
) -> Executor:
    strides = (w.stride(0), w.stride(1))
    if team.size == 1 or x.device.type != "cuda":
        from weft.ops.execute_cpu import LocalExecutor, MessageExecutor

        program = Program(schedule, x.dtype, x.device, strides)
        return (
            LocalExecutor(schedule, program)
            if team.size == 1
            else MessageExecutor(schedule, program, team.group)
        )
    from weft.ops.engines import cuda_executor

    return cuda_executor(schedule, choice.engine, agreement, x.dtype, x.device, strides, team)
