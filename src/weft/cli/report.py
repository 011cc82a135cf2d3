"""`weft report DIR`: the HTML page of the results in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer


def report(
    folder: Path = typer.Argument(..., metavar="DIR", help="A folder with results of analyze, bench or tune."),
    out: Optional[Path] = typer.Option(None, "--out", help="Where to write the page (DIR/report.html)."),  # noqa: UP007, UP045
) -> None:
    """Write the HTML page of the results in DIR and print its path."""
    raise NotImplementedError
