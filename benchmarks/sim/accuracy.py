"""The simulator against the lab's H200 measurements: errors and picks on the held-out half.

python benchmarks/sim/accuracy.py [--out benchmarks/results/sim/h200_accuracy.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from lab_rows import SEED, Case, cases, halves

from weft.execute.sim import SimExecutor

REFERENCES = ("compute", "comm")  # measured alone: printed, but not counted as pipelines
BASELINES = ("sequential", "overlap")


def predict(found: list[Case]) -> list[float]:
    """Simulated ms of each case, all ranks on one GPU as in the lab."""
    runs: dict[int, SimExecutor] = {}
    times = []
    for case in found:
        run = runs.setdefault(case.ctas, SimExecutor("h200-ghost", baseline_ctas=case.ctas))
        times.append(run.measure(case.workload, case.policy, case.mode).ms)
    return times


def picks(found: list[Case], times: list[float]) -> dict[str, Any]:
    """How much longer the simulator's pick takes than the measured best, in percent, by workload."""
    cells: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for case, ms in zip(found, times, strict=True):
        if case.label not in REFERENCES:
            cells[f"{case.suite}/{case.cell}"].append((ms, case.ms, case.label))
    regret = {}
    for name, rows in cells.items():
        _, measured, label = min(rows)
        best = min(rows, key=lambda row: row[1])
        regret[name] = (round(100 * (measured / best[1] - 1), 2), label, best[2])
    within = float(np.mean([value[0] <= 5 for value in regret.values()]))
    return {"workloads": len(regret), "within_5_pct": round(within, 4), "regret_pct": regret}


def summary(found: list[Case], times: list[float]) -> dict[str, Any]:
    counted = [(c, ms) for c, ms in zip(found, times, strict=True) if c.label not in REFERENCES]
    errors = np.array([abs(ms / case.ms - 1) for case, ms in counted])
    return {
        "cases": len(errors),
        "median_error_pct": round(100 * float(np.median(errors)), 2),
        "p90_error_pct": round(100 * float(np.quantile(errors, 0.9)), 2),
        "max_error_pct": round(100 * float(errors.max()), 1),
        **picks(found, times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sim/h200_accuracy.json"))
    options = parser.parse_args()
    document: dict[str, Any] = {"simulated": True, "command": "python " + " ".join(sys.argv), "seed": SEED}
    for name, found in zip(("fitted", "held_out"), halves(cases()), strict=True):
        times = predict(found)
        document[name] = summary(found, times)
        print(name, {k: v for k, v in document[name].items() if k != "regret_pct"}, flush=True)
        document[name]["cases_ms"] = [
            [c.suite, c.cell, c.label, round(c.ms, 4), round(ms, 4)]
            for c, ms in zip(found, times, strict=True)
        ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
