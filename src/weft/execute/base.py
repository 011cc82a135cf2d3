"""Executor: what every way to run a Workload has in common, and the reference times of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from weft.errors import UnavailableError, UsageError, WeftError
from weft.policy import Policy
from weft.timeline import Timeline
from weft.workload import MODES, Workload


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
        room = self.sequential_ms - self.ideal_ms
        return (self.sequential_ms - ms) / room if room > NO_ROOM * self.sequential_ms else None


@dataclass(frozen=True)
class Run:
    """Repeated measurements of one Workload under one Policy."""

    workload: Workload
    policy: Policy
    mode: str
    samples_ms: tuple[float, ...]
    references: References | None = None
    timeline: Timeline | None = None
    device: str = ""
    simulated: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Median time of the whole pipeline."""
        return median(self.samples_ms)

    @property
    def time_ratio(self) -> float | None:
        """Time over sequential time."""
        return self.ms / self.references.sequential_ms if self.references else None

    @property
    def fraction_of_ideal(self) -> float | None:
        return self.references.fraction_of_ideal(self.ms) if self.references else None

    @property
    def overlap_rate(self) -> float | None:
        """Share (0 to 1) of communication that runs beside compute."""
        return self.timeline.figures().overlap_pct / 100 if self.timeline is not None else None


def run(
    executor: Executor, workload: Workload, policy: Policy, *, repeats: int = 5, with_timeline: bool = False
) -> Run:
    """Measure a workload under a policy, with its references taken in turn with it."""
    if repeats < 1:
        raise UsageError(f"repeats {repeats} is not possible; use at least 1")
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    plain = Policy(max_ctas=policy.max_ctas)
    facts: Mapping[str, Any] = {}
    for _ in range(repeats):
        for mode in MODES:
            sample = executor.measure(workload, policy if mode == "overlap" else plain, mode)
            times[mode].append(sample.ms)
            facts = sample.facts if mode == "overlap" else facts
    references = References(
        median(times["sequential"]), median(times["compute"]), median(times["comm"]), workload.iterations
    )
    return Run(
        workload,
        policy,
        "overlap",
        tuple(times["overlap"]),
        references,
        executor.timeline(workload, policy) if with_timeline else None,
        executor.device,
        executor.simulated,
        facts,
    )
