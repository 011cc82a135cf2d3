"""Measures the schedules of one operation on the machine where it runs, and stores the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import UnavailableError, UsageError
from weft.measure.race import race
from weft.ops import functions
from weft.ops.call import Call
from weft.ops.choose import Choice, workload
from weft.ops.prepare import problem_of
from weft.ops.schedule import OPERATIONS, Problem
from weft.ops.teams import Team, team_of
from weft.policy import ENGINES, SCHEDULES, Policy
from weft.tuning.candidates import Candidate
from weft.tuning.lab import why_left_alone
from weft.tuning.store import Store, here
from weft.tuning.verdict import Measured, Verdict

_ROUNDS = 9


def tune(
    operation: str,
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any = None,
    *,
    rounds: int = _ROUNDS,
    store: bool = True,
    **options: Any,
) -> Verdict:
    """Race every schedule on every engine, on all ranks; later calls like this one use the fastest.

    Serial stays unless another schedule is significantly faster, and is so again when both are re-measured.
    `options`: rows, or input_splits and output_splits. `store`: whether rank 0 writes the verdict to the
    store, from which later calls take it, in all processes on machines like this one. Times are those of the
    slowest rank.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"operation {operation!r} is not known; use one of {', '.join(OPERATIONS)}")
    team, function = team_of(group), getattr(functions, operation)

    def measure(choice: Choice) -> float:
        return _slowest(team, x.device, _timed(function, x, w, group, choice, options))

    candidates = _candidates(team, x)
    for choice in candidates:
        measure(choice)  # the first call of each candidate prepares it
    choice, verdict = decide(candidates, measure, rounds)
    # Drop calls that were prepared before the verdict, so that they are prepared again with it.
    team.drop(lambda prepared: prepared.call.operation == operation and prepared.call.schedule is None)
    if store and team.rank == 0:
        name = workload(operation, _problem(operation, x, w, team, options), x.dtype, team.group)
        Store().put(here(name), verdict.policy, {**verdict.to_dict(), "pieces": choice.pieces})
    return verdict


def decide(
    candidates: Sequence[Choice], measure: Callable[[Choice], float], rounds: int = _ROUNDS
) -> tuple[Choice, Verdict]:
    """Race the candidates; `measure` returns ms. The serial candidates are the baselines."""
    baselines = [i for i, choice in enumerate(candidates) if choice.schedule == "serial"]
    labelled = [
        Candidate(_label(choice), Policy(schedule=choice.schedule, engine=choice.engine))
        for choice in candidates
    ]
    choices = dict(zip((each.label for each in labelled), candidates, strict=True))
    result = race(
        labelled,
        lambda each: measure(choices[each.label]),
        baselines=baselines,
        rounds=rounds,
        min_rounds=min(3, rounds),
    )
    baseline, chosen = result.best_baseline, result.chosen
    if chosen is None or baseline is None:
        reason = next((entry.problem for entry in result.entries if entry.failed), "no candidate")
        raise UnavailableError(f"no schedule could be measured here: {reason}")
    applies = chosen not in result.baselines
    best = result.entries[chosen if applies else baseline]
    middle, low, high = result.ratio(chosen) if applies else (1.0, 1.0, 1.0)
    verdict = Verdict(
        source="ops",
        policy=best.candidate.policy,
        chosen=best.candidate.label,
        applies=applies,
        gain_pct=100 * (1 - middle),
        gain_ci_pct=(100 * (1 - high), 100 * (1 - low)),
        best_ms=best.ms,
        baseline_ms=result.entries[baseline].ms,
        baseline="serial",
        reason="" if applies else why_left_alone(result, "noise"),
        measurements=result.measurements,
        candidates=tuple(map(Measured.of, result.entries)),
    )
    return choices[best.candidate.label], verdict


def _candidates(team: Team, x: torch.Tensor) -> list[Choice]:
    engines = ENGINES if x.device.type == "cuda" else ("sm",)
    made = [Choice(name, engine, None) for engine in engines for name in SCHEDULES]
    if team.size > 1:
        made += [Choice("hetero-fused-1d", engine, 2 * team.size) for engine in engines]
    return made


def _label(choice: Choice) -> str:
    return f"{choice.schedule}{f'/{choice.pieces}' if choice.pieces else ''} {choice.engine}"


def _timed(
    function: Any, x: torch.Tensor, w: torch.Tensor, group: Any, choice: Choice, options: dict[str, Any]
) -> float:
    cuda = x.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    with torch.no_grad():
        function(x, w, group, **choice._asdict(), **options)
    if cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) * 1000


def _slowest(team: Team, device: torch.device, ms: float) -> float:
    """The time of the slowest rank: the same number on all ranks, so that all reach the same verdict."""
    if team.size == 1 or getattr(team.group, "silent", False):
        return ms
    longest = torch.tensor(ms, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=team.group)
    return float(longest)


def _problem(
    operation: str, x: torch.Tensor, w: torch.Tensor, team: Team, options: dict[str, Any]
) -> Problem:
    inner = prod(x.shape[1:-1])
    rows, sent = (
        None if options.get(name) is None else tuple(count * inner for count in options[name])
        for name in ("output_splits" if operation == "all_to_all_matmul" else "rows", "input_splits")
    )
    return problem_of(Call(operation, rows, sent), (x.reshape(-1, x.shape[-1]),), (w,), team.rank, team.size)
