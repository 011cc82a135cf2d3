"""Output of commands: weft's own lines, versioned JSON, and checks of output files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.files import why_not_writable

RESULT_VERSION = 1
"""Increases if a key is removed or changes its type, not if one is added."""


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the version of its keys; `weft schema` describes them."""
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


def check_distinct(outputs: Mapping[str, Path | None]) -> None:
    """Refuse two options that name the same file to write; a device such as /dev/null may be named twice."""
    taken: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise UsageError(f"{option} {path}: {taken[place]} writes there too; give another file")
        taken[place] = option


def check_output_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be written to or created. Writes nothing."""
    try:
        known = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    except OSError as error:  # the current folder is gone
        raise UsageError(
            f"{option} {folder}: current folder: {error.strerror or error}; name an absolute path"
        ) from None
    if not known.is_dir():
        raise UsageError(f"{option} {folder}: {known} is not a folder; name another")
    if not os.access(known, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: the folder {known} is not writable; name another")


def check_seconds(option: str, seconds: float) -> None:
    """Raises UsageError for a time that is not above 0, including NaN."""
    if not seconds > 0:
        raise UsageError(f"{option} {seconds:g}: give more than 0 seconds")


def say(line: str, quiet: bool) -> None:
    """Print a line from weft on stderr, unless it is empty or `quiet`."""
    if line and not quiet:
        with suppress(OSError):  # standard error is closed
            print(f"weft: {line}", file=sys.stderr, flush=True)
