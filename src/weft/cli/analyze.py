"""`weft analyze`: overlap, exposed time and its causes, per rank and collective; advice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.analysis import run_analysis


def analyze(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE",
            help="Traces, or folders with one trace per rank; - for stdin. Two folders are compared.",
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against",
            metavar="TRACE",
            help="Compare with an earlier run of the same job; may be given several times.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page.")] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="FILE", help="Write a trace for ui.perfetto.dev with the causes."),
    ] = None,
    comm: Annotated[
        str | None,
        typer.Option(
            "--comm", metavar="REGEX", help="Also treat kernels whose names match as communication."
        ),
    ] = None,
) -> None:
    """Show how much communication is exposed, why, and what to try."""
    run_analysis(traces, against, as_json, html, perfetto, comm)
