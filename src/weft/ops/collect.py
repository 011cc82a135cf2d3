"""Collects the rows that an operation multiplied, and runs the plain collectives that gradients need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.dma import HostPeers
from weft.errors import UsageError
from weft.ops.program import Program
from weft.ops.steps import Recv, Schedule
from weft.ops.teams import Team


def arrived(schedule: Schedule, program: Program, x: torch.Tensor) -> torch.Tensor:
    """All rows that were multiplied, in the order of the result, as one new tensor; x itself for one rank."""
    if schedule.problem.ranks == 1:
        return x
    if "gather" in program.tensors:  # the serial schedule gathers into one buffer in this order
        return program.tensors["gather"].clone()
    whole = x.new_empty(schedule.buffers["out"][0], schedule.problem.k)
    incoming = schedule.problem.rows or ()
    rank = schedule.rank
    starts = [sum(incoming[:peer]) for peer in range(len(incoming))]
    mine = sum((schedule.problem.sent or ())[:rank]) if schedule.problem.sent else 0
    whole.narrow(0, starts[rank], incoming[rank]).copy_(x.narrow(0, mine, incoming[rank]))
    done = dict.fromkeys(range(len(incoming)), 0)
    for step in schedule.steps:
        if isinstance(step, Recv):
            here = step.target
            piece = program.tensors[here.buffer].narrow(0, here.row, here.rows)
            if here.cols == schedule.problem.k:
                whole.narrow(0, starts[step.peer] + done[step.peer], here.rows).copy_(piece)
                done[step.peer] += here.rows
            else:
                rows = whole.narrow(0, starts[step.peer], here.rows)
                rows.narrow(1, done[step.peer], here.cols).copy_(piece)
                done[step.peer] += here.cols
    return whole


def start_gather(x: torch.Tensor, rows: Sequence[int] | None, team: Team) -> Callable[[], torch.Tensor]:
    """Start gathering every rank's rows. The returned function waits for them and returns them all."""
    if team.size == 1:
        return lambda: x
    _check_peers(team)
    facts = _counted(team, "all_gather")
    counts = list(rows or (x.shape[0],) * team.size)
    most = max(counts)
    mine = x if x.shape[0] == most else torch.cat([x, x.new_zeros(most - x.shape[0], x.shape[1])])
    every = x.new_empty(team.size * most, x.shape[1])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _explained(team, facts):
        work: Any = gather(every, mine, group=team.group, async_op=True)

    def finish() -> torch.Tensor:
        with _explained(team, facts):
            _wait(work, x, team)
        if min(counts) == most:
            return every
        return torch.cat([every[i * most : i * most + count] for i, count in enumerate(counts)])

    return finish


def all_to_all(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], team: Team) -> torch.Tensor:
    """Send a block of rows to every rank and return the blocks received from every rank."""
    if team.size == 1:
        return x
    _check_peers(team)
    facts = _counted(team, "all_to_all")
    made = x.new_empty(sum(received), x.shape[1])
    with _explained(team, facts):
        work = dist.all_to_all_single(made, x, list(received), list(sent), group=team.group, async_op=True)
        _wait(work, x, team)
    return made


def _wait(work: Any, x: torch.Tensor, team: Team) -> None:
    """Wait for a collective. On a GPU only the stream waits: with a timeout, NCCL would block the process."""
    work.wait() if x.is_cuda else work.wait(team.patience)


def _counted(team: Team, collective: str) -> dict[str, Any]:
    """Count a collective as a separate call, so that an error in it can be explained; returns its facts."""
    team.calls += 1
    return {"operation": f"the {collective} of a gradient or of scales", "own call": team.calls}


@contextmanager
def _explained(team: Team, facts: dict[str, Any]) -> Iterator[None]:
    """Turn a failure into an error that says which rank did not take part."""
    try:
        yield
    except RuntimeError as error:
        if facts["own call"] != team.calls:  # another call has started since; ranks now report on that one
            raise
        raise team.explain(facts, error) from error


def _check_peers(team: Team) -> None:
    if isinstance(team.group, HostPeers):
        raise UsageError(
            "host peers are data and cannot answer: gradients and scales of rows need a process group"
        )
