"""The page of `weft run --tune --html`: step times over the run, the candidates, and why each dropped out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from weft.report import words
from weft.report.build import Part
from weft.report.page import render
from weft.report.parts import MAX_ROWS, Card, Cell, Column, Table
from weft.report.reading import Document, clean, finite, interval, number, record, records, text
from weft.tuning.live.trial import PURPOSES

_WIDTH, _HEIGHT, _MARGIN = 1000, 260, 46
MOST_POINTS = 3000
HEADROOM = 1.6  # multiple of the median step: slower steps are drawn at the upper edge
_CSS = {
    "warm-up": "faint",
    "profile": "faint",
    "search": "search",
    "proof": "proof",
    "probe": "probe",
    "check": "proof",
    "wait": "probe",
    "pause": "faint",
    "watch": "watch",
}


@dataclass(frozen=True)
class LivePoint:
    """A step in plot coordinates."""

    x: float
    y: float
    css: str
    title: str


@dataclass(frozen=True)
class LivePlot:
    """Step times over the run."""

    points: tuple[LivePoint, ...]
    marks: tuple[tuple[float, float, str], ...]
    """Decisions: position, width, and text."""
    ticks: tuple[tuple[float, str], ...]
    """Positions on the y axis, and their labels."""
    steps: int
    legend: tuple[tuple[str, str, str], ...]
    description: str
    width: int = _WIDTH
    height: int = _HEIGHT


@dataclass(frozen=True, kw_only=True)
class LivePart(Part):
    """A job under live tuning."""

    cards: tuple[Card, ...]
    plot: LivePlot | None
    notes: tuple[tuple[str, str], ...]
    candidates: Table
    kernels: Table


def live_page(document: Document, steps: Document) -> str:
    """The page. `document`: the value of `tuning` in `weft run --stats`; `steps`: the record of all steps."""
    plot = _plot(steps)
    drawn = (("steps", "Steps"),) if plot else ()
    part = LivePart(
        template="live.html.j2",
        title="Live tuning",
        subtitle=_subtitle(document),
        sentence=_capitalized(text(document, "text")),
        contents=(("summary", "Summary"), *drawn, ("candidates", "Candidates"), ("kernels", "Kernels")),
        cards=tuple(_cards(document)),
        plot=plot,
        notes=tuple((f"step {at:.0f}", said) for at, said in _notes(steps)),
        candidates=_candidates(document),
        kernels=_kernels(document),
    )
    return render([part])


def _capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _subtitle(document: Document) -> str:
    facts = record(document, "facts")
    return text(facts, "workload") or f"{text(facts, 'world', 'unknown number of')} ranks"


def _cards(document: Document) -> list[Card]:
    kept = text(document, "state") == "kept"
    before, after = number(document, "default_ms"), number(document, "best_ms")
    spread = words.gain(interval(document, "ci")) if kept else ""
    watch = record(document, "watch")
    cost = number(document, "cost_ms")
    cards = [
        Card("Before", words.milliseconds(before), "a step under the default"),
        Card(
            "After",
            words.milliseconds(after if kept else before),
            "a step as the job goes on",
            "good" if kept else "",
        ),
        Card("Gain", words.percent(number(document, "gain_pct")) if kept else "none", spread),
        Card(
            "Steps used",
            text(document, "steps"),
            f"{cost:+.0f} ms against the default" if cost is not None else "",
        ),
        Card("Scatter of a step", words.percent(number(document, "noise_pct"))),
    ]
    if watch:
        reverted = text(watch, "reverted")
        note = f"{text(watch, 'probes')} probes, {text(watch, 'checks')} checks"
        cards.append(
            Card("Watched", f"{text(watch, 'steps')} steps", reverted or note, "exposed" if reverted else "")
        )
    return cards


def _rows(steps: Document) -> list[tuple[float, float, str, str]]:
    """Number, ms, policy label and purpose of each valid row of the record."""
    labels = [clean(label) for label in steps.get("policies", ())]
    found = []
    for row in steps.get("times", ()):
        if not isinstance(row, (list, tuple)) or len(row) != 4:
            continue
        at, ms, policy = finite(row[0]), finite(row[1]), finite(row[2])
        if at is None or ms is None or policy is None or ms <= 0:
            continue
        label = labels[int(policy)] if 0 <= policy < len(labels) else "unknown policy"
        found.append((at, ms, label, str(row[3])))
    return found


def _notes(steps: Document) -> list[tuple[float, str]]:
    notes = [row for row in steps.get("notes", ()) if isinstance(row, (list, tuple)) and len(row) == 2]
    known = [(finite(at), clean(said)) for at, said in notes[:MAX_ROWS]]
    return [(at, said) for at, said in known if at is not None]


def _plot(steps: Document) -> LivePlot | None:
    rows = _rows(steps)
    if len(rows) < 2:
        return None
    # A row may be the mean of several steps, and a long record keeps only some rows.
    counted = max(number(steps, "steps") or 0.0, 1.0 + max(at for at, *_ in rows))
    last = counted - 1.0
    times = [ms for _, ms, *_ in rows]
    top = min(max(times), HEADROOM * median(times)) * 1.02
    bottom = min(times) * 0.98
    step = -(-len(rows) // MOST_POINTS)
    special = [row for row in rows if row[3] != "watch"]
    shown = rows if step == 1 else sorted({*special[-MOST_POINTS:], *rows[::step]})

    def x(at: float) -> float:
        return round(_MARGIN + (_WIDTH - _MARGIN - 8) * at / last, 1)

    def y(ms: float) -> float:
        share = (min(ms, top) - bottom) / (top - bottom) if top > bottom else 0.5
        return round(_HEIGHT - 24 - (_HEIGHT - 40) * share, 1)

    points = tuple(
        LivePoint(x(at), y(ms), _CSS.get(purpose, "watch"), _title(at, ms, label, purpose))
        for at, ms, label, purpose in shown
    )
    ticks = tuple((y(value), f"{value:.3g}") for value in _levels(bottom, top))
    marks = tuple((x(at), 1.0, said) for at, said in _notes(steps))
    present = dict.fromkeys(_CSS.get(row[3], "watch") for row in rows)
    names = {
        "faint": "warm-up and profile",
        "search": "candidates compared",
        "proof": "policy and default in random order",
        "probe": "probe of the default",
        "watch": "as the job goes on",
    }
    legend = tuple((f"step-{css}", names[css], "") for css in present)
    description = f"{counted:.0f} steps, from {min(times):.4g} to {max(times):.4g} ms"
    return LivePlot(points, marks, ticks, round(last), legend, description)


def _title(at: float, ms: float, label: str, purpose: str) -> str:
    return f"step {at:.0f}: {ms:.4g} ms, {label}, {PURPOSES.get(purpose, 'step')}"


def _levels(low: float, high: float) -> list[float]:
    return [low + (high - low) * part / 4 for part in range(5)]


def _candidates(document: Document) -> Table:
    columns = (
        Column("policy", numeric=False),
        Column("ms", title="median of its steps"),
        Column("to the default"),
        Column("steps"),
        Column("why it dropped out", numeric=False),
    )
    base = number(document, "default_ms")
    final = record(document, "policy")
    rows = []
    for row in records(document, "candidates")[:MAX_ROWS]:
        ms, name = number(row, "ms"), text(row, "label")
        change = 100 * (ms / base - 1) if ms and base else None
        kept = record(row, "policy") == final
        why = text(row, "note") or ("in force at the end" if kept else "not the fastest")
        rows.append(
            (
                Cell(name, name),
                Cell(words.milliseconds(ms), ms),
                Cell(words.NOTHING if change is None else f"{change:+.1f}%", change),
                Cell(text(row, "steps"), number(row, "steps")),
                Cell(why, why, "good" if kept else ""),
            )
        )
    return Table("Candidates", columns, tuple(rows))


def _kernels(document: Document) -> Table:
    columns: Sequence[Column] = (
        Column("kernel", numeric=False),
        Column("launches", title="per step"),
        Column("ms", title="per step, where it was timed"),
        Column("share", title="of all compute that overlaps with collectives"),
        Column("blocks per SM"),
        Column("what can be done", numeric=False),
    )
    rows = []
    for row in records(document, "explanation")[:MAX_ROWS]:
        name, what = text(row, "kernel"), text(row, "what")
        share = number(row, "beside_collectives_pct")
        launches = number(row, "launches_per_step")
        rows.append(
            (
                Cell(name, name),
                Cell(words.NOTHING if launches is None else f"{launches:.0f}", launches),
                Cell(words.milliseconds(number(row, "ms")), number(row, "ms")),
                Cell(words.percent(share), share),
                Cell(text(row, "blocks_per_sm", words.NOTHING), number(row, "blocks_per_sm")),
                Cell(what, what),
            )
        )
    return Table("Kernels that overlap with collectives", tuple(columns), tuple(rows), sorted_by=3)
