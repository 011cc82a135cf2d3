"""The document of `weft reproduce --json`."""

from __future__ import annotations

from typing import Any, TypedDict

from weft.reproduce.figure import Target


class ReproducedJson(TypedDict):
    """One published figure and ours."""

    id: str
    cell: str
    published: float | None
    ours: float | None
    error: float | None
    """Ours less the published figure."""
    basis: str
    """`inspected`: the figure was known while the model was built; `held out`: it was not."""
    unit: str
    sign_right: bool | None
    ours_range: list[float] | None
    note: str


class ReproduceDocument(TypedDict):
    """`weft reproduce PAPER --json`."""

    version: int
    paper: str
    title: str
    device: str
    simulated: bool
    figures: list[ReproducedJson]
    summary: dict[str, Any]
    bars: list[Target]
    assumptions: list[str]
    findings: list[str]
