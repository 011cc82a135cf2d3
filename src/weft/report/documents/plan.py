"""The documents of `weft plan --json`. Times in seconds, memory in bytes."""

from __future__ import annotations

from typing import Any, TypedDict

from weft.plan.accuracy import Interval
from weft.plan.calibrate import MeasuredStep
from weft.plan.changes import Change
from weft.report.documents.job import PolicyJson

Breakdown = dict[str, float]
"""Seconds of a step by kind of work; communication counts only its exposed part."""


class ErrorJson(TypedDict):
    """Error of predictions on published runs that were left out of the fit."""

    mean_pct: float
    p90_pct: float
    max_pct: float
    runs: int
    sources: int
    low_pct: float
    high_pct: float
    covered_pct: float
    family: str
    on: list[str]


class JobJson(TypedDict):
    model: str
    params: int
    gpu: str
    gpus: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_tp: int
    dp: int
    interleave: int
    schedule: str
    micro_batch: int
    micro_batches: int
    global_batch: int
    seq_len: int
    sharding: str
    shard_ranks: int
    sequence_parallel: bool
    recompute: str
    precision: str
    software: str
    compression: str
    network: str
    tokens: int


class PlanFiguresJson(TypedDict):
    step_time_s: float
    tflops_per_gpu: float
    mfu_pct: float
    exposed_comm_s: float
    breakdown: Breakdown
    policy: dict[str, Any] | None
    """A policy, or one per collective, by name; `weft schema policy` describes it."""


class PredictionJson(PlanFiguresJson):
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    memory_bytes: float
    memory: dict[str, float]


class GroupJson(TypedDict):
    ranks: int
    per_domain: int
    span: int


class CollectiveCostJson(TypedDict):
    name: str
    kind: str
    group: GroupJson
    bytes: float
    count: int
    alone_s: float
    hidden_s: float
    exposed_s: float
    slows_compute_by_s: float
    policy: PolicyJson | None


class WithoutWeftJson(TypedDict):
    step_time_s: float
    exposed_comm_s: float
    mfu_pct: float
    breakdown: Breakdown


class CostJson(TypedDict):
    gpu_hours_per_step: float
    gpu_hours_per_billion_tokens: float
    usd_per_gpu_hour: float | None
    usd_per_billion_tokens: float | None


class StageJson(TypedDict):
    layers: int
    moe_layers: int
    head: bool


class PipelineJson(TypedDict):
    schedule: str
    micro_batches: int
    stages: list[StageJson]
    bubble_share: float
    drawing: list[dict[str, Any]]


class FigureChangeJson(TypedDict):
    name: str
    before: float
    after: float


class CalibrationJson(TypedDict):
    trace: MeasuredStep
    figures: list[FigureChangeJson]
    model_compute_s: float
    trace_compute_s: float


class _Expected(TypedDict):
    version: int
    kind: str
    simulated: bool
    family: str
    interval: Interval | None
    """90% prediction interval of the step time without weft's controls."""
    known_error: ErrorJson | None
    job: JobJson
    notes: list[str]


class PlanDocument(_Expected, PredictionJson):
    """`weft plan --json`."""

    collectives: list[CollectiveCostJson]
    memory_limit_bytes: int
    controls: str
    without_weft: WithoutWeftJson
    gain_pct: float
    changes: list[Change]
    cost: CostJson
    pipeline: PipelineJson
    calibration: CalibrationJson | None


class WayJson(TypedDict):
    label: str
    controls: str
    job: JobJson
    step_time_s: float
    tflops_per_gpu: float
    mfu_pct: float
    tokens_per_s_per_gpu: float
    exposed_comm_s: float
    memory_bytes: float
    gpu_s_per_token: float
    pareto: bool


class StepWithoutJson(TypedDict):
    step_time_s: float


class PlanSweepDocument(_Expected, PlanFiguresJson):
    """`weft plan --sweep --json`."""

    best: WayJson
    rows: list[WayJson]
    refused: list[str]
    left_out: int
    memory_limit_bytes: int
    without_weft: StepWithoutJson
    cost: CostJson


class ScaledJson(PredictionJson):
    efficiency_pct: float


class PointJson(TypedDict):
    gpus: int
    global_batch: int
    without: ScaledJson
    with_weft: ScaledJson


class CurveJson(TypedDict):
    kind: str
    points: list[PointJson]
    note: str


class PlanScaleDocument(_Expected, PlanFiguresJson):
    """`weft plan --scale --json`."""

    curves: list[CurveJson]
