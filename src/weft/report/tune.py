"""The report of a tune: the verdict, the key figures, the candidates."""

from __future__ import annotations

from weft.report import words
from weft.report.charts import Chart, chart, interval_cell
from weft.report.parts import MAX_ROWS, Card, Cell, Column, Table
from weft.report.reading import Document, number, records, shorten, text


def tune_sentence(document: Document) -> str:
    """The verdict in one sentence."""
    verdict = document.get("verdict")
    if isinstance(verdict, dict):
        summary = (
            text(verdict, "text")
            or text(verdict, "summary")
            or text(verdict, "reason")
            or text(verdict, "verdict")
        )
    else:
        summary = text(document, "verdict")
    if summary:
        return summary
    best, plain = number(document, "best_ms"), number(document, "overlap_ms")
    policy = words.policy_name(document.get("policy"))
    if best is None or not plain:
        return f"Policy: {policy}."
    change = 100 * (best / plain - 1)
    against = f"{abs(change):.1f}% {'less' if change < 0 else 'more'} than overlap with no control"
    return f"{policy}: {words.milliseconds(best)}, {against}."


def tune_cards(document: Document) -> list[Card]:
    """The key figures of a tune."""
    sequential, best = number(document, "sequential_ms"), number(document, "best_ms")
    plain, fraction = number(document, "overlap_ms"), number(document, "fraction_of_ideal")

    def against(base: float | None) -> str:
        if base is None or best is None or base <= 0:
            return ""
        change = 100 * (best / base - 1)
        return f"best is {abs(change):.1f}% {'less' if change < 0 else 'more'}"

    found = [
        Card("Best", words.milliseconds(best), words.policy_name(document.get("policy")), "good"),
        Card("Overlap, no control", words.milliseconds(plain), against(plain)),
        Card("Sequential", words.milliseconds(sequential), against(sequential)),
        Card("Ideal", words.milliseconds(number(document, "ideal_ms"))),
        Card("Fraction of ideal", words.ratio(fraction), "of the possible gain"),
    ]
    if ruled_out := number(document, "ranked_out"):
        raced = len(records(document, "candidates"))
        found.append(Card("Candidates", f"{raced}", f"{ruled_out:.0f} more ruled out by simulation"))
    return found


def candidate_chart(document: Document) -> Chart:
    """The candidates against sequential, plain overlap and ideal."""
    named = (("sequential", "sequential_ms"), ("overlap, no control", "overlap_ms"), ("ideal", "ideal_ms"))
    lines = [(label, number(document, key)) for label, key in named]
    candidates = sorted(records(document, "candidates"), key=lambda c: number(c, "ms") or float("inf"))
    return chart("Candidates", candidates, lines, best=None)


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
                interval_cell(item, ms),
                Cell(kept, kept),
            )
        )
    return Table("Candidates", columns, tuple(rows), max(len(found) - MAX_ROWS, 0))
