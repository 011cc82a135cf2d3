"""What the page says about bench and tune results: heatmaps, candidates with intervals, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.report import words
from weft.report.parts import MAX_ROWS, Card, Cell, Column, Table
from weft.report.reading import Document, interval, number, record, records, shorten, text

MAX_BARS = 120


@dataclass(frozen=True)
class Heatmap:
    """Workloads down, policies across."""

    title: str
    note: str
    policies: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True)
class Whisker:
    """A measured time with its confidence interval; positions in per mille of the chart's width."""

    label: str
    at: float
    low: float
    high: float
    value: str
    kept: bool
    description: str


@dataclass(frozen=True)
class Reference:
    """A vertical line that the times are read against."""

    css: str
    label: str
    at: float


@dataclass(frozen=True)
class Chart:
    """Whiskers on one axis."""

    title: str
    whiskers: tuple[Whisker, ...]
    references: tuple[Reference, ...]
    left_out: int = 0


def is_simulated(document: Document) -> bool:
    """Whether a result comes from the simulator: it says so, or its device does."""
    devices = [text(document, "device"), *(text(row, "device") for row in records(document, "rows"))]
    return document.get("simulated") is True or any(device.startswith("sim:") for device in devices)


def confidence(source: Document, ms: float | None) -> tuple[float, float] | None:
    """The confidence interval in ms, from a pair of bounds or a half width."""
    bounds, half = interval(source, "ci_ms"), number(source, "ci_ms")
    if bounds is None and half is not None and ms is not None:
        bounds = (ms - abs(half), ms + abs(half))
    return bounds


def heatmaps(document: Document) -> list[Heatmap]:
    """Time ratio and fraction of ideal, workload by policy, where the rows have them."""
    maps = (
        _heatmap(
            document,
            "time_ratio",
            "Time ratio",
            "Overlapped time over sequential time: under 1 (blue) is a gain, over 1 (orange) a loss.",
        ),
        _heatmap(
            document,
            "fraction_of_ideal",
            "Fraction of ideal",
            "How much of the possible gain was reached: 1 is ideal, 0 is no better than sequential.",
        ),
    )
    return [found for found in maps if found is not None]


def _heatmap(document: Document, key: str, title: str, note: str) -> Heatmap | None:
    values: dict[tuple[str, str], float] = {}
    for row in records(document, "rows"):
        value = number(row, key)
        if value is not None:
            values[text(row, "workload", "?"), words.policy_name(row.get("policy"))] = value
    if not values:
        return None
    workloads = list(dict.fromkeys(workload for workload, _ in values))[:MAX_ROWS]
    policies = list(dict.fromkeys(policy for _, policy in values))[:40]
    better = min if key == "time_ratio" else max
    rows = []
    for workload in workloads:
        best = better((v for (w, _), v in values.items() if w == workload))
        cells = [_heat_cell(values.get((workload, policy)), key, best) for policy in policies]
        rows.append((shorten(workload, 60), tuple(cells)))
    return Heatmap(title, note, tuple(shorten(policy, 60) for policy in policies), tuple(rows))


def _heat_cell(value: float | None, key: str, best: float) -> Cell:
    if value is None:
        return Cell(words.NOTHING, None, "heat-none")
    # Ratios are shaded by 5% steps from 1; fractions of ideal from half, so that blue is good in both.
    steps = (value - 1) / 0.05 if key == "time_ratio" else (0.5 - value) / 0.11
    level = max(-4, min(4, round(steps)))
    css = "heat-0" if level == 0 else f"heat-{'n' if level < 0 else 'p'}{abs(level)}"
    return Cell(f"{value:.2f}", value, css + (" best" if value == best else ""))


def bench_charts(document: Document) -> list[Chart]:
    """Times of the policies, a chart for each workload."""
    groups: dict[str, list[Document]] = {}
    for row in records(document, "rows"):
        groups.setdefault(text(row, "workload", "?"), []).append(row)
    charts = []
    for workload, rows in list(groups.items())[:MAX_BARS]:
        times = [ms for row in rows if (ms := number(row, "ms")) is not None]
        charts.append(_chart(shorten(workload, 80), rows, [], best=min(times, default=None)))
    return [chart for chart in charts if chart.whiskers]


def tune_chart(document: Document) -> Chart:
    """The candidates against sequential, plain overlap and ideal."""
    named = (("sequential", "sequential_ms"), ("overlap, no control", "overlap_ms"), ("ideal", "ideal_ms"))
    lines = [(label, number(document, key)) for label, key in named]
    candidates = sorted(records(document, "candidates"), key=lambda c: number(c, "ms") or float("inf"))
    return _chart("Candidates", candidates, lines, best=None)


def _chart(
    title: str, rows: Sequence[Document], lines: Sequence[tuple[str, float | None]], best: float | None
) -> Chart:
    measured = [(row, ms) for row in rows if (ms := number(row, "ms")) is not None]
    ends = [ms for _, ms in measured] + [ms for _, ms in lines if ms is not None]
    ends += [end for row, ms in measured for end in (confidence(row, ms) or ())]
    top = max(ends, default=0.0) * 1.04 or 1.0

    def place(ms: float) -> float:
        return round(1000 * max(0.0, min(ms / top, 1.0)), 2)

    whiskers = []
    for row, ms in measured[:MAX_BARS]:
        low, high = confidence(row, ms) or (ms, ms)
        label = words.policy_name(row.get("policy"))
        value = f"{words.milliseconds(ms)}" + ("" if low == high else f" ±{(high - low) / 2:.2g}")
        kept = row.get("kept") is True or (best is not None and ms == best)
        said = f"{label}: {words.milliseconds(ms)}, {words.milliseconds(low)} to {words.milliseconds(high)}"
        whiskers.append(Whisker(shorten(label, 80), place(ms), place(low), place(high), value, kept, said))
    references = tuple(
        Reference(f"ref-{position}", f"{label} {words.milliseconds(ms)}", place(ms))
        for position, (label, ms) in enumerate(lines)
        if ms is not None
    )
    return Chart(title, tuple(whiskers), references, max(len(measured) - MAX_BARS, 0))


