"""From recorded events to spans: when each kernel, copy and graph of a recording ran, and what overlapped.

Runs inside users' programs: standard library only. Times are integer nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.shim import tracer
from weft.shim.tracer import Recording

Interval = tuple[int, int]

PLACED_LATENCY_NS = 10_000
"""From a collective's placement to the event behind it, at most; a longer distance is a wait for SMs."""
USUAL_LATENCY_NS = 1_500
"""Where every collective of a recording waited, so that the latency cannot be told from it."""

SUBMITTED_NS = 2_500
"""An end event that fires so soon after its submission tells only that the kernel was over by then."""
NEIGHBOURS = 128

EXACT, CHAIN, LATE_END, FRONT_ONLY, SHORT = (
    "events",
    "chain",
    "late end",
    "stream ready",
    "shorter than its launch",
)


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the GPU. `timing` says how it was found."""

    start_ns: int
    end_ns: int
    name: str
    kind: str
    """compute, comm, memory, graph, or unknown: a graph with collectives in it."""
    timing: str
    raw: Any
    """The CSpan it comes from."""


@dataclass(frozen=True)
class StepProfile:
    """What a step of the job does on the GPU, averaged over the recorded steps, in ms."""

    span_ms: float
    comm_ms: float | None
    """None: collectives run inside graphs, where nothing can be told apart."""
    exposed_ms: float | None
    kernels: dict[str, tuple[float, float]]
    """By the driver's name: all of the kernel's time, and what of it overlaps with collectives."""
    launches: dict[str, float]
    """By the driver's name: kernels a step, those of graphs included."""


def spans_of(recording: Recording) -> list[Span]:
    """Every operation with a known time, in the order of launches."""
    by_lane: dict[int, list[Any]] = defaultdict(list)
    for raw in recording.spans:
        if not raw.flags & (tracer.FAILED | tracer.UNTIMED):
            by_lane[raw.lane].append(raw)
    delays = _Delays(recording.spans)
    latency_ns = _placed_latency(recording.spans, delays)
    timed = [found for lane in by_lane.values() for found in _lane(lane, latency_ns, delays)]
    usual = _usual_durations(timed)
    spans = [_span(recording, *found, usual) for found in timed]
    return sorted(spans, key=lambda span: span.raw.host_ns)


Timed = tuple[int, int, str, Any]


class _Delays:
    """From a call of the driver to the GPU's doing it on an idle stream: the least seen around that time.

    The two clocks drift, so it is taken from the neighbourhood.
    """

    def __init__(self, spans: Iterable[Any]) -> None:
        found = [(s.host_front_ns, s.before_ns - s.host_front_ns) for s in spans if s.before_ns >= 0]
        self._starts: list[int] = []
        self._least: list[int] = []
        for at in range(0, len(found), NEIGHBOURS):
            self._starts.append(found[at][0])
            self._least.append(min(delay for _, delay in found[at : at + NEIGHBOURS]))

    def at(self, host_ns: int) -> int | None:
        i = max(0, bisect_right(self._starts, host_ns) - 1)
        near = self._least[max(0, i - 1) : i + 2]
        return min(near) if near else None


def _lane(lane: Sequence[Any], latency_ns: int, delays: _Delays) -> Iterable[Timed]:
    """The spans of one stream. Operations of a stream never overlap, except programmatic launches."""
    chain: list[Any] = []
    free_ns = -1
    for raw in lane:
        linked = raw.flags & tracer.CHAINED and not raw.flags & tracer.PDL_SPLIT
        if not linked and chain:  # a chain whose end was never recorded
            chain = []
            free_ns = -1
        chain.append(raw)
        if raw.flags & tracer.OPEN:
            continue
        if raw.after_ns >= 0:
            yield from _chain(chain, free_ns, latency_ns, delays)
        free_ns, chain = raw.after_ns, []


def _chain(chain: Sequence[Any], free_ns: int, latency_ns: int, delays: _Delays) -> Iterable[Timed]:
    """One operation, or several kernels without an event between them, which share the time equally."""
    first, last = chain[0], chain[-1]
    end_ns = last.after_ns
    start_ns = max(first.before_ns, free_ns)
    if start_ns < 0:
        start_ns = first.host_ns
    timing = EXACT
    if first.placed_ns >= 0:
        if not _at_once(first, delays):
            start_ns = max(start_ns, first.placed_ns - latency_ns)
    elif first.flags & tracer.COMM and first.kind == tracer.KERNEL:
        timing = FRONT_ONLY
    delay_ns = delays.at(first.host_front_ns)
    if first.before_ns >= 0 and delay_ns is not None and not first.flags & tracer.STALLED:
        # On an idle stream the event in front fires before the operation is even submitted.
        start_ns = max(start_ns, first.host_ns + delay_ns)
        if end_ns <= last.host_end_ns + delay_ns + SUBMITTED_NS and first.kind == tracer.KERNEL:
            timing = SHORT
    start_ns = min(start_ns, end_ns)
    if last.flags & tracer.LATE:
        timing = LATE_END
    if len(chain) > 1:
        timing = CHAIN
    each = (end_ns - start_ns) / len(chain)
    for i, raw in enumerate(chain):
        yield start_ns + round(i * each), start_ns + round((i + 1) * each), timing, raw


