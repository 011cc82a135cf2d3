"""`weft analyze`: overlap, exposed time and its causes, per rank and collective; advice."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.errors import UsageError
from weft.files import write_whole

if TYPE_CHECKING:
    from rich.status import Status

    from weft.trace.parallel import Progress

QUIET_S = 2.0
"""Progress is shown only when the work takes longer than this."""


def analyze(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE",
            help="Profiler traces, or folders with one trace per rank. Two folders: before and after.",
        ),
    ],
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
    """Show how much communication is exposed, why, and what would hide it."""
    import weft.trace

    if len(traces) == 2 and all(path.is_dir() for path in traces):
        if perfetto:
            raise UsageError("--perfetto takes one run; give one folder, or leave the option out")
        _compare(traces, as_json, html, comm)
        return
    with _progress() as progress:
        found = weft.trace.analyze(*traces, comm=comm, progress=progress)
    document = found.to_json()
    if html:
        from weft.report.page import analysis_page

        write_whole(html, analysis_page(document, found.timelines))
    if perfetto:
        from weft.report.perfetto import export

        data = export(document, found.timelines)
        write_whole(perfetto, gzip.compress(data, 6) if perfetto.suffix == ".gz" else data)
    if as_json:
        _print_json(document)
    else:
        from weft.report.terminal import show_analysis

        show_analysis(document, _console())
        _tell_written(html, perfetto)


def _compare(folders: list[Path], as_json: bool, html: Path | None, comm: str | None) -> None:
    import weft.trace

    with _progress() as progress:
        before, after = (weft.trace.analyze(folder, comm=comm, progress=progress) for folder in folders)
    document = weft.trace.compare(before, after)
    if html:
        from weft.report.page import comparison_page

        page = comparison_page(document, before.timelines, after.timelines)
        write_whole(html, page)
    if as_json:
        _print_json(document)
    else:
        from weft.report.terminal import show_comparison

        show_comparison(document, _console())
        _tell_written(html)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, allow_nan=False))


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=False, highlight=False)


def _tell_written(*files: Path | None) -> None:
    for file in files:
        if file:
            print(f"wrote {file}", file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A moving line on stderr once the work has taken a while; nothing if stderr is not a terminal."""
    shown: list[Status] = []
    text = ["reading traces …"]

    def start() -> None:
        from rich.console import Console

        shown.append(Console(stderr=True).status(text[-1]))
        shown[0].start()

    timer = threading.Timer(QUIET_S, start)
    timer.daemon = True
    timer.start()

    def show(path: str, done: int, total: int) -> None:
        text.append(f"reading traces, {done} of {total} done …")
        for status in shown:
            status.update(text[-1])

    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()