def bench_table(document: Document) -> Table:
    """Every row of a bench."""
    columns = (
        Column("Workload", numeric=False),
        Column("Policy", numeric=False),
        Column("Time"),
        Column("Interval", title="confidence interval of the median"),
        Column("Time ratio", title="overlapped over sequential"),
        Column("Overlap rate", title="share of communication that runs beside compute"),
        Column("Fraction of ideal"),
    )
    found = records(document, "rows")
    rows = tuple(_bench_row(row) for row in found[:MAX_ROWS])
    return Table("Results", columns, rows, max(len(found) - MAX_ROWS, 0))


def _bench_row(row: Document) -> tuple[Cell, ...]:
    ms, ratio = number(row, "ms"), number(row, "time_ratio")
    rate, fraction = number(row, "overlap_rate"), number(row, "fraction_of_ideal")
    workload, policy = text(row, "workload", "?"), words.policy_name(row.get("policy"))
    tone = "" if ratio is None or ratio == 1 else "good" if ratio < 1 else "bad"
    return (
        Cell(shorten(workload, 60), workload),
        Cell(shorten(policy, 80), policy),
        Cell(words.milliseconds(ms), ms),
        _interval_cell(row, ms),
        Cell(words.ratio(ratio), ratio, tone),
        Cell(words.ratio(rate), rate),
        Cell(words.ratio(fraction), fraction),
    )


def _interval_cell(row: Document, ms: float | None) -> Cell:
    bounds = confidence(row, ms)
    if bounds is None:
        return Cell(words.NOTHING)
    return Cell(f"{bounds[0]:.4g} to {bounds[1]:.4g} ms", bounds[1] - bounds[0])


def candidate_table(document: Document) -> Table:
    """Every candidate of a tune."""
    columns = (
        Column("Policy", numeric=False),
        Column("Time"),
        Column("Interval"),
        Column("Kept", numeric=False),
    )
    found = records(document, "candidates")
    rows = []
    for item in found[:MAX_ROWS]:
        ms, policy = number(item, "ms"), words.policy_name(item.get("policy"))
        kept = "kept" if item.get("kept") is True else ""
        rows.append(
            (
                Cell(shorten(policy, 90), policy),
                Cell(words.milliseconds(ms), ms),
                _interval_cell(item, ms),
                Cell(kept, kept),
            )
        )
    return Table("Candidates", columns, tuple(rows), max(len(found) - MAX_ROWS, 0))


def tune_cards(document: Document) -> list[Card]:
    """The key figures of a tune."""
    sequential, best = number(document, "sequential_ms"), number(document, "best_ms")
    plain, fraction = number(document, "overlap_ms"), number(document, "fraction_of_ideal")

    def against(base: float | None) -> str:
        if base is None or best is None or base <= 0:
            return ""
        change = 100 * (best / base - 1)
        return f"best is {abs(change):.1f}% {'less' if change < 0 else 'more'}"

    return [
        Card("Best", words.milliseconds(best), words.policy_name(document.get("policy")), "good"),
        Card("Overlap, no control", words.milliseconds(plain), against(plain)),
        Card("Sequential", words.milliseconds(sequential), against(sequential)),
        Card("Ideal", words.milliseconds(number(document, "ideal_ms"))),
        Card("Fraction of ideal", words.ratio(fraction), "of the possible gain"),
    ]


def tune_sentence(document: Document) -> str:
    """The verdict in one sentence."""
    verdict = document.get("verdict")
    if isinstance(verdict, dict):
        said = (
            text(verdict, "text")
            or text(verdict, "summary")
            or text(verdict, "reason")
            or text(verdict, "verdict")
        )
    else:
        said = text(document, "verdict")
    if said:
        return said
    best, plain = number(document, "best_ms"), number(document, "overlap_ms")
    policy = words.policy_name(document.get("policy"))
    if best is None or not plain:
        return f"Policy: {policy}."
    change = 100 * (best / plain - 1)
    against = f"{abs(change):.1f}% {'less' if change < 0 else 'more'} than overlap with no control"
    return f"{policy}: {words.milliseconds(best)}, {against}."


def bench_sentence(document: Document) -> str:
    """How many workloads gain, in one sentence."""
    best: dict[str, float] = {}
    for row in records(document, "rows"):
        ratio, workload = number(row, "time_ratio"), text(row, "workload", "?")
        if ratio is not None:
            best[workload] = min(ratio, best.get(workload, ratio))
    if not best:
        return f"{len(records(document, 'rows'))} measurements."
    gained = [workload for workload, ratio in best.items() if ratio < 1]
    top = min(best, key=lambda workload: best[workload])
    said = f"{len(gained)} of {len(best)} workloads run faster overlapped than in sequence"
    return (
        f"{said}; the best is {shorten(top, 40)} at {best[top]:.2f} of its sequential time."
        if gained
        else f"{said}."
    )


def workload_name(document: Document) -> str:
    """The workload of a tune, as a name or as its parts."""
    parts = record(document, "workload")
    if not parts:
        return text(document, "workload")
    return text(parts, "name") or ", ".join(f"{key} {text(parts, key)}" for key in parts if text(parts, key))
