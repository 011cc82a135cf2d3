"""A plan in the terminal: first that it is simulated, and its error; then tables that fit 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.report import plan, words
from weft.report.lines import plain_table, print_line, print_table
from weft.report.reading import Document, amount, number, record, records, shorten, text

_MAX_ROWS = 14
_BAR = 22


def show_plan(document: dict[str, Any], console: Console | None = None) -> None:
    """Print the document of `weft plan`."""
    out = console or Console(soft_wrap=False, highlight=False)
    print_line(out, plan.plan_sentence(document), style="bold")
    print_line(out, plan.honesty(document), style="yellow")
    kind = text(document, "kind")
    if kind == "plan-sweep":
        _show_sweep(document, out)
    elif kind == "plan-scaling":
        _show_scaling(document, out)
    else:
        _show_one(document, out)
    for note in plan.notes(document):
        print_line(out, f"Note: {note}")


def _table(*columns: tuple[str, str]) -> Table:
    return plain_table(*columns, edge=False)


def _show_one(document: Document, out: Console) -> None:
    _show_breakdown(document, out)
    _show_collectives(document, out)
    print_line(out, plan.weft_sentence(document), style="bold")
    for entry in plan.controls(document):
        print_line(out, f"{entry.collective}: {entry.policy}", indent=2)
    if plan.change_rows(document):
        print_line(out, "What else would change the step", style="bold")
        table = _table(("change", "fold"), ("step", "right"), ("gain", "right"))
        for change in plan.change_rows(document):
            style = "green" if change.gain_pct > 0 else "red"
            gain = Text(f"{change.gain_pct:+.1f}%", style=style)
            table.add_row(Text(change.label), words.duration(1e6 * change.step_s), gain)
        print_table(out, table)
    print_line(out, plan.memory_sentence(document))
    if plan.cost_sentence(document):
        print_line(out, plan.cost_sentence(document))


def _show_breakdown(document: Document, out: Console) -> None:
    print_line(out, "Where the step goes", style="bold")
    table = _table(("", "left"), ("time", "right"), ("share", "right"), ("", "left"))
    table.show_header = False
    step = amount(document, "step_time_s")
    for name, seconds in plan.breakdown(document):
        part = words.share(seconds, step)
        bar = "█" * round(_BAR * min(100.0, part or 0.0) / 100)
        table.add_row(name, words.duration(1e6 * seconds), words.percent(part), bar)
    print_table(out, table)


def _show_collectives(document: Document, out: Console) -> None:
    found = plan.planned_collective_rows(document)
    if not found:
        print_line(out, "No communication: one GPU for each part of the model.")
        return
    print_line(out, "Communication of a step, on the slowest stage", style="bold")
    heads = ("collective", "ranks", "size", "count", "alone", "hidden", "exposed")
    table = _table(*((head, "left" if at == 0 else "right") for at, head in enumerate(heads)))
    for one in found[:_MAX_ROWS]:
        table.add_row(
            Text(shorten(one.short, 24)),
            one.ranks,
            _size(one.bytes),
            f"{one.count:.0f}",
            _short(one.alone_s),
            _short(one.hidden_s),
            Text(_short(one.exposed_s), style="bold"),
        )
    print_table(out, table)
    print_line(out, "ranks: how many, and on how many nodes where it is more than one.", indent=1)


def _size(count: float) -> str:
    """Bytes to three digits."""
    for limit, unit in ((2.0**10, "B"), (2.0**20, "KiB"), (2.0**30, "MiB"), (2.0**40, "GiB")):
        if count < limit * 0.9995:
            return f"{count / limit * 1024:.3g} {unit}"
    return f"{count / 2.0**40:.3g} TiB"


def _short(seconds: float) -> str:
    """Seconds to three digits, for narrow columns."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}" if seconds else "0"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _show_sweep(document: Document, out: Console) -> None:
    heads = ("", "way", "weft", "step", "tok/s/GPU", "exposed", "memory")
    sides = ("left", "fold", "left", "right", "right", "right", "right")
    table = _table(*zip(heads, sides, strict=True))
    rows = records(document, "rows")
    shown = rows[:_MAX_ROWS]
    shown += [row for row in rows[_MAX_ROWS:] if row.get("pareto") is True][:_MAX_ROWS]
    for row in shown:
        table.add_row(
            "●" if row.get("pareto") is True else " ",
            Text(shorten(text(row, "label"), 60)),
            "yes" if text(row, "controls") == "weft" else "no",
            _short(amount(row, "step_time_s")),
            f"{amount(row, 'tokens_per_s_per_gpu'):,.0f}",
            _short(amount(row, "exposed_comm_s")),
            f"{amount(row, 'memory_bytes') / 2**30:.0f} GiB",
        )
    print_table(out, table)
    print_line(out, f"{len(rows)} predictions; ● nothing is faster with less memory. {plan.WAY_PARTS}.")
    for reason in plan.refused(document):
        print_line(out, f"left out: {reason}", indent=2)


def _show_scaling(document: Document, out: Console) -> None:
    for curve in records(document, "curves"):
        print_line(out, plan.curve_title(curve), style="bold")
        heads = ("GPUs", "step", "exposed", "keeps", "step", "exposed", "keeps", "gain")
        table = _table(*((head, "right") for head in heads))
        for point in records(curve, "points"):
            without, with_weft = record(point, "without"), record(point, "with_weft")
            base, best = amount(without, "step_time_s"), amount(with_weft, "step_time_s")
            cells = [f"{amount(point, 'gpus'):.0f}"]
            for side in (without, with_weft):
                cells += [
                    _short(amount(side, "step_time_s")),
                    _short(amount(side, "exposed_comm_s")),
                    words.percent(number(side, "efficiency_pct")),
                ]
            table.add_row(*cells, words.percent(100 * (1 - best / base) if base else None))
        print_table(out, table)
        print_line(out, "Left: without a control; right: the best control for each collective.", indent=2)
        if text(curve, "note"):
            print_line(out, f"Left out: {text(curve, 'note')}", indent=2)
