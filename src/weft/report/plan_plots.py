"""Plots of a plan, as positions for a template: step time against memory, and rates against GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.report import words
from weft.report.parts import Cell, Column, Table
from weft.report.plan import WAY_PARTS, curve_title
from weft.report.reading import Document, amount, number, record, records, text

_WIDTH, _HEIGHT = 900.0, 360.0
_LEFT, RIGHT, TOP, BOTTOM = 62.0, 884.0, 28.0, 312.0
MAX_DOTS = 1000
_MAX_ROWS = 400


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Dot:
    css: str
    x: float
    y: float
    r: float
    title: str


@dataclass(frozen=True)
class Line:
    css: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot, with a table of the same data."""

    title: str
    note: str
    description: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    dots: tuple[Dot, ...]
    legend: tuple[tuple[str, str, str], ...]
    table: Table
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM


class _Axis:
    """Maps values to positions."""

    def __init__(self, values: Sequence[float], low: float, high: float, *, log: bool = False) -> None:
        self.log = log
        numbers = [math.log2(v) if log else v for v in values if not log or v > 0]
        self.first, self.last = min(numbers, default=0.0), max(numbers, default=1.0)
        if not log:
            pad = 0.05 * (self.last - self.first or abs(self.last) or 1.0)
            self.first, self.last = self.first - pad, self.last + pad
        if self.last <= self.first:
            self.first, self.last = self.first - 1, self.last + 1
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        number = math.log2(max(value, 1e-12)) if self.log else value
        share = (number - self.first) / (self.last - self.first)
        return round(self.low + share * (self.high - self.low), 2)

    def ticks(self, suffix: str = "") -> tuple[Tick, ...]:
        rough = (self.last - self.first) / 5
        scale = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
        step = next((s * scale for s in (1, 2, 5, 10) if s * scale >= rough), rough)
        begin = math.ceil(self.first / step)
        found = [begin * step + i * step for i in range(8)]
        return tuple(Tick(self(v), f"{v:.6g}{suffix}") for v in found if v <= self.last)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if at else 'M'}{x:g} {y:g}" for at, (x, y) in enumerate(points))


def pareto(document: Document) -> Plot:
    """Step time against memory of every configuration in a sweep."""
    rows = records(document, "rows")[:MAX_DOTS]
    steps = [amount(row, "step_time_s") for row in rows]
    memory = [amount(row, "memory_bytes") / 2**30 for row in rows]
    x, y = _Axis(memory, _LEFT, RIGHT), _Axis(steps, BOTTOM, TOP)
    dots = []
    for row, step, size in zip(rows, steps, memory, strict=True):
        best, weft = row.get("pareto") is True, text(row, "controls") == "weft"
        css = "dot" + (" weft" if weft else "") + (" best" if best else "")
        said = f"{text(row, 'label')}, {'with' if weft else 'without'} weft: {words.duration(1e6 * step)}"
        dots.append(Dot(css, x(size), y(step), 5.0 if best else 3.5, f"{said}, {size:.0f} GiB"))
    dots.sort(key=lambda dot: dot.r)
    front = sorted(
        (size, step) for row, step, size in zip(rows, steps, memory, strict=True) if row.get("pareto")
    )
    return Plot(
        title="Step time against memory",
        note="Every dot is a way to run the job. On the line, nothing is faster with as little memory. "
        f"{WAY_PARTS}.",
        description=f"Step time against memory of {len(rows)} ways; the table below says the same",
        x_label="GiB on the fullest GPU",
        y_label="seconds a step",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        lines=(Line("front", _path([(x(size), y(step)) for size, step in front])),),
        dots=tuple(dots),
        legend=(
            ("dot best", "on the front", "nothing is faster with as little memory"),
            ("dot weft", "with weft's controls", "the best control for each collective"),
            ("dot", "without", "no control"),
        ),
        table=_way_table(document),
    )


