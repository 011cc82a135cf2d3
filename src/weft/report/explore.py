"""The output of `weft explore`: the table and strips in a terminal, and the page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from weft.report import figures, words
from weft.report.build import Part
from weft.report.charts import Chart, chart, is_simulated, timings
from weft.report.details import exposed_table, stream_table
from weft.report.drawing import draw
from weft.report.occupancy import Picture
from weft.report.page import render
from weft.report.parts import Card, Cell, Column, Table
from weft.report.reading import Document, number, records, text
from weft.timeline import Kind, Timeline

CELLS = 60
SHADES = " ░▒▓█"
LOSSES = (
    ("decomposition_ms", "cut", "extra GEMM time from splitting"),
    ("contention_ms", "shared", "extra GEMM time from concurrent copies"),
    ("staging_ms", "staging", "copies and sums on the rank itself"),
    ("exposed_ms", "exposed", "no GEMM runs: waiting for a transfer or launch"),
)


@dataclass(frozen=True, kw_only=True)
class ExplorePart(Part):
    """An exploration."""

    cards: tuple[Card, ...] = ()
    chart: Chart | None = None
    table: Table | None = None
    pictures: tuple[Picture, ...] = ()


def _title(document: Document) -> str:
    """The operation in one line."""
    shape = "x".join(str(size) for size in document.get("gemm", []))
    return f"{text(document, 'operation')} {shape} {text(document, 'dtype')} on {document.get('ranks')} ranks"


def where(document: Document) -> str:
    note = "simulated" if is_simulated(document) else "measured"
    joined = text(document, "topology")
    return f"{text(document, 'device')}{f', {joined}' if joined else ''} ({note})"


def show_schedules(
    console: Console, document: Document, timelines: Sequence[tuple[str, Timeline]] = ()
) -> None:
    """Prints the table, the sentences and a strip of each timeline."""
    rows = records(document, "schedules")
    losses = LOSSES if any("exposed_ms" in row for row in rows) else ()
    table = Grid(title=f"{_title(document)}\n{where(document)}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for head in ("ms", "gain", "by", *(head for _, head, _ in losses)):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        name = text(row, "name")
        marks = "←" * (name == document.get("best")) + "*" * (name == document.get("picked"))
        cells = [_number(row, "ms"), _number(row, "speedup_vs_serial"), text(row, "engine")]
        table.add_row(f"{name} {marks}".strip(), *cells, *(_number(row, key) for key, _, _ in losses))
    console.print(table)
    if losses:
        said = "ms lost to: cut GEMMs; shared memory and SMs; staging on the rank; exposed waits"
        console.print(said, markup=False, highlight=False)
    console.print(_sentences(document), markup=False, highlight=False)
    for name, line in timelines:
        console.print("\n".join(strip(name, line)), markup=False, highlight=False)
    if timelines:
        console.print("█ all of the time   ░ little of it", markup=False, highlight=False)


def _number(row: Document, key: str) -> str:
    value = number(row, key)
    if key == "ms" and value is not None:
        return f"{value:.4g}"
    if value is None:
        return words.NOTHING
    return "0" if abs(value) < 5e-7 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _sentences(document: Document) -> str:
    ideal, bound = number(document, "ideal_ms"), number(document, "bound")
    found = [f"best (←): {text(document, 'best')}; picked from sizes (*): {text(document, 'picked')}"]
    if ideal is not None:
        found.append(f"ideal {words.milliseconds(ideal)}: at most {words.ratio(bound)}x of serial's speed")
    found += [
        f"{label}: {said}"
        for label, key in (("why", "reason"), ("pick", "why"))
        if (said := text(document, key))
    ]
    for rule in records(document, "rules"):
        regret = number(rule, "regret_pct")
        if text(rule, "name") != "weft" and regret is not None:
            name = text(rule, "name")
            found.append(f"{name}'s rule: {text(rule, 'picked')}, {regret:.1f}% behind: {text(rule, 'why')}")
    return "\n".join(found)


def strip(name: str, line: Timeline) -> list[str]:
    """Compute and communication over time as two lines of characters."""
    end = int(line.end_ns.max()) if len(line) else 1
    edges = np.linspace(0, end, CELLS + 1)
    found = [f"{name}: {words.duration(end / 1e3)}"]
    for label, kind in (("compute", Kind.COMPUTE), ("copies", Kind.COMM)):
        spans = line.covered(kind)
        cells = []
        for low, high in pairwise(edges):
            busy = np.clip(np.minimum(spans.end, high) - np.maximum(spans.start, low), 0, None).sum()
            share = busy / (high - low)
            cells.append(SHADES[0 if share <= 0 else min(4, 1 + int(share * 3.999))])
        found.append(f"  {label:8}|{''.join(cells)}|")
    return found


def page(document: Document, timelines: Sequence[tuple[str, Timeline]] = ()) -> str:
    """The page of an exploration."""
    return render([explore_part(document, timelines)])


def explore_part(document: Document, timelines: Sequence[tuple[str, Timeline]] = ()) -> ExplorePart:
    """The page part of `weft explore`."""
    names, lines = [name for name, _ in timelines], [line for _, line in timelines]
    drawn = draw(lines, names) if lines else None
    rows = [{**row, "candidate": text(row, "name")} for row in records(document, "schedules")]
    best = number(next((r for r in rows if r.get("name") == document.get("best")), {}), "ms")
    return ExplorePart(
        template="explore.html.j2",
        title=f"Explore {_title(document)}",
        subtitle=where(document),
        sentence=text(document, "reason"),
        contents=(
            ("summary", "Summary"),
            ("schedules", "Schedules"),
            *((("timeline", "Timeline"),) if lines else ()),
        ),
        simulated=is_simulated(document),
        cards=tuple(_cards(document, best)),
        chart=chart("", timings(rows, best=best), (("ideal", number(document, "ideal_ms")),)),
        table=_table(document),
        drawing=drawn,
        what_is_drawn=", ".join(names),
        stream_table=stream_table(lines, names) if lines else Part.stream_table,
        exposed_table=exposed_table(lines, names) if lines else Part.exposed_table,
    )


def _cards(document: Document, best: float | None) -> list[Card]:
    serial = next((row for row in records(document, "schedules") if row.get("name") == "serial"), {})
    return [
        Card(
            "Best",
            words.milliseconds(best),
            f"{text(document, 'best')} on {text(document, 'best_engine')}",
            "good",
        ),
        Card("Serial", words.milliseconds(number(serial, "ms")), "collective, then GEMM"),
        Card("Ideal", words.milliseconds(number(document, "ideal_ms")), "the longer of both"),
        Card("Picked from sizes", text(document, "picked"), text(document, "why")),
    ]


def _table(document: Document) -> Table:
    columns = [
        Column("schedule", numeric=False),
        Column("engine", numeric=False),
        Column("ms"),
        Column("vs serial"),
    ]
    columns += [Column(head, title=said) for _, head, said in LOSSES]
    columns.append(Column("links", title="links into a rank that are busy at once"))
    rows = []
    for row in records(document, "schedules"):
        cells = [Cell(text(row, "name"), text(row, "name")), Cell(text(row, "engine"), text(row, "engine"))]
        for key in ("ms", "speedup_vs_serial", *(key for key, _, _ in LOSSES)):
            cells.append(Cell(_number(row, key), number(row, key)))
        used = number(row, "links_used")
        shown = words.NOTHING if used is None else f"{used:.0f} of {number(row, 'links') or 0:.0f}"
        cells.append(Cell(shown, used))
        rows.append(tuple(cells))
    return Table("Schedules", tuple(columns), tuple(rows))


def show_losses(console: Console, document: Document) -> None:
    """Prints the tables of `--characterize`."""
    note = "simulated" if is_simulated(document) else "measured"
    head = f"{text(document, 'gpu')} {text(document, 'dtype')}, {note}"
    both = any("simulated_loss_pct" in row for row in records(document, "decomposition"))
    table = Grid(title=f"Cutting a GEMM: {head}", box=box.SIMPLE_HEAD)
    for column in (
        "M x N x K",
        "along",
        "ways",
        "whole ms",
        "cut ms",
        "loss",
        *(["simulated"] if both else []),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in records(document, "decomposition"):
        shape = "x".join(str(size) for size in row["gemm"])
        cells = [shape, str(row["axis"]), str(row["ways"]), f"{row['whole_ms']:.4g}", f"{row['ms']:.4g}"]
        cells.append(f"{row['loss_pct']:+.1f}%")
        cells += [f"{row['simulated_loss_pct']:+.1f}%"] if both else []
        table.add_row(*cells)
    console.print(table)
    table = Grid(title="Sharing the GPU with copies", box=box.SIMPLE_HEAD)
    for column in ("engine", "GEMM slowed", "copy slowed", "copy GB/s", "how"):
        table.add_column(column, justify="right", no_wrap=column != "how")
    for row in records(document, "contention"):
        slowed = [_slowed(row, side) for side in ("gemm", "copy")]
        table.add_row(str(row["engine"]), *slowed, f"{row['copy_alone_gb_s']:.4g}", str(row["how"]))
    console.print(table)
    start, rate = number(document, "copy_start_us"), number(document, "copy_gb_s")
    console.print(
        f"a DMA copy costs {start:.3g} µs before its bytes, then moves {rate:.4g} GB/s", highlight=False
    )


def _slowed(row: Mapping[str, Any], side: str) -> str:
    """How much slower one side is, and the model's figure if there is one."""
    model = row.get(f"simulated_{side}_slowed_pct")
    return f"{row[f'{side}_slowed_pct']:+.1f}%" + ("" if model is None else f" (model {model:+.1f}%)")


