"""Reads and writes the stored verdict of one tuned workload or callable; store errors are only reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from weft.errors import WeftError
from weft.execute.base import Executor
from weft.gpu import nvml
from weft.policy import Policy
from weft.tuning.store import Entry, Key, Store
from weft.workload import Workload

_log = logging.getLogger(__name__)


class Remembered:
    """The store's entry for one key. `warn` receives one line per store error.

    `reads`: whether this process looks up the stored verdict. `writes`: whether it stores a new one.
    """

    def __init__(
        self, key: Callable[[], Key], warn: Callable[[str], None], *, reads: bool = True, writes: bool = True
    ) -> None:
        self._key, self._warn, self._writes = key, warn, writes
        self.entry: Entry | None = None
        if reads:
            with self._reported():
                self.entry = Store().get(key())

    @property
    def fresh(self) -> Entry | None:
        """The stored entry if it need not be measured again, else None."""
        return self.entry if self.entry is not None and not self.entry.stale else None

    def put(self, policy: Policy, document: Mapping[str, Any]) -> None:
        """Store a new verdict."""
        if self._writes:
            with self._reported():
                Store().put(self._key(), policy, document)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except WeftError as error:
            _log.debug("store: %s", error)
            self._warn(str(error))


def workload_key(executor: Executor, workload: Workload) -> Key:
    """The store key for a workload on the executor's GPU."""
    info = executor.info()
    with nvml.session() as library:
        driver = nvml.driver_release(library) or str(info.get("cuda") or "unknown")
    what = {k: v for k, v in workload.to_dict().items() if k != "name"}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return Key(
        gpu=str(info.get("gpu") or executor.device),
        driver=driver,
        nccl=str(info.get("nccl") or "unknown"),
        torch=str(info.get("torch") or "unknown"),
        workload=f"{info.get('ranks', '')} {text}",
    )
