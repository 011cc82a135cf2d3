"""Measure the schedules of one operation where it runs, and remember the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import UnavailableError, UsageError
from weft.measure.race import Entry, Result, race, ratio_ci
from weft.ops import functions
from weft.ops.call import Call
from weft.ops.choose import Choice, workload
from weft.ops.prepare import problem_of
from weft.ops.schedule import OPERATIONS, Problem
from weft.ops.teams import Team, team_of
from weft.policy import ENGINES, SCHEDULES, Policy
from weft.tuning.store import Store, here

ROUNDS = 9


@dataclass(frozen=True)
class Tuned:
    """What `tune` found. Times are milliseconds, medians, of the slowest rank."""

    schedule: str
    engine: str
    pieces: int | None
    ms: float
    serial_ms: float
    gain_ci_pct: tuple[float, float]
    """Percent less time than serial, 95% interval, of measurements taken after the choice; 0 for serial."""
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
    rounds: int = ROUNDS,
    store: bool = True,
    **options: Any,
) -> Tuned:
    """Race every schedule on every engine, on all ranks; the fastest is used for calls like this one.

    Serial stays unless another schedule is faster beyond doubt, also when both are measured again. `options`:
    rows, or input_splits and output_splits. `store`: whether rank 0 writes the verdict to the store, from
    which later processes on machines like this one take it.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"operation {operation!r} is not known; use one of {', '.join(OPERATIONS)}")
    team, function = team_of(group), getattr(functions, operation)

    def measure(choice: Choice) -> float:
        return _slowest(team, x.device, _timed(function, x, w, group, choice, options))

    candidates = _candidates(team, x)
    for choice in candidates:
        measure(choice)  # the first call of each prepares it
    found = decide(candidates, measure, rounds)
    _keep(operation, x, w, team, found, store, options)
    return found


def decide(candidates: Sequence[Choice], measure: Callable[[Choice], float], rounds: int = ROUNDS) -> Tuned:
    """Race the candidates, in ms; the serial ones are the baselines."""
    baselines = [i for i, choice in enumerate(candidates) if choice.schedule == "serial"]
    result = race(candidates, measure, baselines=baselines, rounds=rounds, min_rounds=min(3, rounds))
    best, serial = _chosen(result)
    interval = (0.0, 0.0)
    if best is not serial:
        _, low, high = ratio_ci(best.again, serial.again)
        interval = (100 * (1 - high), 100 * (1 - low))
    return Tuned(
        *best.candidate,
        ms=best.ms,
        serial_ms=serial.ms,
        gain_ci_pct=interval,
        tried={_name(entry.candidate): entry.ms for entry in result.entries if entry.samples},
    )


def _chosen(result: Result[Choice]) -> tuple[Entry[Choice], Entry[Choice]]:
    """The winner, if the measurements that were taken after the choice confirm it, and the best baseline."""
    if result.chosen is None or result.best_baseline is None:
        reason = next((entry.problem for entry in result.entries if entry.failed), "no candidate")
        raise UnavailableError(f"no schedule could be measured here: {reason}")
    chosen, serial = result.entries[result.chosen], result.entries[result.best_baseline]
    if result.chosen in result.baselines or ratio_ci(chosen.again, serial.again)[2] >= 1.0:
        return serial, serial
    return chosen, serial


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
    """The same number on all ranks, so that all come to the same verdict."""
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
    """Write the verdict, and drop calls that were prepared before it was known."""
    team.drop(lambda prepared: prepared.call.operation == operation and prepared.call.schedule is None)
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
    return problem_of(Call(operation, rows, sent), (x.reshape(-1, x.shape[-1]),), (w,), team.rank, team.size)
