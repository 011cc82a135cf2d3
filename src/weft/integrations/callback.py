"""Shared by the framework callbacks: apply a policy during training, report the verdict of live tuning."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from weft.policy import Policy
from weft.shim import binding

log = logging.getLogger("weft")


class Training:
    """A training run in a process that was started by `weft run`."""

    def __init__(self, policy: Policy | str | os.PathLike[str] | None = None) -> None:
        self._policy = Policy.load(policy) if isinstance(policy, (str, os.PathLike)) else policy
        self._applied = False

    def begin(self) -> None:
        """Apply the policy. Raises UnavailableError if the process was not started by `weft run`."""
        if self._policy is None:
            return
        if _tuned() is not None:
            log.warning("the policy of this callback is not applied: `weft run --tune` chooses its own")
            return
        if self._policy.max_ctas is not None:
            log.warning("comm.max_ctas is not applied by a callback: give the policy to `weft run --policy`")
        binding.set_policy(self._policy)
        self._applied = True

    def end(self) -> dict[str, Any]:
        """Remove the policy; returns the result of live tuning, if any, as metrics to log."""
        if self._applied:
            binding.set_policy(None)
            self._applied = False
        folder = _tuned()
        if folder is None:
            return {}
        from weft.tuning.live.outcome import read_result

        result = read_result(folder)
        log.info("live tuning: %s", result["text"])
        return {"weft/gain_pct": float(result["gain_pct"]), "weft/steps": float(result["steps"])}


def _tuned() -> Path | None:
    """The folder of this job, if it runs under `weft run --tune`."""
    folder = Path(os.environ.get("WEFT_JOB") or "/nowhere")
    return folder if (folder / "tuning.loaded").exists() else None
