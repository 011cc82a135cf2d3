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

REFERENCES = ("compute", "comm")  # measured alone: printed but not counted as pipelines
EFFECT = 0.02
"""Effects smaller than this share count as no effect."""


def predict(found: list[Case]) -> list[float]:
    """Simulated ms of each case, with all ranks on one GPU as in the lab."""
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


def families(found: list[Case], times: list[float]) -> dict[str, Any]:
    """Median error by kind of compute and collective, in percent."""
    errors: dict[str, list[float]] = defaultdict(list)
    for case, ms in zip(found, times, strict=True):
        if case.label not in REFERENCES:
            errors[f"{case.workload.compute.kind}+{case.workload.collective}"].append(ms / case.ms - 1)
    return {
        name: {
            "cases": len(values),
            "median_error_pct": round(100 * float(np.median(np.abs(values))), 1),
            "bias_pct": round(100 * float(np.median(values)), 1),
        }
        for name, values in sorted(errors.items())
    }


def signs(found: list[Case], times: list[float]) -> dict[str, Any]:
    """How often a policy's effect of over 2% has the measured sign."""
    both = list(zip(found, times, strict=True))
    plain = {(c.suite, c.cell): (c.ms, ms) for c, ms in both if c.label == "overlap"}
    right, wrong = 0, []
    for case, ms in both:
        base = plain.get((case.suite, case.cell))
        if base is None or case.label in (*REFERENCES, "overlap"):
            continue
        measured, simulated = case.ms / base[0] - 1, ms / base[1] - 1
        if abs(measured) > EFFECT:
            right += measured * simulated > 0
            if measured * simulated <= 0:
                wrong.append([case.cell, case.label, round(100 * measured, 1), round(100 * simulated, 1)])
    return {
        "effects": right + len(wrong),
        "right_pct": round(100 * right / (right + len(wrong)), 1),
        "wrong": wrong,
    }


def tile_options(found: list[Case], times: list[float]) -> dict[str, Any]:
    """Time of opt1 over opt2, measured and simulated, for every grid that was measured with both tiles."""
    pairs: dict[tuple[str, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    for case, ms in zip(found, times, strict=True):
        for option in ("opt1", "opt2"):
            if (
                case.suite == "paper"
                and option in case.cell
                and case.label in ("compute", "overlap", "priority")
            ):
                pairs[case.cell.replace(f"-{option}", ""), case.label][option] = (case.ms, ms)
    rows, wrong = [], 0
    for (cell, label), both in sorted(pairs.items()):
        if len(both) == 2:
            measured, simulated = (both["opt1"][i] / both["opt2"][i] for i in (0, 1))
            rows.append([cell, label, round(measured, 3), round(simulated, 3)])
            wrong += abs(measured - 1) > EFFECT and (measured - 1) * (simulated - 1) <= 0
    return {"pairs": len(rows), "wrong_signs": wrong, "opt1_over_opt2": rows}


def summary(found: list[Case], times: list[float]) -> dict[str, Any]:
    counted = [(c, ms) for c, ms in zip(found, times, strict=True) if c.label not in REFERENCES]
    errors = np.array([abs(ms / case.ms - 1) for case, ms in counted])
    return {
        "cases": len(errors),
        "median_error_pct": round(100 * float(np.median(errors)), 2),
        "p90_error_pct": round(100 * float(np.quantile(errors, 0.9)), 2),
        "max_error_pct": round(100 * float(errors.max()), 1),
        **picks(found, times),
        "families": families(found, times),
        "signs": signs(found, times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sim/h200_accuracy.json"))
    options = parser.parse_args()
    document: dict[str, Any] = {"simulated": True, "command": "python " + " ".join(sys.argv), "seed": SEED}
    every: list[tuple[Case, float]] = []
    for name, found in zip(("fitted", "held_out"), halves(cases()), strict=True):
        times = predict(found)
        document[name] = summary(found, times)
        print(name, {k: v for k, v in document[name].items() if k != "regret_pct"}, flush=True)
        every += zip(found, times, strict=True)
        document[name]["cases_ms"] = [
            [c.suite, c.cell, c.label, round(c.ms, 4), round(ms, 4)]
            for c, ms in zip(found, times, strict=True)
        ]
    document["tile_options"] = tile_options([case for case, _ in every], [ms for _, ms in every])
    print({k: v for k, v in document["tile_options"].items() if k != "opt1_over_opt2"})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
