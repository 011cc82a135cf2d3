"""Fit the one figure of the estimate that is not derived: how much copies wait for each other in groups.

python benchmarks/ops/fit_pick.py [--count 240] [--out benchmarks/results/ops/fit_pick.json]

The shapes are of the fit's own generator. What it prints goes to `weft.ops.estimate.GROUPED` by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cases import FIT_SEED, fit_cases

from weft.ops import estimate
from weft.ops.case import Case
from weft.ops.pick import estimates
from weft.ops.simulate import exhaustive

SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)
Row = tuple[Case, dict[tuple[str, str], float]]


def regret(rows: list[Row]) -> float:
    """What the fastest estimate takes over the best, on average."""
    total = 0.0
    for case, times in rows:
        found = min(estimates(case), key=lambda e: e.seconds)
        total += times[found.schedule, found.engine] / min(times.values()) - 1
    return total / max(1, len(rows))


def by_share(topology: str, rows: list[Row]) -> dict[float, float]:
    """Mean regret for each share."""
    before, found = dict(estimate.GROUPED), {}
    for share in SHARES:
        estimate.GROUPED[topology] = share
        estimate._loads.cache_clear()
        found[share] = round(regret(rows), 6)
    estimate.GROUPED.clear()
    estimate.GROUPED.update(before)
    estimate._loads.cache_clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=FIT_SEED)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops/fit_pick.json"))
    options = parser.parse_args()
    rows: list[Row] = [
        (case, {(r.name, r.engine): r.seconds for r in exhaustive(case)})
        for case in fit_cases(options.count, options.seed)
    ]
    document: dict[str, Any] = {"command": "python " + " ".join(sys.argv), "seed": options.seed}
    for topology in sorted({case.topology for case, _ in rows}):
        mine = [row for row in rows if row[0].topology == topology]
        document[topology] = {"shapes": len(mine), "mean_regret_by_share": by_share(topology, mine)}
        print(topology, document[topology], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
