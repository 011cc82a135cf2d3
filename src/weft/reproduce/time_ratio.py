"""Fig. 2 of arXiv:2606.09200: TimeRatio of plain overlap by grid, on the paper's simulated nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median

from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.reproduce.figure import INSPECTED, OnProgress, Reproduced, same_sign
from weft.sim.profile import PAPER_CTAS, PAPER_NODE, PAPER_RANKS, Profile, paper_node, profile
from weft.workload import Workload, named, paper_reading

PAPER_GPUS = {"a40": "A40", "a100": "A100", "h100": "H100", "mi250x": "MI250X"}
"""The paper's GPUs: profile name → the paper's name."""
LARGE_GRID = 4096
"""A grid with at least this many blocks counts as large."""
FAR = 0.1
"""A cell whose TimeRatio is off by more than this counts as a miss."""
WORKERS = 2
"""Number of threads; the simulator's core releases Python's lock."""
CB_TILES = 128
"""Tiles of cb along each side; more blocks than this along a side have no work."""


@dataclass(frozen=True)
class PublishedTables:
    """The four tables; rows are grid Y, columns grid X."""

    grid: tuple[int, ...]
    tables: dict[str, list[list[float]]]
    """TimeRatio by profile name, then row and column."""

    def cells(self, gpu: str) -> list[tuple[int, int, float]]:
        """(X, Y, TimeRatio) of every cell."""
        table = self.tables[gpu]
        return [(x, y, table[j][i]) for j, y in enumerate(self.grid) for i, x in enumerate(self.grid)]


@cache
def published_tables() -> PublishedTables:
    """The published tables of Fig. 2."""
    document = json.loads((Path(__file__).parent / "data" / "fig2_time_ratio.json").read_text("utf-8"))
    tables = {gpu: document["gpus"][title] for gpu, title in PAPER_GPUS.items()}
    return PublishedTables(tuple(document["grid"]), tables)


@dataclass(frozen=True)
class SharedFigures:
    """The assumptions that all four nodes share; only these were chosen by the errors in Fig. 2."""

    tile_loads: int = 2
    vector_efficiency: float = 0.8
    ctas: int = PAPER_CTAS

    def node(self, gpu: str) -> Profile:
        """The profile of a node under these assumptions."""
        base = profile(gpu).with_figures(
            tile_loads=float(self.tile_loads), vector_efficiency=self.vector_efficiency
        )
        return paper_node(base, ctas=self.ctas)


CHOICES = tuple(SharedFigures(*values) for values in product((1, 2, 3), (0.7, 0.8, 0.9), (8, 10)))
"""Assumptions from which `leave_one_out` chooses by the errors of the three other GPUs. The share of the link
is not varied, because only its ratio to the GEMM's rate matters."""


def paper_workload(name: str, gpu: str, grid: tuple[int, int] | None = None) -> Workload:
    """One of the paper's workloads with the number of ranks that the paper used for a GPU."""
    found = paper_reading(named(name)).but(ranks=PAPER_RANKS[gpu])
    return found if grid is None else found.but(grid=grid)


def time_ratio(run: SimExecutor, workload: Workload) -> float:
    """Time of plain overlap over sequential time."""
    return run.measure(workload, Policy()).ms / run.measure(workload, Policy(), "sequential").ms


def fig2_cells(progress: OnProgress) -> list[Reproduced]:
    """Every cell of the four tables."""
    published = published_tables()
    jobs = [(gpu, x, y, value) for gpu in PAPER_GPUS for x, y, value in published.cells(gpu)]
    runs = {gpu: SimExecutor(gpu + PAPER_NODE) for gpu in PAPER_GPUS}

    def cell(job: tuple[str, int, int, float]) -> Reproduced:
        gpu, x, y, value = job
        ours = time_ratio(runs[gpu], paper_workload("cb-ar-opt2", gpu, (x, y)))
        return Reproduced(
            id=f"fig2/{PAPER_GPUS[gpu]}",
            cell=f"{x}x{y}",
            published=value,
            ours=ours,
            basis=INSPECTED,
            unit="TimeRatio",
            sign_right=same_sign(ours, value, neutral=1.0),
        )

    found = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for one in pool.map(cell, jobs):
            found.append(one)
            progress("Fig. 2", len(found), len(jobs))
    return found


