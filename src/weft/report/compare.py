"""Two analyses side by side: the figures that both have, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report import words
from weft.report.parts import Cell, Column, Table
from weft.report.reading import Document, number, record, records, text

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
_MAX_COLLECTIVES = 12


@dataclass(frozen=True)
class MetricChange:
    """One figure before and after, formatted."""

    label: str
    before: str
    after: str
    change: str
    tone: str
    """Empty, `good` or `bad`."""


def metric_changes(document: Document) -> list[MetricChange]:
    """The figures of `change`, means over ranks: of the run, by cause, and by kind of collective."""
    change = record(document, "change")
    found = [_change(label, record(change, key), key, better) for label, key, better in _FIGURES]
    why = record(change, "attribution")
    found += [
        _change(f"Exposed: {words.cause_name(key)}", record(why, key), key, False) for key in map(str, why)
    ]
    found += [
        _change(f"Exposed {text(item, 'kind', '?')}", record(item, "exposed_us"), "exposed_us", False)
        for item in records(change, "collectives")[:_MAX_COLLECTIVES]
    ]
    return [row for row in found if row is not None]


def _change(label: str, entry: Document, key: str, more_is_better: bool | None) -> MetricChange | None:
    old, new = number(entry, "before"), number(entry, "after")
    if old is None or new is None:
        return None
    show = words.percent if key.endswith("_pct") else words.duration
    said, large = _difference(old, new, key)
    tone = "" if not large or more_is_better is None else "good" if (new > old) == more_is_better else "bad"
    return MetricChange(label, show(old), show(new), said, tone)


def _difference(old: float, new: float, key: str) -> tuple[str, bool]:
    """The difference in words, and whether it is one that counts: at least 1% or a point."""
    if key.endswith("_pct"):
        return f"{new - old:+.1f} points", abs(new - old) >= 1
    if not old:
        return words.NOTHING if not new else f"+{words.duration(new)}", bool(new)
    return f"{100 * (new - old) / old:+.1f}%", abs(new - old) >= 0.01 * abs(old)


def comparison_sentence(document: Document) -> str:
    """What became of the exposed communication, in one sentence."""
    change = record(document, "change")
    exposed, span = record(change, "exposed_comm_us"), record(change, "span_us")
    old, new = number(exposed, "before"), number(exposed, "after")
    if old is None or new is None:
        return text(change, "text") or "The two runs cannot be compared: one has no figures."
    said = f"Exposed communication per rank went from {words.duration(old)} to {words.duration(new)}"
    said += f" ({_difference(old, new, 'us')[0]})" if old else ""
    spans = number(span, "before"), number(span, "after")
    if spans[0] and spans[1] is not None:
        said += f", the span from {words.duration(spans[0])} to {words.duration(spans[1])}"
        said += f" ({_difference(spans[0], spans[1], 'us')[0]})"
    return said + "."


def change_table(document: Document) -> Table:
    """The changes as a table of the page."""
    columns = (Column("Figure", numeric=False), Column("Before"), Column("After"), Column("Change"))
    rows = tuple(
        (Cell(row.label, row.label), Cell(row.before), Cell(row.after), Cell(row.change, None, row.tone))
        for row in metric_changes(document)
    )
    return Table("What changed", columns, rows)
