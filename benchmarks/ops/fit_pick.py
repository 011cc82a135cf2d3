"""Fit the one figure that the estimate does not derive, on shapes of the fit's own generator.

python benchmarks/ops/fit_pick.py [--count 100] [--out benchmarks/results/ops/fit_pick.json]

That figure is DRIFT: how much longer copies take in a PCIe tree whose ranks fall out of step. Copy the
printed value to `weft.ops.estimate` by hand. `usual` and `rough` are the errors that CLOSE and CLOSE_ROUGH of
`weft.ops.pick` must cover.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cases import FIT_SEED, fit_cases

from weft.ops import estimate
from weft.ops.case import Case
from weft.ops.simulate import exhaustive

DRIFTS = (1.0, 1.02, 1.04, 1.06, 1.08)
RELEVANT = 1.25
"""Schedules that take at most this many times as long as the best."""
Row = tuple[Case, dict[tuple[str, str], float]]


def score(rows: list[Row]) -> dict[str, float]:
    """Percent by which estimates differ from simulated times, over the schedules that may be picked."""
    estimate._loads.cache_clear()
    errors = []
    for case, times in rows:
        most_s = RELEVANT * min(times.values())
        errors += [
            100 * abs(estimate.seconds(case, *key) / taken_s - 1)
            for key, taken_s in times.items()
            if taken_s <= most_s
        ]
    return {
        "median_error_pct": round(float(np.median(errors)), 3),
        "mean_error_pct": round(float(np.mean(errors)), 3),
        "p99_error_pct": round(float(np.quantile(errors, 0.99)), 2),
        "estimates": len(errors),
    }


def scan(rows: list[Row]) -> dict[float, Any]:
    """The score for each value of DRIFT."""
    before, found = dict(estimate.DRIFT), {}
    for value in DRIFTS:
        estimate.DRIFT["pcie"] = value
        found[value] = score(rows)
    estimate.DRIFT.update(before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=FIT_SEED)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops/fit_pick.json"))
    options = parser.parse_args()
    rows: list[Row] = [
        (case, {(r.name, r.engine): r.seconds for r in exhaustive(case)})
        for case in fit_cases(options.count, options.seed)
    ]
    document: dict[str, Any] = {"command": "python " + " ".join(sys.argv), "seed": options.seed}
    document["all"] = score(rows)
    document["usual"] = score([row for row in rows if not estimate.is_rough(row[0])])
    document["rough"] = score([row for row in rows if estimate.is_rough(row[0])])
    document["DRIFT"] = scan([row for row in rows if row[0].topology == "pcie"])
    for name, found in document.items():
        print(name, found, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
