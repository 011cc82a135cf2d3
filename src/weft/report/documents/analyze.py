"""The documents of `weft analyze --json`. Times are µs of the whole trace, exact to 1 ns."""

from __future__ import annotations

from typing import TypedDict


class FiguresJson(TypedDict):
    span_us: float
    compute_us: float
    comm_us: float
    overlap_us: float
    """Communication during which a compute kernel ran."""
    overlap_pct: float
    exposed_comm_us: float
    """Communication during which no compute kernel ran."""
    memory_us: float
    idle_us: float


class StepFiguresJson(FiguresJson):
    name: str
    start_us: float


class CausesJson(TypedDict):
    """Exposed time by cause."""

    launched_late_us: float
    behind_compute_us: float
    slower_rank_us: float
    nothing_to_hide_behind_us: float


class CollectiveRowJson(TypedDict):
    """All calls of one collective on one rank."""

    name: str
    kernel: str
    kind: str
    group: str | None
    count: int
    bytes: int | None
    total_us: float
    exposed_us: float
    median_us: float
    busbw_gbps: float | None
    attribution: CausesJson
    reasons: dict[str, float]
    recoverable_us: float | None


class ModuleRowJson(TypedDict):
    """Communication that one module of the program launched."""

    module: str
    count: int
    comm_us: float
    exposed_us: float
    reasons: dict[str, float]


class CriticalPathJson(TypedDict):
    compute_us: float
    comm_us: float
    memory_us: float
    host_us: float
    gap_us: float
    recoverable_us: float
    """How much shorter the trace would be if exposed communication were hidden."""
    recoverable_by_reason: dict[str, float]


class KernelPriceJson(TypedDict):
    """Slowdown of a compute kernel while it overlaps with communication (`beside`)."""

    name: str
    beside: int
    alone: int
    beside_us: float
    alone_us: float
    slowdown_pct: float
    lost_us: float


class PriceOfOverlapJson(TypedDict):
    lost_us: float
    slowdown_pct: float | None
    spans_beside: int
    spans_alone: int
    kernels: list[KernelPriceJson]


class RankJson(FiguresJson):
    """One rank, or one cycle of a rank."""

    path: str
    rank: int | None
    cycle: int | None
    device: str | None
    device_index: int | None
    world_size: int | None
    events: int
    gpu_events: int
    partial: bool
    warnings: list[str]
    steps: list[StepFiguresJson]
    collectives: list[CollectiveRowJson]
    modules: list[ModuleRowJson]
    attribution: CausesJson
    reasons: dict[str, float]
    critical_path: CriticalPathJson
    price_of_overlap: PriceOfOverlapJson
    clock_offset_us: float
    matched_collectives: int


class SummaryJson(TypedDict):
    """Sums over ranks, and figures of the worst rank."""

    text: str
    """The finding in one sentence: quote it."""
    ranks: int
    comm_us: float
    compute_us: float
    overlap_us: float
    overlap_pct: float
    exposed_comm_us: float
    worst_rank: int | None
    worst_rank_exposed_comm_us: float
    attribution: CausesJson
    reasons: dict[str, float]
    recoverable_us: float | None
    steps: int
    step_us: float
    recoverable_step_us: float | None
    """Per rank and step."""
    slowest_rank: int | None


class AdviceJson(TypedDict):
    """Something to try, the most promising first. `gain_us` and `step_ms` are ranges: low, high."""

    control: str
    title: str
    detail: str
    collective: str | None
    gain_us: list[float]
    command: str | None
    step_ms: list[float]
    step_pct: list[float]
    evidence: str
    of: str
    """What `step_ms` and `step_pct` refer to: `step`, or `span` (the whole trace) if no steps are marked."""


class AnalysisJson(TypedDict):
    ranks: list[RankJson]
    summary: SummaryJson
    advice: list[AdviceJson]
    partial: bool
    """A file was truncated or damaged: the figures cover part of it."""
    warnings: list[str]


class AnalyzeDocument(AnalysisJson):
    """`weft analyze TRACE --json`."""

    version: int


class DeltaJson(TypedDict):
    before: float
    after: float
    delta: float
    percent: float | None


class KindDeltaJson(TypedDict):
    kind: str
    exposed_us: DeltaJson


class MatchedJson(TypedDict):
    """A collective of either run, by kind, group and size; figures per rank and step."""

    kind: str
    group: str | None
    bytes: int | None
    calls: DeltaJson
    total_us: DeltaJson
    exposed_us: DeltaJson
    in_both: bool


class StepCountsJson(TypedDict):
    before: int
    after: int


class ChangeJson(TypedDict):
    """Means over ranks, before and after."""

    span_us: DeltaJson
    compute_us: DeltaJson
    comm_us: DeltaJson
    overlap_us: DeltaJson
    exposed_comm_us: DeltaJson
    memory_us: DeltaJson
    idle_us: DeltaJson
    overlap_pct: DeltaJson
    attribution: dict[str, DeltaJson]
    reasons: dict[str, DeltaJson]
    collectives: list[KindDeltaJson]
    per_step: dict[str, DeltaJson]
    steps: StepCountsJson
    matched: list[MatchedJson]
    text: str


class AnalyzeCompareDocument(TypedDict):
    """`weft analyze TRACE --against TRACE --json`."""

    version: int
    before: AnalysisJson
    after: AnalysisJson
    change: ChangeJson
    warnings: list[str]
