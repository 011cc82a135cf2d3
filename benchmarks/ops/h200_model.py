"""The simulated node and the pick against what one H200 measured with peers in pinned host memory.

python benchmarks/ops/h200_model.py [--measured benchmarks/results/ops/h200.json]
    [--out benchmarks/results/ops/h200_model.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from weft.ops.case import Case
from weft.ops.pick import pick
from weft.ops.simulate import simulate
from weft.policy import SCHEDULES


def row(measured: dict[str, Any], ranks: int) -> dict[str, Any]:
    """One shape: each schedule on copy engines, measured and simulated, and the cost of the pick."""
    sizes = (measured["m"], measured["n"], measured["k"])
    case = Case(
        operation=measured["operation"],
        m=sizes[0],
        n=sizes[1],
        k=sizes[2],
        ranks=ranks,
        gpu="h200",
        topology="host",
    )
    times = {name: measured["variants"][f"{name} dma"]["ms"] for name in SCHEDULES}
    model = {name: simulate(case, name, "dma").ms for name in SCHEDULES}
    found = pick(case.operation, *sizes, ranks, "bf16", "h200", "host", engines=("dma",))
    best = min(times, key=lambda name: times[name])
    return {
        "operation": case.operation,
        "gemm": list(sizes),
        "measured_ms": {name: round(ms, 4) for name, ms in times.items()},
        "simulated_ms": {name: round(ms, 4) for name, ms in model.items()},
        "best": best,
        "picked": found.schedule,
        "picked_regret_pct": round(100 * (times[found.schedule] / times[best] - 1), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, default=Path("benchmarks/results/ops/h200.json"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops/h200_model.json"))
    options = parser.parse_args()
    document = json.loads(options.measured.read_text())
    rows = [row(measured, document["ranks"]) for measured in document["rows"]]
    errors = {
        name: [r["simulated_ms"][name] / r["measured_ms"][name] - 1 for r in rows] for name in SCHEDULES
    }
    found = {
        "command": "python " + " ".join(sys.argv),
        "median_error_pct": {name: round(100 * median(values), 2) for name, values in errors.items()},
        "mean_regret_pct": round(sum(r["picked_regret_pct"] for r in rows) / len(rows), 3),
        "rows": rows,
    }
    for r in rows:
        print(
            r["operation"], r["gemm"], "best", r["best"], "picked", r["picked"], r["picked_regret_pct"], "%"
        )
    print({key: found[key] for key in ("median_error_pct", "mean_regret_pct")})
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
