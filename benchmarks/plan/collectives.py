"""How far is the model of collectives from published nccl-tests points, and which figures fit a node?

    python benchmarks/plan/collectives.py [--fit]

Prints the error by size and by number of nodes. fit.py fits the constants between nodes, to these points
together with the training runs. --fit also fits the figures inside a node (`NODE_LINKS` of weft.gpu.cost) to
a seeded random half of the single-node points, and prints them and their error on the other half.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.gpu.collectives import Group, collective_s
from weft.gpu.network import NETWORKS, Links, Network
from weft.gpu.specs import spec
from weft.plan.figures import shipped

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "published_collectives.csv"
SEED = 8
NODE = ("launch_us", "domain_us", "half_bytes")
"""The fitted figures; the bandwidth shares are NVIDIA's (nccl-tests issues 212 and 326)."""
Point = tuple[str, str, str, float, Group, Network, float]


def points(path: Path = TABLE) -> list[Point]:
    """Source, GPU, collective, bytes, group, network, seconds."""
    found = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ranks, nodes = int(row["ranks"]), int(row["nodes"])
            group = Group(ranks, ranks // nodes, ranks)
            network = NETWORKS[row["network"]]
            item = (row["source"], row["gpu"], row["collective"], float(row["bytes"]), group, network)
            found.append((*item, float(row["time_us"]) * 1e-6))
    return found


def log_errors(links: Links, rows: list[Point]) -> list[float]:
    """Log of predicted over measured."""
    return [
        math.log(collective_s(kind, size, group, spec(gpu), network, links) / seconds)
        for _, gpu, kind, size, group, network, seconds in rows
    ]


def fit_node(rows: list[Point], start: Links) -> Links:
    """Coordinate descent over logarithms: with few figures no gradient is needed."""

    def loss(links: Links) -> float:
        return statistics.fmean(abs(error) for error in log_errors(links, rows))

    best, cost = start, loss(start)
    for width in (1.5, 1.2, 1.08, 1.03, 1.01):
        moved = True
        while moved:
            moved = False
            for name in NODE:
                for factor in (width, 1 / width):
                    trial = replace(best, **{name: getattr(best, name) * factor})
                    found = loss(trial)
                    if found < cost - 1e-6:
                        best, cost, moved = trial, found, True
    return best


def main() -> None:
    rows = points()
    if "--fit" in sys.argv:
        mine = [row for row in rows if row[4].domains == 1]
        chosen = set(random.Random(SEED).sample(range(len(mine)), len(mine) // 2))
        found = fit_node([row for i, row in enumerate(mine) if i in chosen], shipped().links)
        off = log_errors(found, [row for i, row in enumerate(mine) if i not in chosen])
        print({name: round(getattr(found, name), 4) for name in NODE})
        print(f"on the other half: {100 * math.expm1(statistics.fmean(map(abs, off))):.1f}%")
    errors = [100 * abs(math.expm1(e)) for e in log_errors(shipped().links, rows)]
    for words, chosen in (
        ("all", lambda row: True),
        ("below 1 MB", lambda row: row[3] < 1e6),
        ("from 16 MB on", lambda row: row[3] >= 16e6),
        ("one node", lambda row: row[4].domains == 1),
        ("several nodes", lambda row: row[4].domains > 1),
    ):
        off = [e for e, row in zip(errors, rows, strict=True) if chosen(row)]
        print(f"{words}: {len(off)} points, mean {statistics.fmean(off):.1f}%, largest {max(off):.0f}%")


if __name__ == "__main__":
    main()
