"""The HTML page of a result: one self-contained file that needs no network."""

from __future__ import annotations

from typing import Any

from weft.timeline import Timeline

Document = dict[str, Any]


def analysis_page(document: Document, timelines: list[Timeline]) -> str:
    """The page of `weft analyze`; `timelines` are those of `document["ranks"]`, in the same order."""
    raise NotImplementedError


def bench_page(document: Document) -> str:
    """The page of `weft bench`."""
    raise NotImplementedError


def tune_page(document: Document, before: Timeline | None, after: Timeline | None) -> str:
    """The page of `weft tune`, with the timelines before and after where they are known."""
    raise NotImplementedError