@dataclass(frozen=True, kw_only=True)
class TableErrors:
    """The errors of one table."""

    mae: float
    diagonal_mae: float
    largest: float
    far: int
    """Cells with an error of more than FAR."""
    large_mae: float
    """Mean absolute error at large grids (LARGE_GRID)."""
    constant_mae: float
    """Mean absolute error of the best constant at large grids."""
    large_ours: float
    large_published: float
    """Mean TimeRatio at large grids."""
    signs_right: int
    signs: int


def table_errors(cells: Sequence[Reproduced]) -> TableErrors:
    """The errors of the cells of one table."""
    rows = []
    for one in cells:
        x, y = (int(part) for part in one.cell.split("x"))
        rows.append((x, y, one.error or 0.0, one.published or 0.0))
    errors = [abs(error) for _, _, error, _ in rows]
    large = [(error, value) for x, y, error, value in rows if x * y >= LARGE_GRID]
    middle = median(value for _, value in large)
    signs = [one.sign_right for one in cells if one.sign_right is not None]
    return TableErrors(
        mae=fmean(errors),
        diagonal_mae=fmean(abs(error) for x, y, error, _ in rows if x == y),
        largest=max(errors),
        far=sum(error > FAR for error in errors),
        large_mae=fmean(abs(error) for error, _ in large),
        constant_mae=fmean(abs(value - middle) for _, value in large),
        large_ours=fmean(value + error for error, value in large),
        large_published=fmean(value for _, value in large),
        signs_right=sum(signs),
        signs=len(signs),
    )


def curve_mae(gpu: str, node: Profile) -> float:
    """Mean absolute error of a table on a node; simulates one grid for each number of blocks with work.

    Grids with the same number of such blocks hardly differ, neither in the paper nor in the simulator.
    """
    run = SimExecutor(gpu, model=node)
    ours: dict[int, float] = {}
    errors = []
    for x, y, value in published_tables().cells(gpu):
        blocks = min(x, CB_TILES) * min(y, CB_TILES)
        if blocks not in ours:
            ours[blocks] = time_ratio(run, paper_workload("cb-ar-opt2", gpu, _near_square(blocks)))
        errors.append(abs(ours[blocks] - value))
    return fmean(errors)


def leave_one_out(progress: OnProgress) -> dict[str, tuple[float, SharedFigures]]:
    """For each GPU: its mean absolute error under the assumptions that fit the others best, and those."""
    jobs = [(gpu, figures) for figures in CHOICES for gpu in PAPER_GPUS]
    errors: dict[tuple[str, SharedFigures], float] = {}
    with ThreadPoolExecutor(WORKERS) as pool:
        for job, error in zip(
            jobs, pool.map(lambda job: curve_mae(job[0], job[1].node(job[0])), jobs), strict=True
        ):
            errors[job] = error
            progress("leaving one GPU out", len(errors), len(jobs))
    found = {}
    for left in PAPER_GPUS:
        others = [gpu for gpu in PAPER_GPUS if gpu != left]
        chosen = min(CHOICES, key=lambda f: fmean(errors[gpu, f] for gpu in others))
        found[left] = (errors[left, chosen], chosen)
    return found


def own_link_mae() -> dict[str, float]:
    """Mean absolute error by GPU with NVLink if collectives had NVLink's rate."""
    return {gpu: curve_mae(gpu, profile(gpu)) for gpu in ("a100", "h100")}


def _near_square(blocks: int) -> tuple[int, int]:
    x = 2
    while x * x < blocks:
        x *= 2
    return x, blocks // x
