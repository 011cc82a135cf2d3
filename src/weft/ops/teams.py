"""Team: a process group whose ranks agree on each kind of call before they make it.

At the first call of a kind, each rank posts the facts of its call in the group's key-value store and reads
those of the others. Later calls of that kind cost nothing. A kind consists of the facts that all ranks have
in common. If a rank changes what it may change alone (its blocks of an all-to-all), it prepares the call
again without the others. If a rank fails or waits in vain, the posted facts explain why, on both sides.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.dma import host_peers
from weft.errors import UsageError, WeftError
from weft.ranks import publish, published

_log = logging.getLogger("weft.ops")

GRACE_S = 5.0
GRACE_SHARE = 0.2
"""Time reserved at the end of a group's timeout for ranks to post which of them failed and why: this fraction
of the timeout, but at most `GRACE_S`."""
SPARE_SHARE = 0.25
"""Fraction of the grace time reserved for raising the error on a busy machine."""
DEFAULT_TIMEOUT_S = 300.0
PROBLEM, _FAILED = " problem", "failed"

KEPT = 32  # most kinds of calls, and most prepared calls, that a group keeps; each call has scratch memory

RankFacts = Mapping[str, Any]


class DisagreementError(UsageError):
    """Ranks of one group are about to do different things."""


class PeerError(WeftError):
    """A peer did not take part, or its connection broke."""


@dataclass(slots=True)
class TeamAgreement:
    """The facts of all ranks about one kind of call, and the resources they share for it."""

    everyone: list[RankFacts]
    kind: str = ""
    memory: Any = None
    """Symmetric memory; None if there is none."""
    joined: bool = False
    """Whether the ranks have set up their shared resources: symmetric memory, or the NCCL communicator."""


class Team:
    """Rank, size and store of one process group; counts its calls."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.calls = 0
        self.prepared: OrderedDict[Any, Any] = OrderedDict()
        self.promises: dict[Any, bool] = {}
        """Whether rank 0 expects a fused operation to gain, by operation and sizes (`weft.ops.promise`)."""
        self.reached: Any = None
        """Symmetric memory that moves GPU tensors between the ranks of a group without NCCL; None: not tried,
        or unavailable."""
        self.unreachable = ""
        """Why GPU tensors cannot move between the ranks; empty if they can."""
        self._captured: list[Any] = []
        self._agreements: OrderedDict[str, TeamAgreement] = OrderedDict()
        self._store: Any = None
        self._posted = -1
        self._answered = ""  # key of this rank's entry in the last exchange that all ranks took part in
        self._part = 0  # number of additional exchanges so far, beyond one per call

    @property
    def timeout_s(self) -> float:
        """Timeout of the group's GPU or CPU backend."""
        for device in ("cuda", "cpu"):
            try:
                backend = self.group._get_backend(torch.device(device))
                return float(backend.options._timeout.total_seconds())
            except (AttributeError, RuntimeError):
                continue
        return DEFAULT_TIMEOUT_S

    @property
    def grace_s(self) -> float:
        """Time after a failed wait for data in which ranks post what they were doing."""
        return min(GRACE_S, GRACE_SHARE * self.timeout_s)

    @property
    def patience(self) -> timedelta:
        """How long to wait for data, so that the error that names a missing rank comes within the timeout."""
        return timedelta(seconds=self.timeout_s - self.grace_s)

    @property
    def store(self) -> Any:
        if self._store is None:
            base = dist.distributed_c10d._get_process_group_store(self.group)
            self._store = dist.PrefixStore("weft.ops", base)
        return self._store

    def agreement(self, kind: str, facts: RankFacts) -> TeamAgreement:
        """The agreement on calls of this kind. For a new kind, all ranks agree now."""
        found = self._agreements.get(kind)
        if found is None:
            found = self._agreements[kind] = TeamAgreement(self.agree(facts), kind)
            if len(self._agreements) > KEPT:
                old, _ = self._agreements.popitem(last=False)
                self.drop(lambda prepared: prepared.agreement.kind == old)
        return found

    def keep(self, key: Any, prepared: Any) -> None:
        """Keep a prepared call; drops the least recently used one if there are too many."""
        self.prepared[key] = prepared
        if len(self.prepared) > KEPT:
            self.prepared.popitem(last=False)

    def hold(self, prepared: Any) -> None:
        """Keep a prepared call forever: a CUDA graph replays it on the call's scratch memory."""
        if not any(prepared is held for held in self._captured):
            self._captured.append(prepared)

    def used(self, key: Any, prepared: Any) -> None:
        """Mark a prepared call as used. All ranks do so at every call, and so forget the same agreements."""
        self.prepared.move_to_end(key)
        self._agreements.move_to_end(prepared.agreement.kind)

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the unwanted prepared calls and their agreements. All ranks must do this alike."""
        for key in [key for key, prepared in self.prepared.items() if unwanted(prepared)]:
            self._agreements.pop(self.prepared.pop(key).agreement.kind, None)

    def tell(self, operation: str, error: WeftError) -> None:
        """Post why this rank does not move its data, for the ranks that wait for it."""
        if self.size > 1 and not getattr(self.group, "silent", False):
            said = {"operation": operation, "problem": str(error)}
            publish(self.store, self._key(self.rank) + PROBLEM, said)
            publish(self.store, f"{_FAILED}/{self.rank}", said)

    def refuse(self, operation: str, error: WeftError) -> None:
        """Raise this error on every rank, instead of agreeing."""
        self.agree({"operation": operation, "problem": str(error)})

    def agree(self, facts: RankFacts) -> list[RankFacts]:
        """Exchange the facts of a call; returns those of every rank. Raises on all ranks if they disagree."""
        if self.size == 1 or getattr(self.group, "silent", False):
            return [facts] * self.size
        everyone = self._exchange(facts, facts)
        compare_facts(everyone)
        return everyone

    def all_can(self, facts: RankFacts, reason: str | None) -> str | None:
        """None if every rank can do something (its reason is None); else the first reason, on every rank."""
        if getattr(self.group, "silent", False):
            return reason
        self._part += 1
        own = {"operation": facts["operation"], "reason": reason}
        for rank, said in enumerate(self._exchange(facts, own)):
            if said["reason"] is not None:
                return f"rank {rank}: {said['reason']}"
        return None

    def _exchange(self, facts: RankFacts, own: RankFacts) -> list[Any]:
        """Post `own` and return what every rank posts. A rank that waits for data posts when it gives up."""
        keys = [self._key(rank) for rank in range(self.size)]
        try:
            self._post(own)
            everyone = published(self.store, keys, self.timeout_s - SPARE_SHARE * self.grace_s)
        except RuntimeError as error:
            raise self._lost(facts, error) from None
        if None in everyone:
            compare_facts([*map(self._said, range(self.size))])
            posted = {rank: said for rank, said in enumerate(everyone) if said is not None}
            raise self._missing(facts, posted, TimeoutError(f"no word for {self.timeout_s:.3g} s"))
        # Every rank has read the previous exchange, so this rank's entry for it can be deleted.
        if self._answered:
            self.store.delete_key(self._answered)
        self._answered = keys[self.rank]
        return everyone

    def explain(self, facts: RankFacts, error: BaseException) -> WeftError:
        """The error to raise after a failed transfer, which says what the other ranks were doing instead."""
        try:
            if self._posted != self.calls:
                self._post(facts)
            end = time.monotonic() + (1 - SPARE_SHARE) * self.grace_s
            posted = self._read()
            while len(posted) < self.size and time.monotonic() < end:
                time.sleep(0.05)
                posted = self._read()
            compare_facts([posted.get(rank) for rank in range(self.size)])
        except DisagreementError as disagreement:
            return disagreement
        except RuntimeError as lost:
            _log.debug("%s: the store does not answer: %s", facts["operation"], lost)
            return self._lost(facts, error)
        return self._missing(facts, posted, error)

    def _missing(self, facts: RankFacts, posted: Mapping[int, RankFacts], error: BaseException) -> PeerError:
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in posted]
        who = f"rank {' and rank '.join(map(str, silent))}" if silent else "a peer"
        failed = [text for text in map(self._failure, silent) if text]
        why = "; ".join(failed) or "it ended, or is elsewhere in the program"
        return self._absent(facts, f"{who} did not take part ({why})", error)

    def _failure(self, rank: int) -> str:
        """Why a rank failed in an earlier call; empty if it did not."""
        key = f"{_FAILED}/{rank}"
        try:
            if not self.store.check([key]):
                return ""
            said = json.loads(self.store.get(key))
        except RuntimeError as error:
            _log.debug("the store does not answer: %s", error)
            return ""
        return f"rank {rank} failed in an earlier {said['operation']}: {said['problem']}"

    def _lost(self, facts: RankFacts, error: BaseException) -> PeerError:
        """The error to raise if the store, and so the process that hosts it, is gone."""
        who = "rank 0 of the job, which hosts the process group's store, did not take part (it ended)"
        return self._absent(facts, who, error)

    def _absent(self, facts: RankFacts, who: str, error: BaseException) -> PeerError:
        reason = str(error).strip().splitlines()
        return PeerError(
            f"{facts['operation']} on rank {self.rank} of {self.size}: {who}: "
            f"{reason[0] if reason else type(error).__name__}"
        )

    def _key(self, rank: int) -> str:
        return f"{self.calls}.{self._part}/{rank}"

    def _post(self, facts: RankFacts) -> None:
        self._posted = self.calls
        publish(self.store, self._key(self.rank), dict(facts))

    def _read(self) -> dict[int, RankFacts]:
        found = {rank: self._said(rank) for rank in range(self.size)}
        return {rank: said for rank, said in found.items() if said is not None}

    def _said(self, rank: int) -> RankFacts | None:
        """What a rank posted for this call: its problem if it has one, else its facts; None if nothing."""
        key = self._key(rank)
        for each in (key + PROBLEM, key):
            if self.store.check([each]):
                said: RankFacts = json.loads(self.store.get(each))
                return said
        return None


def compare_facts(everyone: list[RankFacts | None]) -> None:
    """Raise DisagreementError unless all facts agree. A fact `problem` says that a rank cannot continue."""
    said = [(rank, facts) for rank, facts in enumerate(everyone) if facts is not None]
    for rank, facts in said:
        if "problem" in facts:
            raise DisagreementError(f"rank {rank} cannot continue: {facts['problem']}")
    first_rank, first = said[0]
    for rank, facts in said[1:]:
        for name in [*first, *facts]:
            if name.startswith("own "):
                continue
            here, there = first.get(name), facts.get(name)
            if here != there:
                raise DisagreementError(
                    f"{first['operation']}: ranks disagree on {name}: rank {first_rank} has "
                    f"{_said(here)}, rank {rank} has {_said(there)}; all ranks must make the same call"
                )
    _compare_blocks(said)


def _compare_blocks(said: list[tuple[int, RankFacts]]) -> None:
    """All-to-all: check that each rank sends as many rows as its peer expects."""
    for rank, facts in said:
        for peer, other in said:
            sent, expected = facts.get("own sent"), other.get("own received")
            if sent is not None and expected is not None and sent[peer] != expected[rank]:
                raise DisagreementError(
                    f"{facts['operation']}: rank {rank} sends {sent[peer]} rows to rank {peer}, which "
                    f"expects {expected[rank]}; input_splits and output_splits must fit"
                )


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


_TEAMS: dict[Any, Team] = {}


def team_of(group: Any) -> Team:
    """The team of a group. None stands for torch's default group or, without one, for a team of one rank."""
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else _ALONE
    team = _TEAMS.get(group)
    if team is None:
        group = _resolved(group)
        team = _TEAMS.get(group)
    if team is None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError("this rank is not in the group; only its members may call the operation")
        if not hasattr(group, "rank") or not hasattr(group, "size"):
            raise UsageError(
                f"group must be a torch process group, its name or a mesh, not {type(group).__name__}"
            )
        _forget_destroyed()
        team = _TEAMS[group] = Team(group)
    return team


