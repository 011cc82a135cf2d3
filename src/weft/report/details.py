"""More tables of the page: streams and exposed ranges of a timeline, steps, the price of overlap."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from weft.report import words
from weft.report.analysis import overlap_pct
from weft.report.decimate import exposed_spans
from weft.report.parts import MAX_ROWS, Cell, Column, Table
from weft.report.reading import Document, clean, number, record, records, shorten, text
from weft.timeline import Kind, Timeline, union

MAX_RANGES = 25
_STEP_FIGURES = (
    ("Span", "span_us"),
    ("Compute", "compute_us"),
    ("Communication", "comm_us"),
    ("Exposed", "exposed_comm_us"),
    ("Idle", "idle_us"),
)


def stream_table(timelines: Sequence[Timeline], names: Sequence[str]) -> Table:
    """Busy time of each stream by kind: the content of the drawing, for readers who cannot see it."""
    columns = (
        Column("Where", numeric=False),
        Column("Stream"),
        Column("Spans"),
        Column("Compute"),
        Column("Communication"),
        Column("Memory"),
    )
    rows = []
    for timeline, name in zip(timelines, names, strict=True):
        streams, counts = np.unique(timeline.stream, return_counts=True)
        for stream, count in sorted(zip(streams.tolist(), counts.tolist(), strict=True), key=lambda s: -s[1])[
            :40
        ]:
            at = timeline.stream == stream
            busy = []
            for kind in Kind:
                mask = at & (timeline.kind == kind)
                busy.append(union(timeline.start_ns[mask], timeline.end_ns[mask]).total_ns / 1e3)
            cells = (Cell(words.duration(us), us) for us in busy)
            rows.append(
                (Cell(clean(name), clean(name)), Cell(str(stream), stream), Cell(f"{count:,}", count), *cells)
            )
    return Table("Busy time of each stream", columns, tuple(rows[:MAX_ROWS]), max(len(rows) - MAX_ROWS, 0))


def exposed_table(timelines: Sequence[Timeline], names: Sequence[str]) -> Table:
    """The longest exposed ranges, with the collective that ran."""
    columns = (
        Column("Where", numeric=False),
        Column("Start", title="from the first span of the timeline"),
        Column("Exposed"),
        Column("Collective", numeric=False),
    )
    found = []
    for timeline, name in zip(timelines, names, strict=True):
        start, end, owner = exposed_spans(timeline)
        origin = int(timeline.start_ns.min()) if len(timeline) else 0
        for at in np.argsort(start - end, kind="stable")[:MAX_RANGES].tolist():
            us, begun = int(end[at] - start[at]) / 1e3, int(start[at] - origin) / 1e3
            collective = clean(timeline.names[timeline.name[owner[at]]]) if owner[at] >= 0 else ""
            found.append((us, begun, clean(name), shorten(collective, 200)))
    found.sort(key=lambda row: -row[0])
    rows = tuple(
        (
            Cell(where, where),
            Cell(words.duration(begun), begun),
            Cell(words.duration(us), us, "strong"),
            Cell(collective, collective.lower(), "name", collective),
        )
        for us, begun, where, collective in found[:MAX_RANGES]
    )
    links = tuple(
        json.dumps({"group": where, "name": collective, "at_us": begun})
        for us, begun, where, collective in found[:MAX_RANGES]
    )
    return Table("Longest exposed ranges", columns, rows, sorted_by=2, links=links)


def step_table(document: Document, names: Sequence[str]) -> Table:
    """Figures of each step, if the trace marks steps."""
    columns = (
        Column("Rank", numeric=False),
        Column("Step", numeric=False),
        *(Column(label) for label, _ in _STEP_FIGURES),
        Column("Hidden %"),
    )
    rows = []
    for rank, label in zip(records(document, "ranks"), names, strict=True):
        for position, step in enumerate(records(rank, "steps")):
            name = text(step, "name") or text(step, "step") or text(step, "index") or str(position)
            figures = [number(step, key) for _, key in _STEP_FIGURES]
            hidden = overlap_pct(step)
            rows.append(
                (
                    Cell(label, label),
                    Cell(shorten(name, 40), name),
                    *(Cell(words.duration(us), us) for us in figures),
                    Cell(words.percent(hidden), hidden),
                )
            )
    return Table("Steps", columns, tuple(rows[:MAX_ROWS]), max(len(rows) - MAX_ROWS, 0))


def module_table(document: Document, names: Sequence[str]) -> Table:
    """Communication by the module of the model that launched it, the most exposed first."""
    columns = (
        Column("Module", numeric=False),
        Column("Rank", numeric=False),
        Column("Count"),
        Column("Communication"),
        Column("Exposed"),
    )
    found = [
        (label, item)
        for rank, label in zip(records(document, "ranks"), names, strict=True)
        for item in records(rank, "modules")
    ]
    found.sort(key=lambda entry: -(number(entry[1], "exposed_us") or 0.0))
    rows = []
    for label, item in found[:MAX_ROWS]:
        count, comm, exposed = (number(item, key) for key in ("count", "comm_us", "exposed_us"))
        module = text(item, "module", "?")
        rows.append(
            (
                Cell(shorten(module, 80), module.lower(), "name", shorten(module, 300)),
                Cell(label, label),
                Cell(words.NOTHING if count is None else f"{count:,.0f}", count),
                Cell(words.duration(comm), comm),
                Cell(words.duration(exposed), exposed, "strong"),
            )
        )
    return Table("Modules", columns, tuple(rows), max(len(found) - MAX_ROWS, 0), sorted_by=4)


def price_table(document: Document, names: Sequence[str]) -> Table:
    """How much slower the same kernel is while a collective runs, the costliest first."""
    columns = (
        Column("Kernel", numeric=False),
        Column("Rank", numeric=False),
        Column("Alone", title="median without a collective"),
        Column("With a collective", title="median"),
        Column("Slower by"),
        Column("Lost in all"),
    )
    found = []
    for rank, label in zip(records(document, "ranks"), names, strict=True):
        found += [(label, item) for item in _priced_kernels(rank)]
    found.sort(key=lambda entry: -(number(entry[1], "lost_us") or 0.0))
    rows = tuple(_price_row(label, item) for label, item in found[:MAX_ROWS])
    return Table("The price of overlap", columns, rows, max(len(found) - MAX_ROWS, 0), sorted_by=5)


def _priced_kernels(rank: Document) -> list[dict[str, object]]:
    if isinstance(rank.get("price_of_overlap"), list):
        return records(rank, "price_of_overlap")
    return records(record(rank, "price_of_overlap"), "kernels")


def _price_row(label: str, item: Document) -> tuple[Cell, ...]:
    alone, shared, lost = number(item, "alone_us"), number(item, "beside_us"), number(item, "lost_us")
    slower = number(item, "slowdown_pct")
    if slower is None and alone and shared is not None:
        slower = 100 * (shared / alone - 1)
    name = text(item, "name", "?")
    return (
        Cell(shorten(name, 80), name.lower(), "name", shorten(name, 300)),
        Cell(label, label),
        Cell(words.duration(alone), alone),
        Cell(words.duration(shared), shared),
        Cell(words.percent(slower), slower),
        Cell(words.duration(lost), lost),
    )


def price_sentence(document: Document) -> str:
    """What overlap costs over all ranks, in one sentence."""
    prices = [record(rank, "price_of_overlap") for rank in records(document, "ranks")]
    lost = [us for price in prices if (us := number(price, "lost_us")) is not None]
    said = "Kernels that overlap with a collective share SMs and memory bandwidth with it"
    if not lost:
        return f"{said} and may take longer."
    if sum(lost) <= 0:
        return f"{said}; none of them took longer here."
    return f"{said}: {words.duration(sum(lost))} longer in all, over the kernels that got slower."
