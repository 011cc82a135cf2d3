"""The part of the papers that one GPU can run: ranks share it, and an H200 stands in for their GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from weft.errors import UnavailableError, WeftError
from weft.execute.base import Executor
from weft.execute.devices import has_gpu, open_executor
from weft.execute.sim import GHOST, SimExecutor
from weft.policy import Policy
from weft.reproduce.figure import NOT_LOOKED_AT, OnProgress, Reproduced, Reproduction, same_sign
from weft.reproduce.time_ratio import published_tables
from weft.rules import Rule
from weft.sim.profile import PAPER_CTAS, Profile, by_title
from weft.tuning.candidates import GEMM, residency_choices
from weft.workload import Workload, named, paper_reading

SIDES = (128, 64, 32, 256, 16, 1024, 8)
"""Grids X = Y, in the order in which they are measured; small ones take longest."""
RUNS = 6
"""Runs of each cell; the first third is dropped, as in the paper."""
RANKS_ON_GPU = 2
DEADLINE_S = 60.0
STAND_IN = "h100"
"""The GPU of the paper with the same SMs as an H200."""

GPU_ASSUMPTIONS = (
    "All ranks share one GPU: their collectives move bytes within it, at another rate than over links, and "
    f"their CTAs ({PAPER_CTAS} each) all sit on it. Two ranks, where the paper has four.",
    "Published: the H100's table, whose SMs the H200 shares. Ours over simulated: the same cell on sim:"
    "h200-ghost, which has seen no measurement of this kernel.",
    f"{RUNS} runs of each cell, the first third dropped, the median taken.",
)


def reproduce_on_gpu(paper: str, budget_s: float, progress: OnProgress) -> Reproduction:
    """What this machine's GPU can show of a paper, within `budget_s` seconds of measurements."""
    if not has_gpu():
        raise UnavailableError(
            "weft reproduce --device cuda needs a GPU and this machine has none; leave --device out to "
            "simulate the paper's nodes"
        )
    if paper == "2512.10236":
        return _measured_losses(paper, progress)
    executor = open_executor("cuda", baseline_ctas=PAPER_CTAS, deadline_s=DEADLINE_S)
    try:
        return measured_overlap(executor, paper, budget_s, progress)
    finally:
        executor.close()


def measured_overlap(
    executor: Executor,
    paper: str,
    budget_s: float,
    progress: OnProgress,
    clock: Callable[[], float] = time.monotonic,
) -> Reproduction:
    """TimeRatio and the gains of both controls by grid, measured and simulated."""
    until = clock() + budget_s
    model = by_title(str(executor.info().get("gpu", "")))
    simulated = SimExecutor(model.name + GHOST, model=model, baseline_ctas=PAPER_CTAS)
    figures: list[Reproduced] = []
    problems: list[str] = []
    slower = 1.0  # than the simulated GPU, so far
    for done, side in enumerate(SIDES):
        progress("grids", done, len(SIDES))
        workload = paper_reading(named("cb-ar-opt2")).but(ranks=RANKS_ON_GPU, grid=(side, side))
        needed = RUNS * 4 * simulated.measure(workload, Policy(), "sequential").ms / 1e3
        start = clock()
        if start + needed * slower > until:
            problems.append(f"{side}x{side} not measured: about {needed * slower:.0f} s, beyond --budget")
            continue
        try:
            figures += _grid_rows(executor, simulated, workload, model)
        except WeftError as error:
            problems.append(f"{side}x{side} not measured: {error}")
        slower = max(slower, (clock() - start) / needed)
    progress("grids", len(SIDES), len(SIDES))
    ratios = [one for one in figures if one.id == "fig2/H100" and one.error is not None]
    signs = [one.sign_right for one in figures if one.sign_right is not None]
    summary: dict[str, Any] = {"cells": len(ratios), "signs_right": sum(signs), "signs": len(signs)}
    if ratios:
        summary["mae_against_h100"] = round(sum(abs(one.error or 0) for one in ratios) / len(ratios), 4)
    return Reproduction(
        paper=paper,
        title="Resource-aware overlap, the part that one GPU can run",
        device=str(executor.info().get("gpu", executor.device)),
        simulated=False,
        figures=tuple(figures),
        summary=summary,
        assumptions=GPU_ASSUMPTIONS,
        findings=tuple(problems),
    )


