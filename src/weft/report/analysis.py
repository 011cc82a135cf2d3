"""The page's content for an analysis: sentence, key figures, bars, tables and advice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from weft.report import words
from weft.report.parts import (
    MAX_ROWS,
    Bar,
    Card,
    Cell,
    Column,
    Table,
    cause_pieces,
    causes,
    main_cause,
    stacked,
)
from weft.report.reading import Document, amount, clean, interval, number, record, records, shorten, text
from weft.trace.summary import summary_sentence

MAX_RANKS = 32
"""Most ranks with a bar; if there are more, the most exposed ones are shown."""
MAX_COLLECTIVE_BARS = 12
MAX_WARNINGS = 12


@dataclass(frozen=True)
class AdviceItem:
    """One thing to try."""

    title: str
    detail: str
    control: str
    collective: str
    gain: str
    command: str


def rank_label(rank: Document, position: int) -> str:
    """Label of a rank in all outputs: its number, or the name of its file."""
    known = number(rank, "rank")
    if known is not None:
        return f"rank {known:.0f}"
    return shorten(PurePath(text(rank, "path")).name, 60) or f"trace {position}"


def labels(document: Document) -> list[str]:
    """The labels of all ranks, made distinct."""
    found: dict[str, None] = {}
    for position, rank in enumerate(records(document, "ranks")):
        label = rank_label(rank, position)
        found[label if label not in found else f"{label} ({position})"] = None
    return list(found)


def worst_rank_row(document: Document) -> dict[str, Any]:
    """The rank with the most exposed communication."""
    return max(records(document, "ranks"), key=lambda rank: amount(rank, "exposed_comm_us"), default={})


def worst_position(document: Document) -> int:
    """Index of the rank with the most exposed communication."""
    ranks = records(document, "ranks")
    return ranks.index(worst_rank_row(document)) if ranks else 0


def analysis_sentence(document: Document) -> str:
    """The summary in the document; if there is none, one built from the figures."""
    ranks, worst = records(document, "ranks"), worst_rank_row(document)
    said = text(record(document, "summary"), "text")
    totals: dict[str, float] = {}
    for rank in ranks:
        for key, us in causes(rank):
            totals[key] = totals.get(key, 0.0) + us
    return said or summary_sentence(
        exposed_us=amount(worst, "exposed_comm_us"),
        comm_us=amount(worst, "comm_us"),
        ranks=len(ranks),
        name=rank_label(worst, ranks.index(worst)) if worst else "",
        reasons_us=totals,
    )


def cards(document: Document) -> list[Card]:
    """Key figures of the rank with the most exposed communication."""
    rank = worst_rank_row(document)
    span, comm = amount(rank, "span_us"), amount(rank, "comm_us")

    def of(part: float, whole: float, what: str) -> str:
        return f"{words.percent(words.share(part, whole))} of {what}" if whole > 0 else ""

    def figure(label: str, key: str, tone: str = "") -> Card:
        return Card(label, words.duration(number(rank, key)), of(amount(rank, key), span, "the span"), tone)

    exposed = amount(rank, "exposed_comm_us")
    hidden = overlap_pct(rank)
    return [
        Card(
            "Exposed communication",
            words.duration(number(rank, "exposed_comm_us")),
            of(exposed, span, "the span"),
            "exposed" if exposed > 0 else "good",
        ),
        Card("Hidden behind compute", words.percent(hidden), f"of {words.duration(comm)} communication"),
        figure("Communication", "comm_us"),
        figure("Compute", "compute_us"),
        figure("Idle", "idle_us"),
        Card(
            "Span",
            words.duration(number(rank, "span_us")),
            f"memory {words.duration(number(rank, 'memory_us'))}",
        ),
    ]


def overlap_pct(source: Document) -> float | None:
    """Share of communication that is hidden, in percent; None if there is no communication."""
    return number(source, "overlap_pct") if amount(source, "comm_us") > 0 else None


def rank_bars(document: Document) -> list[Bar]:
    """One bar of communication per rank: the hidden part, then the exposed part by cause."""
    ranks = list(zip(labels(document), records(document, "ranks"), strict=True))
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda entry: -amount(entry[1], "exposed_comm_us"))[:MAX_RANKS]
    whole = max((amount(rank, "comm_us") for _, rank in ranks), default=0.0)
    return [_comm_bar(label, rank, whole) for label, rank in ranks]


def _comm_bar(label: str, source: Document, whole: float) -> Bar:
    comm, exposed = amount(source, "comm_us"), amount(source, "exposed_comm_us")
    hidden = number(source, "overlap_us")
    hidden = comm - exposed if hidden is None else hidden
    pieces = [("hidden", hidden, f"hidden {words.duration(hidden)}"), *_exposed_pieces(source, exposed)]
    return Bar(label, stacked(pieces, whole), words.duration(exposed), f"exposed of {words.duration(comm)}")


def _exposed_pieces(source: Document, exposed: float) -> list[tuple[str, float, str]]:
    return cause_pieces(source) or [("cause-other", exposed, f"exposed {words.duration(exposed)}")]


def collective_bars(document: Document) -> list[Bar]:
    """Exposed time of the most exposed collectives over all ranks, by cause."""
    merged: dict[str, dict[str, Any]] = {}
    for rank in records(document, "ranks"):
        for item in records(rank, "collectives"):
            total = merged.setdefault(collective_name(item), {"exposed_us": 0.0, "attribution": {}})
            total["exposed_us"] += amount(item, "exposed_us")
            for key, us in causes(item):
                total["attribution"][key] = total["attribution"].get(key, 0.0) + us
    ranked = sorted(merged.items(), key=lambda entry: -entry[1]["exposed_us"])[:MAX_COLLECTIVE_BARS]
    whole = max((item["exposed_us"] for _, item in ranked), default=0.0)
    return [
        Bar(
            name,
            stacked(_exposed_pieces(item, item["exposed_us"]), whole),
            words.duration(item["exposed_us"]),
        )
        for name, item in ranked
        if item["exposed_us"] > 0
    ]


def collective_name(item: Document) -> str:
    """Kind and name of a collective, short enough for a label."""
    name, kind = text(item, "name", "?"), text(item, "kind")
    plain = (
        name.replace("(anonymous namespace)::", "").split("(")[0].split("<")[0].removeprefix("void ").strip()
        or name
    )
    said = kind.lower().replace("_", "") in plain.lower().replace("_", "")
    return shorten(plain if said else f"{kind} · {plain}", 60)


def collective_table(document: Document) -> Table:
    """Every collective of every rank, the most exposed first."""
    found = [
        (label, item)
        for label, rank in zip(labels(document), records(document, "ranks"), strict=True)
        for item in records(rank, "collectives")
    ]
    found.sort(key=lambda entry: -amount(entry[1], "exposed_us"))
    columns = (
        Column("Collective", numeric=False),
        Column("Rank", numeric=False),
        Column("Count"),
        Column("Bytes", title="moved in all"),
        Column("Total"),
        Column("Median"),
        Column("Exposed"),
        Column("Exposed %", title="of its total"),
        Column("GB/s", title="bus bandwidth, as nccl-tests counts it"),
        Column("Main cause", numeric=False),
    )
    rows = tuple(_collective_row(label, item) for label, item in found[:MAX_ROWS])
    links = tuple(
        json.dumps({"group": label, "name": text(item, "kernel") or text(item, "name")})
        for label, item in found[:MAX_ROWS]
    )
    return Table("Collectives", columns, rows, max(len(found) - MAX_ROWS, 0), sorted_by=6, links=links)


def _collective_row(label: str, item: Document) -> tuple[Cell, ...]:
    count, size, busbw = number(item, "count"), number(item, "bytes"), number(item, "busbw_gbps")
    total, median, exposed = number(item, "total_us"), number(item, "median_us"), number(item, "exposed_us")
    part = None if not total or exposed is None else words.share(exposed, total)
    cause = main_cause([item])
    return (
        Cell(
            collective_name(item),
            collective_name(item).lower(),
            "name",
            shorten(text(item, "kernel") or text(item, "name"), 300),
        ),
        Cell(label, label),
        Cell(words.NOTHING if count is None else f"{count:,.0f}", count),
        Cell(words.size(size), size),
        Cell(words.duration(total), total),
        Cell(words.duration(median), median),
        Cell(words.duration(exposed), exposed, "strong"),
        Cell(words.percent(part), part),
        Cell(words.bandwidth(busbw), busbw),
        Cell(words.cause_name(cause) if cause else words.NOTHING, words.cause_name(cause) if cause else ""),
    )


def advice(document: Document) -> list[AdviceItem]:
    """The advice of the document, in its order."""
    return [
        AdviceItem(
            title=shorten(text(item, "title", text(item, "control", "Advice")), 200),
            detail=shorten(text(item, "detail"), 2000),
            control=shorten(text(item, "control"), 60) if text(item, "control") != "none" else "",
            collective=shorten(text(item, "collective"), 200),
            gain=gain_text(item),
            command=text(item, "command"),
        )
        for item in records(document, "advice")[:50]
    ]


def gain_text(item: Document) -> str:
    """Expected saving of a change: of one step if the document has it, else of the whole trace.

    For changes that only the program's author can make, only the upper bound is known.
    """
    step, percent = interval(item, "step_ms"), interval(item, "step_pct")
    whole = "span" if text(item, "of") == "span" else "step"
    if step is not None and percent is not None and text(item, "control") == "program":
        return f"at most {words.duration(step[1] * 1e3)} of the {whole}, {percent[1]:.1f}%"
    if step is None or percent is None:
        return words.gain(interval(item, "gain_us"))
    said = words.gain((step[0] * 1e3, step[1] * 1e3))
    return f"{said} of the {whole}, {percent[0]:.1f} to {percent[1]:.1f}%" if said else ""


def device(document: Document) -> str:
    """The names of all distinct devices, at most four of them."""
    found = [text(rank, "device") for rank in records(document, "ranks")] + [text(document, "device")]
    distinct = list(dict.fromkeys(shorten(name, 60) for name in found if name))
    return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")


def analysis_warnings(document: Document) -> list[str]:
    """Warnings about the analysis: files left out, figures that cover only part of a trace."""
    listed = document.get("warnings")
    found = [clean(item) for item in listed if isinstance(item, str)] if isinstance(listed, list) else []
    if document.get("partial") is True and not found:
        found = ["A trace was cut short or damaged; the figures cover only a part of it."]
    return [shorten(item, 400) for item in dict.fromkeys(found)][:MAX_WARNINGS]


def clock_offsets_ns(document: Document) -> list[int]:
    """How far each rank's clock is ahead, as found by matching collectives."""
    return [round(amount(rank, "clock_offset_us") * 1000) for rank in records(document, "ranks")]
