"""Earlier: stored results of jobs of the same kind. An error of the store costs a line, never the job."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.policy import Policy
from weft.tuning.live.options import Facts
from weft.tuning.live.tuned_job import TunedJob
from weft.tuning.live.watch_status import WatchStatus
from weft.tuning.store import Entry, Key, Store, StoreError, here

STORE_TIMEOUT_S = 2.0
_log = logging.getLogger("weft.live")


class Earlier:
    """The stored verdict of this job, whose key is known after its profile. `warn` gets lines."""

    def __init__(self, default: Policy, warn: Callable[[str], None]) -> None:
        self.default, self.warn = default, warn
        self.key: Key | None = None
        self._known: TunedJob | None = None
        """The outcome that the store has, or that a search left open: then it is no verdict yet."""
        self._reverted = ""

    def recall(self, facts: Facts) -> Policy | None:
        """The result of an earlier job of this kind, unless it is too old."""
        self.key = here(facts.workload) if facts.workload else None
        if self.key is None:
            return None
        try:
            store = Store(timeout_s=STORE_TIMEOUT_S)
            entry = store.get(self.key) or _alike(store, self.key)
        except StoreError as error:
            self.warn(f"earlier results are not used: {error}")
            return None
        if entry is None or entry.stale:
            return None
        # Only a job of exactly this kind shows that there is nothing to gain.
        return None if entry.key != self.key and entry.policy == self.default else entry.policy

    def found(self, outcome: TunedJob) -> dict[str, Any]:
        """The result of the first search, which `remember` is then given."""
        self._known = outcome
        return outcome.to_dict()

    def follow(self, status: WatchStatus, result: dict[str, Any]) -> None:
        """Keep what the watch has come to, if that has changed."""
        before, self._reverted = self._reverted, status.reverted
        if status.reverted:
            if not before:
                self.forget()
        elif status.outcome is not self._known and (status.outcome.kept or not status.proving):
            self._known = status.outcome
            self.remember(result)

    def remember(self, result: dict[str, Any]) -> None:
        """Keep the result of a search for the next start."""
        is_open = self._known is not None and self._known.still_open
        if self.key is None or result["state"] == "stopped" or is_open:
            return
        try:
            Store(timeout_s=STORE_TIMEOUT_S).put(self.key, Policy.from_dict(result["policy"]), result)
        except Exception as error:  # the result holds, kept or not
            self.warn(f"the result is not saved for the next start: {error}")

    def forget(self) -> None:
        """Remove a reverted policy, so that the next job does not start from it."""
        try:
            if self.key is not None:
                Store(timeout_s=STORE_TIMEOUT_S).remove(self.key)
        except Exception:
            _log.debug("the store could not be changed", exc_info=True)


def _alike(store: Store, key: Key) -> Entry | None:
    """The newest verdict of a job that differs from this one only in its number of ranks."""
    alike = replace(key, workload=_any_ranks(key.workload), setting="")
    return next(
        (
            entry
            for entry in store.entries()
            if replace(entry.key, workload=_any_ranks(entry.key.workload), setting="") == alike
            and ("ghost" in entry.key.setting) == ("ghost" in key.setting)
        ),
        None,
    )


def _any_ranks(workload: str) -> str:
    return re.sub(r"^job of \d+ ranks", "job of any ranks", workload)
