"""A tuned workload in the terminal: the fastest candidates, the baselines and the verdict."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from weft.tuning.tuned_workload import TunedWorkload

_SHOWN = 12  # candidates in the table; --json has them all


def show_tuned(tuned: TunedWorkload, console: Console) -> None:
    """Print the fastest candidates, how many could not be measured, and the verdict."""
    note = " (simulated)" if tuned.verdict.simulated else ""
    table = Table(title=f"{tuned.workload} on {tuned.device}{note}", box=box.SIMPLE_HEAD, width=76)
    table.add_column("candidate", overflow="fold")
    for heading in ("ms", "vs overlap", "% of ideal"):
        table.add_column(heading, justify="right", no_wrap=True)
    measured = [(one, one.ms) for one in tuned.candidates if one.ms is not None]
    ranked = sorted(measured, key=lambda pair: pair[1])
    baselines = [pair for pair in ranked[_SHOWN:] if pair[0] in tuned.candidates[:2]]
    for one, ms in ranked[:_SHOWN] + baselines:
        share = tuned.fraction_of_ideal(ms)
        table.add_row(
            one.candidate + (" ←" if one.candidate == tuned.verdict.chosen else ""),
            f"{ms:.2f}",
            f"{100 * (ms / tuned.overlap_ms - 1):+.1f}%",
            "-" if share is None else f"{100 * share:.0f}",
        )
    console.print(table)
    counted = f"{len(tuned.candidates)} candidates, {len(tuned.candidates) - len(measured)} not possible"
    counted += f"; {tuned.ranked_out} more ruled out by simulation" if tuned.ranked_out else ""
    for line in (f"ideal {tuned.ideal_ms:.2f} ms; {counted}", tuned.text):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
