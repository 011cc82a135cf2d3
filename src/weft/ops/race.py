"""Measure the schedules of one operation where it runs, and remember the best."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.measure.intervals import ratio_ci
from weft.ops import functions
from weft.ops.choose import Choice, workload
from weft.ops.plan import Call, problem_of
from weft.ops.schedule import OPERATIONS, Problem
from weft.ops.teams import Team, team_of
from weft.policy import ENGINES, SCHEDULES, Policy
from weft.tuning.store import Store, here


@dataclass(frozen=True)
class Tuned:
    """What `tune` found. Times are milliseconds, medians, of the slowest rank."""

    schedule: str
    engine: str
    pieces: int | None
    ms: float
    serial_ms: float
    tried: dict[str, float]

    @property
    def policy(self) -> Policy:
        return Policy(schedule=self.schedule, engine=self.engine)


def tune(
    operation: str,
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any = None,
    *,
    rounds: int = 9,
    store: bool = True,
    **options: Any,
) -> Tuned:
    """Run every schedule with every engine in turn, on all ranks; keep the fastest for calls like this one.

    Serial stays unless another is faster beyond doubt. `options`: rows, or input_splits and output_splits.
    `store`: whether rank 0 writes the verdict, which later processes on machines like this then use.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"operation {operation!r} is not known; use one of {', '.join(OPERATIONS)}")
    team, function = team_of(group), getattr(functions, operation)
    candidates = _candidates(team, x)
    samples: dict[Choice, list[float]] = {choice: [] for choice in candidates}
    turns = random.Random(0)
    for number in range(rounds + 1):
        for choice in turns.sample(candidates, len(candidates)):
            ms = _slowest(team, x.device, _timed(function, x, w, group, choice, options))
            if number:  # the first call makes the plan
                samples[choice].append(ms)
    best = min(samples, key=lambda choice: median(samples[choice]))
    serial = min((c for c in samples if c.schedule == "serial"), key=lambda choice: median(samples[choice]))
    if ratio_ci(samples[best], samples[serial])[1] >= 1.0:
        best = serial
    found = Tuned(
        *best,
        ms=median(samples[best]),
        serial_ms=median(samples[serial]),
        tried={_name(choice): median(times) for choice, times in samples.items()},
    )
    _keep(operation, x, w, team, found, store, options)
    return found


def _candidates(team: Team, x: torch.Tensor) -> list[Choice]:
    engines = ENGINES if x.device.type == "cuda" else ("sm",)
    made = [Choice(name, engine, None) for engine in engines for name in SCHEDULES]
    if team.size > 1:
        made += [Choice("hetero-fused-1d", engine, 2 * team.size) for engine in engines]
    return made


def _name(choice: Choice) -> str:
    return f"{choice.schedule}{f'/{choice.pieces}' if choice.pieces else ''} {choice.engine}"


def _timed(
    function: Any, x: torch.Tensor, w: torch.Tensor, group: Any, choice: Choice, options: dict[str, Any]
) -> float:
    schedule, engine, pieces = choice
    cuda = x.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    with torch.no_grad():
        function(x, w, group, schedule=schedule, engine=engine, pieces=pieces, **options)
    if cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) * 1000


def _slowest(team: Team, device: torch.device, ms: float) -> float:
    if team.size == 1 or getattr(team.group, "silent", False):
        return ms
    longest = torch.tensor(ms, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=team.group)
    return float(longest)


def _keep(
    operation: str,
    x: torch.Tensor,
    w: torch.Tensor,
    team: Team,
    found: Tuned,
    store: bool,
    options: dict[str, Any],
) -> None:
    """Write the verdict, and make no plan of before answer for it."""
    team.drop(lambda plan: plan.call.operation == operation and plan.call.schedule is None)
    if store and team.rank == 0:
        name = workload(operation, _problem(operation, x, w, team, options), x.dtype, team.group)
        gain = found.serial_ms / found.ms - 1
        text = f"{found.schedule} on {found.engine}: {gain:+.1%} over serial"
        document = {"text": text, "pieces": found.pieces, "ms": found.ms, "serial_ms": found.serial_ms}
        Store().put(here(name), found.policy, document)


def _problem(
    operation: str, x: torch.Tensor, w: torch.Tensor, team: Team, options: dict[str, Any]
) -> Problem:
    inner = prod(x.shape[1:-1])
    rows, sent = (
        None if options.get(name) is None else tuple(count * inner for count in options[name])
        for name in ("output_splits" if operation == "all_to_all_matmul" else "rows", "input_splits")
    )
    return problem_of(Call(operation, rows, sent), x.reshape(-1, x.shape[-1]), w, team.rank, team.size)
