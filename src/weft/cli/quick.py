"""Parses simple command lines of `weft analyze` without typer, whose import takes longer than a small trace.

Everything else (help, a misspelled option, a missing value) is left to typer. A test compares the table below
and its results with typer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = "analyze"
FLAGS = {"--json": "as_json"}
LISTS = {"--against": "against"}
VALUES = {"--html": "html", "--perfetto": "perfetto", "--comm": "comm"}
TEXTS = {"comm"}


def plain_arguments(argv: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `run_analysis`; None for a command line that typer must read."""
    if not argv or argv[0] != COMMAND:
        return None
    found: dict[str, Any] = {"traces": []}
    words = iter(argv[1:])
    for word in words:
        if word in FLAGS:
            found[FLAGS[word]] = True
            continue
        if not _is_value(word):
            option, value = word, next(words, "")
            if not _is_value(value):
                return None
            if option in LISTS:
                found.setdefault(LISTS[option], []).append(Path(value))
            elif option in VALUES:
                name = VALUES[option]
                found[name] = value if name in TEXTS else Path(value)
            else:
                return None
        else:
            found["traces"].append(Path(word))
    return found if found["traces"] else None


def _is_value(word: str) -> bool:
    return word == "-" or (word != "" and not word.startswith("-"))
