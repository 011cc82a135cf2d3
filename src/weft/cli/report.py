"""`weft report DIR`: write an HTML page of the results in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder with results of analyze, bench, tune, plan, explore or reproduce."
        ),
    ],
    out: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation on Python 3.10 too
        typer.Option("--out", metavar="FILE", help="File to write; default: DIR/report.html."),
    ] = None,
) -> None:
    """Write an HTML page of the results in DIR and print its path."""
    from weft.cli.output import check_output
    from weft.errors import UsageError
    from weft.files import write_whole
    from weft.report.find import find_results
    from weft.report.folder import folder_page

    check_output("--out", out)
    found = find_results(folder)
    for reason in found.skipped:
        typer.echo(f"weft: skipped {reason}", err=True)
    target = out or folder / "report.html"
    if target.exists() and any(target.samefile(result.path) for result in found.results):
        raise UsageError(f"--out {target} is one of the results; name another file")
    check_output("--out", target)
    write_whole(target, folder_page(found.results))
    typer.echo(str(target))
