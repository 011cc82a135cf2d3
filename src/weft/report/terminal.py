"""Results in the terminal: tables that fit 80 columns, the causes, and the next command.

Names from a trace are printed as plain text, without control characters, and never interpreted as markup.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.report import analysis, compare, words
from weft.report.lines import TERMINAL_WIDTH, plain_table, print_line, print_table
from weft.report.parts import causes, main_cause
from weft.report.reading import Document, amount, number, records, shorten

_MAX_RANKS = 16
MAX_COLLECTIVES = 10
MAX_ADVICE = 5
_BAR = 24
_COPIES_SHARE = 0.05
"""Copies and fills get a column if they take more than this share of a rank's span."""


def show_analysis(document: dict[str, Any], console: Console) -> None:
    """Print the document of `weft analyze`."""
    print_line(console, analysis.analysis_sentence(document), style="bold")
    if not records(document, "ranks"):
        return
    print_table(console, _rank_table(document))
    if any(records(rank, "collectives") for rank in records(document, "ranks")):
        print_table(console, _collective_table(document))
    _show_causes(document, console)
    _show_advice(document, console)
    _show_warnings(document, console)


def show_comparison(document: dict[str, Any], console: Console) -> None:
    """Print a comparison of two analyses: `before`, `after` and `change`."""
    print_line(console, compare.comparison_sentence(document), style="bold")
    table = plain_table(("figure", "left"), ("before", "right"), ("after", "right"), ("change", "right"))
    styles = {"good": "green", "bad": "red"}
    for row in compare.metric_changes(document):
        table.add_row(row.label, row.before, row.after, Text(row.change, style=styles.get(row.tone, "")))
    print_table(console, table)
    after = document.get("after")
    if isinstance(after, dict):
        _show_causes(after, console)
        _show_advice(after, console)
    _show_warnings(document, console)


def _rank_table(document: Document) -> Table:
    names, ranks = analysis.labels(document), records(document, "ranks")
    copies = any(amount(rank, "memory_us") > _COPIES_SHARE * amount(rank, "span_us") for rank in ranks)
    heads = ("span", "compute", "comm", "exposed", "hidden", *(("copies",) if copies else ()), "idle")
    table = plain_table(("rank", "left"), *((head, "right") for head in heads))
    # If there are too many ranks, show the most exposed ones.
    chosen = sorted(range(len(ranks)), key=lambda i: -amount(ranks[i], "exposed_comm_us"))[:_MAX_RANKS]
    for i in sorted(chosen):
        rank = ranks[i]
        table.add_row(
            Text(shorten(names[i].removeprefix("rank "), 8 if copies else 18)),
            words.duration(number(rank, "span_us")),
            words.duration(number(rank, "compute_us")),
            words.duration(number(rank, "comm_us")),
            Text(words.duration(number(rank, "exposed_comm_us")), style="bold"),
            words.percent(analysis.overlap_pct(rank)),
            *((words.duration(number(rank, "memory_us")),) if copies else ()),
            words.duration(number(rank, "idle_us")),
        )
    _mention_rest(table, len(ranks) - len(chosen), "ranks, less exposed")
    return table


def _collective_table(document: Document) -> Table:
    heads = ("collective", "rank", "count", "total", "exposed", "GB/s", "main cause")
    rows = [
        (name, item)
        for name, rank in zip(analysis.labels(document), records(document, "ranks"), strict=True)
        for item in records(rank, "collectives")
    ]
    rows.sort(key=lambda row: -amount(row[1], "exposed_us"))
    cells = [_collective_row(name, item) for name, item in rows[:MAX_COLLECTIVES]]
    # The name gets the width that the figures leave: figures are never truncated.
    taken = sum(max(len(row[at]) for row in (heads, *cells)) + 3 for at in range(1, len(heads)))
    table = plain_table(*((head, "right" if 2 <= at <= 5 else "left") for at, head in enumerate(heads)))
    for row in cells:
        name = _fitted(row[0], max(TERMINAL_WIDTH - taken - 2, 10))
        table.add_row(
            Text(name), *(Text(cell, style="bold" if at == 4 else "") for at, cell in enumerate(row) if at)
        )
    _mention_rest(table, len(rows) - MAX_COLLECTIVES, "collectives, less exposed")
    return table


def _collective_row(rank: str, item: Document) -> tuple[str, ...]:
    count, busbw, main = number(item, "count"), number(item, "busbw_gbps"), main_cause([item])
    return (
        _shown_name(item),
        shorten(rank.removeprefix("rank "), 8),
        words.NOTHING if count is None else f"{count:.0f}",
        words.duration(number(item, "total_us")),
        words.duration(number(item, "exposed_us")),
        words.bandwidth(busbw),
        words.brief_cause(main),
    )


def _shown_name(item: Document) -> str:
    """A short name of a collective for a narrow column: the kernel's name without the usual prefixes.

    If the kernel's name does not show the kind of collective but the trace does, the kind is the name.
    """
    kind, _, kernel = analysis.collective_name(item).partition(" · ")
    name = kernel if kind == "other" and kernel else kind
    for prefix in ("ncclDevKernel_", "ncclKernel_", "rcclDevKernel_"):
        name = name.replace(prefix, "")
    return name


def _fitted(name: str, width: int) -> str:
    """A name without its outer namespaces, as far as needed to fit; shortened if that is not enough."""
    parts = name.split("::")
    for at in range(len(parts)):
        if len("::".join(parts[at:])) <= width:
            return "::".join(parts[at:])
    return shorten(parts[-1], width)


def _mention_rest(table: Table, left_out: int, noun: str) -> None:
    if left_out > 0:
        table.caption = f"{left_out} more {noun}"
        table.caption_justify = "left"


def _show_causes(document: Document, console: Console) -> None:
    totals: dict[str, float] = {}
    for rank in records(document, "ranks"):
        for key, us in causes(rank):
            totals[key] = totals.get(key, 0.0) + us
    whole = sum(totals.values())
    if whole <= 0:
        return
    print_line(console, f"Why {words.duration(whole)} are exposed (all ranks)", style="bold")
    table = plain_table(("cause", "left"), ("time", "right"), ("share", "right"), ("", "left"))
    table.show_header = False
    for key, us in sorted(((key, us) for key, us in totals.items() if us > 0), key=lambda entry: -entry[1]):
        bar = "█" * round(_BAR * us / whole)
        table.add_row(words.cause_name(key), words.duration(us), words.percent(words.share(us, whole)), bar)
    print_table(console, table)


def _show_advice(document: Document, console: Console) -> None:
    items = analysis.advice(document)
    if not items:
        print_line(console, "Nothing to gain: no control would hide more of this communication.")
        return
    print_line(console, "What to try", style="bold")
    for position, item in enumerate(items[:MAX_ADVICE], 1):
        gain = f" ({item.gain})" if item.gain else ""
        print_line(console, f"{position}. {item.title}{gain}", indent=2)
        if item.detail:
            print_line(console, item.detail, indent=5)
        if item.command:
            # A command is never wrapped, so that it can be copied.
            console.print(Text("     " + item.command, style="cyan"), soft_wrap=True)
    if len(items) > MAX_ADVICE:
        print_line(console, f"{len(items) - MAX_ADVICE} more in the page (--html FILE).", indent=2)


def _show_warnings(document: Document, console: Console) -> None:
    for warning in analysis.analysis_warnings(document):
        print_line(console, f"Note: {warning}", style="yellow")
