"""The documents of `weft run --stats` and `weft top`."""

from __future__ import annotations

from typing import Any, TypedDict


class PolicyJson(TypedDict):
    """A policy, as `weft schema policy` describes it: its keys come from the fields of `weft.Policy`."""


class KernelCountJson(TypedDict):
    name: str
    kind: str
    """`compute`, `comm`, `weft` or `unknown`."""
    launches: int
    shaped: int
    beside: int
    """Launches made while a collective was in flight, where that was tracked."""
    ctas: int | None
    blocks_per_sm: int | None
    natural_blocks_per_sm: int | None
    threads: int
    shared_bytes: int
    why_not: str | None
    """Why the latest launch was not shaped."""


class CountersJson(TypedDict):
    """Besides these keys, one for each counter of the shim (`weft.shim.layout.COUNTERS`)."""

    launches: int
    comm_launches: int
    shaped: int
    kernels: list[KernelCountJson]


class NcclJson(TypedDict):
    """The NCCL of the latest communicator, and how rules for collectives reach it."""

    version: str
    path: str
    why: str
    tuner: int | None
    user_tuner: int | None


class EngineJson(TypedDict):
    """Collectives by copy engines (comm.engine dma)."""

    asked: bool
    copied: int
    """No SM kernel was launched for them."""
    kernels: int
    unsure: int
    """Not distinguished from other collectives of their group."""
    why: list[str]
    """Why collectives were not copied, each with their number."""
    traced: dict[str, int] | None
    """With `--trace`: SM kernels of the traced steps that did what copy engines can, by name."""
    represented_as: list[str]
    """With ghosts of a node: what stands for the copies, with the rate and its source. Otherwise empty."""


class ProcessJson(CountersJson):
    nccl: NcclJson | None
    pid: int
    rank: int | None
    command: str
    api: str


class VerdictJson(TypedDict):
    """What a tuner concludes."""

    source: str
    text: str
    choice: str
    """`apply`, or `leave it alone`."""
    policy: PolicyJson
    chosen: str
    gain_pct: float
    gain_ci_pct: list[float]
    """95% confidence interval."""
    best_ms: float | None
    baseline_ms: float | None
    baseline: str
    reason: str
    measurements: int


class TriedJson(TypedDict):
    label: str
    policy: PolicyJson
    ms: float | None
    steps: int
    note: str


class WatchJson(TypedDict):
    """What happened after the search, until the job's end."""

    steps: int
    probes: int
    checks: int
    searches: int
    reverted: str
    """Why the policy was reverted; empty if it was not."""
    in_force: PolicyJson
    default_ms: float | None
    policy_ms: float | None


class ExplanationJson(TypedDict):
    kernel: str
    launches_per_step: float
    ms: float | None
    beside_ms: float | None
    beside_collectives_pct: float
    blocks_per_sm: int | None
    what: str


class FactsJson(TypedDict):
    """The job before anything was tried."""

    collectives_per_step: float
    step_ms: float | None
    comm_ms: float | None
    exposed_ms: float | None
    ctas: int | None
    cta_choices: list[int]
    why_no_ctas: str
    cta_choices_at_start: list[int]
    start_settings: list[str]
    """Settings `NAME=VALUE` that a later start could try."""
    world: int
    processes: int
    workload: str


class LeverJson(TypedDict):
    """A lever of live tuning."""

    lever: str
    bound_ms: float | None
    """The most that it could win, per step."""


class BoundJson(TypedDict):
    """What communication costs a step, in ms, by cause."""

    cost_ms: float
    """Exposed and slowed time, less the SM-time that collectives take in any case."""
    left_ms: float | None
    """What of it the policy has not won."""
    exposed_ms: dict[str, float]
    """By kind of collective."""
    late_ms: float
    """Collectives that waited for SMs while compute ran."""
    slowed_ms: float
    """What compute took longer because collectives ran at the same time."""
    held_ms: float
    """Time of the whole GPU that the collectives' blocks take."""
    levers: list[LeverJson]
    """In the order in which they were tried."""


class TuningJson(TypedDict):
    state: str
    """`kept`, `left alone` or `stopped`."""
    text: str
    """The outcome in one sentence: quote it."""
    verdict: VerdictJson
    policy: PolicyJson | None
    gain_pct: float
    ci: list[float]
    steps: int
    warm_up_steps: int
    noise_pct: float | None
    default_ms: float | None
    best_ms: float | None
    reason: str
    source: str
    candidates: list[TriedJson]
    cost_ms: float
    """What tuning cost the job so far; below 0 it saved time."""
    watch: WatchJson | None
    bound: BoundJson | None
    """What could be won; null where the tracer could not be used."""
    explanation: list[ExplanationJson]
    facts: FactsJson | None


class ReplacedJson(TypedDict):
    """What `--ops` replaced."""

    text: str
    processes: list[dict[str, Any]]
    """The replacements in each process, with sizes, schedules and engines."""


class _WithTuning(TypedDict, total=False):
    tuning: TuningJson
    """With `--tune`."""
    ops: ReplacedJson
    """With `--ops`."""


class RunDocument(CountersJson, _WithTuning):
    """The file of `weft run --stats FILE`: sums over all processes, and each of them."""

    version: int
    policy: PolicyJson
    processes: list[ProcessJson]
    engine: EngineJson


class TopChangeDocument(TypedDict):
    """`weft top JOB --policy FILE --json` or `--off --json`."""

    version: int
    job: str
    before: PolicyJson
    policy: PolicyJson
    stays: str
    """Controls that stay in force, since all ranks must change them together; empty where none does."""
