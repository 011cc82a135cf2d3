"""Errors of the shipped profiles on published results that no profile was fitted to (unseen.csv).

    python benchmarks/node/unseen.py

Prints one row of the table in docs/nodes.md for each profile, collective and source.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from weft.comm.node import load_node

DATA = Path(__file__).parent / "unseen.csv"


def main() -> None:
    with DATA.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    groups = dict.fromkeys((r["profile"], r["ranks"], r["collective"], r["source"]) for r in rows)
    print("| profile | ranks | collective | sizes | mean error | largest | range | source |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for group in groups:
        name, ranks, kind, source = group
        node, count = load_node(name), int(ranks)
        mine = [r for r in rows if (r["profile"], r["ranks"], r["collective"], r["source"]) == group]
        errors, inside = [], 0
        for row in mine:
            size, us = int(row["bytes"]), float(row["time_us"])
            found = node.collective(kind, size, ranks=count)
            errors.append(100 * (found.us / us - 1))
            low, high = node.range(kind, size, ranks=count)
            inside += low <= us <= high
        mean = statistics.fmean(errors)
        most = max(errors, key=abs)
        sizes = (
            f"{min(int(r['bytes']) for r in mine) >> 20} to {max(int(r['bytes']) for r in mine) >> 20} MiB"
        )
        print(
            f"| `{name}` | {ranks} | {kind} | {len(mine)}, {sizes} | {mean:+.1f}% | {most:+.1f}% "
            f"| {inside} of {len(mine)} inside | {source} |"
        )


if __name__ == "__main__":
    main()
