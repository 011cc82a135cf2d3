"""What commands write: lines of their own, JSON with the version of its keys, and checked output files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.files import why_not_writable

RESULT_VERSION = 1
"""Changes where a key is removed or gets another type, not where one is added."""


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result with its version, which `weft schema` describes."""
    return {"version": RESULT_VERSION, **document}


def check_output(option: str, path: Path | None) -> None:
    """Reject an output file that cannot be written, before any work is done. Raises UsageError."""
    if path is None:
        return
    try:
        reason = why_not_writable(path)
    except OSError as error:
        reason = str(error)
    if reason:
        raise UsageError(f"{option} {path}: cannot write: {reason}")


def check_seconds(option: str, seconds: float) -> None:
    """Raises UsageError for a time that is not above 0, NaN included."""
    if not seconds > 0:
        raise UsageError(f"{option} {seconds:g}: give more than 0 seconds")


def say(line: str, quiet: bool) -> None:
    """Print a line of weft's own, if there is one and there is somewhere to print it."""
    if line and not quiet:
        with suppress(OSError):  # standard error is closed
            print(f"weft: {line}", file=sys.stderr, flush=True)
