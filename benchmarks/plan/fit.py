"""Fit the planner's constants, and measure the error on each publication with that publication left out.

    python benchmarks/plan/fit.py [--write] [--warm]

Reads tests/data/published_training.csv (made by rows.py) and published_collectives.csv. --write puts
the constants fitted to all rows into src/weft/plan/data/figures.json, and the results of leaving out each
source into benchmarks/results/plan/left_out.json, the input of validate.py and of the shipped intervals.
--warm starts from the shipped constants instead of the priors.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from collectives import log_errors as point_errors
from collectives import points

from weft.plan.accuracy import family
from weft.plan.figures import BETWEEN_NODES, FIGURES_FILE, Constants, Figures, shipped
from weft.plan.fit import Fitted, Free, fit, log_errors, without
from weft.plan.published import Published, load

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ROOT / "benchmarks" / "results" / "plan" / "left_out.json"

# The prior of each constant and its uncertainty. Sources: benchmarks/results/ops (8192^3 on an
# H200 at 0.79 of the peak cold, and cut eight ways along K: 25% slower) for matmuls, with a tenth off for the
# clock under load; NCCL's tuning table (src/graph/tuning.cc) for hops; nccl-tests issues 212 and 326 for
# NVLink shares; kernel counts for the traffic factors.
FREE = [
    Free("gemm_a100", 0.82, 0.05, 0.85),
    Free("gemm_h100", 0.74, 0.03, 1.0),
    Free("gemm_fp8", 0.66, 0.05, 1.0),
    Free("power", 0.15, 0.3, 1.0),
    Free("power_limit", 0.6, 0.3, 1.0),
    Free("native", 0.92, 0.06, 1.2),
    Free("attention", 0.80, 0.12, 1.5),
    Free("elementwise", 1.25, 0.12),
    Free("eager", 2.0, 0.2),
    Free("cast", 1.0, 0.3),
    Free("routing", 2.0, 0.3),
    Free("gap_us", 4.5, 0.25),
    Free("fusion", 0.6, 0.3, 1.0),
    Free("skew", 0.004, 0.5),
    Free("ring_us", 3.4, 0.3),
    Free("network_us", 9.0, 0.5),
    Free("network_share", 0.90, 0.1, 1.0),
    Free("congestion", 0.03, 0.7),
]
assert {one.name for one in FREE} == {field.name for field in fields(Constants)}
assert len(FREE) <= 25
ABOUT = {
    "command": "python benchmarks/plan/fit.py --write",
    "data": "tests/data/published_training.csv and published_collectives.csv",
    "constants": "fitted; meanings in weft.plan.figures.Constants",
    "software": "facts from the papers and recipes of each framework; nothing in it is fitted",
}


def left_out(rows: list[Published], whole: Fitted) -> list[dict[str, Any]]:
    """Each publication predicted with constants fitted to the others."""
    found = []
    for source in sorted({row.source for row in rows}):
        mine = [row for row in rows if row.source == source]
        figures = without(source, whole, FREE, rows)
        for row, error in zip(mine, log_errors(figures, mine), strict=True):
            found.append(
                {
                    "source": source,
                    "run": row.label,
                    "family": family(row.job),
                    "gpus": row.job.gpus,
                    "published_s": row.step_s,
                    "log_error": round(float(error), 5),
                }
            )
        off = [100 * abs(math.expm1(line["log_error"])) for line in found if line["source"] == source]
        bias = [100 * math.expm1(line["log_error"]) for line in found if line["source"] == source]
        print(
            f"  without {source:12} {len(off):4} rows: mean {statistics.fmean(off):5.1f}% "
            f"bias {statistics.fmean(bias):+5.1f}%",
            flush=True,
        )
    return found


def main() -> None:
    rows = load(ROOT / "tests" / "data" / "published_training.csv")
    measured = points(ROOT / "tests" / "data" / "published_collectives.csv")

    def extra(figures: Figures) -> Any:
        return np.array(point_errors(figures.links, measured))

    fitted = fit(shipped(), FREE, rows, extra=extra, start=shipped() if "--warm" in sys.argv else None)
    whole = fitted.figures
    for one in FREE:
        print(f"{getattr(whole.constants, one.name):12.5g}  (prior {one.prior:g})  {one.name}")
    errors = fitted.errors[: len(rows)]
    for kind in sorted({family(row.job) for row in rows}):
        off = [
            100 * abs(math.expm1(e)) for e, row in zip(errors, rows, strict=True) if family(row.job) == kind
        ]
        print(f"  fitted to all: {kind:12} {len(off):4} rows: mean {statistics.fmean(off):.1f}%")
    off = [100 * abs(math.expm1(e)) for e in extra(whole)]
    print(f"  single collectives: {len(off)} points: median {statistics.median(off):.1f}%")
    lines = left_out(rows, fitted)
    for kind in sorted({line["family"] for line in lines}):
        off = [100 * abs(math.expm1(line["log_error"])) for line in lines if line["family"] == kind]
        print(f"  left out: {kind:12} {len(off):4} rows: mean {statistics.fmean(off):.1f}%")
    if "--write" in sys.argv:
        LEFT_OUT.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
        document = json.loads(FIGURES_FILE.read_text(encoding="utf-8"))
        found = {k: float(f"{v:.4g}") for k, v in asdict(whole.constants).items()}
        shared = {name: found.pop(name) for name in BETWEEN_NODES}
        print(f"  put these into LINKS of weft.gpu.network by hand: {shared}")
        document["constants"] = found
        document["about"] = ABOUT | {
            "priors": {one.name: f"{one.prior:g}, spread {one.spread:g}" for one in FREE},
            "rows": {s: sum(r.source == s for r in rows) for s in sorted({r.source for r in rows})},
        }
        FIGURES_FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