def _grid_rows(
    executor: Executor, simulated: SimExecutor, workload: Workload, model: Profile
) -> list[Reproduced]:
    """One grid: TimeRatio of plain overlap, then the gain of each control over it."""
    table = published_tables()
    side = (workload.compute.grid or (0, 0))[0]
    sequential = _median_ms(executor, workload, Policy(), "sequential")
    plain = _median_ms(executor, workload, Policy())
    model_plain = simulated.measure(workload, Policy()).ms
    model_ratio = model_plain / simulated.measure(workload, Policy(), "sequential").ms
    index = table.grid.index(side)
    published, ours = table.tables[STAND_IN][index][index], plain / sequential
    rows = [
        Reproduced(
            id="fig2/H100",
            cell=f"{side}x{side}",
            published=published,
            ours=ours,
            basis=NOT_LOOKED_AT,
            unit="TimeRatio",
            sign_right=same_sign(ours, published, neutral=1.0),
            note=f"simulated: {model_ratio:.3f}; sequential {sequential:.2f} ms",
        )
    ]
    policies = [Policy(priority="high")]
    for residency in residency_choices(workload.compute, model.spec)[-1:]:
        policies.append(Policy(priority="high", rules=(Rule(GEMM, residency),)))
    for policy in policies:
        gain = 100 * (1 - _median_ms(executor, workload, policy) / plain)
        expected = 100 * (1 - simulated.measure(workload, policy).ms / model_plain)
        rows.append(
            Reproduced(
                id="controls/gain",
                cell=f"{side}x{side} {policy.label}",
                published=None,
                ours=gain,
                basis=NOT_LOOKED_AT,
                unit="% less time than plain overlap",
                sign_right=same_sign(expected, gain, within=2.0),
                note=f"simulated: {expected:.1f}%",
            )
        )
    return rows


def _median_ms(executor: Executor, workload: Workload, policy: Policy, mode: str = "overlap") -> float:
    times = [executor.measure(workload, policy, mode).ms for _ in range(RUNS)]
    return median(times[RUNS // 3 :])


def _measured_losses(paper: str, progress: OnProgress) -> Reproduction:
    """Losses of cut GEMMs, contention and copies on this GPU, next to the simulator's."""
    from weft.ops.characterize_device import measured

    progress("losses", 0, 1)
    document = measured([(8192, 8192, 8192)], "bf16")
    progress("losses", 1, 1)
    rows = [
        Reproduced(
            id=f"ficco/loss/{row['ways']}-way along {row['axis']}",
            cell="x".join(map(str, row["gemm"])),
            published=None,
            ours=float(row["loss_pct"]),
            basis=NOT_LOOKED_AT,
            unit="% more time",
            note=f"simulated: {row.get('simulated_loss_pct')}%",
        )
        for row in document["decomposition"]
    ]
    rows += [
        Reproduced(
            id="dma/overhead",
            cell=f"{row['bytes'] >> 10} KiB",
            published=None,
            ours=float(row["overhead_pct"]),
            basis=NOT_LOOKED_AT,
            unit="% of a copy",
            note="pinned host memory to this GPU; the paper's is between two MI300X",
        )
        for row in document["copies"]
    ]
    return Reproduction(
        paper=paper,
        title="FiCCO, the part that one GPU can run: losses",
        device=str(document["gpu"]),
        simulated=False,
        figures=tuple(rows),
        summary={"figures": len(rows)},
        assumptions=("One GPU: peers are pinned host memory, so copies cross PCIe.",),
    )
