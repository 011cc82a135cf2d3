"""Earlier: stored results of similar jobs. A store error only prints a line; the job continues."""

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
    """The stored verdict of this job; its key is known once the job is profiled. `warn` receives lines."""

    def __init__(self, default: Policy, warn: Callable[[str], None]) -> None:
        self.default, self.warn = default, warn
        self.key: Key | None = None
        self._known: TunedJob | None = None
        """The last outcome seen: stored, or left open by a search and then not yet a verdict."""
        self._reverted = ""

    def recall(self, facts: Facts) -> Policy | None:
        """The policy that a similar earlier job ended with; None if there is none or it is stale."""
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
        # "Nothing to gain" is believed only from a job with exactly the same key.
        return None if entry.key != self.key and entry.policy == self.default else entry.policy

    def found(self, outcome: TunedJob) -> dict[str, Any]:
        """Note the first search's outcome; returns its document, which `remember` then receives."""
        self._known = outcome
        return outcome.to_dict()

    def follow(self, status: WatchStatus, result: dict[str, Any]) -> None:
        """Store what the watch has concluded, if that has changed."""
        before, self._reverted = self._reverted, status.reverted
        if status.reverted:
            if not before:
                self.forget()
        elif status.outcome is not self._known and (status.outcome.kept or not status.proving):
            self._known = status.outcome
            self.remember(result)

    def remember(self, result: dict[str, Any]) -> None:
        """Store the result of a search for the next start."""
        is_open = self._known is not None and self._known.still_open
        if self.key is None or result["state"] == "stopped" or is_open:
            return
        try:
            Store(timeout_s=STORE_TIMEOUT_S).put(self.key, Policy.from_dict(result["policy"]), result)
        except Exception as error:  # the result is valid even if it cannot be stored
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
