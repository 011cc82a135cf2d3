"""CallSteps: finds the steps of a program without an optimizer, such as inference, from NCCL collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable

from weft.tuning.live.steps import period

CALLS_BETWEEN_LOOKS = 256
PERIODS = 12  # repetitions required; more than the micro-batches that most programs accumulate
CALLS_OF_A_STEP = 16  # at least this many collectives per step: each step boundary costs a wait


class CallSteps:
    """Calls `ended` at the end of each step, once the sequence of a communicator's collectives repeats.

    `unneeded`: returns True once steps are found another way, for example after an optimizer has stepped.
    """

    def __init__(self, ended: Callable[[], None], unneeded: Callable[[], bool]) -> None:
        self._ended, self._unneeded = ended, unneeded

    def watch(self) -> None:
        """Examine the collectives at intervals, if the process runs under the shim."""
        from weft.shim import binding, communicators

        if binding.injected():
            communicators.on_call(self._called, every=CALLS_BETWEEN_LOOKS)

    def stop(self) -> None:
        """Stop examining collectives."""
        communicators = sys.modules.get("weft.shim.communicators")
        if communicators is not None:
            communicators.on_call(None)

    def _called(self, key: str, count: int) -> None:
        from weft.shim import communicators

        if self._unneeded():
            self.stop()
            return
        calls = [(c.operation, c.bytes) for c in communicators.calls() if c.key == key]
        length = period(calls, PERIODS)
        if length is not None:
            every = length * -(-CALLS_OF_A_STEP // length)
            communicators.on_call(self._repeated, key, every=every)

    def _repeated(self, key: str, count: int) -> None:
        if self._unneeded():
            self.stop()
        else:
            self._ended()
