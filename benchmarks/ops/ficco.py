"""The 16 shapes of FiCCO (arXiv:2512.10236) on eight simulated MI300X: finer grain against whole shards.

python benchmarks/ops/ficco.py [--out benchmarks/results/ops/ficco.json]

The shapes are said to be the paper's (a comment in ROCm/iris); whether they are a layer's or one rank's is
not said, so both are run: `split` divides N (of a reduce-scatter, K) by eight, as tensor parallelism does,
`whole` does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from weft.ops.case import Case
from weft.ops.explore import FINER, explore
from weft.ops.schedule import OPERATIONS

RANKS, GPU, TOPOLOGY = 8, "mi300x", "mesh"
NEAR_PCT = 0.1
"""Times this close are equal."""
SHAPES = (
    (16384, 16384, 131072), (131072, 16384, 16384), (53248, 16384, 131072), (131072, 53248, 16384),
    (8192, 8192, 262144), (262144, 8192, 8192), (28672, 8192, 262144), (262144, 28672, 8192),
    (196608, 18432, 16384), (196608, 106496, 16384), (1048576, 10240, 8192), (1048576, 57344, 8192),
    (1607680, 57344, 8192), (147456, 28672, 4096), (327680, 28672, 4096), (229376, 28672, 4096),
)  # fmt: skip


def row(operation: str, reading: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    m, n, k = shape
    if reading == "split":
        n, k = (n, k // RANKS) if operation == "matmul_reduce_scatter" else (n // RANKS, k)
    case = Case(operation=operation, m=m, n=n, k=k, ranks=RANKS, gpu=GPU, topology=TOPOLOGY)
    found = explore(case)
    finest = min((found.fastest(name) for name in FINER), key=lambda r: r.seconds)
    shard, serial = found.fastest("shard"), found.serial
    document = found.to_dict()
    return {
        "shape": list(shape),
        "of_a_rank": [m, n, k],
        "collective_over_product": round(document["collective_ms"] / document["product_ms"], 4),
        "bound": document["bound"],
        "serial_ms": round(serial.ms, 4),
        "shard_ms": round(shard.ms, 4),
        "finer": finest.name,
        "finer_engine": finest.engine,
        "finer_ms": round(finest.ms, 4),
        "finer_over_serial": round(serial.seconds / finest.seconds, 4),
        "finer_over_shard": round(shard.seconds / finest.seconds, 4),
        "best": document["best"],
        "picked": document["picked"],
        "picked_regret_pct": document["picked_regret_pct"],
        "rules": {rule.pop("name"): rule for rule in document["rules"]},
        "losses": finest.losses.to_dict(),
        "shard_losses": shard.losses.to_dict(),
        "reason": document["reason"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    gains = [r["finer_over_serial"] for r in rows]
    return {
        "finer_beats_shard": sum(r["finer_over_shard"] > 1 for r in rows),
        "shapes": len(rows),
        "largest_over_serial": max(gains),
        "geometric_mean_over_serial": round(statistics.geometric_mean(gains), 4),
        "largest_over_shard": max(r["finer_over_shard"] for r in rows),
        "over_their_bound": sum(r["finer_over_serial"] > r["bound"] for r in rows),
        "largest_pick_regret_pct": max(r["picked_regret_pct"] for r in rows),
        **{name: rule_summary(name, rows) for name in ("weft", "ficco")},
    }


def rule_summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often a rule names the best of the finer schedules (the paper's measure), and what a miss costs."""
    regrets = [row["rules"][name]["regret_of_finer_pct"] for row in rows]
    missed = [each for each in regrets if each > NEAR_PCT]
    return {
        "right_pct": round(100 * (1 - len(missed) / len(rows)), 1),
        "lost_where_wrong_pct": round(statistics.mean(missed), 2) if missed else 0.0,
        "slower_than_serial": sum(row["rules"][name]["speedup_vs_serial"] < 0.995 for row in rows),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| M, N, K | comm / product | bound | serial ms | shard ms | finer ms | schedule "
        "| over serial | over shard |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        shape = ", ".join(map(str, r["shape"]))
        lines.append(
            f"| {shape} | {r['collective_over_product']:.2f} | {r['bound']:.2f} | {r['serial_ms']:.2f} | "
            f"{r['shard_ms']:.2f} | {r['finer_ms']:.2f} | {r['finer']} ({r['finer_engine']}) | "
            f"{r['finer_over_serial']:.2f} | {r['finer_over_shard']:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops/ficco.json"))
    options = parser.parse_args()
    command = "python " + " ".join(sys.argv)
    document: dict[str, Any] = {"simulated": True, "command": command, "ranks": RANKS, "gpu": GPU}
    lines = ["# The 16 FiCCO shapes, simulated", "", f"`{command}`: eight {GPU}, full mesh, bf16."]
    for operation in OPERATIONS:
        document[operation] = {}
        for reading in ("split", "whole"):
            rows = [row(operation, reading, shape) for shape in SHAPES]
            found = {"summary": summary(rows), "rows": rows}
            document[operation][reading] = found
            print(operation, reading, found["summary"], flush=True)
            cut = "K" if operation == "matmul_reduce_scatter" else "N"
            said = f"{cut} divided by eight" if reading == "split" else "as they stand"
            lines += ["", f"## {operation}, {said}", "", *table(rows), ""]
            lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in found["summary"].items()]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
