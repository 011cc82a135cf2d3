"""The report of a bench: heatmaps, times with intervals, a table."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report import words
from weft.report.charts import Chart, chart, confidence, interval_cell, row_policy, row_workload, timings
from weft.report.parts import MAX_ROWS, Cell, Column, Table
from weft.report.reading import Document, number, records, shorten, text

MAX_POLICIES = 40
"""Most columns of a heatmap."""
MAX_CELLS = 4000
"""Most cells of a heatmap."""
MAX_WHISKERS = 300
"""After this many times in charts, further workloads appear only in the heatmap and the table."""


@dataclass(frozen=True)
class Heatmap:
    """A table of cells: one row per workload, one column per policy."""

    title: str
    note: str
    policies: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    left_out: int = 0
    """Number of workloads that do not fit."""


def heatmaps(document: Document) -> list[Heatmap]:
    """Heatmaps of time ratio and fraction of ideal by workload and policy, if the rows have them."""
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
            "Fraction of the possible gain that was reached: 1 is ideal, 0 is no better than sequential.",
        ),
    )
    return [found for found in maps if found is not None]


def _heatmap(document: Document, key: str, title: str, note: str) -> Heatmap | None:
    values: dict[tuple[str, str], float] = {}
    for row in records(document, "rows"):
        value = number(row, key)
        if value is not None:
            values[row_workload(row), row_policy(row)] = value
    if not values:
        return None
    policies = list(dict.fromkeys(policy for _, policy in values))[:MAX_POLICIES]
    every = list(dict.fromkeys(workload for workload, _ in values))
    workloads = every[: MAX_CELLS // len(policies)]
    better = min if key == "time_ratio" else max
    rows = []
    for workload in workloads:
        mine = [values.get((workload, policy)) for policy in policies]
        best = better((v for v in mine if v is not None), default=0.0)
        cells = [_heat_cell(value, key, best) for value in mine]
        rows.append((shorten(workload, 60), tuple(cells)))
    names = tuple(shorten(policy, 60) for policy in policies)
    return Heatmap(title, note, names, tuple(rows), len(every) - len(workloads))


def _heat_cell(value: float | None, key: str, best: float) -> Cell:
    if value is None:
        return Cell(words.NOTHING, None, "heat-none")
    # Ratios are shaded in steps of 0.05 from 1, fractions of ideal in steps of 0.11 from 0.5: blue is good.
    steps = (value - 1) / 0.05 if key == "time_ratio" else (0.5 - value) / 0.11
    level = max(-4, min(4, round(steps)))
    css = "heat-0" if level == 0 else f"heat-{'n' if level < 0 else 'p'}{abs(level)}"
    return Cell(f"{value:.2f}", value, css + (" best" if value == best else ""))


def times(document: Document) -> list[Chart]:
    """Times of the policies, one chart per workload."""
    groups: dict[str, list[Document]] = {}
    for row in records(document, "rows"):
        groups.setdefault(row_workload(row), []).append(row)
    charts: list[Chart] = []
    for workload, rows in groups.items():
        if sum(len(c.whiskers) for c in charts) > MAX_WHISKERS:
            break
        times = [ms for row in rows if (ms := number(row, "ms")) is not None]
        charts.append(chart(shorten(workload, 80), timings(rows, best=min(times, default=None)), []))
    return [chart for chart in charts if chart.whiskers]


def row_table(document: Document) -> Table:
    """Every row of a bench."""
    columns: tuple[Column, ...] = (
        Column("Workload", numeric=False),
        Column("Policy", numeric=False),
        Column("Time"),
        Column("Interval", title="confidence interval of the median"),
        Column("Time ratio", title="overlapped over sequential"),
        Column("Overlap rate", title="fraction of communication that overlaps compute"),
        Column("Fraction of ideal"),
    )
    found = records(document, "rows")
    rows = tuple(_bench_row(row) for row in found[:MAX_ROWS])
    if any(_problem(row) for row in found):
        columns = (*columns, Column("Problem", numeric=False))
        problems = (Cell(shorten(_problem(row), 120), _problem(row)) for row in found[:MAX_ROWS])
        rows = tuple((*cells, problem) for cells, problem in zip(rows, problems, strict=True))
    return Table("Results", columns, rows, max(len(found) - MAX_ROWS, 0))


def _problem(row: Document) -> str:
    """Why a row has no reliable time; empty if it has."""
    status = text(row, "status")
    return "" if status in ("", "ok", "dropped") else text(row, "problem") or status


def bench_warnings(document: Document) -> list[str]:
    """Warnings about missing workloads."""
    missing = document.get("missing")
    if not isinstance(missing, list) or not missing:
        return []
    return [f"The time budget ended before {len(missing)} workloads; run the bench again to continue."]


def _bench_row(row: Document) -> tuple[Cell, ...]:
    ms, ratio = number(row, "ms"), number(row, "time_ratio")
    rate, fraction = number(row, "overlap_rate"), number(row, "fraction_of_ideal")
    workload, policy = row_workload(row), row_policy(row)
    tone = "" if ratio is None or ratio == 1 else "good" if ratio < 1 else "bad"
    return (
        Cell(shorten(workload, 60), workload),
        Cell(shorten(policy, 80), policy),
        Cell(words.milliseconds(ms), ms),
        interval_cell(confidence(row, ms)),
        Cell(words.ratio(ratio), ratio, tone),
        Cell(words.ratio(rate), rate),
        Cell(words.ratio(fraction), fraction),
    )


def bench_sentence(document: Document) -> str:
    """One sentence: how many workloads gain, and the best."""
    best: dict[str, float] = {}
    for row in records(document, "rows"):
        ratio, workload = number(row, "time_ratio"), row_workload(row)
        if ratio is not None:
            best[workload] = min(ratio, best.get(workload, ratio))
    if not best:
        return f"{len(records(document, 'rows'))} measurements."
    gained = [workload for workload, ratio in best.items() if ratio < 1]
    top = min(best, key=lambda workload: best[workload])
    summary = f"{len(gained)} of {len(best)} workloads run faster overlapped than sequentially"
    return (
        f"{summary}; the best is {shorten(top, 40)} at {best[top]:.2f} of its sequential time."
        if gained
        else f"{summary}."
    )
