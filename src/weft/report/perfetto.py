"""Export to Perfetto: a Chrome JSON trace with weft's annotations."""

from __future__ import annotations

from typing import Any

from weft.timeline import Timeline


def export(document: dict[str, Any], timelines: list[Timeline]) -> bytes:
    """The trace as JSON; `timelines` are those of `document["ranks"]`, in the same order."""
    raise NotImplementedError