def _resolved(group: Any) -> Any:
    """The process group of a one-dimensional mesh or of a name; anything else is returned unchanged."""
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"group is a mesh of {group.ndim} dimensions; give one, as in mesh['tp']")
        return group.get_group()
    if isinstance(group, str):
        try:
            return group_named(group)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"no process group has the name {group!r}: {error}") from None
    return group


def _forget_destroyed() -> None:
    known = dist.distributed_c10d._world.pg_map
    for group in [each for each in _TEAMS if isinstance(each, dist.ProcessGroup) and each not in known]:
        del _TEAMS[group]


class Alone:
    """A group of one rank, used if torch.distributed is not initialized."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


_ALONE = Alone()


def team_name(group: Any) -> str:
    """The name by which `group_named` finds this group; empty for the default group."""
    if group is None or isinstance(group, str):
        return group or ""
    if isinstance(group, dist.DeviceMesh):
        group = group.get_group()
    return str(group.group_name)


def group_named(name: str) -> Any:
    if not name:
        return None
    return host_peers(name) or dist.distributed_c10d._resolve_process_group(name)


def known_teams() -> list[Team]:
    """The teams of all groups that were used in a call."""
    return list(_TEAMS.values())


def forget() -> None:
    """Drop every team and its prepared calls; for use after destroy_process_group."""
    _TEAMS.clear()