def loss_figures(document: Document) -> dict[str, str]:
    """The plots of `--characterize` as SVG text, by name."""
    note = f"{text(document, 'gpu')}, {'simulated' if is_simulated(document) else 'measured'}"
    cuts: dict[str, dict[str, float | None]] = {}
    for row in records(document, "decomposition"):
        shape = "x".join(map(str, row.get("gemm") or ()))
        group = cuts.setdefault(f"{shape} along {text(row, 'axis')}", {})
        group[f"{text(row, 'ways')} ways"] = number(row, "loss_pct")
        if "simulated_loss_pct" in row:
            group[f"{text(row, 'ways')} ways, simulated"] = number(row, "simulated_loss_pct")
    shared = {
        f"{text(row, 'engine')} copies, {text(row, 'how')}": {
            "GEMM slowed": number(row, "gemm_slowed_pct"),
            "copy slowed": number(row, "copy_slowed_pct"),
        }
        for row in records(document, "contention")
    }
    copies = records(document, "copies")
    return {
        "decomposition": figures.bars(f"Time lost by cutting a GEMM ({note})", cuts, unit="%"),
        "contention": figures.bars(f"Time lost by sharing the GPU ({note})", shared, unit="%"),
        "copies": figures.lines(
            f"Share of a DMA copy that is not moving bytes ({note})",
            {"": {"overhead": [number(row, "overhead_pct") for row in copies]}},
            [words.size(number(row, "bytes")) for row in copies],
            y_label="%",
            low=0.0,
        ),
    }


def losses_page(document: Document) -> str:
    """The page of `--characterize`."""
    return render([losses_part(document)])


def losses_part(document: Document) -> ExplorePart:
    """The page part of `weft explore --characterize`."""
    captions = {
        "decomposition": "All pieces, back to back, against the whole; along K they add to one result.",
        "contention": "A GEMM while copies run, and copies while GEMMs run, each against itself alone.",
        "copies": "Share of a copy's time in which no byte moves, by its size.",
    }
    pictures = [
        Picture(
            name.capitalize(),
            captions[name],
            "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode(),
        )
        for name, svg in loss_figures(document).items()
    ]
    return ExplorePart(
        template="explore.html.j2",
        title=f"Losses on {text(document, 'gpu')}",
        subtitle=f"{text(document, 'device')} · {text(document, 'dtype')}",
        sentence="What cutting a GEMM into pieces costs, and what GEMM and copies cost each other.",
        contents=(("plots", "Plots"),),
        simulated=is_simulated(document),
        pictures=tuple(pictures),
    )
