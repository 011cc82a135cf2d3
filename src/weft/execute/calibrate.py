"""Calibration: the probes to measure on a real GPU, and the fit of a simulator profile to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from weft.errors import UsageError, WeftError
from weft.execute.sim import GHOST, SimExecutor
from weft.policy import Policy
from weft.sim.profile import Profile
from weft.workload import Compute, Workload

FITTED = (
    "latency_ns",
    "cache_tb_s",
    "memory_tb_s",
    "library_efficiency",
    "matrix_efficiency",
    "attention_efficiency",
    "rows_traffic",
    "elementwise_traffic",
    "ghost_all_reduce_gb_s",
    "ghost_all_gather_gb_s",
    "ghost_reduce_scatter_gb_s",
    "ghost_all_to_all_gb_s",
    "intake_gb_s",
    "memory_latency_ns",
    "comm_latency_ns",
    "comm_traffic",
    "comm_miss",
)
FRACTIONS = ("library_efficiency", "matrix_efficiency", "attention_efficiency", "comm_miss")
"""Fitted figures that cannot exceed 1."""
FIRST_STEP, LAST_STEP = 0.2, 0.01
"""Relative step sizes at which the fit of a figure starts and ends."""


@dataclass(frozen=True)
class Probe:
    """One measurement of the calibration."""

    name: str
    workload: Workload
    policy: Policy
    mode: str


@dataclass(frozen=True)
class Reading:
    """A probe and its time on the real GPU, in ms."""

    probe: Probe
    ms: float


def probes() -> list[Probe]:
    """The probes. For each figure of the model, one of the workloads depends strongly on it."""
    found = []

    def gemm(tile_k: int, grid: tuple[int, int] | None) -> Workload:
        compute = Compute(kind="triton_gemm", shape=(8192,) * 3, tile=(64, 64, tile_k), grid=grid)
        return Workload(compute=compute, bytes=512 << 20, ranks=2, iterations=4)

    for grid in ((8, 8), (16, 16), None):
        for tile_k in (64, 32):
            found.append(Probe(f"gemm {tile_k} {grid}", gemm(tile_k, grid), Policy(), "compute"))
    for compute in (
        Compute(kind="triton_gemm", shape=(8192, 57344, 8192), tile=(64, 64, 64)),
        Compute(kind="triton_gemm", shape=(8192,) * 3, tile=(128, 256, 64), warps=8),
        Compute(kind="gemm"),
        Compute(kind="attention", shape=(8, 32, 2048, 128), repeat=3),
        Compute(kind="layer_norm", shape=(16384, 8192), repeat=2),
        Compute(kind="gelu", shape=(16384, 8192), repeat=2),
    ):
        workload = Workload(compute=compute, ranks=2, iterations=2)
        found.append(Probe(str(compute), workload, Policy(), "compute"))
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        workload = gemm(64, None).but(collective=collective, bytes=256 << 20)
        found.append(Probe(collective, workload, Policy(), "comm"))
    high = Policy(priority="high", head_start_us=5)
    for name, workload in (
        ("contention", gemm(64, None)),
        ("contention, short tiles", gemm(32, None)),
        ("contention, library", Workload(compute=Compute(kind="gemm"), bytes=200 << 20, iterations=6)),
    ):
        found += [Probe(f"{name}: {p}", workload, p, "overlap") for p in (Policy(), high)]
    return found


def take(measure: Callable[[Probe], float], chosen: Sequence[Probe]) -> tuple[list[Reading], list[str]]:
    """Measure the probes. Returns the readings, and one line for each probe that cannot run."""
    readings, problems = [], []
    for probe in chosen:
        try:
            readings.append(Reading(probe, measure(probe)))
        except WeftError as error:
            problems.append(f"{probe.name}: {error}")
    if not readings:
        raise UsageError(f"no probe could be measured ({problems[0]}); see `weft doctor`")
    return readings, problems


def error(profile: Profile, readings: Sequence[Reading], ctas: int) -> float:
    """Mean of |log(simulated / measured)| over the readings."""
    run = SimExecutor(profile.name + GHOST, baseline_ctas=ctas, model=profile)
    return fmean(
        abs(math.log(run.measure(r.probe.workload, r.probe.policy, r.probe.mode).ms / r.ms)) for r in readings
    )


def fit_profile(
    start: Profile,
    readings: Sequence[Reading],
    *,
    ctas: int,
    budget_s: float = 120.0,
    source: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Profile:
    """Fit the figures to the readings by coordinate descent with shrinking steps, for at most `budget_s`."""
    until = clock() + budget_s
    best, least = start, error(start, readings, ctas)
    steps = dict.fromkeys(FITTED, FIRST_STEP)
    while max(steps.values()) > LAST_STEP and clock() < until:
        for name, step in steps.items():
            if step <= LAST_STEP or clock() >= until:
                continue
            moved = False
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(best.figures, name) * factor
                if name in FRACTIONS and value > 1:
                    continue
                tried = best.with_figures(**{name: value})
                miss = error(tried, readings, ctas)
                if miss < least:
                    best, least, moved = tried, miss, True
                    break
            steps[name] = step * (1.3 if moved else 0.5)
    sources = {**best.sources, **dict.fromkeys(FITTED, source)} if source else best.sources
    return replace(best, sources=sources)
