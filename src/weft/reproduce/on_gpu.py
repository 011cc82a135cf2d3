"""The part of the papers that one GPU can run: ranks share it, and an H200 represents the papers' GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from weft.errors import UnavailableError, UsageError, WeftError
from weft.execute.base import Executor, MemoryFullError
from weft.execute.devices import has_gpu, open_executor
from weft.execute.sim import GHOST, SimExecutor
from weft.policy import Policy
from weft.reproduce.figure import HELD_OUT, OnProgress, Reproduced, Reproduction, same_sign
from weft.reproduce.gpu_losses import measured_losses
from weft.reproduce.time_ratio import paper_workload, published_tables
from weft.rules import Rule
from weft.sim.profile import PAPER_NODE, Profile, by_title
from weft.tuning.candidates import GEMM, residency_choices
from weft.workload import Workload, named, paper_reading

SIDES = (128, 32, 16, 64, 8, 256, 1024)
"""Sides of the grids X = Y in order of measurement; those where the ratio changes most come first."""
RUNS = 4
"""Rounds per grid, each with every candidate. The first third is dropped, as in the paper."""
FEWEST_RUNS = 3
"""A grid is measured only if the budget allows this many rounds."""
RANKS_ON_GPU = 2
GPU_CTAS = 2
"""CTAs per rank: within one GPU, a collective with few CTAs is as slow as one with more over a link."""
MOST_COLLECTIVE_BYTES = 4_000_000_000
"""Largest collective, because its elements are counted in 32 bits."""
DEADLINE_S = 60.0
STAND_IN = "h100"
"""The paper's GPU that has the same SMs as an H200."""

GPU_ASSUMPTIONS = (
    "All ranks share one GPU: their collectives move bytes within it, at another rate than over links, and "
    f"their CTAs ({GPU_CTAS} each) all sit on it. Two ranks, where the paper has four.",
    "The size of the collective is chosen so that, alone, it takes as long relative to the GEMM as on the "
    "simulated H100 node of the paper; on the simulator likewise.",
    "Published: the H100's table, whose SMs the H200 shares. Simulated: the same cell on sim:h200-ghost, "
    "which was not fitted to any measurement of this kernel.",
    f"Up to {RUNS} rounds of each grid, candidates in turn; the first third dropped, the median taken.",
)


def reproduce_on_gpu(paper: str, budget_s: float, progress: OnProgress) -> Reproduction:
    """The part of a paper that this machine's GPU can run, within `budget_s` seconds of measurements."""
    if not has_gpu():
        raise UnavailableError(
            "weft reproduce --device cuda needs a GPU and this machine has none; leave --device out to "
            "simulate the paper's nodes"
        )
    if paper == "2512.10236":
        return measured_losses(paper, budget_s, progress)
    deadline_s = min(DEADLINE_S, budget_s)
    executor = open_executor("cuda", baseline_ctas=GPU_CTAS, deadline_s=deadline_s)
    try:
        return measured_overlap(executor, paper, budget_s, progress)
    finally:
        executor.close()


@dataclass
class _Clock:
    """The deadline, and how much slower than simulated the GPU has been so far."""

    now: Callable[[], float]
    until: float
    slower: float = 1.0

    def covers(self, expected_s: float) -> bool:
        return self.now() + expected_s * self.slower <= self.until


def measured_overlap(
    executor: Executor,
    paper: str,
    budget_s: float,
    progress: OnProgress,
    clock: Callable[[], float] = time.monotonic,
) -> Reproduction:
    """TimeRatio and the gains of both controls by grid, measured and simulated."""
    model = _simulator_of(str(executor.info().get("gpu", "")))
    simulated = SimExecutor(model.name + GHOST, model=model, baseline_ctas=GPU_CTAS)
    left = _Clock(clock, clock() + budget_s)
    wanted = paper_share()
    sizes = [matched_bytes(run, wanted) for run in (executor, simulated)]
    figures: list[Reproduced] = []
    problems: list[str] = []
    off_model: list[float] = []
    for done, side in enumerate(SIDES):
        progress("grids", done, len(SIDES))
        grid = on_one_gpu().but(grid=(side, side))
        real, model_of = (grid.but(bytes=size) for size in sizes)
        try:
            rows, model_ratio = _grid_rows(executor, simulated, real, model_of, left)
            figures += rows
            off_model.append(abs((rows[0].ours or 0.0) - model_ratio))
        except (UnavailableError, UsageError) as error:
            if not figures and not isinstance(error, MemoryFullError):
                raise  # other grids would fail in the same way
            problems.append(f"{side}x{side} not measured: {error}")
        except WeftError as error:
            problems.append(f"{side}x{side} not measured: {error}")
    progress("grids", len(SIDES), len(SIDES))
    ratios = [one for one in figures if one.id == "fig2/H100" and one.error is not None]
    signs = [one.sign_right for one in figures if one.sign_right is not None]
    summary: dict[str, Any] = {
        "cells": len(ratios),
        "signs_right": sum(signs),
        "signs": len(signs),
        "comm_over_compute": round(wanted, 3),
        "collective_bytes": sizes[0],
    }
    found = []
    if ratios:
        summary["mae_against_h100"] = round(fmean(abs(one.error or 0) for one in ratios), 4)
        summary["mae_against_simulated"] = round(fmean(off_model), 4)
        found.append(
            f"TimeRatio at {len(ratios)} grids: {summary['mae_against_h100']:.3f} from the H100's table and "
            f"{summary['mae_against_simulated']:.3f} from the simulator on average; "
            f"{sum(signs)} of {len(signs)} signs right."
        )
    return Reproduction(
        paper=paper,
        title="Resource-aware overlap, the part that one GPU can run",
        device=str(executor.info().get("gpu", executor.device)),
        simulated=False,
        figures=tuple(figures),
        summary=summary,
        assumptions=GPU_ASSUMPTIONS,
        findings=(*found, *problems),
    )


