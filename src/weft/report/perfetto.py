"""Export to Perfetto: a Chrome JSON trace with weft's annotations.

Times are written from integers (microseconds with three decimals) and count from the first span of all ranks:
a Unix clock in microseconds would lose nanoseconds in a reader that holds it as float64.
"""

from __future__ import annotations

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

KINDS = {Kind.COMPUTE: "compute", Kind.COMM: "communication", Kind.MEMORY: "memory"}
EXPOSED_TRACK = 1
_FIRST_STREAM_TRACK = 10


def export(document: dict[str, Any], timelines: Sequence[Timeline]) -> bytes:
    """The trace as JSON; `timelines` are those of `document["ranks"]`, in the same order."""
    offsets = [*clock_offsets_ns(document), *(0 for _ in timelines)][: len(timelines)]
    pairs = list(zip(timelines, offsets, strict=True))
    first = min((int(t.start_ns.min()) - ahead for t, ahead in pairs if len(t)), default=0)
    names = [*labels(document), *(f"timeline {i}" for i in range(len(timelines)))]
    ranks = [*records(document, "ranks"), *({} for _ in timelines)]
    lines: list[str] = []
    for pid, ((timeline, ahead), name, rank) in enumerate(zip(pairs, names, ranks, strict=False)):
        origin = first + ahead  # the ranks' clocks as the analysis laid them over each other
        lines += _process(pid, name, text(rank, "device"))
        lines += _exposed(pid, timeline, rank, origin)
        lines += _streams(pid, timeline, origin)
        for kind in (Kind.COMPUTE, Kind.COMM):
            lines += _counter(pid, f"{KINDS[kind]} running", timeline.covered(kind), origin)
    head = json.dumps(
        {
            "displayTimeUnit": "ns",
            "otherData": {"writer": f"weft {weft.__version__}", "baseTimeNanoseconds": str(first)},
        }
    )
    return (head[:-1] + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def _us(ns: int) -> str:
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def _process(pid: int, name: str, device: str) -> Iterator[str]:
    title = f"{name} ({device})" if device else name
    yield _meta(pid, 0, "process_name", name=title)
    yield _meta(pid, 0, "process_sort_index", sort_index=pid)


def _meta(pid: int, tid: int, what: str, **args: Any) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})


def _track(pid: int, tid: int, name: str) -> list[str]:
    return [_meta(pid, tid, "thread_name", name=name), _meta(pid, tid, "thread_sort_index", sort_index=tid)]


def _span(pid: int, tid: int, start: int, end: int, name: str, category: str, args: str) -> str:
    """A complete event; `name` and `args` are JSON already."""
    head = f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{_us(start)},"dur":{_us(end - start)}'
    return f'{head},"name":{name},"cat":"{category}","args":{args}}}'


def _exposed(pid: int, timeline: Timeline, rank: dict[str, Any], origin: int) -> list[str]:
    """The exposed ranges as a track of their own, with the causes of the collective that ran."""
    start, end, owner = exposed_spans(timeline)
    if not len(start):
        return []
    by_name = {text(item, "kernel") or text(item, "name"): item for item in records(rank, "collectives")}
    args: dict[str, str] = {}
    lines = _track(pid, EXPOSED_TRACK, "exposed communication")
    for first, last, span in zip(start.tolist(), end.tolist(), owner.tolist(), strict=True):
        name = clean(timeline.names[timeline.name[span]]) if span >= 0 else "communication"
        if name not in args:
            args[name] = json.dumps(_annotation(name, by_name.get(name) or {}))
        label = json.dumps("exposed: " + collective_name({"name": name}))
        lines.append(_span(pid, EXPOSED_TRACK, first - origin, last - origin, label, "exposed", args[name]))
    return lines


def _annotation(name: str, collective: dict[str, Any]) -> dict[str, Any]:
    """What is known about a collective; its causes are totals over all its runs on this rank."""
    return {"collective": name, "causes_of_this_collective_us": dict(causes(collective))}


def _streams(pid: int, timeline: Timeline, origin: int) -> list[str]:
    lines: list[str] = []
    names = [json.dumps(clean(name)) for name in timeline.names]
    keys = [key for key in timeline.resources if len(timeline.resources[key]) == len(timeline)]
    columns = [timeline.resources[key].tolist() for key in keys]
    start, end = (timeline.start_ns - origin).tolist(), (timeline.end_ns - origin).tolist()
    kind, name = timeline.kind.tolist(), timeline.name.tolist()
    tid = _FIRST_STREAM_TRACK
    for stream in np.unique(timeline.stream).tolist():
        index = np.flatnonzero(timeline.stream == stream)
        index = index[np.lexsort((-timeline.end_ns[index], timeline.start_ns[index]))]
        for number, lane in enumerate(_lanes(index, timeline)):
            lines += _track(pid, tid, f"stream {stream}" + (f" ({number + 1})" if number else ""))
            for i in lane:
                what = KINDS.get(kind[i], "other")
                facts = {k: column[i] for k, column in zip(keys, columns, strict=True) if column[i] >= 0}
                args = json.dumps({"kind": what, "stream": stream, **facts})
                lines.append(_span(pid, tid, start[i], end[i], names[name[i]], what, args))
            tid += 1
    return lines


def _lanes(index: Ns, timeline: Timeline) -> list[list[int]]:
    """Spans that overlap on one stream go to lanes of their own: Perfetto only draws what nests."""
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


def _counter(pid: int, name: str, running: Intervals, origin: int) -> list[str]:
    """1 while at least one span of a kind runs, else 0."""
    head = f'{{"ph":"C","pid":{pid},"tid":0,"name":{json.dumps(name)}'
    lines = []
    for start, end in zip((running.start - origin).tolist(), (running.end - origin).tolist(), strict=True):
        lines.append(f'{head},"ts":{_us(start)},"args":{{"running":1}}}}')
        lines.append(f'{head},"ts":{_us(end)},"args":{{"running":0}}}}')
    return lines
