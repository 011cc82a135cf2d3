"""Fit the curves of the shipped node profiles to published nccl-tests results, and state their errors.

    python benchmarks/node/fit.py [--write]

Results: benchmarks/node/published.csv and tests/data/published_collectives.csv (time over bytes), ctas.csv
(bandwidth over CTAs). If a family of nodes has results from several sources, each source is predicted by
constants fitted to the others; that error is the profile's. `--write` puts the constants fitted to all
sources into src/weft/comm/nodes and the errors into benchmarks/results/node/fit.json.

The overlap times of pytorch PR 172714, which check the paced collectives, are not used here.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from weft.comm.node import Node, load_node
from weft.comm.node_curve import LARGE_MESSAGE_BYTES, TimeCurve
from weft.comm.node_file import node_to_dict
from weft.gpu.cost import NODE_LINKS, UNFITTED_LINKS, link_bytes_per_s
from weft.gpu.presets import PCIE4_X16
from weft.gpu.specs import spec
from weft.tuning.candidates import CTA_LADDER

ROOT = Path(__file__).resolve().parents[2]
NODES = ROOT / "src" / "weft" / "comm" / "nodes"
RESULTS = ROOT / "benchmarks" / "results" / "node"
LEAST = {"switch_gain": 1.0, "launch_us": 5.0, "ring_us": 0.1, "network_us": 0.1}
MANY_SIZES = 12
SATURATED = 0.95
"""CTAs count as saturated at this share of the highest bandwidth."""


@dataclass(frozen=True)
class Point:
    """One published result."""

    gpu: str
    network: str
    ranks: int
    nodes: int
    collective: str
    algorithm: str | None
    nbytes: int
    us: float
    source: str


@dataclass(frozen=True)
class Family:
    """Profiles that share their constants: the same links, with other GPUs or another GPU count."""

    name: str
    profiles: tuple[str, ...]
    gpus: tuple[str, ...]
    network: str = ""

    def has(self, point: Point) -> bool:
        network = point.network if point.nodes > 1 else ""
        return point.gpu in self.gpus and network == self.network


FAMILIES = (
    Family("ampere", ("dgx-a100",), ("a100-40gb", "a100-80gb")),
    Family("hopper", ("dgx-h100", "dgx-h200"), ("h100", "h200")),
    Family("blackwell", ("dgx-b200", "gb200-nvl72", "gb200-nvl72-slice"), ("b200", "gb200", "b300", "gb300")),
    Family("mi300x", ("mi300x",), ("mi300x",)),
    Family("pcie", ("pcie-8",), ("rtx4090",)),
    Family("pcie-p2p", ("pcie-p2p-4",), ("rtx4090-p2p",)),
    Family("hopper-ndr", ("dgx-h100-2", "dgx-h100-4", "dgx-h100-8"), ("h100", "h200"), "ndr400"),
    Family("hopper-efa", ("p5-2",), ("h100",), "efa-p5"),
    Family("ampere-hdr", ("dgx-a100-2",), ("a100-40gb", "a100-80gb"), "hdr200"),
)


def read_points() -> list[Point]:
    """All published results."""
    found = []
    for path in (ROOT / "benchmarks/node/published.csv", ROOT / "tests/data/published_collectives.csv"):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                source = row["source"]
                algorithm = row.get("algorithm") or ("ring" if "Ring" in source else None)
                ranks, nodes = int(row["ranks"]), int(row["nodes"])
                item = (row["gpu"], row["network"], ranks, nodes, row["collective"], algorithm)
                found.append(Point(*item, int(row["bytes"]), float(row["time_us"]), source))
    return found


def predicted_us(node: Node, curve: TimeCurve, point: Point) -> float:
    """Microseconds predicted by the model with a curve's constants."""
    trial = replace(node, curves=(curve,))
    return trial.collective(point.collective, point.nbytes, None, point.ranks, point.algorithm).us


def log_errors(node: Node, curve: TimeCurve, points: Iterable[Point]) -> list[float]:
    return [math.log(predicted_us(node, curve, point) / point.us) for point in points]


def free_constants(node: Node, points: Sequence[Point], collective: str, algorithm: str | None) -> list[str]:
    """The constants that these points can determine."""
    free = ["gb_s"]
    if collective == "all_reduce" and algorithm is None and node.switch_reduces:
        free = ["switch_gain"]
    if len({point.nbytes for point in points}) >= 4:
        free.append("half_bytes")
    if min(point.nbytes for point in points) < LARGE_MESSAGE_BYTES:
        free.append("launch_us")
        if points[0].nodes > 1:
            free.append("ring_us" if algorithm == "ring" else "network_us")
    return free