def on_one_gpu() -> Workload:
    """The workload of Fig. 2 with ranks that share a GPU, and with one block per tile."""
    return paper_reading(named("cb-ar-opt2")).but(ranks=RANKS_ON_GPU)


def paper_share() -> float:
    """Time of the collective over that of the GEMM, each alone, on the paper's simulated STAND_IN node."""
    return _alone_share(SimExecutor(STAND_IN + PAPER_NODE), paper_workload("cb-ar-opt2", STAND_IN))


def matched_bytes(run: Executor, wanted: float) -> int:
    """The size at which the collective takes `wanted` times as long as the GEMM, each alone."""
    workload = on_one_gpu()
    return min(MOST_COLLECTIVE_BYTES, round(workload.bytes * wanted / _alone_share(run, workload)))


def _alone_share(run: Executor, workload: Workload) -> float:
    compute, comm = (
        min(run.measure(workload, Policy(), mode).ms for _ in range(2)) for mode in ("compute", "comm")
    )
    return comm / compute


def _simulator_of(title: str) -> Profile:
    try:
        return by_title(title)
    except UsageError as error:
        raise UnavailableError(
            f"weft reproduce --device cuda compares with the simulator: {error}; leave --device out to "
            "simulate the paper's nodes"
        ) from None


def _grid_rows(
    executor: Executor, simulated: SimExecutor, workload: Workload, simulated_workload: Workload, left: _Clock
) -> tuple[list[Reproduced], float]:
    """The rows of one grid, and its simulated TimeRatio.

    The rows are the TimeRatio of plain overlap, then the gain of each control over plain overlap.
    """
    table = published_tables()
    side = (workload.compute.grid or (0, 0))[0]
    index = table.grid.index(side)
    policies = [Policy(priority="high")]
    for residency in residency_choices(workload.compute, simulated.profile.spec)[:1]:
        policies.append(Policy(priority="high", rules=(Rule(GEMM, residency),)))
    tried = [(Policy(), "sequential"), (Policy(), "overlap"), *((policy, "overlap") for policy in policies)]
    expected = [simulated.measure(simulated_workload, *one).ms for one in tried]
    sequential, plain, *others = _medians_ms(executor, workload, tried, 1e-3 * sum(expected), left)
    published, ours = table.tables[STAND_IN][index][index], plain / sequential
    model_ratio = expected[1] / expected[0]
    rows = [
        Reproduced(
            id="fig2/H100",
            cell=f"{side}x{side}",
            published=published,
            ours=ours,
            basis=HELD_OUT,
            unit="TimeRatio",
            sign_right=same_sign(ours, published, neutral=1.0),
            note=f"simulated: {model_ratio:.3f}; sequential {sequential:.2f} ms, "
            f"simulated {expected[0]:.2f} ms",
        )
    ]
    for policy, ms, model_ms in zip(policies, others, expected[2:], strict=True):
        gain, expected_gain = 100 * (1 - ms / plain), 100 * (1 - model_ms / expected[1])
        rows.append(
            Reproduced(
                id="controls/gain",
                cell=f"{side}x{side} {policy.label}",
                published=None,
                ours=gain,
                basis=HELD_OUT,
                unit="% less time than plain overlap",
                sign_right=same_sign(expected_gain, gain, within=2.0),
                note=f"simulated: {expected_gain:.1f}%",
            )
        )
    return rows, model_ratio


def _medians_ms(
    executor: Executor, workload: Workload, tried: Sequence[tuple[Policy, str]], round_s: float, left: _Clock
) -> list[float]:
    """Median time of each candidate in ms, from interleaved rounds. `round_s`: simulated time of a round."""
    times: list[list[float]] = [[] for _ in tried]
    if not left.covers(FEWEST_RUNS * round_s):
        raise WeftError(f"needs about {FEWEST_RUNS * round_s * left.slower:.0f} s, more than --budget allows")
    rounds = 0
    while rounds < RUNS and (rounds < FEWEST_RUNS or left.covers(round_s)):
        start = left.now()
        for found, (policy, mode) in zip(times, tried, strict=True):
            found.append(executor.measure(workload, policy, mode).ms)
        if rounds:  # the first round also compiles and creates communicators
            left.slower = max(left.slower, (left.now() - start) / round_s)
        rounds += 1
    return [median(found[rounds // 3 :]) for found in times]
