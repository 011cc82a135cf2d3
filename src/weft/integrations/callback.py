"""Shared by the framework callbacks: apply a policy during training, report the verdict of live tuning."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from weft.policy import Policy
from weft.shim.apply import overlap

_log = logging.getLogger("weft")


class Training:
    """A training run in a process that was started by `weft run`."""

    def __init__(self, policy: Policy | str | os.PathLike[str] | None = None) -> None:
        self._policy = Policy.load(policy) if isinstance(policy, (str, os.PathLike)) else policy
        self._applied: ExitStack | None = None

    def begin(self) -> None:
        """Apply the policy. Raises UnavailableError if the process was not started by `weft run`."""
        if self._policy is None:
            return
        if _tuned() is not None:
            _log.warning("the policy of this callback is not applied: `weft run --tune` chooses its own")
            return
        self._applied = ExitStack()
        self._applied.enter_context(overlap(self._policy))

    def end(self) -> dict[str, Any]:
        """Remove the policy; returns the result of live tuning, if any, as metrics to log."""
        if self._applied is not None:
            self._applied.close()
            self._applied = None
        folder = _tuned()
        if folder is None:
            return {}
        from weft.tuning.live.tuned_job import read_result

        result = read_result(folder)
        _log.info("live tuning: %s", result["text"])
        return {"weft/gain_pct": float(result["gain_pct"]), "weft/steps": float(result["steps"])}


def _tuned() -> Path | None:
    """The folder of this job; None if it does not run under `weft run --tune`."""
    folder = Path(os.environ.get("WEFT_JOB") or "/nowhere")
    return folder if (folder / "tuning.loaded").exists() else None