def fit(node: Node, points: Sequence[Point], start: TimeCurve) -> TimeCurve:
    """The curve of least mean absolute log error, by coordinate descent over logarithms."""
    free = free_constants(node, points, start.collective, start.algorithm)
    defaults = {"half_bytes": NODE_LINKS.half_bytes, "network_us": 14.0, "ring_us": 6.0, "switch_gain": 1.3}
    constants = {**{name: node.constants.get(name) or defaults[name] for name in free}, **start.constants}
    # Every source has the same weight, however many sizes it has; in it, large messages count three times.
    weight = {point: 3.0 if point.nbytes >= LARGE_MESSAGE_BYTES else 1.0 for point in points}
    sizes = {point.source: 0.0 for point in points}
    for point in points:
        sizes[point.source] += weight[point]

    def loss(trial: dict[str, float]) -> float:
        curve = replace(start, constants=trial)
        errors = log_errors(node, curve, points)
        return sum(weight[p] * abs(e) / sizes[p.source] for e, p in zip(errors, points, strict=True))

    most = {"gb_s": spec(node.gpu).fabric_bytes_per_s / 1e9} if node.network else {}
    found = min((descend(loss, {**constants, **first}, free, most) for first in starts(free)), key=loss)
    kept = {name: float(f"{value:.4g}") for name, value in found.items()}
    return replace(start, constants=kept)


def starts(free: Sequence[str]) -> list[dict[str, float]]:
    """Starting points of the descent: links that fill at small or at large messages."""
    return [{"half_bytes": size} for size in (1e4, 1e6, 1e7)] if "half_bytes" in free else [{}]


def descend(
    loss: Callable[[dict[str, float]], float],
    constants: dict[str, float],
    free: Sequence[str],
    most: dict[str, float],
) -> dict[str, float]:
    """Minimize the loss along each constant in turn, in ever smaller steps."""
    cost = loss(constants)
    for width in (2.0, 1.4, 1.15, 1.05, 1.02, 1.005):
        moved = True
        while moved:
            moved = False
            for name in free:
                for factor in (width, 1 / width):
                    value = min(max(constants[name] * factor, LEAST.get(name, 1.0)), most.get(name, 9e9))
                    trial = {**constants, name: value}
                    found = loss(trial)
                    if found < cost - 1e-6:
                        constants, cost, moved = trial, found, True
    return constants


def percent(errors: Iterable[float]) -> float | None:
    """Mean absolute error in percent."""
    off = [100 * abs(math.expm1(error)) for error in errors]
    return round(statistics.fmean(off), 1) if off else None


def with_points(curve: TimeCurve, points: Sequence[Point]) -> TimeCurve:
    """The curve through the published results themselves: geometric means over the sources."""
    times: dict[int, list[float]] = {}
    for point in points:
        times.setdefault(point.nbytes, []).append(point.us)
    found = [(size, round(statistics.geometric_mean(times[size]), 2)) for size in sorted(times)]
    return replace(curve, points=tuple(found))


def left_out(
    node: Node, points: list[Point], start: TimeCurve, *, through: bool = False
) -> dict[str, list[tuple[Point, float]]]:
    """For each source, its points and their errors under a curve of the other sources.

    `through`: the curve goes through the others' points; otherwise it is the model fitted to them.
    """
    found: dict[str, list[tuple[Point, float]]] = {}
    for source in sorted({point.source for point in points}):
        rest = [point for point in points if point.source != source]
        mine = [point for point in points if point.source == source]
        if rest:
            curve = fit(node, rest, start)
            curve = with_points(curve, rest) if through else curve
            found[source] = list(zip(mine, log_errors(node, curve, mine), strict=True))
    return found


def mean_pct(out: dict[str, list[tuple[Point, float]]]) -> float:
    return statistics.fmean(percent(error for _, error in lines) or 0.0 for lines in out.values())


def judge(family: Family, node: Node, points: list[Point]) -> tuple[TimeCurve, dict[str, Any]]:
    """The curve of one collective of a family, and its reported errors."""
    first = points[0]
    start = TimeCurve(first.collective, first.ranks, "published", first.algorithm)
    curve = fit(node, points, start)
    out = left_out(node, points, start)
    # With many sizes for the same ranks, the points may predict an unseen source better than the model.
    if len({point.ranks for point in points}) == 1 and len({point.nbytes for point in points}) >= MANY_SIZES:
        through = left_out(node, points, start, through=True)
        if not out or mean_pct(through) < mean_pct(out):
            curve, out = with_points(curve, points), through

    def over(chosen: Callable[[Point], bool]) -> float | None:
        sources = [percent(e for p, e in lines if chosen(p)) for lines in out.values()]
        known = [one for one in sources if one is not None]
        return round(statistics.fmean(known), 1) if len(known) > 1 else None

    large = over(lambda p: p.nbytes >= LARGE_MESSAGE_BYTES)
    small = over(lambda p: p.nbytes < LARGE_MESSAGE_BYTES)
    sources = sorted({point.source for point in points})
    record = {
        "family": family.name,
        "collective": first.collective,
        "algorithm": first.algorithm,
        "points": len(points),
        "sources": len(sources),
        "fitted_error_pct": percent(log_errors(node, curve, points)),
        "error_pct": large,
        "error_small_pct": small,
        "left_out": {name: percent(e for _, e in lines) for name, lines in out.items()},
        "constants": dict(curve.constants),
        "through_points": bool(curve.points),
    }
    return replace(curve, error_pct=large, error_small_pct=small, sources=tuple(sources)), record


