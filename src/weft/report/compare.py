"""Two analyses side by side: the figures that both have, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report import words
from weft.report.analysis import worst_rank
from weft.report.parts import Cell, Column, Table
from weft.report.reading import Document, number, record

# Label, key, and whether more of it is better (None: neither).
_FIGURES: tuple[tuple[str, str, bool | None], ...] = (
    ("Span", "span_us", False),
    ("Exposed communication", "exposed_comm_us", False),
    ("Communication", "comm_us", None),
    ("Compute", "compute_us", None),
    ("Hidden behind compute", "overlap_pct", True),
    ("Memory", "memory_us", None),
    ("Idle", "idle_us", False),
)


@dataclass(frozen=True)
class Change:
    """One figure before and after, formatted."""

    label: str
    before: str
    after: str
    change: str
    tone: str
    """Empty, `good` or `bad`."""


def changes(document: Document) -> list[Change]:
    """The figures of the rank with the most exposed communication, before and after."""
    before, after = worst_rank(record(document, "before")), worst_rank(record(document, "after"))
    found = []
    for label, key, more_is_better in _FIGURES:
        old, new = number(before, key), number(after, key)
        if old is None and new is None:
            continue
        show = words.percent if key.endswith("_pct") else words.duration
        found.append(Change(label, show(old), show(new), *_difference(old, new, key, more_is_better)))
    return found


def _difference(
    old: float | None, new: float | None, key: str, more_is_better: bool | None
) -> tuple[str, str]:
    if old is None or new is None:
        return words.NOTHING, ""
    delta = new - old
    if key.endswith("_pct"):
        said, large = f"{delta:+.1f} points", abs(delta) >= 1
    else:
        said = f"{100 * delta / old:+.1f}%" if old else words.NOTHING
        large = bool(old) and abs(delta / old) >= 0.01
    if not large or more_is_better is None:
        return said, ""
    return said, "good" if (delta > 0) == more_is_better else "bad"


def sentence(document: Document) -> str:
    """What became of the exposed communication, in one sentence."""
    before, after = worst_rank(record(document, "before")), worst_rank(record(document, "after"))
    old, new = number(before, "exposed_comm_us"), number(after, "exposed_comm_us")
    if old is None or new is None:
        return "The two runs cannot be compared: one has no figures."
    said = f"Exposed communication went from {words.duration(old)} to {words.duration(new)}"
    if old > 0:
        said += f" ({100 * (new - old) / old:+.1f}%)"
    spans = number(before, "span_us"), number(after, "span_us")
    if spans[0] and spans[1] is not None:
        said += f", the span from {words.duration(spans[0])} to {words.duration(spans[1])}"
    return said + "."


def change_table(document: Document) -> Table:
    """The changes as a table of the page."""
    columns = (Column("Figure", numeric=False), Column("Before"), Column("After"), Column("Change"))
    rows = tuple(
        (Cell(row.label, row.label), Cell(row.before), Cell(row.after), Cell(row.change, None, row.tone))
        for row in changes(document)
    )
    return Table("What changed", columns, rows)
