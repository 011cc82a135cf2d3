"""Building blocks of the parts of a page; the templates only draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.report.reading import Document, amount, record
from weft.report.words import CAUSE_TEXTS, cause_name, duration

MAX_ROWS = 400
"""Most rows of a table on the page. The least important are left out, and the page says how many."""


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
    """A piece of a bar; positions in per mille of the chart's width."""

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
    """A table cell and its sort key (None sorts last)."""

    text: str
    sort: float | str | None = None
    css: str = ""
    title: str = ""


@dataclass(frozen=True)
class Column:
    """A table column; numeric ones are right-aligned."""

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
    """Index of the column by which the rows are sorted, descending; None if unsorted."""
    links: tuple[str, ...] = ()
    """Link of each row into the timeline: JSON with a rank's label and a name or time; empty for no links."""


def stacked(pieces: Sequence[tuple[str, float, str]], whole: float) -> tuple[Segment, ...]:
    """Adjacent segments from (class, amount, title); amounts in the unit of `whole`."""
    segments: list[Segment] = []
    x = 0.0
    for css, value, title in pieces:
        width = 1000 * max(value, 0.0) / whole if whole > 0 else 0.0
        if width > 0:
            segments.append(Segment(css, round(x, 2), round(width, 2), title))
        x += width
    return tuple(segments)


def causes(source: Document) -> list[tuple[str, float]]:
    """(key, microseconds) of the reasons in a document; known reasons first, in their usual order.

    Documents of earlier versions have only the four causes of `attribution`.
    """
    attribution = record(source, "reasons") or record(source, "attribution")
    known = [cause.key for cause in CAUSE_TEXTS]
    keys = [key for key in known if key in attribution]
    keys += sorted(str(key) for key in attribution if key not in known and str(key).endswith("_us"))
    return [(key, amount(attribution, key)) for key in keys]


def cause_pieces(source: Document) -> list[tuple[str, float, str]]:
    """The attribution as pieces for `stacked`."""
    known = [cause.key for cause in CAUSE_TEXTS]
    return [
        (f"cause-{known.index(key) if key in known else 'other'}", us, f"{cause_name(key)} {duration(us)}")
        for key, us in causes(source)
        if us > 0
    ]


def main_cause(sources: Sequence[Document]) -> str | None:
    """The key of the cause with the most time over all sources; None if nothing is attributed."""
    totals: dict[str, float] = {}
    for source in sources:
        for key, us in causes(source):
            totals[key] = totals.get(key, 0.0) + us
    best = max(totals, key=lambda key: totals[key], default=None)
    return best if best is not None and totals[best] > 0 else None
