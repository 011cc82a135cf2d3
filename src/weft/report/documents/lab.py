"""The documents of `weft tune`, `weft bench`, `weft explore`, `weft store` and `weft doctor`."""

from __future__ import annotations

from typing import Any, TypedDict

from weft.report.documents.job import PolicyJson, VerdictJson


class ComputeJson(TypedDict):
    kind: str
    shape: list[int]
    dtype: str
    repeat: int
    tile: list[int] | None
    grid: list[int] | None
    warps: int | None
    stages: int | None
    target: str


class WorkloadJson(TypedDict):
    name: str
    compute: ComputeJson
    collective: str
    bytes: int
    ranks: int
    iterations: int
    compute_streams: int


class TunedVerdictJson(VerdictJson):
    candidate: str


class CandidateJson(TypedDict):
    candidate: str
    mode: str
    policy: PolicyJson
    ms: float | None
    """Null if it could not be measured; `problem` says why."""
    ci_ms: list[float] | None
    kept: bool
    problem: str


class TuneDocument(TypedDict):
    """`weft tune --json`."""

    version: int
    device: str
    simulated: bool
    workload: WorkloadJson
    sequential_ms: float
    overlap_ms: float
    best_ms: float
    ideal_ms: float
    fraction_of_ideal: float | None
    policy: PolicyJson
    verdict: TunedVerdictJson
    ranked_out: int
    measurements: int
    candidates: list[CandidateJson]


class _BenchRowMore(TypedDict, total=False):
    samples_ms: list[float]
    again_ms: float
    """Time of the second measurement, after the choice."""
    again_ci_ms: list[float]
    again_samples_ms: list[float]
    sequential_ms: float
    compute_ms: float
    comm_ms: float
    ideal_ms: float
    own_comm_ms: float
    fraction_of_own_ideal: float | None
    facts: dict[str, Any]


class BenchRowJson(_BenchRowMore):
    suite: str
    cell: str
    device: str
    simulated: bool
    workload: WorkloadJson
    comm_share: float | None
    baseline_ctas: int
    candidate: str
    mode: str
    policy: PolicyJson
    ms: float | None
    ci_ms: list[float] | None
    time_ratio: float | None
    overlap_rate: float | None
    fraction_of_ideal: float | None
    chosen: bool
    status: str
    problem: str
    of: int


class BenchDocument(TypedDict):
    """`weft bench SUITE --json`."""

    version: int
    device: str
    simulated: bool
    suite: str
    rows: list[BenchRowJson]
    missing: list[str]
    """Workloads that the budget did not cover."""


class _ScheduleMore(TypedDict, total=False):
    product_ms: float
    decomposition_ms: float
    contention_ms: float
    staging_ms: float
    exposed_ms: float
    links_used: int
    links: int
    fraction_of_ideal: float | None


class ScheduleJson(_ScheduleMore):
    name: str
    ms: float
    speedup_vs_serial: float
    engine: str
    engines_ms: dict[str, float]


class PickRuleJson(TypedDict):
    name: str
    picked: str
    engine: str
    regret_pct: float | None
    regret_of_finer_pct: float | None
    speedup_vs_serial: float | None
    why: str


class _ExploreMore(TypedDict, total=False):
    rules: list[PickRuleJson]
    gpu: str
    not_possible: dict[str, str]


class ExploreDocument(_ExploreMore):
    """`weft explore --json`."""

    version: int
    device: str
    simulated: bool
    operation: str
    gemm: list[int]
    ranks: int
    dtype: str
    topology: str
    product_ms: float
    """Time of the GEMM alone."""
    collective_ms: float
    ideal_ms: float
    bound: float
    schedules: list[ScheduleJson]
    picked: str
    picked_engine: str
    picked_regret_pct: float | None
    why: str
    best: str
    best_engine: str
    reason: str


class CutJson(TypedDict):
    gemm: list[int]
    axis: str
    ways: int
    whole_ms: float
    ms: float
    loss_pct: float


class CopyJson(TypedDict):
    bytes: int
    us: float
    overhead_pct: float


class CharacterizeDocument(TypedDict):
    """`weft explore --characterize --json`."""

    version: int
    device: str
    simulated: bool
    gpu: str
    dtype: str
    decomposition: list[CutJson]
    contention: list[dict[str, Any]]
    copies: list[CopyJson]
    copy_start_us: float
    copy_gb_s: float


class StoredJson(TypedDict):
    gpu: str
    driver: str
    nccl: str
    torch: str
    workload: str
    setting: str
    policy: PolicyJson
    verdict: dict[str, Any]
    made: float
    """Unix time."""
    weft: str
    stale: bool


class _StoreResults(TypedDict, total=False):
    entries: list[StoredJson]
    exported: int
    imported: int
    forgot: int


class StoreDocument(_StoreResults):
    """`weft store ACTION --json`: `entries` of list, or the number of verdicts that the action changed."""

    version: int
    store: str


class CheckJson(TypedDict):
    name: str
    status: str
    """`ok`, `warn`, `fail` (overlap cannot work until it is fixed) or `skip`."""
    detail: str
    fix: str
    """A command or a setting; empty if nothing needs to be done."""


class DoctorDocument(TypedDict):
    """`weft doctor --json`."""

    version: int
    checks: list[CheckJson]
