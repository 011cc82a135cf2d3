"""The page of a plan: one configuration, a sweep or scaling curves."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report import plan, words
from weft.report.build import Part
from weft.report.page import render
from weft.report.parts import Bar, Card, Cell, Column, Segment, Table, stacked
from weft.report.plan_pipeline import PipelineView, pipeline_view
from weft.report.plan_plots import Plot, pareto, scaling
from weft.report.reading import Document, amount, clean, number, record, records, text

_NO_TABLE = Table("", (), ())
_KINDS = {
    "plan-compute": ("compute", ("gemm", "attention", "elementwise", "optimizer")),
    "plan-extra": ("recomputation and compression", ("recompute", "compression")),
    "plan-exposed": ("exposed communication", plan.EXPOSED),
    "plan-contention": ("compute slowed by collectives", ("contention",)),
    "plan-bubble": ("pipeline bubble", ("bubble",)),
    "plan-other": ("gaps and skew", ("overhead", "skew")),
}


@dataclass(frozen=True, kw_only=True)
class PlanPart(Part):
    """A plan."""

    cards: tuple[Card, ...]
    bars: tuple[Bar, ...] = ()
    legend: tuple[tuple[str, str, str], ...] = ()
    weft: str = ""
    breakdown: Table = _NO_TABLE
    collectives: Table = _NO_TABLE
    changes: Table = _NO_TABLE
    plots: tuple[Plot, ...] = ()
    interval: tuple[Bar, ...] = ()
    interval_note: str = ""
    pipeline: PipelineView | None = None
    cost: str = ""
    memory: str = ""
    memory_bars: tuple[Bar, ...] = ()
    refused: tuple[str, ...] = ()


def plan_page(document: Document) -> str:
    """The page of `weft plan`."""
    return render([plan_part(document)])


def plan_part(document: Document) -> PlanPart:
    """The page part of a plan's document."""
    kind = text(document, "kind")
    if kind == "plan-sweep":
        return _part(
            document,
            (("plot0", "Ways"), ("refused", "Left out")),
            plots=(pareto(document),),
            refused=tuple(plan.refused(document)),
        )
    if kind == "plan-scaling":
        plots = tuple(scaling(curve) for curve in records(document, "curves"))
        sections = tuple((f"plot{at}", plot.title.split(":")[0]) for at, plot in enumerate(plots))
        return _part(document, sections, plots=plots)
    changes = _change_table(document)
    picture = pipeline_view(record(document, "pipeline"))
    sections = (("step", "Step"), ("collectives", "Communication"))
    sections += (("pipeline", "Pipeline"),) if picture else ()
    sections += (("changes", "What if"),) if changes.rows else ()
    return _part(
        document,
        (*sections, ("memory", "Memory")),
        bars=_bars(document),
        legend=tuple((css, label, "") for css, (label, _) in _KINDS.items()),
        weft=plan.weft_sentence(document),
        breakdown=_breakdown_table(document),
        collectives=_collective_table(document),
        changes=changes if changes.rows else _NO_TABLE,
        pipeline=picture,
        memory=plan.memory_sentence(document),
        memory_bars=_memory_bars(document),
    )


def _part(document: Document, sections: tuple[tuple[str, str], ...], **content: object) -> PlanPart:
    interval = _interval_bars(document)
    return PlanPart(
        template="plan.html.j2",
        title=f"Plan {plan.title(document)}",
        subtitle=plan.subtitle(document),
        sentence=plan.plan_sentence(document),
        contents=(("summary", "Summary"), *sections),
        simulated=True,
        warnings=(*(() if interval else (plan.honesty(document),)), *plan.notes(document)),
        cards=tuple(_cards(document)),
        interval=interval,
        interval_note=plan.honesty(document),
        cost=plan.cost_sentence(document),
        **content,  # type: ignore[arg-type]
    )


def _cards(document: Document) -> list[Card]:
    step, exposed = amount(document, "step_time_s"), amount(document, "exposed_comm_s")
    without = amount(record(document, "without_weft"), "step_time_s")
    hours = amount(record(document, "cost"), "gpu_hours_per_billion_tokens")
    money = amount(record(document, "cost"), "usd_per_billion_tokens")
    found = [
        Card("Step", words.duration(1e6 * step), _which(document)),
        Card("Rate", f"{amount(document, 'tflops_per_gpu'):.0f} TFLOP/s", "model FLOPs of each GPU"),
        Card("MFU", words.percent(number(document, "mfu_pct")), "of the bf16 peak"),
        Card(
            "Exposed communication",
            words.duration(1e6 * exposed),
            f"{words.share(exposed, step):.1f}% of the step",
            "exposed",
        ),
    ]
    if without:
        gain = 100 * (1 - step / without)
        found.append(
            Card("Without a control", words.duration(1e6 * without), f"weft saves {gain:.1f}%", "good")
        )
    if hours:
        note = f"{money:,.0f} USD" if money else "without weft's controls"
        found.append(Card("A billion tokens", f"{hours:,.0f} GPU-hours", note))
    return found


