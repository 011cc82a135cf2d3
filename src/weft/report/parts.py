"""The building blocks that the parts of a page are made of; the templates draw them and decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.report.reading import Document, amount, record
from weft.report.words import CAUSES, cause_name, duration

MAX_ROWS = 400
"""Rows of a table on the page; what is left out is the least important, and the page says so."""


@dataclass(frozen=True)
class Card:
    """A key figure."""

    label: str
    value: str
    note: str = ""
    tone: str = ""
    """Empty, `exposed` or `good`."""


@dataclass(frozen=True)
class Segment:
    """A piece of a bar, in per mille of the whole chart's width."""

    css: str
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class Bar:
    """A labelled row of a bar chart."""

    label: str
    segments: tuple[Segment, ...]
    value: str
    detail: str = ""

    @property
    def description(self) -> str:
        return f"{self.label}: " + (", ".join(segment.title for segment in self.segments) or "nothing")


@dataclass(frozen=True)
class Cell:
    """A table cell and what it sorts by (None: last)."""

    text: str
    sort: float | str | None = None
    css: str = ""
    title: str = ""


@dataclass(frozen=True)
class Column:
    """A table column; numbers are set to the right."""

    label: str
    numeric: bool = True
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: int = 0
    sorted_by: int | None = None
    """The column that the rows come sorted by, descending."""
    links: tuple[str, ...] = ()
    """Where each row leads in the timeline: JSON with a rank's label and a name or time; empty: nowhere."""


def stacked(pieces: Sequence[tuple[str, float, str]], whole: float) -> tuple[Segment, ...]:
    """Segments side by side from (class, amount, title); amounts in the unit of `whole`."""
    segments: list[Segment] = []
    x = 0.0
    for css, value, title in pieces:
        width = 1000 * max(value, 0.0) / whole if whole > 0 else 0.0
        if width > 0:
            segments.append(Segment(css, round(x, 2), round(width, 2), title))
        x += width
    return tuple(segments)


def causes(source: Document) -> list[tuple[str, float]]:
    """(key, microseconds) of the reasons in a document, known ones first and in their order.

    Documents of earlier versions have the four groups of `attribution` only.
    """
    attribution = record(source, "reasons") or record(source, "attribution")
    known = [cause.key for cause in CAUSES]
    keys = [key for key in known if key in attribution]
    keys += sorted(str(key) for key in attribution if key not in known and str(key).endswith("_us"))
    return [(key, amount(attribution, key)) for key in keys]


def cause_pieces(source: Document) -> list[tuple[str, float, str]]:
    """The attribution as pieces for `stacked`."""
    known = [cause.key for cause in CAUSES]
    return [
        (f"cause-{known.index(key) if key in known else 'other'}", us, f"{cause_name(key)} {duration(us)}")
        for key, us in causes(source)
        if us > 0
    ]


def main_cause(sources: Sequence[Document]) -> str | None:
    """The key of the cause with the most time in all the sources, or None where nothing is attributed."""
    totals: dict[str, float] = {}
    for source in sources:
        for key, us in causes(source):
            totals[key] = totals.get(key, 0.0) + us
    best = max(totals, key=lambda key: totals[key], default=None)
    return best if best is not None and totals[best] > 0 else None
