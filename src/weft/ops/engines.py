"""Chooses the link of an operation on a GPU. If the requested engine is unavailable, warns and falls back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.dma import HostPeers, copies
from weft.comm.paced_delay import stream_delays
from weft.comm.paced_peers import PacedPeers
from weft.comm.symmetric import SymmetricBuffer
from weft.errors import UnavailableError, UsageError, WeftError
from weft.ops.choose import say_once
from weft.ops.links import HostLink, NcclLink, SymmetricLink, peer_schedule, symmetric_size
from weft.ops.operands import Operands
from weft.ops.paced_link import PacedLink
from weft.ops.program import Program
from weft.ops.run_streams import StreamRunner
from weft.ops.steps import Schedule
from weft.ops.teams import RankFacts, Team, TeamAgreement

PULL_LANES = 2  # so that one copy is in progress while the next one starts

_LANES: dict[tuple[int, int], list[Any]] = {}


def stream_runner(
    schedule: Schedule,
    engine: str,
    agreement: TeamAgreement,
    operands: Operands,
    team: Team,
) -> StreamRunner:
    """The runner of one schedule on one GPU, with the requested engine or the fallback."""
    device = operands.device
    lanes = _lanes(device)

    def current() -> int:
        return int(torch._C._cuda_getCurrentRawStream(device.index))

    if isinstance(team.group, HostPeers):
        driver = copies()
        host = HostLink(schedule, team.group, engine, driver, lanes)
        if isinstance(team.group, PacedPeers):
            host = PacedLink(schedule, team.group, engine, driver, lanes, stream_delays().issue)
        program = Program(schedule, operands)
        return StreamRunner(schedule, program, host, driver, current)
    if engine == "dma":
        made = _symmetric(schedule, agreement, operands.moved_dtype, device, team, lanes)
        if made is not None:
            program = Program(schedule, operands, made.buffers())
            return StreamRunner(schedule, program, made, copies(), current)
    lacking = no_nccl(team.group)
    if lacking is not None:
        raise lacking
    program = Program(schedule, operands)
    if not agreement.joined:
        # The first use of an NCCL group needs all ranks. All are here, but some may have nothing to move.
        team.group.allreduce([torch.zeros(1, device=device)]).wait()
        agreement.joined = True
    nccl = NcclLink(schedule, team.group, lanes[0])
    return StreamRunner(schedule, program, nccl, copies(), current)


def _lanes(device: torch.device) -> list[Any]:
    key = (device.index, PULL_LANES)
    if key not in _LANES:
        _LANES[key] = [torch.cuda.Stream(device) for _ in range(PULL_LANES)]
    return _LANES[key]


def _symmetric(
    schedule: Schedule,
    agreement: TeamAgreement,
    dtype: torch.dtype,
    device: torch.device,
    team: Team,
    lanes: Sequence[Any],
) -> SymmetricLink | None:
    """A link through symmetric memory, allocated once per kind of call; None unless all ranks have it."""
    everyone = agreement.everyone
    if getattr(team.group, "silent", False):
        say_once("weft.ops: engine dma is not available: ghosts have no memory; SMs move the bytes instead")
        return None
    if everyone[team.rank].get("blocks") == "given":
        say_once(
            "weft.ops: engine dma needs sizes that every rank knows, and input_splits may change on one "
            "rank alone; NCCL moves the bytes instead"
        )
        return None
    if agreement.joined and agreement.memory is None:
        return None
    theirs = {
        rank: schedule if rank == team.rank else peer_schedule(schedule, rank, everyone[rank].get("own sent"))
        for rank in range(team.size)
    }
    size = symmetric_size(theirs, dtype.itemsize)
    if agreement.memory is None and not _share(agreement, size, device, team):
        return None
    return SymmetricLink(schedule, theirs, agreement.memory, dtype, copies(), lanes)


def _share(agreement: TeamAgreement, size: int, device: torch.device, team: Team) -> bool:
    """Allocate the symmetric memory of an agreement; it succeeds on all ranks, or on none."""
    memory, reason = _try_symmetric(size, device, team, agreement.everyone[team.rank])
    if memory is None:
        say_once(f"weft.ops: engine dma is not available ({reason}); NCCL moves the bytes instead")
        return False
    agreement.memory, agreement.joined = memory, True
    return True


def _try_symmetric(
    size: int, device: torch.device, team: Team, facts: RankFacts
) -> tuple[SymmetricBuffer | None, str | None]:
    """Symmetric memory, or why there is none. A collective operation; it succeeds on all ranks or none."""
    memory, reason = None, None
    try:
        copies()
        memory = SymmetricBuffer(size, device, team.group, team.timeout_s)
    except WeftError as error:
        reason = str(error)
    reason = team.all_can(facts, reason)
    return (memory, None) if reason is None else (None, reason)


def can_move(team: Team, device: torch.device) -> bool:
    """Whether operations can move tensors of this GPU between the ranks of a group.

    NCCL can. Without NCCL, the first call tries symmetric memory, a collective operation. If that fails,
    `team.unreachable` says why.
    """
    lacking = no_nccl(team.group)
    if lacking is None:
        return True
    if team.reached is None and not team.unreachable:
        team.calls += 1
        team.reached, reason = _try_symmetric(1, device, team, {"operation": "symmetric memory"})
        team.unreachable = f"{lacking} ({reason})" if team.reached is None else ""
    return team.reached is not None


def no_nccl(group: Any) -> WeftError | None:
    """The error for a group without NCCL for GPU tensors; None if it has NCCL. Involves no other rank."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (AttributeError, RuntimeError):
        return UsageError(
            "this group has no backend for GPU tensors; make it with backend 'nccl' or 'cpu:gloo,cuda:nccl'"
        )
    if "gloo" in type(backend).__name__.lower():
        return UnavailableError("gloo cannot move GPU tensors between ranks; use a group with backend 'nccl'")
    return None
