"""Result files: one JSON line per run, appended atomically, so that an interrupted suite can resume."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import InputError, OutputError

Row = dict[str, Any]
"""One line of a result file."""


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append lines in one write: a crash leaves at worst an incomplete last line, which reading skips."""
    data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data  # do not append to an incomplete line that a crash left
            file.write(data)  # always at the end: the file is opened for appending
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another --out") from None


def load_results(path: Path) -> tuple[list[Row], list[Row]]:
    """Headers and rows of a result file; both are empty if the file does not exist. Skips broken lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    headers: list[Row] = []
    rows: list[Row] = []
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            (headers if "header" in document else rows).append(document)
    return headers, whole_cells(rows)


def whole_cells(rows: Iterable[Row]) -> list[Row]:
    """The rows of complete cells. If a cell was run more than once, its latest rows."""
    kept = [row for row in rows if {"cell", "candidate", "device", "of"} <= set(row)]
    latest = {(row["device"], row["cell"], row["candidate"]): row for row in kept}
    counts = Counter((device, cell) for device, cell, _ in latest)
    return [row for key, row in latest.items() if counts[key[:2]] >= row["of"]]


def done_cells(rows: Iterable[Row], device: str, candidate: str = "") -> set[str]:
    """Names of the cells that have results for this device, and for this candidate if one is named."""
    return {row["cell"] for row in rows if row["device"] == device and candidate in ("", row["candidate"])}
