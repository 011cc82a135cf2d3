"""The output of `weft reproduce`: published figures next to ours, in a terminal and on a page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from weft.report import figures
from weft.report.build import Part
from weft.report.occupancy import Picture
from weft.report.page import render
from weft.report.parts import MAX_ROWS, Card, Cell, Column, Table
from weft.report.words import NOTHING
from weft.reproduce.figure import Reproduced, Reproduction

_HEADS = ("published", "ours", "error", "sign", "basis")


@dataclass(frozen=True, kw_only=True)
class ReproducePart(Part):
    """A reproduction."""

    cards: tuple[Card, ...]
    bars: Table
    findings: tuple[str, ...]
    assumptions: tuple[str, ...]
    pictures: tuple[Picture, ...]
    tables: tuple[Table, ...]


def show_reproduction(console: Console, found: Reproduction, *, cells: bool = False) -> None:
    """Prints grids, single figures, targets, findings and assumptions."""
    note = "simulated" if found.simulated else "measured"
    console.print(f"arXiv:{found.paper}: {found.title}\n{found.device} ({note})", markup=False)
    groups = _groups(found.figures)
    for name, rows in groups.items():
        sides = _sides(rows)
        if sides and not cells:
            console.print(_matrix(name, sides))
    unpublished = 0
    for name, rows in groups.items():
        known = [one for one in rows if one.published is not None or one.sign_right is not None]
        if cells or (known and not _sides(rows)):
            console.print(_list(name, rows if cells else known))
        unpublished += len(rows) - len(known)
    if unpublished and not cells:
        console.print(f"{unpublished} more figures of ours have no published value: --cells shows them")
    if found.bars:
        table = Grid(title="Targets", box=box.SIMPLE_HEAD)
        for head in ("figure", "value", "target", ""):
            table.add_column(head, justify="left" if head in ("figure", "") else "right")
        for bar in found.bars:
            table.add_row(bar.name, f"{bar.value:.4g}", bar.target, "met" if bar.met else "missed")
        console.print(table)
    for title, texts in (("Findings", found.findings), ("Assumed", found.assumptions)):
        if texts:
            lines = "\n".join(f"- {text}" for text in texts)
            console.print(f"{title}:\n{lines}", markup=False, highlight=False)


def _matrix(name: str, sides: _Sides) -> Grid:
    """Published and our values by grid, in hundredths to fit a terminal; rows are Y, columns X."""
    across, down, by_cell = sides
    table = Grid(title=f"{name}, in hundredths: published / ours", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("Y \\ X", justify="right", no_wrap=True)
    for x in across:
        table.add_column(str(x), justify="right", no_wrap=True)
    for y in down:
        table.add_row(str(y), *(f" {_hundredths(by_cell.get((x, y)))}" for x in across))
    return table


def _hundredths(one: Reproduced | None) -> str:
    if one is None or one.published is None or one.ours is None:
        return NOTHING
    return f"{100 * one.published:.0f}/{100 * one.ours:.0f}"


def _list(name: str, rows: Sequence[Reproduced]) -> Grid:
    unit = next((one.unit for one in rows if one.unit), "")
    table = Grid(
        title=f"{name} ({unit})" if unit else name,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        width=78,
    )
    table.add_column("cell", overflow="fold", ratio=1)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for one in rows:
        table.add_row(one.cell, *_texts(one))
    return table


def _texts(one: Reproduced) -> list[str]:
    ours = NOTHING if one.ours is None else f"{one.ours:.3g}"
    if one.ours_range is not None:
        ours += f" ({one.ours_range[0]:.3g} to {one.ours_range[1]:.3g})"
    return [
        NOTHING if one.published is None else f"{one.published:.3g}",
        ours,
        NOTHING if one.error is None else f"{round(one.error, 3):+.3g}",
        NOTHING if one.sign_right is None else "right" if one.sign_right else "wrong",
        one.basis,
    ]


def reproduction_page(found: Reproduction) -> str:
    """The page of `weft reproduce`."""
    return render([reproduction_part(found)])


def reproduction_part(found: Reproduction) -> ReproducePart:
    """The page part of `weft reproduce`."""
    met = sum(bar.met for bar in found.bars)
    signs = [one.sign_right for one in found.figures if one.sign_right is not None]
    published = sum(one.published is not None for one in found.figures)
    pictures = tuple(_pictures(found))
    return ReproducePart(
        template="reproduce.html.j2",
        title=f"arXiv:{found.paper} next to weft",
        subtitle=f"{found.title} · {found.device}",
        sentence=found.findings[0] if found.findings else "",
        contents=(
            ("summary", "Summary"),
            ("findings", "Findings"),
            *((("plots", "Tables"),) if pictures else ()),
            ("cells", "Every cell"),
        ),
        simulated=found.simulated,
        cards=(
            Card("Published figures", str(published), "each with ours"),
            Card("Targets met", f"{met} of {len(found.bars)}", "", "good" if met == len(found.bars) else ""),
            Card("Signs right", f"{sum(signs)} of {len(signs)}", "effects that have a sign"),
        ),
        bars=_bar_table(found),
        findings=found.findings,
        assumptions=found.assumptions,
        pictures=pictures,
        tables=tuple(_page_table(name, rows) for name, rows in _groups(found.figures).items()),
    )


def _bar_table(found: Reproduction) -> Table:
    columns = (Column("Figure", numeric=False), Column("Value"), Column("Target"), Column("", numeric=False))
    rows = tuple(
        (
            Cell(bar.name, bar.name),
            Cell(f"{bar.value:.4g}", bar.value),
            Cell(bar.target, bar.target),
            Cell("met" if bar.met else "missed", str(bar.met), "" if bar.met else "strong"),
        )
        for bar in found.bars
    )
    return Table("Targets", columns, rows)


def _page_table(name: str, rows: Sequence[Reproduced]) -> Table:
    columns = (
        Column("Cell", numeric=False),
        Column("Published"),
        Column("Ours"),
        Column("Error"),
        Column("Sign", numeric=False),
        Column("Basis", numeric=False, title="inspected while the model was built, or held out"),
        Column("Note", numeric=False),
    )
    body = []
    for one in rows[:MAX_ROWS]:
        published, ours, error, sign, basis = _texts(one)
        body.append(
            (
                Cell(one.cell, one.cell),
                Cell(published, one.published),
                Cell(ours, one.ours),
                Cell(error, None if one.error is None else abs(one.error)),
                Cell(sign, sign, "strong" if sign == "wrong" else ""),
                Cell(basis, basis),
                Cell(one.note, one.note),
            )
        )
    unit = next((one.unit for one in rows if one.unit), "")
    return Table(f"{name} ({unit})" if unit else name, columns, tuple(body), max(0, len(rows) - MAX_ROWS))


def _pictures(found: Reproduction) -> list[Picture]:
    pictures = []
    for name, rows in _groups(found.figures).items():
        sides = _sides(rows)
        if sides is None:
            continue
        across, down, by_cell = sides
        values = [[by_cell[x, y].error if (x, y) in by_cell else None for x in across] for y in down]
        svg = figures.heatmap(
            f"{name}: ours less published, grid X across, Y down",
            [str(y) for y in down],
            [str(x) for x in across],
            values,
            digits=2,
        )
        uri = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        pictures.append(Picture(name, "Error of every cell; blue: ours is larger.", uri))
    return pictures


def _groups(rows: Sequence[Reproduced]) -> dict[str, list[Reproduced]]:
    found: dict[str, list[Reproduced]] = {}
    for one in rows:
        found.setdefault(one.id, []).append(one)
    return found


_Sides = tuple[list[int], list[int], dict[tuple[int, int], Reproduced]]


def _sides(rows: Sequence[Reproduced]) -> _Sides | None:
    """X values, Y values and cells of a two-dimensional figure; None if the figure is not two-dimensional."""
    if not all(one.cell.replace("x", "", 1).isdecimal() for one in rows):
        return None
    by_cell = {}
    for one in rows:
        x, _, y = one.cell.partition("x")
        if not y:
            return None
        by_cell[int(x), int(y)] = one
    across, down = sorted({x for x, _ in by_cell}), sorted({y for _, y in by_cell})
    return (across, down, by_cell) if len(across) > 1 and len(down) > 1 else None
