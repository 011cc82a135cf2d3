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
    """Launches made while a collective was in flight, if tracked."""
    ctas: int | None
    blocks_per_sm: int | None
    natural_blocks_per_sm: int | None
    threads: int
    shared_bytes: int
    why_not: str | None
    """Why the latest launch was not shaped."""


class CountersJson(TypedDict):
    """There is also one key for each counter of the shim (`weft.shim.layout.COUNTERS`)."""

    launches: int
    comm_launches: int
    shaped: int
    kernels: list[KernelCountJson]


class NcclJson(TypedDict):
    """The NCCL library of the latest communicator, and how collective rules reach it."""

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
    """Could not be told apart from other collectives of their group."""
    why: list[str]
    """Reasons why collectives were not copied, each with a count."""
    traced: dict[str, int] | None
    """With `--trace`: SM kernels in the traced steps that did work copy engines can do, by name."""
    represented_as: list[str]
    """With ghost ranks of a node: what represents the copies, their rate and its source. Otherwise empty."""


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
    """What happened from the end of the search to the end of the job."""

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
    """The job before any trial."""

    collectives_per_step: float
    step_ms: float | None
    comm_ms: float | None
    exposed_ms: float | None
    ctas: int | None
    cta_choices: list[int]
    why_no_ctas: str
    cta_choices_at_start: list[int]
    start_settings: list[str]
    """Settings `NAME=VALUE` that a later start of the job could try."""
    world: int
    processes: int
    workload: str


class LeverJson(TypedDict):
    """A lever of live tuning."""

    lever: str
    bound_ms: float | None
    """The most that it could save per step."""


class BoundJson(TypedDict):
    """What communication costs a step, in ms, by cause."""

    cost_ms: float
    """Exposed and slowed time, less the SM time that collectives take in any case."""
    left_ms: float | None
    """The part of `cost_ms` that the policy did not recover."""
    exposed_ms: dict[str, float]
    """Exposed time by kind of collective."""
    late_ms: float
    """Time that collectives waited for SMs while compute ran."""
    slowed_ms: float
    """Extra time of compute because collectives ran concurrently."""
    held_ms: float
    """SM time of the collectives' blocks, as time of the whole GPU."""
    levers: list[LeverJson]
    """In the order in which they are tried."""


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
    """What tuning has cost the job so far; negative if it saved time."""
    watch: WatchJson | None
    bound: BoundJson | None
    """How much could be saved; null if the tracer could not be used."""
    explanation: list[ExplanationJson]
    facts: FactsJson | None


class ReplacedJson(TypedDict):
    """What `--ops` replaced."""

    text: str
    processes: list[dict[str, Any]]
    """The replacements in each process, with sizes, schedules and engines."""


class _WithTuning(TypedDict, total=False):
    tuning: TuningJson
    """Present with `--tune`."""
    ops: ReplacedJson
    """Present with `--ops`."""


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
    """Controls that stay in force, because all ranks must change them together; empty if none do."""
