"""Charts of measured times, and the fields that bench and tune rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.report import words
from weft.report.parts import Cell
from weft.report.reading import Document, interval, number, record, records, shorten, text

MAX_BARS = 120
"""Most times in one chart."""


@dataclass(frozen=True)
class Timing:
    """One candidate in a chart."""

    label: str
    ms: float
    ci_ms: tuple[float, float] | None
    kept: bool
    """Whether it is highlighted: the chosen candidate, or one that stayed in the race until the end."""


@dataclass(frozen=True)
class Whisker:
    """A measured time with its confidence interval; positions in thousandths of the chart's width."""

    label: str
    at: float
    low: float
    high: float
    value: str
    kept: bool
    description: str


@dataclass(frozen=True)
class Reference:
    """A vertical reference line."""

    css: str
    label: str
    at: float


@dataclass(frozen=True)
class Chart:
    """Whiskers on one axis."""

    title: str
    whiskers: tuple[Whisker, ...]
    references: tuple[Reference, ...]
    left_out: int = 0


def is_simulated(document: Document) -> bool:
    """Whether a result comes from the simulator."""
    sources = [document, *records(document, "rows")]
    return any(s.get("simulated") is True or text(s, "device").startswith("sim:") for s in sources)


def workload_name(document: Document) -> str:
    """The workload of a tune result: its name, or its fields."""
    parts = record(document, "workload")
    if not parts:
        return text(document, "workload")
    return text(parts, "name") or ", ".join(f"{key} {text(parts, key)}" for key in parts if text(parts, key))


def row_workload(row: Document) -> str:
    """The workload of a bench row: the row's cell, or the workload's name."""
    return text(row, "cell") or workload_name(row) or "?"


def row_policy(row: Document) -> str:
    """The policy of a bench row: the candidate's label, or the policy's name."""
    return text(row, "candidate") or words.policy_name(row.get("policy"))


def confidence(source: Document, ms: float | None) -> tuple[float, float] | None:
    """The confidence interval in ms, from a pair of bounds or a half width."""
    bounds, half = interval(source, "ci_ms"), number(source, "ci_ms")
    if bounds is None and half is not None and ms is not None:
        bounds = (ms - abs(half), ms + abs(half))
    return bounds


def interval_cell(bounds: tuple[float, float] | None) -> Cell:
    """A confidence interval in ms as a table cell, sorted by its width."""
    if bounds is None:
        return Cell(words.NOTHING)
    return Cell(f"{bounds[0]:.4g} to {bounds[1]:.4g} ms", bounds[1] - bounds[0])


def timings(rows: Sequence[Document], *, best: float | None = None) -> list[Timing]:
    """Rows with a time. The chosen row is highlighted; if none is, those kept or with a time of `best` ms."""
    chosen = any(row.get("chosen") is True for row in rows)
    found = []
    for row in rows:
        ms = number(row, "ms")
        if ms is not None:
            kept = (row.get("chosen") if chosen else row.get("kept")) is True or (not chosen and ms == best)
            found.append(Timing(row_policy(row), ms, confidence(row, ms), kept))
    return found


def chart(title: str, shown: Sequence[Timing], lines: Sequence[tuple[str, float | None]]) -> Chart:
    """A chart of timings as whiskers; `lines` are reference lines, with label and ms."""
    ends = [one.ms for one in shown] + [ms for _, ms in lines if ms is not None]
    ends += [end for one in shown for end in one.ci_ms or ()]
    top = max(ends, default=0.0) * 1.04 or 1.0

    def place(ms: float) -> float:
        return round(1000 * max(0.0, min(ms / top, 1.0)), 2)

    whiskers = []
    for one in shown[:MAX_BARS]:
        low, high = one.ci_ms or (one.ms, one.ms)
        value = f"{words.milliseconds(one.ms)}" + ("" if low == high else f" ±{(high - low) / 2:.2g}")
        times = f"{words.milliseconds(one.ms)}, {words.milliseconds(low)} to {words.milliseconds(high)}"
        whiskers.append(
            Whisker(
                label=shorten(one.label, 80),
                at=place(one.ms),
                low=place(low),
                high=place(high),
                value=value,
                kept=one.kept,
                description=f"{one.label}: {times}",
            )
        )
    references = tuple(
        Reference(f"ref-{position}", f"{label} {words.milliseconds(ms)}", place(ms))
        for position, (label, ms) in enumerate(lines)
        if ms is not None
    )
    return Chart(title, tuple(whiskers), references, max(len(shown) - MAX_BARS, 0))
