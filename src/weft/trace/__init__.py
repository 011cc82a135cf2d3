"""Profiler traces: what is exposed, why, and what would hide it. Needs neither torch nor a GPU.

Imports here are light: processes that only read a file need no more.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import InputError
from weft.lazy import lazy_names

_HOMES = {
    "Analysis": "weft.trace.analysis",
    "RankAnalysis": "weft.trace.analysis",
    "compare": "weft.trace.comparison",
}

__all__ = ["Analysis", "RankAnalysis", "analyze", "compare"]

if TYPE_CHECKING:
    from weft.trace.analysis import Analysis, RankAnalysis
    from weft.trace.comparison import compare
    from weft.trace.parallel import Progress


def analyze(*paths: str | Path, comm: str | None = None, progress: Progress | None = None) -> Analysis:
    """Analyzes profiler traces: files, folders that hold one file per rank, or `-` for standard input.

    `comm` is a regular expression; kernels whose names match it count as communication too. Raises InputError
    for a file that is not a usable trace, UsageError for a bad expression.
    """
    from concurrent.futures import ThreadPoolExecutor

    from weft.trace.custom import comm_matcher
    from weft.trace.files import find_traces, standard_input
    from weft.trace.parallel import helpers_for, read_files

    if not paths:
        raise InputError("no trace given; pass a file or a folder of ranks")
    comm_matcher(comm)  # a bad expression is reported before any file is searched or read
    files: list[Path] = []
    in_folder: set[Path] = set()
    names: dict[Path, str] = {}
    with contextlib.ExitStack() as held:
        for path in map(Path, paths):
            if str(path) == "-":
                found = [held.enter_context(standard_input())]
                names[found[0]] = "-"
            else:
                found = find_traces(path)
            files += found
            if path.is_dir():
                in_folder.update(found)
        helpers = held.enter_context(helpers_for(files, comm))
        reader = held.enter_context(ThreadPoolExecutor(1))
        reading = reader.submit(read_files, files, comm, helpers, progress, names)
        from weft.trace.analysis import analyze_outcomes  # loads while the scanner works

        return analyze_outcomes(files, in_folder, reading.result())


__getattr__ = lazy_names(__name__, _HOMES)
