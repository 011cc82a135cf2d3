"""Samples of a running job: plain data, in the form that `weft top --json` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

TOP_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """One process of a job. Rates are over the time since the last sample; None: unknown."""

    rank: int | None
    pid: int
    command: str
    alive: bool
    launches: int
    """GPU kernels since the process started."""
    comm_launches: int
    """Communication kernels among them."""
    shaped: int
    comm_bytes: int
    """Bytes that NCCL calls were asked to move."""
    launches_per_s: float | None
    collectives_per_s: float | None
    comm_bytes_per_s: float | None
    ctas: int | None
    """Thread blocks of the collective kernel launched most since the last sample."""
    policy: str
    """Label of the policy in force."""
    steps: int | None
    """Steps so far; None if steps are not counted in this process."""
    step_ms: float | None
    """Median of the latest steps."""
    step_p10_ms: float | None
    step_p90_ms: float | None


@dataclass(frozen=True, kw_only=True)
class TuningSample:
    """The state of live tuning in a job, and its result so far."""

    phase: str
    """`waiting` for the first step, `searching`, `watching` or `over`."""
    trying: str
    """Label of the policy that the leading rank runs under."""
    state: str
    """State of the result so far: `kept`, `left alone` or `stopped`; empty if there is none."""
    text: str
    gain_pct: float | None


@dataclass(frozen=True, kw_only=True)
class JobSample:
    """The state of a job at one moment."""

    job: str
    folder: str
    pid: int | None
    command: str
    state: Literal["running", "ended", "killed"]
    """`killed`: the `weft run` that started it is gone and left the job's folder behind."""
    elapsed_s: float | None
    policy: dict[str, Any]
    """The policy in force for processes without their own."""
    policy_label: str
    launches_per_s: float | None
    collectives_per_s: float | None
    comm_bytes_per_s: float | None
    step_ms: float | None
    """Median step of the slowest rank on this machine."""
    step_spread_pct: float | None
    """Spread of its steps: 10th to 90th percentile, in percent of the median."""
    exposed_pct: float | None
    """Exposed communication in percent of the recorded time: from a trace of `weft run --trace`, else from
    live tuning; None if neither has recorded anything."""
    tuning: TuningSample | None
    totals: dict[str, int]
    """Counters of `weft run --stats`, under the same names, over all processes."""
    ranks: list[RankSample]

    def to_dict(self) -> dict[str, Any]:
        # Not asdict: it copies every value, which takes longer than reading the files.
        tuning = None if self.tuning is None else vars(self.tuning)
        return {**vars(self), "tuning": tuning, "ranks": [vars(rank) for rank in self.ranks]}


@dataclass(frozen=True, kw_only=True)
class TopSample:
    """The state of all jobs at one moment: a line of `weft top --json`."""

    version: int
    time: float
    """Unix time."""
    jobs: list[JobSample]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "jobs": [job.to_dict() for job in self.jobs]}
