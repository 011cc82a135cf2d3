"""The data of the page's timeline: rows of spans in compact columns, decimated to fit the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.report.decimate import Spans, decimate, exposed_spans
from weft.report.reading import clean, shorten
from weft.timeline import Intervals, Kind, Ns, Timeline, intersect
from weft.trace.reasons import REASON_TABLE

MAX_SPANS = 40_000
MAX_JSON_BYTES = 1_900_000
MAX_STREAMS = 12
_BINS = 480
RESOURCES = ("blocks", "threads", "registers", "shared_bytes", "bytes")
_EXPOSED = 3
"""The kind of a drawn span that marks exposed communication; other values are those of `Kind`."""


@dataclass(frozen=True)
class Drawing:
    """The data of one timeline on the page, and notes for the reader."""

    payload: dict[str, Any]
    notes: tuple[str, ...]
    events: int
    """Number of spans before decimation."""
    drawn: int


def draw(
    timelines: Sequence[Timeline],
    labels: Sequence[str],
    *,
    offsets_ns: Sequence[int] | None = None,
    max_bytes: int = MAX_JSON_BYTES,
    reasons: Sequence[Ns] | None = None,
    first: str = "",
) -> Drawing:
    """Packs timelines for the page, coarser and with shorter names until the data fits into `max_bytes`.

    `offsets_ns`: how far the clock of each timeline is ahead; None if the timelines are separate runs, each
    drawn from its own start. `reasons`: for each span of each timeline, why it is exposed (index, or -1).
    `first`: label of the timeline at which the page opens.
    """
    for spans, name_length in ((1, 400), (1, 120), (2, 120), (4, 80), (8, 80), (20, 60), (80, 40)):
        drawing = _draw(timelines, labels, offsets_ns, MAX_SPANS // spans, name_length, reasons)
        drawing.payload["first"] = clean(first)
        if len(json.dumps(drawing.payload, separators=(",", ":"))) <= max_bytes:
            break
    return drawing


def _draw(
    timelines: Sequence[Timeline],
    labels: Sequence[str],
    offsets_ns: Sequence[int] | None,
    budget: int,
    name_length: int,
    reasons: Sequence[Ns] | None,
) -> Drawing:
    origins, aligned = origins_of(timelines, offsets_ns)
    book = _Names(name_length)
    share = budget // max(len(timelines), 1)
    tracks: list[dict[str, Any]] = []
    threshold, folded = 0, 0
    why = reasons or [np.full(len(timeline), -1, dtype=np.int64) for timeline in timelines]
    for timeline, label, origin, reason in zip(timelines, labels, origins, why, strict=True):
        rows = _Rows(timeline)
        folded += rows.folded
        for layer in _layers(timeline, rows, share):
            threshold = max(threshold, layer.threshold)
            tracks += _tracks(timeline, label, rows, layer, origin, book, reason)
    tracks = _in_order(tracks)
    end = max((int(t.end_ns.max()) - o for t, o in zip(timelines, origins, strict=True) if len(t)), default=0)
    payload = {
        "end": end,
        "names": book.names,
        "resources": book.resources,
        "tracks": tracks,
        "reasons": [[item.name, item.meaning] for item in REASON_TABLE],
        "overview": _overview(timelines, origins, end),
    }
    drawn = sum(len(track["s"]) for track in tracks)
    events = sum(map(len, timelines))
    return Drawing(payload, _notes(threshold, folded, aligned, events, drawn), events, drawn)


def origins_of(timelines: Sequence[Timeline], offsets_ns: Sequence[int] | None) -> tuple[list[int], bool]:
    """The origin of each timeline in ns, and whether the timelines are aligned.

    If the ranks' times have no common interval, their clocks cannot be compared: each has its own origin.
    """
    starts = [int(t.start_ns.min()) if len(t) else 0 for t in timelines]
    if offsets_ns is None:
        return starts, True
    known = [
        (int(t.start_ns.min()) - ahead, int(t.end_ns.max()) - ahead)
        for t, ahead in zip(timelines, offsets_ns, strict=True)
        if len(t)
    ]
    if known and max(start for start, _ in known) < min(end for _, end in known):
        first = min(start for start, _ in known)
        return [first + ahead for ahead in offsets_ns], True
    return starts, len(known) < 2


class _Rows:
    """The row of each stream: compute streams first, then by busy time; the least busy share the last row."""

    def __init__(self, timeline: Timeline) -> None:
        self.streams, which = np.unique(timeline.stream, return_inverse=True)
        length = timeline.end_ns - timeline.start_ns
        busy = np.bincount(which, weights=length, minlength=len(self.streams))
        comm = timeline.kind == Kind.COMM
        comm_busy = np.bincount(which[comm], weights=length[comm], minlength=len(self.streams))
        order = np.lexsort((self.streams, -busy))[: MAX_STREAMS if len(busy) > MAX_STREAMS + 1 else None]
        order = order[np.argsort(comm_busy[order] * 2 > busy[order], kind="stable")]
        self.shown = self.streams[order]
        self.folded = len(self.streams) - len(order)
        row_of = np.full(len(self.streams), len(order), dtype=np.int64)
        row_of[order] = np.arange(len(order))
        self.row = row_of[which]

    def label(self, row: int) -> str:
        return f"stream {self.shown[row]}" if row < len(self.shown) else f"{self.folded} more streams"


class _Layer(NamedTuple):
    spans: Spans
    threshold: int
    """Spans shorter than this many nanoseconds were merged; 0 if none were."""
    exposed: bool = False


def _layers(timeline: Timeline, rows: _Rows, budget: int) -> list[_Layer]:
    """Layers of spans within the budget: exposed spans (a third at most), then collectives, then others."""
    start, end, owner = exposed_spans(timeline)
    exposed, threshold = decimate(start, end, np.zeros_like(start), max(budget // 3, 1))
    layers = [_Layer(replace(exposed, first=owner[exposed.first]), threshold, exposed=True)]
    left = budget - len(exposed)
    for mask, part in ((timeline.kind == Kind.COMM, 2), (timeline.kind != Kind.COMM, 1)):
        index = np.flatnonzero(mask)
        lane = rows.row[index] * 4 + timeline.kind[index].astype(np.int64)
        spans, threshold = decimate(
            timeline.start_ns[index], timeline.end_ns[index], lane, max(left // part, 1)
        )
        left -= len(spans)
        layers.append(_Layer(replace(spans, first=index[spans.first]), threshold))
    return layers


def _tracks(
    timeline: Timeline, group: str, rows: _Rows, layer: _Layer, origin: int, book: _Names, reason: Ns
) -> list[dict[str, Any]]:
    """The spans of one layer, one track per lane."""
    spans = layer.spans
    tracks = []
    for lane in np.unique(spans.lane):
        at = np.flatnonzero(spans.lane == lane)
        first = spans.first[at]
        start = spans.start[at] - origin
        merged = np.flatnonzero(spans.count[at] > 1)
        tracks.append(
            {
                "group": clean(group),
                "row": -1 if layer.exposed else int(lane) // 4,
                "label": "exposed" if layer.exposed else rows.label(int(lane) // 4),
                "kind": _EXPOSED if layer.exposed else int(lane) % 4,
                "s": np.diff(start, prepend=0).tolist(),
                "d": (spans.end[at] - spans.start[at]).tolist(),
                "n": book.name_column(timeline, first),
                "r": [] if layer.exposed else book.resource_column(timeline, first),
                # Why each span is exposed: an index into `reasons`, or -1.
                "c": np.where(first >= 0, reason[np.maximum(first, 0)], -1).tolist() if layer.exposed else [],
                # Density spans: position, number of spans, busy nanoseconds.
                "m": [[int(i), int(spans.count[at[i]]), int(spans.busy[at[i]])] for i in merged],
            }
        )
    return tracks


def _in_order(tracks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = list(dict.fromkeys(track["group"] for track in tracks))
    return sorted(tracks, key=lambda track: (groups.index(track["group"]), track["row"], track["kind"]))


class _Names:
    """Tables of distinct names and resources, to which the drawn spans refer by index."""

    def __init__(self, name_length: int) -> None:
        self.names: list[str] = []
        self.resources: list[list[int]] = []
        self._length = name_length
        self._name_at: dict[str, int] = {}
        self._resource_at: dict[tuple[int, ...], int] = {}

    def name_column(self, timeline: Timeline, spans: Ns) -> list[int]:
        known = spans >= 0
        ids = np.where(known, timeline.name[np.maximum(spans, 0)], -1) if len(timeline) else spans
        unique, where = np.unique(ids, return_inverse=True)
        table = [-1 if i < 0 else self._name(timeline.names[i]) for i in unique.tolist()]
        return [table[i] for i in where.tolist()]

    def _name(self, name: str) -> int:
        shown = shorten(clean(name), self._length)
        if shown not in self._name_at:
            self._name_at[shown] = len(self.names)
            self.names.append(shown)
        return self._name_at[shown]

    def resource_column(self, timeline: Timeline, spans: Ns) -> list[int]:
        """Index of each span's resources; empty if the timeline has no resources at all."""
        if not any(key in timeline.resources for key in RESOURCES):
            return []
        absent = np.full(len(timeline), -1, dtype=np.int64)
        table: npt.NDArray[np.int64] = np.stack(
            [timeline.resources.get(key, absent)[spans] for key in RESOURCES], axis=1
        )
        rows, where = np.unique(table, axis=0, return_inverse=True)
        at = [self._resource(tuple(row)) for row in rows.tolist()]
        return [at[i] for i in where.ravel().tolist()]

    def _resource(self, row: tuple[int, ...]) -> int:
        if row not in self._resource_at:
            self._resource_at[row] = len(self.resources)
            self.resources.append(list(row))
        return self._resource_at[row]


