"""Fit the assumptions of the GEMM model to a GPU: the speed of smaller tiles and the overhead per tile.

weft explore --characterize --device cuda --json > measured.json
python benchmarks/ops/fit_gemm.py measured.json

Prints the losses, measured and simulated, before and after, and the figures to set in `weft.gpu.cost`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from weft.gpu import cost
from weft.ops.characterize import cut_s
from weft.sim.gemm import Gemms
from weft.sim.profile import by_title

ADDED = (0.5, 0.75, 1.0, 1.25, 1.5)
POWERS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
TAILS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
TILES, TODAY = cost.TILES, (1.0, cost.TILE_OVERHEAD, cost.ACCUMULATE_EXPOSED)


def losses(document: dict[str, Any], power: float, tail: float, added: float) -> list[tuple[float, float]]:
    """Measured and simulated times relative to the whole GEMM; `power`: exponent of the tiles' shares."""
    cost.TILES = tuple((m, n, share**power) for m, n, share in TILES)
    cost.TILE_OVERHEAD, cost.ACCUMULATE_EXPOSED = tail, added
    costs = Gemms(by_title(document["gpu"]))
    found = []
    for row in document["decomposition"]:
        m, n, k = row["gemm"]
        whole = costs.cost(m, n, k, document["dtype"]).seconds
        cut = cut_s(costs, (m, n, k), document["dtype"], row["axis"], row["ways"])
        found.append((1 + row["loss_pct"] / 100, cut / whole))
    return found


def error(document: dict[str, Any], power: float, tail: float, added: float) -> float:
    """Mean relative error of those times."""
    pairs = losses(document, power, tail, added)
    return sum(abs(simulated / measured - 1) for measured, simulated in pairs) / max(1, len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    document = json.loads(parser.parse_args().measured.read_text())
    grid = ((p, t, a) for p in POWERS for t in TAILS for a in ADDED)
    power, tail, added = min(grid, key=lambda figures: error(document, *figures))
    before, after = losses(document, *TODAY), losses(document, power, tail, added)
    for row, (measured, first), (_, fitted) in zip(document["decomposition"], before, after, strict=True):
        shape = "x".join(map(str, row["gemm"]))
        print(
            f"{shape} {row['axis']}/{row['ways']}: {measured:.3f} measured, {first:.3f}, {fitted:.3f} fitted"
        )
    print(f"mean error {error(document, *TODAY):.3f}, fitted {error(document, power, tail, added):.3f}")
    shares = [(m, n, round(share**power, 3)) for m, n, share in TILES]
    print(f"TILES = {shares}, TILE_OVERHEAD = {tail}, ACCUMULATE_EXPOSED = {added}")
    print(f"a copy starts in {document['copy_start_us']} µs")


if __name__ == "__main__":
    main()
