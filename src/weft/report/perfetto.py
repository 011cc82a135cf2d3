"""Export to Perfetto: a Chrome JSON trace with weft's annotations.

Times are formatted from integers (microseconds with three decimals), relative to the first span of all ranks:
a Unix time in microseconds would lose nanoseconds in a reader that stores it as float64.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import weft
from weft.report.analysis import clock_offsets_ns, collective_name, labels
from weft.report.decimate import exposed_spans
from weft.report.parts import causes
from weft.report.reading import clean, records, text
from weft.timeline import Intervals, Kind, Ns, Timeline

_KINDS = {Kind.COMPUTE: "compute", Kind.COMM: "communication", Kind.MEMORY: "memory"}
EXPOSED_TRACK = 1
_FIRST_STREAM_TRACK = 10


def export(document: dict[str, Any], timelines: Sequence[Timeline]) -> bytes:
    """The trace as JSON; `timelines` are those of `document["ranks"]`, in the same order."""
    offsets = [*clock_offsets_ns(document), *(0 for _ in timelines)][: len(timelines)]
    pairs = list(zip(timelines, offsets, strict=True))
    first = min((int(t.start_ns.min()) - ahead for t, ahead in pairs if len(t)), default=0)
    about = {"writer": f"weft {weft.__version__}", "baseTimeNanoseconds": str(first)}
    out = io.BytesIO()  # written incrementally: a million events as separate strings would take gigabytes
    out.write(_json({"displayTimeUnit": "ns", "otherData": about})[:-1].encode() + b',"traceEvents":[')
    separator = "\n"
    for line in _events(document, pairs, first):
        out.write((separator + line).encode())
        separator = ",\n"
    out.write(b"\n]}\n")
    return out.getvalue()


def _events(document: dict[str, Any], pairs: Sequence[tuple[Timeline, int]], first: int) -> Iterator[str]:
    names = [*labels(document), *(f"timeline {i}" for i in range(len(pairs)))]
    ranks = [*records(document, "ranks"), *({} for _ in pairs)]
    for pid, ((timeline, ahead), name, rank) in enumerate(zip(pairs, names, ranks, strict=False), 1):
        origin = first + ahead  # the ranks' clocks, aligned by the analysis
        yield from _process(pid, name, text(rank, "device"))
        yield from _exposed(pid, timeline, rank, origin)
        yield from _streams(pid, timeline, origin)
        for kind in (Kind.COMPUTE, Kind.COMM):
            yield from _counter(pid, f"{_KINDS[kind]} running", timeline.covered(kind), origin)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _us(ns: int) -> str:
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def _process(pid: int, name: str, device: str) -> Iterator[str]:
    title = f"{name} ({device})" if device else name
    yield _meta(pid, 0, "process_name", name=title)
    yield _meta(pid, 0, "process_sort_index", sort_index=pid)


def _meta(pid: int, tid: int, what: str, **args: Any) -> str:
    return _json({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})


def _track(pid: int, tid: int, name: str) -> list[str]:
    return [_meta(pid, tid, "thread_name", name=name), _meta(pid, tid, "thread_sort_index", sort_index=tid)]


def _span(pid: int, tid: int, start: int, end: int, name: str, category: str, args: str) -> str:
    """A complete event; `name` and `args` are already JSON."""
    head = f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{_us(start)},"dur":{_us(end - start)}'
    return f'{head},"name":{name},"cat":"{category}","args":{args}}}'


def _exposed(pid: int, timeline: Timeline, rank: dict[str, Any], origin: int) -> Iterator[str]:
    """The exposed ranges on a separate track, with the causes of the collective that ran."""
    start, end, owner = exposed_spans(timeline)
    if not len(start):
        return
    by_name = {text(item, "kernel") or text(item, "name"): item for item in records(rank, "collectives")}
    args: dict[str, str] = {}
    yield from _track(pid, EXPOSED_TRACK, "exposed communication")
    for first, last, span in zip(start.tolist(), end.tolist(), owner.tolist(), strict=True):
        name = clean(timeline.names[timeline.name[span]]) if span >= 0 else "communication"
        if name not in args:
            args[name] = _json(_annotation(name, by_name.get(name) or {}))
        label = _json("exposed: " + collective_name({"name": name}))
        yield _span(pid, EXPOSED_TRACK, first - origin, last - origin, label, "exposed", args[name])


def _annotation(name: str, collective: dict[str, Any]) -> dict[str, Any]:
    """Annotations of a collective; its causes are totals over all its calls on this rank."""
    return {"collective": name, "causes_of_this_collective_us": dict(causes(collective))}


def _streams(pid: int, timeline: Timeline, origin: int) -> Iterator[str]:
    names = [_json(clean(name)) for name in timeline.names]
    args = _Arguments(timeline)
    start, end = (timeline.start_ns - origin).tolist(), (timeline.end_ns - origin).tolist()
    kind, name = timeline.kind.tolist(), timeline.name.tolist()
    order = np.lexsort((-timeline.end_ns, timeline.start_ns, timeline.stream))
    streams, begins = np.unique(timeline.stream[order], return_index=True)
    tid = _FIRST_STREAM_TRACK
    for stream, index in zip(streams.tolist(), np.split(order, begins[1:]), strict=False):
        for number, lane in enumerate(_lanes(index, timeline)):
            yield from _track(pid, tid, f"stream {stream}" + (f" ({number + 1})" if number else ""))
            for i in lane:
                what = _KINDS.get(kind[i], "other")
                yield _span(pid, tid, start[i], end[i], names[name[i]], what, args.of(i, what))
            tid += 1


class _Arguments:
    """The arguments of spans as JSON, cached because many launches have the same ones."""

    def __init__(self, timeline: Timeline) -> None:
        known = {key: column for key, column in timeline.resources.items() if len(column) == len(timeline)}
        self._keys = list(known)
        self._columns = [column.tolist() for column in known.values()]
        self._made: dict[tuple[Any, ...], str] = {}

    def of(self, span: int, kind: str) -> str:
        values = (kind, *(column[span] for column in self._columns))
        if values not in self._made:
            facts = {key: value for key, value in zip(self._keys, values[1:], strict=True) if value >= 0}
            self._made[values] = _json({"kind": kind, **facts})
        return self._made[values]


def _lanes(index: Ns, timeline: Timeline) -> list[list[int]]:
    """Splits overlapping spans of one stream into lanes: Perfetto draws only nested spans on a track."""
    start, end = timeline.start_ns[index], timeline.end_ns[index]
    if len(index) < 2 or bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all()):
        return [index.tolist()]
    lanes: list[list[int]] = []
    free: list[int] = []
    for i, begins, ends in zip(index.tolist(), start.tolist(), end.tolist(), strict=True):
        at = next((lane for lane, since in enumerate(free) if since <= begins), len(free))
        if at == len(free):
            lanes.append([])
            free.append(0)
        lanes[at].append(i)
        free[at] = ends
    return lanes


def _counter(pid: int, name: str, running: Intervals, origin: int) -> Iterator[str]:
    """1 while at least one span of a kind runs, else 0."""
    head = f'{{"ph":"C","pid":{pid},"name":{_json(name)}'
    for start, end in zip((running.start - origin).tolist(), (running.end - origin).tolist(), strict=True):
        yield f'{head},"ts":{_us(start)},"args":{{"running":1}}}}'
        yield f'{head},"ts":{_us(end)},"args":{{"running":0}}}}'
