"""Executor, the interface that runs a Workload, and References, the times of a workload without overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.errors import UnavailableError, WeftError
from weft.policy import Policy
from weft.timeline import Timeline
from weft.workload import Workload


class HungError(WeftError):
    """A run that exceeded its deadline."""


class WorkerDiedError(WeftError):
    """The worker process exited, or raised an unexpected error."""


class WrongResultError(WeftError):
    """A collective whose result differs from the reference."""


class MemoryFullError(UnavailableError):
    """The workload does not fit into the GPU's memory."""


@dataclass(frozen=True)
class PipelineSample:
    """One measurement of the whole pipeline."""

    ms: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run, such as clocks (MHz), temperature (°C) and power (W), if known."""


class Executor(Protocol):
    """Runs a Workload under a Policy on `device`; `simulated` is true if the device is a model."""

    device: str
    simulated: bool

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        """Run the pipeline once and check the collective's result."""
        ...

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        """Run the pipeline once and record its timeline."""
        ...

    def info(self) -> dict[str, Any]:
        """The machine and the versions, to be stored with results."""
        ...

    def close(self) -> None:
        """Release the executor's resources."""
        ...


NO_ROOM = 0.02
"""A possible gain below this fraction of the sequential time is within noise."""


@dataclass(frozen=True)
class References:
    """Median times of the whole pipeline without overlap, in ms."""

    sequential_ms: float
    compute_ms: float
    comm_ms: float
    iterations: int

    @property
    def ideal_ms(self) -> float:
        """max(compute, communication) plus the pipeline fill, one iteration of the shorter one, in ms."""
        low, high = sorted((self.compute_ms, self.comm_ms))
        return high + low / self.iterations

    def bound_ms(self, held_sms: int, sms: int) -> float:
        """The least possible time in ms if a running collective holds `held_sms` of the GPU's `sms` SMs.

        SM-time is conserved: compute needs all SMs for its time alone, and collectives need `held_sms` for
        theirs. The bound is never below the ideal.
        """
        low = min(self.compute_ms, self.comm_ms)
        shared = self.compute_ms + self.comm_ms * held_sms / sms + low / self.iterations
        return max(shared, self.ideal_ms)

    def fraction_of_ideal(self, ms: float) -> float | None:
        """Fraction of the possible gain over sequential that `ms` reaches; None if it is within noise."""
        return fraction_of_ideal(ms, self.sequential_ms, self.ideal_ms)


def fraction_of_ideal(ms: float, sequential_ms: float, ideal_ms: float) -> float | None:
    """(sequential - measured) / (sequential - ideal); None if the ideal is within noise of sequential."""
    room = sequential_ms - ideal_ms
    return (sequential_ms - ms) / room if room > NO_ROOM * sequential_ms else None