def unfitted_pct(points: list[Point]) -> dict[str, float | None]:
    """By family, the error of the shared model with data-sheet bandwidth, as for an unpublished node."""
    found = {}
    for family in FAMILIES:
        if family.network:
            continue
        node = load_node(family.profiles[0])
        links, gb_s = UNFITTED_LINKS, PCIE4_X16 * UNFITTED_LINKS.domain_share / 1e9
        if not family.name.startswith("pcie"):
            gpu = spec(node.gpu)
            links = NODE_LINKS if gpu.link_kind == "nvlink" else UNFITTED_LINKS
            gb_s = link_bytes_per_s(gpu, links) / 1e9
        constants = {
            "launch_us": links.launch_us,
            "hop_us": links.domain_us,
            "gb_s": gb_s,
            "switch_gain": links.switch_gain,
            "half_bytes": links.half_bytes,
        }
        mine = [point for point in points if family.has(point) and point.nbytes >= LARGE_MESSAGE_BYTES]
        errors = []
        for p in mine:
            curve = TimeCurve(p.collective, p.ranks, "assumed", p.algorithm, constants=constants)
            errors += [abs(error) for error in log_errors(node, curve, [p])]
        found[family.name] = percent(errors)  # as a factor, since a range extends both ways
    return found


def cta_steps() -> list[dict[str, Any]]:
    """Rungs of the CTA ladder between the model's saturation and the published one."""
    with (ROOT / "benchmarks/node/ctas.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for source in sorted({row["source"] for row in rows}):
        mine = [row for row in rows if row["source"] == source]
        gpu, ranks = mine[0]["gpu"], int(mine[0]["ranks"])
        node = load_node({"h100": "dgx-h100", "b300": "dgx-b200"}[gpu])
        published = {int(row["ctas"]): float(row["bus_gb_s"]) for row in mine}
        model = {
            ctas: 1 / node.collective("all_reduce", 1 << 30, ctas, ranks, "ring").us for ctas in published
        }
        rungs = [
            min(c for c, rate in table.items() if rate >= SATURATED * max(table.values()))
            for table in (published, model)
        ]
        steps = abs(CTA_LADDER.index(rungs[0]) - CTA_LADDER.index(rungs[1]))
        found.append({"source": source, "published": rungs[0], "model": rungs[1], "steps": steps})
    return found


def main() -> None:
    points, records = read_points(), []
    fitted: dict[str, list[TimeCurve]] = {}
    for family in FAMILIES:
        node = replace(load_node(family.profiles[0]), curves=())
        mine = [point for point in points if family.has(point)]
        for kind, algorithm in sorted({(p.collective, p.algorithm) for p in mine}, key=str):
            chosen = [p for p in mine if (p.collective, p.algorithm) == (kind, algorithm)]
            curve, record = judge(family, node, chosen)
            fitted.setdefault(family.name, []).append(curve)
            records.append(record)
            words = (
                f"{record[key]}%" if record[key] is not None else "-"
                for key in ("error_pct", "error_small_pct")
            )
            print(
                f"{family.name:11} {kind:14} {algorithm or 'default':8} {record['points']:3} points, "
                f"{record['sources']} sources: fitted {record['fitted_error_pct']}%, left out "
                f"{' / '.join(words)} (from 16 MiB / below){', points' if curve.points else ''}"
                f"  {record['constants']}"
            )
    unknown = unfitted_pct(points)
    print(f"a node nobody published, from 16 MiB on: {unknown}")
    if "--write" in sys.argv:
        write_profiles(fitted, unknown)
    steps = cta_steps()
    for line in steps:
        print(f"CTAs: published {line['published']}, model {line['model']} ({line['source']})")
    if "--write" in sys.argv:
        RESULTS.mkdir(parents=True, exist_ok=True)
        document = {
            "command": "python benchmarks/node/fit.py --write",
            "curves": records,
            "unfitted_pct": unknown,
            "ctas": steps,
        }
        (RESULTS / "fit.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_profiles(fitted: dict[str, list[TimeCurve]], unknown: dict[str, float | None]) -> None:
    """Put the curves into the profiles, with the range of assumed ones; a PCIe node's is wider."""
    worst = {
        pcie: round(
            max(v for name, v in unknown.items() if v is not None and name.startswith("pcie") == pcie)
        )
        for pcie in (False, True)
    }
    for path in sorted(NODES.glob("*.json")):
        node = replace(load_node(path.stem), assumed_pct=worst[path.stem.startswith("pcie")])
        for family in FAMILIES:
            if node.name in family.profiles:
                curves = tuple(
                    curve if curve.points else replace(curve, ranks=node.ranks)  # points are of some ranks
                    for curve in fitted.get(family.name, ())
                )
                node = replace(node, curves=curves, basis="published")
        save(node)


def save(node: Node) -> None:
    text = json.dumps(node_to_dict(node), indent=1)
    (NODES / f"{node.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
