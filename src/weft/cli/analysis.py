"""The work of `weft analyze`: reads the traces, writes the files, prints the results."""

from __future__ import annotations

import gc
import gzip
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.output import check_distinct, check_output, versioned
from weft.cli.status_line import status_line
from weft.errors import OutputError, UsageError
from weft.files import write_whole

if TYPE_CHECKING:
    from weft.trace import Analysis


def run_analysis(
    traces: list[Path],
    against: list[Path] | None = None,
    as_json: bool = False,
    html: Path | None = None,
    perfetto: Path | None = None,
    comm: str | None = None,
) -> None:
    """Analyze one run, or compare two; the parameters are those of `weft.cli.analyze.analyze`."""
    gc.disable()  # the process ends after one run: collection would cost time and free nothing
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would spin without any work
    before = against or []
    if not before and len(traces) == 2 and all(path.is_dir() for path in traces):
        before, traces = traces[:1], traces[1:]
    if before and perfetto:
        raise UsageError("--perfetto takes one run; give one folder, or leave the option out")
    check_outputs([*traces, *before], {"--html": html, "--perfetto": perfetto})
    if before:
        _compare(before, traces, as_json, html, comm)
    else:
        _analyze(traces, as_json, html, perfetto, comm)


def check_outputs(inputs: Sequence[Path], outputs: dict[str, Path | None]) -> None:
    """Refuse an output that is an input, a link, a device or another output, before anything is read."""
    from weft.trace.files import find_traces

    given = [path for path in inputs if str(path) != "-" and path.exists()]
    read = [file for path in given for file in find_traces(path)]
    for option, path in outputs.items():
        if path is None:
            continue
        if path.is_symlink():
            raise UsageError(f"{option} {path}: a symbolic link; give the file itself")
        try:
            mode = path.stat().st_mode
        except OSError:
            mode = stat.S_IFREG
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise UsageError(f"{option} {path}: {what}; give a file to write")
        check_output(option, path)
        for file in read:
            if path.exists() and path.samefile(file):
                raise UsageError(f"{option} {path} is a trace to be read; give another file to write")
    check_distinct(outputs)


def _analyze(
    traces: list[Path], as_json: bool, html: Path | None, perfetto: Path | None, comm: str | None
) -> None:
    found = _read(traces, comm)
    if html:
        from weft.report.page import analysis_page

        write_whole(
            html, analysis_page(found.to_json(), found.timelines, [rank.main_reasons for rank in found.ranks])
        )
    if perfetto:
        from weft.report.perfetto import export

        data = export(found.to_json(), found.timelines)
        write_whole(perfetto, gzip.compress(data, 6) if perfetto.suffix == ".gz" else data)
    with _output() as out:
        if as_json:
            out.write(json.dumps(versioned(found.to_json()), allow_nan=False) + "\n")
        else:
            from weft.report.terminal import show_analysis

            show_analysis(found.to_json(), _console())
    if not as_json:
        _tell_written(html, perfetto)


def _compare(
    before: list[Path], after: list[Path], as_json: bool, html: Path | None, comm: str | None
) -> None:
    import weft.trace

    old, new = _read(before, comm), _read(after, comm)
    document = weft.trace.compare(old, new)
    if html:
        from weft.report.page import comparison_page

        write_whole(html, comparison_page(document, old.timelines, new.timelines))
    with _output() as out:
        if as_json:
            out.write(json.dumps(versioned(document), allow_nan=False) + "\n")
        else:
            from weft.report.terminal import show_comparison

            show_comparison(document, _console())
    if not as_json:
        _tell_written(html)


def _read(traces: list[Path], comm: str | None) -> Analysis:
    import weft.trace

    with status_line("reading traces …") as update:
        return weft.trace.analyze(
            *traces,
            comm=comm,
            progress=lambda path, done, total: update(f"reading traces, {done} of {total} done …"),
        )


@contextmanager
def _output() -> Iterator[Any]:
    """Standard output, flushed at the end: if it is full, that is an error, not a lost result."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence()
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from None


def _silence() -> None:
    """Drop unwritten output, so that the interpreter does not try to write it again at exit."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=False, highlight=False)


def _tell_written(*files: Path | None) -> None:
    for file in files:
        if file:
            print(f"wrote {file}", file=sys.stderr)
