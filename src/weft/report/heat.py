"""A map of ranks over time: when each rank is exposed, and which ranks keep the others waiting."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.report import words
from weft.report.drawing import binned, origins_of
from weft.report.parts import Cell, Column, Table
from weft.report.reading import Document, amount, clean, record, records
from weft.timeline import Kind, Timeline, intersect

_BINS = 240
_MAX_ROWS = 12


@dataclass(frozen=True)
class Heat:
    """The map: one row per rank, stragglers first; one byte per time bin, 255 if exposed throughout."""

    payload: dict[str, Any]
    table: Table
    sentence: str


def heat(
    document: Document, timelines: Sequence[Timeline], labels: Sequence[str], offsets: Sequence[int]
) -> Heat:
    """The map of two or more ranks."""
    ranks = records(document, "ranks")
    waits = [
        amount(record(rank, "reasons") or record(rank, "attribution"), "slower_rank_us") for rank in ranks
    ]
    waits += [0.0] * (len(timelines) - len(waits))
    # The rank that waits least is the one that the others wait for most.
    order = sorted(range(len(timelines)), key=lambda i: (waits[i], i))
    origins, _ = origins_of(timelines, offsets)
    end = max((int(t.end_ns.max()) - o for t, o in zip(timelines, origins, strict=True) if len(t)), default=0)
    edges = np.linspace(0, max(end, 1), _BINS + 1)
    width = max(end, 1) / _BINS
    cells = np.zeros((len(timelines), _BINS), dtype=np.uint8)
    for row, i in enumerate(order):
        compute, comm = timelines[i].covered(Kind.COMPUTE), timelines[i].covered(Kind.COMM)
        exposed = binned(comm, origins[i], edges) - binned(intersect(compute, comm), origins[i], edges)
        cells[row] = np.clip(np.rint(255 * exposed / width), 0, 255).astype(np.uint8)
    payload = {
        "end": end,
        "bins": _BINS,
        "ranks": [clean(labels[i]) for i in order],
        "cells": base64.b64encode(cells.tobytes()).decode(),
    }
    return Heat(payload, _table(ranks, waits, labels, order), _sentence(waits, labels, order))


def _sentence(waits: Sequence[float], labels: Sequence[str], order: Sequence[int]) -> str:
    if not waits or max(waits) <= 0:
        return "A row per rank; the stronger the color, the more is exposed. No rank waits for a slower one."
    mean = sum(waits) / len(waits)
    return (
        f"A row per rank, stragglers first: {clean(labels[order[0]])} keeps the others waiting most; "
        f"ranks wait {words.duration(mean)} for slower ones on average. "
        "The stronger the color, the more is exposed."
    )


def _table(
    ranks: Sequence[Document], waits: Sequence[float], labels: Sequence[str], order: Sequence[int]
) -> Table:
    """The first rows of the map as a table; empty if no rank waits."""
    if not waits or max(waits) <= 0:
        return Table("Stragglers", (), ())
    columns = (
        Column("Rank", numeric=False),
        Column("Waits for others", title="exposed time inside collectives until the last rank has entered"),
        Column("Others wait longer by", title="mean of the other ranks, less its own wait"),
        Column("Compute"),
    )
    rows = []
    for i in order[:_MAX_ROWS]:
        others = (sum(waits) - waits[i]) / max(len(waits) - 1, 1) - waits[i]
        compute = amount(ranks[i], "compute_us") if i < len(ranks) else 0.0
        rows.append(
            (
                Cell(clean(labels[i]), clean(labels[i])),
                Cell(words.duration(waits[i]), waits[i]),
                Cell(words.duration(max(others, 0.0)), others, "strong"),
                Cell(words.duration(compute), compute),
            )
        )
    return Table("Stragglers", columns, tuple(rows), len(order) - len(rows), sorted_by=2)
