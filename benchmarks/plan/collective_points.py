"""Published nccl-tests points, and how far the model of collectives is from them.

    python benchmarks/plan/collective_points.py

Prints the error by size and by number of nodes. The constants are fitted by fit.py, which takes these points
along with the training runs.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.gpu.specs import spec
from weft.plan.collectives import Group, collective_s
from weft.plan.figures import Links, shipped
from weft.plan.network import PRESETS, Network

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "published_collectives.csv"
Point = tuple[str, str, str, float, Group, Network, float]


def points(path: Path = TABLE) -> list[Point]:
    """Source, GPU, collective, bytes, group, network, seconds."""
    found = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ranks, nodes = int(row["ranks"]), int(row["nodes"])
            group = Group(ranks, ranks // nodes, ranks)
            network = PRESETS[row["network"]]
            item = (row["source"], row["gpu"], row["collective"], float(row["bytes"]), group, network)
            found.append((*item, float(row["time_us"]) * 1e-6))
    return found


def log_errors(links: Links, rows: list[Point]) -> list[float]:
    """Log of predicted over measured."""
    return [
        math.log(collective_s(kind, size, group, spec(gpu), network, links) / seconds)
        for _, gpu, kind, size, group, network, seconds in rows
    ]


def main() -> None:
    rows = points()
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