def _way_table(document: Document) -> Table:
    columns = (
        Column("Way", numeric=False),
        Column("Controls", numeric=False),
        Column("Step"),
        Column("Tokens/s/GPU"),
        Column("MFU"),
        Column("Exposed"),
        Column("Memory"),
        Column("Front", numeric=False),
    )
    rows = records(document, "rows")
    made = []
    for row in rows[:_MAX_ROWS]:
        step, rate = amount(row, "step_time_s"), amount(row, "tokens_per_s_per_gpu")
        mfu, exposed = number(row, "mfu_pct"), amount(row, "exposed_comm_s")
        memory, best = amount(row, "memory_bytes"), row.get("pareto") is True
        made.append(
            (
                Cell(text(row, "label"), text(row, "label")),
                Cell(text(row, "controls"), text(row, "controls")),
                Cell(words.duration(1e6 * step), step),
                Cell(f"{rate:,.0f}", rate),
                Cell(words.percent(mfu), mfu),
                Cell(words.duration(1e6 * exposed), exposed),
                Cell(f"{memory / 2**30:.1f} GiB", memory),
                Cell("front" if best else "", "front" if best else "", "good" if best else ""),
            )
        )
    return Table("Ways", columns, tuple(made), max(len(rows) - _MAX_ROWS, 0))


def scaling(curve: Document) -> Plot:
    """Tokens per second and GPU against the number of GPUs, with and without weft's controls."""
    points = records(curve, "points")
    gpus = [amount(point, "gpus") for point in points]
    sides = ("without", "with_weft")
    rates = {side: [amount(record(p, side), "tokens_per_s_per_gpu") for p in points] for side in sides}
    x = _Axis(gpus, _LEFT + 10, RIGHT - 10, log=True)
    y = _Axis([rate for side in sides for rate in rates[side]], BOTTOM, TOP)
    lines, dots = [], []
    for at, side in enumerate(sides):
        places = [(x(size), y(rate)) for size, rate in zip(gpus, rates[side], strict=True)]
        lines.append(Line(f"line-{at}", _path(places)))
        for place, point, rate in zip(places, points, rates[side], strict=True):
            keeps = words.percent(number(record(point, side), "efficiency_pct"))
            said = f"{amount(point, 'gpus'):,.0f} GPUs: {rate:,.0f} tokens/s/GPU, {keeps} of the first"
            dots.append(Dot(f"mark-{at}", *place, 3.5, said))
    title = curve_title(curve)
    return Plot(
        title=title,
        note="The axis does not begin at zero."
        + (f" Left out: {text(curve, 'note')}." if text(curve, "note") else ""),
        description=f"{title}; the table below says the same",
        x_label="GPUs",
        y_label="tokens per second and GPU",
        x_ticks=tuple(Tick(x(size), f"{size:,.0f}") for size in gpus),
        y_ticks=y.ticks(),
        lines=tuple(lines),
        dots=tuple(dots),
        legend=(
            ("mark-1", "with weft's controls", "the best control for each collective"),
            ("mark-0", "without", "no control"),
        ),
        table=_curve_table(title, points),
    )


def _curve_table(title: str, points: Sequence[Document]) -> Table:
    heads = (
        "GPUs",
        "Batch",
        "Step, no control",
        "Exposed",
        "Keeps",
        "Step, weft",
        "Exposed",
        "Keeps",
        "Gain",
    )
    made = []
    for point in points:
        sides = [record(point, side) for side in ("without", "with_weft")]
        cells = [
            Cell(f"{amount(point, 'gpus'):,.0f}", amount(point, "gpus")),
            Cell(f"{amount(point, 'global_batch'):,.0f}", amount(point, "global_batch")),
        ]
        for side in sides:
            step, exposed = amount(side, "step_time_s"), amount(side, "exposed_comm_s")
            keeps = number(side, "efficiency_pct")
            cells += [
                Cell(words.duration(1e6 * step), step),
                Cell(words.duration(1e6 * exposed), exposed),
                Cell(words.percent(keeps), keeps),
            ]
        base, best = (amount(side, "step_time_s") for side in sides)
        gain = 100 * (1 - best / base) if base else None
        cells.append(Cell(words.percent(gain), gain))
        made.append(tuple(cells))
    return Table(title, tuple(Column(head) for head in heads), tuple(made))
