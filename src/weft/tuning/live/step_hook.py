"""Publishes a torch program's step times for `weft top` and `--metrics`. Torch's autoload starts it.

Steps end with optimizer steps, found as in live tuning (`weft.tuning.live.steps`). An error in this module
ends the publishing, never the program.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Any

from weft.ranks import launched_ranks
from weft.shim.step_times import StepWriter
from weft.tuning.live.optimizer_steps import OptimizerHook, OptimizerNumbers, OwnThread
from weft.tuning.live.steps import Steps

_log = logging.getLogger("weft.live")


@cache
def _writer(process: int, rank: int, world: int) -> StepWriter:
    return StepWriter(rank, world)


def published_steps(rank: int | None = None) -> StepWriter:
    """This process's only step writer; a fork gets its own."""
    dist: Any = sys.modules.get("torch.distributed")
    joined = dist is not None and dist.is_available() and dist.is_initialized()
    found = dist.get_rank() if joined else int(os.environ.get("RANK", "0") or 0)
    world = dist.get_world_size() if joined else launched_ranks()
    return _writer(os.getpid(), found if rank is None else rank, world)


class _StepHook:
    def __init__(self) -> None:
        self._steps, self._numbers = Steps(), OptimizerNumbers()
        self._thread = OwnThread()
        self._broken = False

    def stepped(self, optimizer: Any) -> None:
        if self._broken or not self._thread.here():
            return
        try:
            if self._steps.ends_with(self._numbers.of(optimizer)):
                published_steps().step()
        except Exception:
            _log.debug("steps are no longer published", exc_info=True)
            self._broken = True


def start() -> None:
    """Entry point: runs during torch's import, in every process of a job that publishes its steps."""
    OptimizerHook(_StepHook().stepped)