def _at_once(raw: Any, delays: _Delays) -> bool:
    """Whether a collective was placed before the event that tells so had even been submitted."""
    delay_ns = delays.at(raw.host_front_ns)
    return delay_ns is not None and raw.placed_ns <= raw.host_placed_ns + delay_ns + SUBMITTED_NS


def _placed_latency(spans: Iterable[Any], delays: _Delays) -> int:
    """How long after a collective was placed its event fires: the least distance to "stream ready"."""
    both = [s for s in spans if s.placed_ns >= 0 and s.before_ns >= 0 and not _at_once(s, delays)]
    gaps = [s.placed_ns - s.before_ns for s in both]
    least = min((gap for gap in gaps if gap >= 0), default=0)
    return least if least < PLACED_LATENCY_NS else USUAL_LATENCY_NS


def _usual_durations(timed: Iterable[Timed]) -> dict[tuple[int, ...], float]:
    """By kernel and grid, and by kernel alone, from spans whose start and end are both exact."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for start_ns, end_ns, timing, raw in timed:
        if timing == EXACT and raw.kind == tracer.KERNEL:
            found[_key(raw)].append(end_ns - start_ns)
            found[raw.row,].append(end_ns - start_ns)
    return {key: statistics.median(values) for key, values in found.items()}


def _key(raw: Any) -> tuple[int, ...]:
    return (raw.row, *raw.grid)


def _span(
    recording: Recording,
    start_ns: int,
    end_ns: int,
    timing: str,
    raw: Any,
    usual: dict[tuple[int, ...], float],
) -> Span:
    if timing in (LATE_END, SHORT):
        expected = usual.get(_key(raw), usual.get((raw.row,)))
        end_ns = min(end_ns, start_ns + round(expected)) if expected is not None else end_ns
    return Span(start_ns, end_ns, name_of(recording, raw), kind_of(raw), timing, raw)


def kind_of(raw: Any) -> str:
    if raw.kind == tracer.GRAPH:
        return "unknown" if raw.flags & tracer.COMM else "graph"
    if raw.kind == tracer.KERNEL:
        return "comm" if raw.flags & tracer.COMM else "compute"
    return "comm" if raw.copy == COPIES.index("PtoP") else "memory"


COPIES = ("", "HtoD", "DtoH", "DtoD", "PtoP", "HtoH")


def name_of(recording: Recording, raw: Any) -> str:
    """The driver's name of a kernel; for the rest, what Kineto would call it."""
    if raw.kind == tracer.KERNEL:
        known = raw.row < len(recording.symbols)
        return recording.symbols[raw.row] if known else "(kernel without a name)"
    if raw.kind == tracer.GRAPH:
        return f"CUDA graph ({raw.graph_kernels} kernels)"
    if raw.kind == tracer.MEMSET:
        return "Memset (Device)"
    return f"Memcpy {COPIES[raw.copy] if raw.copy < len(COPIES) else ''}".rstrip()


def graph_symbols(recording: Recording, raw: Any) -> list[str]:
    """The kernels of a graph, in the order of its nodes."""
    rows = recording.graph_rows[raw.graph : raw.graph + raw.graph_kernels]
    return [recording.symbols[row] for row in rows if row < len(recording.symbols)]


# --- intervals ---------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """How long both last at once; both disjoint and in order."""
    starts = [start for start, _ in second]
    shared = 0
    for start, end in first:
        at = max(0, bisect_right(starts, start) - 1)
        while at < len(second) and second[at][0] < end:
            shared += max(0, min(end, second[at][1]) - max(start, second[at][0]))
            at += 1
    return shared


def profile(recording: Recording, steps: int) -> StepProfile | None:
    """The averages of a recording of so many steps; None where it holds no span."""
    spans = spans_of(recording)
    if not spans or steps < 1:
        return None
    comm = union((s.start_ns, s.end_ns) for s in spans if s.kind == "comm")
    compute = union((s.start_ns, s.end_ns) for s in spans if s.kind in ("compute", "graph"))
    known = not any(s.kind == "unknown" for s in spans)
    by_name: dict[str, list[Interval]] = defaultdict(list)
    launches: Counter[str] = Counter()
    for span in spans:
        if span.raw.kind == tracer.GRAPH:
            launches.update(graph_symbols(recording, span.raw))
        elif span.raw.kind == tracer.KERNEL:
            launches[span.name] += 1
            if span.kind == "compute":
                by_name[span.name].append((span.start_ns, span.end_ns))
    ms = 1e-6 / steps
    kernels = {}
    for name, intervals in by_name.items():
        spent = union(intervals)
        kernels[name] = (total(spent) * ms, common(spent, comm) * ms)
    span_ns = max(s.end_ns for s in spans) - min(s.start_ns for s in spans)
    comm_ns = total(comm)
    return StepProfile(
        span_ms=span_ns * ms,
        comm_ms=comm_ns * ms if known else None,
        exposed_ms=(comm_ns - common(comm, compute)) * ms if known else None,
        kernels=kernels,
        launches={name: count / steps for name, count in launches.items()},
    )
