"""The stored verdict of one thing that is tuned; errors of the store are reported and cost nothing else."""

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
    """What the store holds under a key. `warn` gets one line for each error of the store.

    `reads`, `writes`: whether this process looks the verdict up, and whether it keeps a new one.
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
        """A verdict that need not be measured again."""
        return self.entry if self.entry is not None and not self.entry.stale else None

    def put(self, policy: Policy, document: Mapping[str, Any]) -> None:
        """Keep a new verdict."""
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
    """The key of a workload on the GPU of an executor."""
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
