"""Agree: all ranks of a job do the same thing at the same step, through a key-value store.

In each exchange every rank publishes a report. The first rank, the leader, reads them all and writes one
decision; the others wait for it. The decision is written once, by compare-and-set: a rank whose patience ends
writes "abandon" there, and whoever came first counts, for all ranks. So no rank can go on alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

ABANDON = {"do": "abandon"}
KEPT = 64  # decisions that stay in the store
PATIENCE = 2.0  # a follower waits this many times as long as the leader, so that the leader gives the reason

Report = dict[str, Any]
Decision = dict[str, Any]


class KeyValueStore(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Agreement:
    """The exchanges of one rank. `ranks` are those that take part, and the first of them leads.

    Everything that a store raises passes through, except that time runs out: that is an abandoned exchange.
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
        """Publish what this rank has to say; returns what all ranks do. `decide` is called on the leader.

        `extra_s`: how much longer than the deadline the others may take this time.
        """
        self.number += 1
        if len(self.ranks) == 1:
            return decide([report])
        self.store.set(self._key(f"report/{self.rank}"), json.dumps(report))
        deadline_s = self.deadline_s + extra_s
        return self._lead(decide, deadline_s) if self.leads else self._follow(PATIENCE * deadline_s)

    def announce(self, report: Report, decide: Callable[[list[Report]], Decision]) -> Decision:
        """Like `exchange`, but the leader decides by its own report and waits for nobody.

        The others wait for its decision. Old decisions are removed from the store.
        """
        self.number += 1
        if len(self.ranks) == 1:
            return decide([report])
        if not self.leads:
            return self._follow(PATIENCE * self.deadline_s)
        with suppress(Exception):
            self.store.delete_key(f"{self.number - KEPT}/decision")
        return self._settle(decide([report]))

    def _lead(self, decide: Callable[[list[Report]], Decision], deadline_s: float) -> Decision:
        keys = [self._key(f"report/{rank}") for rank in self.ranks]
        if not self._wait(keys, deadline_s):
            absent = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self.store.check([key])]
            ranks = ", ".join(map(str, absent[:8]))
            return self._settle({**ABANDON, "reason": f"no word from rank {ranks} for {deadline_s:.3g} s"})
        return self._settle(decide([json.loads(self.store.get(key)) for key in keys]))

    def _follow(self, deadline_s: float) -> Decision:
        key = self._key("decision")
        if self._wait([key], deadline_s):
            found: Decision = json.loads(self.store.get(key))
            return found
        reason = f"rank {self.rank} had no word from rank {self.ranks[0]}"
        return self._settle({**ABANDON, "reason": reason})

    def _settle(self, decision: Decision) -> Decision:
        """Write the decision, unless another rank has abandoned the exchange: then that stands."""
        settled: Decision = json.loads(
            self.store.compare_set(self._key("decision"), "", json.dumps(decision))
        )
        return settled

    def _wait(self, keys: list[str], seconds: float) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except Exception as error:  # each store has its own kind for "time is up"
            if _time_is_up(error):
                return False
            raise
        return True

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


def _time_is_up(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timeout" in text or "timed out" in text