def _interval_bars(document: Document) -> tuple[Bar, ...]:
    """The 90% interval of the step without weft and, on the same scale, the step with weft."""
    found = record(document, "interval")
    low, high = amount(found, "low_s"), amount(found, "high_s")
    base = amount(record(document, "without_weft"), "step_time_s") or amount(document, "step_time_s")
    if not 0 < low <= high:
        return ()
    whole = 1.1 * high
    said = f"{words.duration(1e6 * low)} to {words.duration(1e6 * high)}"
    bar = [Segment("plan-hidden", _per_mille(low, whole), _per_mille(high - low, whole), f"90%: {said}")]
    bar.append(
        Segment("plan-exposed", _per_mille(base, whole) - 2, 4, f"predicted {words.duration(1e6 * base)}")
    )
    made = [Bar("without weft", tuple(bar), words.duration(1e6 * base), f"90%: {said}")]
    step = amount(document, "step_time_s")
    if step and step != base:
        point = Segment("plan-compute", _per_mille(step, whole) - 2, 4, words.duration(1e6 * step))
        made.append(Bar("with weft", (point,), words.duration(1e6 * step), "simulated gain, not validated"))
    return tuple(made)


def _per_mille(value: float, whole: float) -> float:
    return round(max(0.0, min(1000.0, 1000 * value / whole)), 2)


def _which(document: Document) -> str:
    """Which step the cards show."""
    kinds = {"plan-sweep": "the fastest way", "plan-scaling": "weak scaling, the largest size"}
    return kinds.get(text(document, "kind"), "with weft's controls")


def _bars(document: Document) -> tuple[Bar, ...]:
    sides = [("no control", record(document, "without_weft")), ("with weft", document)]
    whole = max((amount(side, "step_time_s") for _, side in sides), default=0.0)
    made = []
    for label, side in sides:
        found = record(side, "breakdown")
        pieces = []
        for css, (name, keys) in _KINDS.items():
            seconds = sum(amount(found, key) for key in keys)
            pieces.append((css, seconds, f"{name} {words.duration(1e6 * seconds)}"))
        step = amount(side, "step_time_s")
        made.append(Bar(label, stacked(pieces, whole), words.duration(1e6 * step)))
    return tuple(made)


def _breakdown_table(document: Document) -> Table:
    step = amount(document, "step_time_s")
    before = record(record(document, "without_weft"), "breakdown")
    keys = {label: key for key, label in plan.LABELS.items()}
    rows = []
    for label, seconds in plan.breakdown(document):
        base = amount(before, keys.get(label, label))
        share = words.share(seconds, step)
        rows.append(
            (
                Cell(label, label),
                Cell(words.duration(1e6 * seconds), seconds),
                Cell(words.percent(share), share),
                Cell(words.duration(1e6 * base), base),
            )
        )
    columns = (Column("Part", numeric=False), Column("Time"), Column("Share"), Column("Without a control"))
    return Table("Where the step goes", columns, tuple(rows))


def _collective_table(document: Document) -> Table:
    heads = ("Ranks", "Size", "Count", "Alone", "Hidden", "Exposed", "Slows compute by")
    rows = []
    for one in plan.planned_collective_rows(document):
        rows.append(
            (
                Cell(one.name, one.name),
                Cell(one.ranks, one.ranks),
                Cell(words.size(one.bytes), one.bytes),
                Cell(f"{one.count:,.0f}", one.count),
                Cell(words.duration(1e6 * one.alone_s), one.alone_s),
                Cell(words.duration(1e6 * one.hidden_s), one.hidden_s),
                Cell(words.duration(1e6 * one.exposed_s), one.exposed_s, "strong"),
                Cell(words.duration(1e6 * one.slows_s), one.slows_s),
                Cell(one.policy, one.policy),
            )
        )
    columns = (
        Column("Collective", numeric=False),
        *(Column(head) for head in heads),
        Column("Control", numeric=False),
    )
    return Table("Communication of a step; ranks: how many on how many nodes", columns, tuple(rows))


def _change_table(document: Document) -> Table:
    rows = tuple(
        (
            Cell(one.label, one.label),
            Cell(words.duration(1e6 * one.step_s), one.step_s),
            Cell(f"{one.gain_pct:+.1f}%", one.gain_pct, "good" if one.gain_pct > 0 else "bad"),
        )
        for one in plan.change_rows(document)
    )
    return Table("Changes", (Column("Change", numeric=False), Column("Step"), Column("Gain")), rows)


def _memory_bars(document: Document) -> tuple[Bar, ...]:
    kinds, limit = record(document, "memory"), amount(document, "memory_limit_bytes")
    order = sorted(kinds, key=lambda kind: -amount(kinds, kind))
    made = []
    for kind in order:
        size = amount(kinds, kind)
        said = f"{clean(kind)} {words.size(size)}"
        made.append(Bar(clean(kind), stacked([("plan-compute", size, said)], limit), words.size(size)))
    return tuple(made)
