"""Compares two analyses: the figures that both have, and how they changed."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report import words
from weft.report.parts import Cell, Column, Table
from weft.report.reading import Document, number, record, records, text

# Label, key, and whether a larger value is better (None: neither).
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
    """The figures of `change`, as means over ranks, per step if the runs mark steps: totals, exposed time by
    reason (in older documents by cause) and by kind of collective. Leaves out reasons that neither run
    has."""
    change = record(document, "change")
    found = [
        _change(change, label, record(change, key), key, better)
        for label, key, better in _FIGURES
        if _communicates(change) or key != "overlap_pct"
    ]
    why = record(change, "reasons") or record(change, "attribution")
    found += [
        _change(change, f"Exposed: {words.cause_name(key)}", record(why, key), key, False)
        for key in map(str, why)
        if any(_sides(record(why, key)) or ())
    ]
    found += [
        _change(change, f"Exposed {text(item, 'kind', '?')}", record(item, "exposed_us"), "exposed_us", False)
        for item in records(change, "collectives")[:_MAX_COLLECTIVES]
    ]
    return [row for row in found if row is not None]


def _change(
    change: Document, label: str, entry: Document, key: str, more_is_better: bool | None
) -> MetricChange | None:
    known = _sides(entry) if key.endswith("_pct") else _per_step(change, entry)
    if known is None:
        return None
    old, new = known
    show = words.percent if key.endswith("_pct") else words.duration
    said, large = _difference(old, new, key)
    tone = "" if not large or more_is_better is None else "good" if (new > old) == more_is_better else "bad"
    label = "Step" if key == "span_us" and _stepped(change) else label
    return MetricChange(label, show(old), show(new), said, tone)


def _sides(entry: Document) -> tuple[float, float] | None:
    old, new = number(entry, "before"), number(entry, "after")
    return None if old is None or new is None else (old, new)


def _communicates(change: Document) -> bool:
    """Whether either run has communication; True if the document does not say."""
    return any(_sides(record(change, "comm_us")) or (True,))


def _stepped(change: Document) -> bool:
    """Whether the runs mark steps, so that figures are per step."""
    return max(_sides(record(change, "steps")) or (1.0, 1.0)) > 1


def _per_step(change: Document, entry: Document) -> tuple[float, float] | None:
    """Times before and after, per step of each run."""
    known, steps = _sides(entry), _sides(record(change, "steps")) or (1.0, 1.0)
    return None if known is None else (known[0] / max(steps[0], 1.0), known[1] / max(steps[1], 1.0))


def _difference(old: float, new: float, key: str) -> tuple[str, bool]:
    """The difference in words, and whether it is significant: at least 1% or one percentage point."""
    if key.endswith("_pct"):
        return f"{new - old:+.1f} points", abs(new - old) >= 1
    if not old:
        return words.NOTHING if not new else f"+{words.duration(new)}", bool(new)
    return f"{100 * (new - old) / old:+.1f}%", abs(new - old) >= 0.01 * abs(old)


def comparison_sentence(document: Document) -> str:
    """How exposed communication changed, in one sentence."""
    change = record(document, "change")
    exposed = _per_step(change, record(change, "exposed_comm_us"))
    span = _per_step(change, record(change, "span_us"))
    if exposed is None:
        return text(change, "text") or "The two runs cannot be compared: one has no figures."
    each, whole = ("rank and step", "step") if _stepped(change) else ("rank", "span")
    if _communicates(change):
        said, then = f"Exposed communication per {each} went {_from_to(exposed)}", f", the {whole} "
    else:
        said, then = "Neither run has communication", f"; the {whole} went "
    return f"{said}{then}{_from_to(span)}." if span is not None else f"{said}."


def _from_to(sides: tuple[float, float]) -> str:
    old, new = sides
    changed = f" ({_difference(old, new, 'us')[0]})" if old else ""
    return f"from {words.duration(old)} to {words.duration(new)}{changed}"


def change_table(document: Document) -> Table:
    """The changes as a table of the page."""
    columns = (Column("Figure", numeric=False), Column("Before"), Column("After"), Column("Change"))
    rows = tuple(
        (Cell(row.label, row.label), Cell(row.before), Cell(row.after), Cell(row.change, None, row.tone))
        for row in metric_changes(document)
    )
    return Table("What changed", columns, rows)
