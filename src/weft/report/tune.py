"""The report of a tuned workload: the verdict, the key figures, the candidates."""

from __future__ import annotations

from weft.report import words
from weft.report.charts import Chart, Timing, chart, interval_cell
from weft.report.parts import MAX_ROWS, Card, Cell, Column, Table
from weft.report.reading import shorten
from weft.tuning.tuned_workload import TunedWorkload


def tune_cards(tuned: TunedWorkload) -> list[Card]:
    """The key figures of a tuned workload."""
    best = tuned.best_ms

    def against(base: float) -> str:
        change = 100 * (best / base - 1) if base > 0 else 0.0
        return f"best is {abs(change):.1f}% {'less' if change < 0 else 'more'}"

    found = [
        Card("Best", words.milliseconds(best), str(tuned.verdict.policy), "good"),
        Card("Overlap, no control", words.milliseconds(tuned.overlap_ms), against(tuned.overlap_ms)),
        Card("Sequential", words.milliseconds(tuned.sequential_ms), against(tuned.sequential_ms)),
        Card("Ideal", words.milliseconds(tuned.ideal_ms)),
        Card("Fraction of ideal", words.ratio(tuned.fraction_of_ideal(best)), "of the possible gain"),
    ]
    if tuned.ranked_out:
        ruled_out = f"{tuned.ranked_out} more ruled out by simulation"
        found.append(Card("Candidates", f"{len(tuned.candidates)}", ruled_out))
    return found


def candidate_chart(tuned: TunedWorkload) -> Chart:
    """The candidates against sequential, plain overlap and ideal."""
    lines = [
        ("sequential", tuned.sequential_ms),
        ("overlap, no control", tuned.overlap_ms),
        ("ideal", tuned.ideal_ms),
    ]
    bars = [
        Timing(one.candidate, one.ms, one.ci_ms, one.kept) for one in tuned.candidates if one.ms is not None
    ]
    return chart("Candidates", sorted(bars, key=lambda bar: bar.ms), lines)


def candidate_table(tuned: TunedWorkload) -> Table:
    """Every candidate of a tuned workload."""
    columns = (
        Column("Candidate", numeric=False),
        Column("Time"),
        Column("Interval"),
        Column("Kept", numeric=False),
    )
    rows = []
    for one in tuned.candidates[:MAX_ROWS]:
        kept = "kept" if one.kept else ""
        rows.append(
            (
                Cell(shorten(one.candidate, 90), one.candidate),
                Cell(words.milliseconds(one.ms), one.ms),
                interval_cell(one.ci_ms),
                Cell(kept, kept),
            )
        )
    return Table("Candidates", columns, tuple(rows), max(len(tuned.candidates) - MAX_ROWS, 0))
