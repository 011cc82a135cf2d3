"""The pick from sizes alone against exhaustive search, on shapes that the fit has not seen.

python benchmarks/ops/pick.py [--count 60] [--seeds 24] [--first 730001] [--out FILE]

Runs several consecutive seeds. Of every four shapes, the pick may use both engines for two, only DMA for one,
and only SMs for one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from cases import CHECK_SEED, check_cases

from weft.ops.case import FUSED_ENGINES, Case
from weft.ops.explore import FINER
from weft.ops.ficco import RULE_READINGS, ficco_pick
from weft.ops.pick import pick
from weft.ops.simulate import exhaustive

NEAR, WORSE = 0.02, 0.01
ENGINES = (FUSED_ENGINES, FUSED_ENGINES, ("dma",), ("sm",))


def judge(case: Case, engines: tuple[str, ...] = FUSED_ENGINES) -> dict[str, Any]:
    """The time of the pick against the best schedule and serial, each with its best of these engines."""
    began = time.process_time()
    sizes = (case.m, case.n, case.k, case.ranks)
    found = pick(case.operation, *sizes, case.dtype, case.gpu, case.topology, engines=engines)
    picked_us = 1e6 * (time.process_time() - began)
    times = {(r.name, r.engine): r.seconds for r in exhaustive(case, engines)}
    best = min(times, key=lambda key: times[key])
    serial = min(seconds for (name, _), seconds in times.items() if name == "serial")
    taken = times[found.schedule, found.engine]
    finer = {key: seconds for key, seconds in times.items() if key[0] in FINER}

    def ruled_s(schedule: str) -> float:
        return min(seconds for (name, _), seconds in finer.items() if name == schedule)

    ruled, other = (ficco_pick(case, reading).schedule for reading in RULE_READINGS)
    by_rule = ruled_s(ruled)
    return {
        "case": [case.operation, case.m, case.n, case.k, case.ranks, case.dtype, case.gpu, case.topology],
        "engines": list(engines),
        "picked": [found.schedule, found.engine],
        "best": list(best),
        "best_ms": round(1e3 * times[best], 6),
        "regret": round(taken / times[best] - 1, 6),
        "over_serial": round(taken / serial - 1, 6),
        "possible_gain": round(serial / times[best], 4),
        "picked_us": round(picked_us, 1),
        "ficco": ruled,
        "ficco_regret": round(by_rule / times[best] - 1, 6),
        "ficco_regret_of_finer": round(by_rule / min(finer.values()) - 1, 6),
        "ficco_over_serial": round(by_rule / serial - 1, 6),
        "ficco_other_regret_of_finer": round(ruled_s(other) / min(finer.values()) - 1, 6),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    regrets = np.array([row["regret"] for row in rows])
    return {
        "shapes": len(rows),
        "same_schedule": round(float(np.mean([r["picked"][0] == r["best"][0] for r in rows])), 4),
        "best_or_within_2_pct": round(float(np.mean(regrets <= NEAR)), 4),
        "mean_regret_pct": round(100 * float(regrets.mean()), 4),
        "largest_regret_pct": round(100 * float(regrets.max()), 2),
        "slower_than_serial_pct": round(100 * max(row["over_serial"] for row in rows), 3),
        "cases_over_1_pct_slower": sum(row["over_serial"] > WORSE for row in rows),
        "always_serial_mean_regret_pct": round(
            100 * float(np.mean([r["possible_gain"] - 1 for r in rows])), 2
        ),
        "cases_over_half_pct_slower": sum(row["over_serial"] > 0.005 for row in rows),
        "ficco_rule": ficco_summary(rows),
        "ficco_rule_other_reading": _accuracy([row["ficco_other_regret_of_finer"] for row in rows]),
        "median_pick_us": round(float(np.median([row["picked_us"] for row in rows])), 1),
        "p95_pick_us": round(float(np.quantile([row["picked_us"] for row in rows], 0.95)), 1),
    }


def ficco_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """FiCCO's rule on the same shapes, counted as in its paper: among its own four schedules."""
    return {
        **_accuracy([row["ficco_regret_of_finer"] for row in rows]),
        "mean_regret_of_all_pct": round(100 * float(np.mean([r["ficco_regret"] for r in rows])), 2),
        "slower_than_serial": round(float(np.mean([r["ficco_over_serial"] > 0.005 for r in rows])), 4),
    }


def _accuracy(found: list[float]) -> dict[str, float]:
    regrets = np.array(found)
    missed = regrets[regrets > 0.001]
    return {
        "right": round(float(np.mean(regrets <= 0.001)), 4),
        "lost_where_wrong_pct": round(100 * float(missed.mean()), 2) if len(missed) else 0.0,
    }


def document(rows: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """The summaries of all shapes, and by topology, operation, engines and seed."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["case"][-1]].append(row)
        groups[row["case"][0]].append(row)
        groups[" and ".join(row["engines"])].append(row)
        groups[f"seed {row['seed']}"].append(row)
    seeds = sorted({row["seed"] for row in rows})
    return {
        "simulated": True,
        "command": f"python benchmarks/ops/pick.py --count {count} --first {seeds[0]} --seeds {len(seeds)}",
        "seeds": seeds,
        "all": summary(rows),
        "by": {name: summary(found) for name, found in sorted(groups.items())},
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=CHECK_SEED)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--most", type=int, default=0, help="stop after so many seeds; the next run goes on")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops/pick.json"))
    options = parser.parse_args()
    wanted = range(options.first, options.first + options.seeds)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() and options.most else []
    left = [seed for seed in wanted if seed not in {row["seed"] for row in rows}]
    for seed in left[: options.most or None]:
        cases = enumerate(check_cases(options.count, seed))
        found = [{"seed": seed, **judge(case, ENGINES[(i + i // 4) % 4])} for i, case in cases]
        near, worst = (summary(found)[key] for key in ("best_or_within_2_pct", "slower_than_serial_pct"))
        print(f"seed {seed}: {near:.1%} within 2%, at most {worst}% slower than serial", flush=True)
        rows += found
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document(rows, options.count)) + "\n")
    print(json.dumps(summary(rows), indent=1), flush=True)


if __name__ == "__main__":
    main()
