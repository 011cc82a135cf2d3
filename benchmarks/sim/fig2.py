"""Fig. 2 of arXiv:2606.09200 on simulated GPUs: TimeRatio of plain overlap over grids X, Y, and its error.

python benchmarks/sim/fig2.py [--out benchmarks/results/sim/fig2.json] [--most 1024] [--streams 4]

Interpretation of the paper, the same for all four GPUs: four compute streams take ten iterations in turn, the
GEMM is a textbook kernel on the vector units (tile 64x64x64, one tile in shared memory), each rank has its
own GPU. The paper's claims about its controls are checked in the same setting.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.sim.kernels import unpipelined_gemm
from weft.sim.profile import Profile
from weft.workload import Workload, named

PAPER = Path(__file__).parents[1] / "lab" / "fig2_time_ratio.json"
GPUS = {"A40": ("a40", 4), "A100": ("a100", 4), "H100": ("h100", 4), "MI250X": ("mi250x", 8)}
ITERATIONS, STREAMS = 10, 4
READING = (
    f"compute streams in turn, {ITERATIONS} iterations, textbook GEMM of 64x64x64 tiles on the vector units"
)
CLAIMED_GRIDS = (2, 4, 8, 16, 32, 64, 128, 256)


def workload(name: str, grid: tuple[int, int], ranks: int, streams: int = STREAMS) -> Workload:
    """One cell of the figure."""
    return named(name).but(grid=grid, ranks=ranks, iterations=ITERATIONS, compute_streams=streams, stages=1)


def executor(gpu: str, model: Profile | None = None) -> SimExecutor:
    return SimExecutor(gpu, model=model, compute=unpipelined_gemm)


def time_ratio(run: SimExecutor, cell: Workload) -> float:
    return run.measure(cell, Policy()).ms / run.measure(cell, Policy(), "sequential").ms


def table(gpu: str, ranks: int, grid: list[int], streams: int) -> list[list[float]]:
    """Rows are grid Y, columns grid X, as in the paper."""
    run = executor(gpu)
    return [[time_ratio(run, workload("cb-ar-opt2", (x, y), ranks, streams)) for x in grid] for y in grid]


def claims(gpu: str, ranks: int, streams: int) -> dict[str, Any]:
    """Gain of priority by grid, in percent, and the ratio of opt1's time to opt2's, both with priority."""
    run, high = executor(gpu), Policy(priority="high")
    gains, options = {}, {}
    for n in CLAIMED_GRIDS:
        cell = workload("cb-ar-opt2", (n, n), ranks, streams)
        gains[n] = round(100 * (1 - run.measure(cell, high).ms / run.measure(cell, Policy()).ms), 1)
        if n <= 128:
            first, second = (workload(f"mb-ar-{o}", (n, n), ranks, streams) for o in ("opt1", "opt2"))
            options[n] = round(run.measure(first, high).ms / run.measure(second, high).ms, 3)
    return {"priority_gain_pct": gains, "mb_opt1_over_opt2": options}


def compare(title: str, grid: list[int], paper: dict[str, Any], streams: int) -> dict[str, Any]:
    gpu, ranks = GPUS[title]
    ours = table(gpu, ranks, grid, streams)
    theirs = [row[: len(grid)] for row in paper["gpus"][title][: len(grid)]]
    errors = [abs(a - b) for r, s in zip(ours, theirs, strict=True) for a, b in zip(r, s, strict=True)]
    return {
        "mae": round(fmean(errors), 4),
        "mae_diagonal": round(fmean(abs(ours[i][i] - theirs[i][i]) for i in range(len(grid))), 4),
        "max_error": round(max(errors), 4),
        **claims(gpu, ranks, streams),
        "time_ratio": [[round(v, 4) for v in row] for row in ours],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sim/fig2.json"))
    parser.add_argument("--most", type=int, default=1024, help="largest X and Y")
    parser.add_argument("--streams", type=int, default=STREAMS, help="compute streams")
    options = parser.parse_args()
    paper = json.loads(PAPER.read_text())
    grid = [n for n in paper["grid"] if n <= options.most]
    found = {}
    for title in GPUS:
        found[title] = compare(title, grid, paper, options.streams)
        print(title, {k: v for k, v in found[title].items() if k != "time_ratio"}, flush=True)
    command = "python " + " ".join(sys.argv)
    document = {
        "simulated": True,
        "command": command,
        "reading": READING,
        "compute_streams": options.streams,
        "grid": grid,
        "gpus": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
