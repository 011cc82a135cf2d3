"""Fit the caution of the pick: factors on estimates that are not exact, on shapes of the fit's own generator.

python benchmarks/ops/fit_pick.py [--count 400] [--out benchmarks/results/ops/fit_pick.json]

Every factor starts at 1 and moves only where that lowers what the picks lose; print them, and copy them to
`weft.ops.pick.CAUTION`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cases import FIT_SEED, fit_cases

from weft.ops.estimate import seconds
from weft.ops.pick import MARGIN, TIE
from weft.ops.simulate import ENGINES, Case, exhaustive
from weft.policy import SCHEDULES

STEPS = (0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12)
KEEP = 2e-5
"""What a factor other than 1 must gain in mean loss."""
Key = tuple[str, str]
Row = tuple[str, dict[Key, float], dict[Key, float]]


def table(cases: list[Case]) -> list[Row]:
    """By case: its topology, simulated times and estimates."""
    rows = []
    for case in cases:
        times = {(r.name, r.engine): r.seconds for r in exhaustive(case)}
        rows.append((case.topology, times, {key: seconds(case, *key) for key in times}))
    return rows


def loss(rows: list[Row], factors: dict[Key, float]) -> float:
    """Mean regret, and ten times what is lost to serial beyond half a percent."""
    total = 0.0
    for _, times, guesses in rows:
        scaled = {
            key: guesses[key] * factors.get(key, 1.0) for key in ((n, e) for e in ENGINES for n in SCHEDULES)
        }
        least = min(scaled.values())
        key = next(key for key, value in scaled.items() if value <= least * (1 + TIE))
        serial = min((k for k in scaled if k[0] == "serial"), key=lambda k: scaled[k])
        if scaled[key] > scaled[serial] * (1 - MARGIN):
            key = serial
        best = min(times.values())
        true_serial = min(times["serial", engine] for engine in ENGINES)
        total += times[key] / best - 1 + 10 * max(0.0, times[key] / true_serial - 1.005)
    return total / max(1, len(rows))


def fit(rows: list[Row]) -> dict[Key, float]:
    """Coordinate descent, two rounds."""
    factors: dict[Key, float] = {}
    for _ in range(2):
        for key in ((name, engine) for engine in ENGINES for name in SCHEDULES):
            here = loss(rows, factors)
            tried = {step: loss(rows, {**factors, key: step}) for step in STEPS}
            step = min(tried, key=lambda s: (tried[s], abs(s - 1)))
            if tried[step] < here - KEEP:
                factors[key] = step
    return {key: step for key, step in factors.items() if step != 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=FIT_SEED)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops/fit_pick.json"))
    options = parser.parse_args()
    rows = table(list(fit_cases(options.count, options.seed)))
    document: dict[str, object] = {"command": "python " + " ".join(sys.argv), "seed": options.seed}
    for topology in sorted({row[0] for row in rows}):
        mine = [row for row in rows if row[0] == topology]
        factors = fit(mine)
        document[topology] = {
            "shapes": len(mine),
            "loss_before": round(loss(mine, {}), 6),
            "loss_after": round(loss(mine, factors), 6),
            "caution": [[*key, step] for key, step in factors.items()],
        }
        print(topology, document[topology], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