def _overview(timelines: Sequence[Timeline], origins: Sequence[int], end: int) -> dict[str, list[int]]:
    """Busy share of each of `_BINS` equal bins, in per mille of all timelines together; not decimated."""
    edges = np.linspace(0, max(end, 1), _BINS + 1)
    totals = {"compute": np.zeros(_BINS), "comm": np.zeros(_BINS), "exposed": np.zeros(_BINS)}
    for timeline, origin in zip(timelines, origins, strict=True):
        compute, comm = timeline.covered(Kind.COMPUTE), timeline.covered(Kind.COMM)
        comm_bins = binned(comm, origin, edges)
        totals["compute"] += binned(compute, origin, edges)
        totals["comm"] += comm_bins
        totals["exposed"] += comm_bins - binned(intersect(compute, comm), origin, edges)
    width = max(end, 1) / _BINS * max(len(timelines), 1)
    return {key: np.rint(1000 * total / width).astype(int).tolist() for key, total in totals.items()}


def binned(intervals: Intervals, origin: int, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Covered nanoseconds between consecutive edges."""
    if not len(intervals.start):
        return np.zeros(len(edges) - 1)
    points = np.stack((intervals.start - origin, intervals.end - origin), axis=1).ravel().astype(float)
    covered = np.cumsum(intervals.end - intervals.start)
    levels = np.stack((np.append(0, covered[:-1]), covered), axis=1).ravel().astype(float)
    return np.diff(np.interp(edges, points, levels))


def _notes(threshold: int, folded: int, aligned: bool, events: int, drawn: int) -> tuple[str, ...]:
    notes = []
    if threshold:
        notes.append(
            f"Decimated: {events:,} spans are drawn as {drawn:,}. Runs of neighbours shorter than "
            f"{threshold / 1000:,.3g} µs became density spans, whose height is how busy they were; "
            "collectives and exposed ranges were kept first. All figures are of the full trace."
        )
    if folded:
        notes.append(f"The {folded} least busy streams share one row.")
    if not aligned:
        notes.append("The timelines have different clocks; each is drawn from its own start.")
    return tuple(notes)
