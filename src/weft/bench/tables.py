"""The rows of a suite as a table: sequential, plain overlap and the chosen policy for each workload."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weft.bench.results import Row

if TYPE_CHECKING:
    from rich.table import Table


def by_cell(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Rows by cell and candidate, in the order of the file."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row["candidate"]] = row
    return cells


def chosen(cell: dict[str, Row]) -> Row | None:
    """The row of the candidate that the race chose."""
    return next((row for row in cell.values() if row["chosen"]), None)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the values that are not None; None if there are none or one is not positive."""
    known = [value for value in values if value is not None]
    if not known or min(known) <= 0:
        return None
    return math.exp(math.fsum(math.log(value) for value in known) / len(known))


def regret(cell: dict[str, Row]) -> float | None:
    """Time of the chosen candidate over the better of sequential and overlap, from the confirmation runs.

    None if a time is missing.
    """
    best = chosen(cell)
    others = [cell[name].get("again_ms") for name in ("sequential", "overlap") if name in cell]
    known = [value for value in others if value is not None]
    if best is None or best.get("again_ms") is None or not known:
        return None
    return float(best["again_ms"] / min(known))


def suite_table(rows: Iterable[Row]) -> Table:
    """The results of a suite as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = list(rows)
    title = "simulated" if any(row["simulated"] for row in rows) else None
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("workload, best policy")
    for name in ("seq", "overlap", "best", "ideal", "plain %", "best %"):
        made.add_column(name, justify="right", no_wrap=True)
    for name, cell in by_cell(rows).items():
        policy, *figures = _line(cell)
        made.add_row(f"{name}\n  {policy}", *figures)
    shares = [row["fraction_of_ideal"] for row in map(chosen, by_cell(rows).values()) if row]
    mean = geometric_mean(shares)
    if mean is not None:
        made.caption = f"ms of the whole pipeline; % of ideal, geometric mean of the best {100 * mean:.0f}%"
    return made


def _line(cell: dict[str, Row]) -> list[str]:
    best, plain, sequential = chosen(cell), cell.get("overlap", {}), cell.get("sequential", {})
    if best is None:
        problem = next((row["problem"] for row in cell.values() if row["problem"]), "no result")
        return [problem[:60], "", "", "", "", "", ""]
    return [
        best["candidate"],
        _ms(sequential.get("ms")),
        _ms(plain.get("ms")),
        _ms(best["ms"]),
        _ms(best.get("ideal_ms")),
        _percent(plain.get("fraction_of_ideal")),
        _percent(best["fraction_of_ideal"]),
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"
