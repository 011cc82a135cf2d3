"""Executor: what every way to run a Workload has in common, and the reference times of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.errors import UnavailableError, WeftError
from weft.policy import Policy
from weft.timeline import Timeline
from weft.workload import Workload


class HungError(WeftError):
    """A run that did not end before its deadline."""


class WorkerDiedError(WeftError):
    """The process that ran the workload ended."""


class WrongResultError(WeftError):
    """A collective whose result differs from the reference."""


class MemoryFullError(UnavailableError):
    """The workload does not fit into the GPU's memory."""


@dataclass(frozen=True)
class Sample:
    """One measurement of the whole pipeline."""

    ms: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Clocks (MHz), temperature (°C), power (W), where known."""


class Executor(Protocol):
    """Runs a Workload under a Policy. `device` names where, `simulated` whether it is a model of that."""

    device: str
    simulated: bool

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Sample:
        """Run the pipeline once and check the collective's result."""
        ...

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        """Run the pipeline once more and record what ran when."""
        ...

    def info(self) -> dict[str, Any]:
        """The machine and the versions, for the record."""
        ...

    def close(self) -> None:
        """Give back what the executor holds."""
        ...


NO_ROOM = 0.02
"""Share of the sequential time below which a gain drowns in noise, and its fraction means nothing."""


@dataclass(frozen=True)
class References:
    """Median times of the whole pipeline without overlap, in ms."""

    sequential_ms: float
    compute_ms: float
    comm_ms: float
    iterations: int

    @property
    def ideal_ms(self) -> float:
        """max(compute, communication) and the pipeline fill: the shorter one's first or last iteration."""
        low, high = sorted((self.compute_ms, self.comm_ms))
        return high + low / self.iterations

    def fraction_of_ideal(self, ms: float) -> float | None:
        """How much of the possible gain over sequential `ms` reaches; None where there is next to none."""
        return fraction_of_ideal(ms, self.sequential_ms, self.ideal_ms)


def fraction_of_ideal(ms: float, sequential_ms: float, ideal_ms: float) -> float | None:
    """(sequential - measured) / (sequential - ideal); None where ideal is next to sequential."""
    room = sequential_ms - ideal_ms
    return (sequential_ms - ms) / room if room > NO_ROOM * sequential_ms else None
