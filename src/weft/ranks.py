"""Agreement between ranks: all ranks of a job do the same thing at the same step.

Ranks      the ranks of torch.distributed share small Python values by collectives; used where all ranks are
           known to make the call together (the lab, `weft.tune`, `weft.overlap`)
Agreement  decisions through a key-value store, with deadlines; used inside a running job, where a rank may be
           late or gone, and the program's collectives must not be disturbed

In each exchange of an Agreement every rank publishes a report. The first rank, the leader, reads them all and
writes one decision; the others wait for it. The decision is written by compare-and-set: a rank whose deadline
passes writes "abandon" there, and the first write counts for all ranks. So no rank continues alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

ABANDON = {"do": "abandon"}
_KEPT = 2048
"""Decisions that stay in the store: between two collectives the leader may be thousands of steps ahead."""
WATCH_PATIENCE_S = 60.0
"""Minimum time that a follower waits for an announcement: the leader may be writing a checkpoint, and a
program that runs ahead of its device reaches the next step before the device does."""
_PAUSE = 0.05  # pause between two polls of a store, as a share of the time waited so far
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.25
PATIENCE = 2.0  # a follower waits this many times as long as the leader, so that the leader states the reason

Report = dict[str, Any]
Decision = dict[str, Any]


def launched_ranks(variable: str = "WORLD_SIZE") -> int:
    """Number of ranks that this process's launcher started; 1 without a launcher."""
    text = os.environ.get(variable, "")
    return max(1, int(text)) if text.isdecimal() else 1


class Ranks:
    """The ranks of torch.distributed, or this process alone. All ranks must make the same calls together."""

    def __init__(self) -> None:
        dist: Any = sys.modules.get("torch.distributed")
        joined = dist is not None and dist.is_available() and dist.is_initialized()
        self._dist = dist if joined and dist.get_world_size() > 1 else None
        self.size: int = self._dist.get_world_size() if self._dist else 1
        self.rank: int = self._dist.get_rank() if self._dist else 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self._dist is None:
            return [value]
        found: list[Any] = [None] * self.size
        self._dist.all_gather_object(found, value)
        return found

    def first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(map(float, self.gather(value)))

    def clock(self) -> float:
        """Rank 0's monotonic clock in seconds."""
        return float(self.first(time.monotonic()))


class KeyValueStore(Protocol):
    """The methods used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Agreement:
    """The exchanges of one rank. `ranks` are the participants; the first of them leads.

    Exceptions of the store are passed on. If a deadline passes, the exchange is abandoned.
    """

    def __init__(self, store: KeyValueStore, rank: int, ranks: Sequence[int], deadline_s: float) -> None:
        self.store, self.rank, self.ranks = store, rank, tuple(ranks)
        self.deadline_s = deadline_s
        self.number = 0

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == self.ranks[0]

    def exchange(
        self, report: Report, decide: Callable[[list[Report]], Decision], *, extra_s: float = 0.0
    ) -> Decision:
        """Publish this rank's report; returns the decision for all ranks. Only the leader calls `decide`.

        `extra_s`: seconds by which this exchange may exceed the deadline.
        """
        self.number += 1
        if len(self.ranks) == 1:
            return decide([report])
        publish(self.store, self._key(f"report/{self.rank}"), report)
        deadline_s = self.deadline_s + extra_s
        return self._lead(decide, deadline_s) if self.leads else self._follow(PATIENCE * deadline_s)

    def announce(self, report: Report, decide: Callable[[list[Report]], Decision]) -> Decision:
        """Like `exchange`, but the leader decides by its own report without waiting for other ranks.

        The others wait for its decision. Old decisions are removed from the store.
        """
        self.number += 1
        if len(self.ranks) == 1:
            return decide([report])
        if not self.leads:
            return self._follow(max(PATIENCE * self.deadline_s, WATCH_PATIENCE_S))
        with suppress(Exception):
            self.store.delete_key(f"{self.number - _KEPT}/decision")
        return self._settle(decide([report]))

    def post(self, report: Report) -> None:
        """Publish a report that the leader may read at the next announcement, without waiting for it."""
        publish(self.store, f"posted/{self.rank}", {**report, "after": self.number})

    def posted(self) -> list[Report]:
        """What the other ranks have posted since the last announcement; empty if a post is missing."""
        keys = [f"posted/{rank}" for rank in self.ranks[1:]]
        if not keys or not self.store.check(keys):
            return []
        # One request for all: each takes tens of microseconds of the thread that launches kernels.
        reports = [json.loads(found) for found in self.store.multi_get(keys)]
        return reports if all(report["after"] == self.number for report in reports) else []

    def leave(self, reason: str) -> None:
        """Abandon the next exchange, in which this rank does not take part, so that no other waits for it.

        All ranks must have finished the same exchanges. No later report of this rank is read.
        """
        self.number += 1
        if len(self.ranks) > 1:
            abandoned = self._settle({**ABANDON, "reason": reason})
            publish(self.store, self._key(f"report/{self.rank}"), abandoned)

    def _lead(self, decide: Callable[[list[Report]], Decision], deadline_s: float) -> Decision:
        keys = [self._key(f"report/{rank}") for rank in self.ranks]
        reports = published(self.store, keys, deadline_s)
        left = next((report for report in reports if report and report.get("do") == ABANDON["do"]), None)
        if left is not None:
            return self._settle(left)
        absent = [rank for rank, report in zip(self.ranks, reports, strict=True) if report is None]
        if absent:
            ranks = ", ".join(map(str, absent[:8]))
            return self._settle({**ABANDON, "reason": f"no word from rank {ranks} for {deadline_s:.3g} s"})
        return self._settle(decide([report for report in reports if report is not None]))

    def _follow(self, deadline_s: float) -> Decision:
        key = self._key("decision")
        (found,) = published(self.store, [key], deadline_s)
        if found is not None:
            return found
        reason = f"rank {self.rank} had no word from rank {self.ranks[0]}"
        return self._settle({**ABANDON, "reason": reason})

    def _settle(self, decision: Decision) -> Decision:
        """Write the decision, unless another rank has already abandoned the exchange; returns what counts."""
        settled: Decision = json.loads(
            self.store.compare_set(self._key("decision"), "", json.dumps(decision))
        )
        return settled

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


def publish(store: KeyValueStore, key: str, report: Report) -> None:
    """Publish a report for the other ranks."""
    store.set(key, json.dumps(report))


def published(store: KeyValueStore, keys: Sequence[str], wait_s: float) -> list[Report | None]:
    """The report under each key, once all are there; None for those missing after `wait_s` seconds.

    Polls instead of calling the store's `wait`, in which Python runs no signal handler (Ctrl-C and SIGTERM
    have no effect) and other threads cannot use the store, and after which torch prints warnings.
    """
    start = time.monotonic()
    while not store.check(list(keys)):
        waited_s = time.monotonic() - start
        if waited_s >= wait_s:
            return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
        pause_s = min(max(_SHORTEST_PAUSE_S, _PAUSE * waited_s), _LONGEST_PAUSE_S)
        time.sleep(min(pause_s, wait_s - waited_s))
    return [json.loads(store.get(key)) for key in keys]
