"""Controls: what a session needs of the process that it tunes, without torch or NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weft.policy import Policy
from weft.tuning.live.options import Facts


class Controls(Protocol):
    """Changes and profiles a process. Everything but `harmless` is called at step boundaries only."""

    default: Policy
    """The policy that the process was started with."""

    def learn(self) -> None:
        """Profile launches from now on."""

    def facts(self, steps: int) -> Facts:
        """The profile of the `steps` steps since `learn`."""

    def preparable(self) -> list[tuple[str, int]]:
        """Key and size of each communicator that can have a sibling."""

    def prepare(self, policy: Policy, keys: Sequence[str] | None) -> None:
        """Create what a policy needs, within PREPARE_S, or raise. Called on all ranks.

        `keys`: communicators that all of their ranks can prepare; None if there is only one process.
        """

    def apply(self, policy: Policy) -> None:
        """Apply this policy from now on; raises if it cannot be applied."""

    def harmless(self) -> None:
        """Revert to a harmless policy, on this rank alone, at any time and on any thread."""

    def release(self) -> None:
        """Release what the policy in force does not need."""

    def synchronize(self) -> None:
        """Wait until the device has finished all launches."""

    def mark(self) -> Any:
        """Mark this point of the program, without waiting."""

    def between_ms(self, start: Any, end: Any) -> float:
        """Device time between two marks, in ms; waits for the second."""

    def copied_bytes(self) -> int:
        """Bytes that the program has copied from the host to the device so far."""

    def clock(self) -> dict[str, int]:
        """Counts that must be equal on all ranks that report them."""
