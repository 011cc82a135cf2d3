"""Finds the results in a folder: files that are documents of a command that `weft report` shows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InputError, UsageError
from weft.reproduce.figure import Reproduction
from weft.tuning.tuned_workload import TunedWorkload

COMMANDS_SHOWN = "analyze, bench, tune, plan, explore or reproduce"
MAX_RESULT_BYTES = 64 << 20
"""Larger files count as traces, not results."""


@dataclass(frozen=True)
class Result:
    """A recognised document."""

    path: Path
    kind: str
    """`analysis`, `comparison`, `bench`, `tune`, `plan`, `explore`, `losses` or `reproduction`."""
    document: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """Results in a folder."""

    results: tuple[Result, ...]
    skipped: tuple[str, ...]
    """Files that are not results, each with the reason."""


def result_kind(document: Any) -> str | None:
    """The kind of a document, by its keys; None if it is not a result."""
    if not isinstance(document, dict):
        return None
    lists = {key for key, value in document.items() if isinstance(value, list)}
    if document.get("kind") in ("plan", "plan-sweep", "plan-scaling") and "step_time_s" in document:
        return "plan"
    if "ranks" in lists and "advice" in document:
        return "analysis"
    if all(isinstance(document.get(side), dict) for side in ("before", "after")):
        return (
            "comparison"
            if result_kind(document["before"]) == result_kind(document["after"]) == "analysis"
            else None
        )
    if "candidates" in lists and ("policy" in document or "best_ms" in document):
        return "tune"
    if lists >= {"schedules", "gemm"} and "picked" in document:
        return "explore"
    if lists >= {"decomposition", "contention"} and all(_is_cut(row) for row in document["decomposition"]):
        return "losses"
    if "figures" in lists and "paper" in document:
        return "reproduction"
    return "bench" if "rows" in lists and all(_is_row(row) for row in document["rows"]) else None


def _is_cut(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("gemm"), list)


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and "workload" in row and "policy" in row


def find_results(folder: Path) -> Found:
    """Every result in a folder. Raises InputError if there is none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one that holds the results of {COMMANDS_SHOWN}")
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jsonl") and path.is_file())
    results: list[Result] = []
    skipped: list[str] = []
    for path in files:
        try:
            found = list(_read(path))
        except (OSError, ValueError, RecursionError, UsageError) as error:
            skipped.append(f"{path.name}: {_reason(error)}")
            continue
        results += found
        skipped += [] if found else [f"{path.name}: not a result of {COMMANDS_SHOWN}"]
    if not results:
        raise InputError(
            f"no results in {folder}: none of its {len(files)} .json or .jsonl files is one of "
            f"{COMMANDS_SHOWN}; write one with `--json > FILE`"
        )
    return Found(tuple(results), tuple(skipped))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return str(error) if isinstance(error, (_TooLargeError, UsageError)) else "not JSON"


class _TooLargeError(ValueError):
    pass


def _read(path: Path) -> Iterator[Result]:
    if path.stat().st_size > MAX_RESULT_BYTES:
        raise _TooLargeError(f"larger than {MAX_RESULT_BYTES >> 20} MiB, so not a result")
    content = path.read_text(encoding="utf-8")
    documents = [json.loads(content)] if path.suffix == ".json" else _lines(content)
    for document in documents:
        kind = result_kind(document)
        if kind == "tune":
            TunedWorkload.from_dict(document)  # raises if it is damaged
        if kind == "reproduction":
            Reproduction.from_dict(document)
        if kind is not None:
            yield Result(path, kind, document)


def _lines(content: str) -> list[Any]:
    """The documents of a .jsonl file; separate bench rows become one document per device."""
    loaded = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError):  # a line cut off when a bench was interrupted
            loaded.append(json.loads(line))
    rows = [item for item in loaded if _is_row(item)]
    heads = [
        item for item in loaded if isinstance(item, dict) and not _is_row(item) and result_kind(item) is None
    ]
    whole = [item for item in loaded if result_kind(item) is not None]
    return [*whole, *_benches(heads, rows)]


def _benches(heads: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One bench document per device; if a cell was run again, its last rows count."""
    latest: dict[tuple[str, ...], dict[str, Any]] = {}
    for at, row in enumerate(rows):
        cell = [str(row.get(key)) for key in ("device", "suite", "cell", "candidate")]
        latest[(*cell,) if "cell" in row else (*cell, str(at))] = row
    for device in dict.fromkeys(key[0] for key in latest):
        mine = [row for key, row in latest.items() if key[0] == device]
        head = next((h for h in heads if str(h.get("device")) == device), heads[0] if heads else {})
        suite = head.get("suite") or head.get("header") or mine[0].get("suite")
        yield {**head, "device": mine[0].get("device") or head.get("device"), "suite": suite, "rows": mine}
