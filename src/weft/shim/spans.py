"""Turns recorded events into spans: when each kernel, copy and graph ran, and which of them overlapped.

Runs inside users' programs, so it uses only the standard library. Times are integer nanoseconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.shim import tracer
from weft.shim.event_clock import SUBMITTED_NS, EventClock
from weft.shim.interval_sets import TimeSpan, common, total, union_spans
from weft.shim.tracer import Recording

SHORT_NS = 10_000
"""A kernel whose usual duration is at most this gets that duration wherever its stream was idle."""

KERNEL_GAP_NS = 1_000
"""Time between two kernels of a busy stream with no event between them. Measured on an H200."""

EXACT, CHAIN, LATE_END, FRONT_ONLY, SHORT, IDLE = (
    "events",
    "chain",
    "late end",
    "stream ready",
    "shorter than its launch",
    "idle stream",
)


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the GPU. `timing` says how its times were determined."""

    start_ns: int
    end_ns: int
    name: str
    kind: str
    """"compute", "comm", "memory", "graph", or "unknown" for a graph that contains collectives."""
    timing: str
    raw: Any
    """The CSpan that it was made from."""
    own_gap_ns: int = 0
    """The gap before it that only the tracer's events and probes cause."""


@dataclass(frozen=True)
class StepProfile:
    """What a step of the job does on the GPU, averaged over the recorded steps, in ms."""

    span_ms: float
    comm_ms: float | None
    """None: collectives run inside graphs, whose kernels cannot be timed individually."""
    exposed_ms: float | None
    """Excludes the time that the tracer's events take between kernels."""
    kernels: dict[str, tuple[float, float]]
    """Keyed by the driver's name: the kernel's total time, and the part that overlaps with collectives."""
    launches: dict[str, float]
    """Keyed by the driver's name: launches per step, including kernels in graphs."""


def spans_of(recording: Recording) -> list[Span]:
    """Every operation with a known time, in launch order."""
    by_lane: dict[int, list[Any]] = defaultdict(list)
    for raw in recording.spans:
        if not raw.flags & (tracer.FAILED | tracer.UNTIMED):
            by_lane[raw.lane].append(raw)
    clock = EventClock(recording)
    timed = [found for lane in by_lane.values() for found in _lane(lane, clock)]
    usual = _usual_durations(timed)
    spans = _with_own_gaps([_span(recording, *found, usual) for found in timed])
    return sorted(spans, key=lambda span: span.raw.host_ns)


def compute_time(spans: Iterable[Span]) -> list[TimeSpan]:
    """When compute kernels run, with the gaps that the tracer causes counted as compute time."""
    return union_spans((s.start_ns - s.own_gap_ns, s.end_ns) for s in spans if s.kind in ("compute", "graph"))


def _with_own_gaps(spans: Iterable[Span]) -> list[Span]:
    """Set `own_gap_ns`. `spans` come stream by stream, in order.

    The tracer causes any gap above KERNEL_GAP_NS between two kernels of a busy stream.
    """
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else span
        gap_ns = span.start_ns - last.end_ns - KERNEL_GAP_NS
        same = last.raw.lane == span.raw.lane and last.kind != "comm"
        busy = same and span.raw.before_ns < 0 and span.timing not in (IDLE, SHORT, LATE_END)
        found.append(replace(span, own_gap_ns=gap_ns) if busy and gap_ns > 0 else span)
    return found


Timed = tuple[int, int, str, Any]


def _lane(lane: Sequence[Any], clock: EventClock) -> Iterable[Timed]:
    """The times of one stream's operations, which never overlap, except for programmatic launches."""
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
            yield from _chain(chain, free_ns, clock)
        free_ns, chain = max(raw.after_ns, raw.again_ns), []


def _chain(chain: Sequence[Any], free_ns: int, clock: EventClock) -> Iterable[Timed]:
    """The times of one operation, or of kernels with no event between them, which share the time equally."""
    first, last = chain[0], chain[-1]
    start_ns, idle = clock.earliest_ns(first, free_ns)
    waited = idle and not first.flags & (tracer.STALLED | tracer.COMM_SPAN)
    end_ns = clock.end_ns(last, idle=waited)
    timing = EXACT
    if first.placed_ns >= 0:
        start_ns = max(start_ns, clock.placed_ns(first, start_ns))
    elif first.flags & tracer.COMM_SPAN and first.kind == tracer.KERNEL_SPAN:
        timing = FRONT_ONLY
    if waited and first.kind == tracer.KERNEL_SPAN:
        soon_ns = last.host_end_ns + (clock.delay_ns(last.host_ns) or 0) + SUBMITTED_NS
        timing = SHORT if end_ns <= soon_ns else IDLE
    start_ns = max(min(start_ns, end_ns), free_ns)
    end_ns = max(start_ns, end_ns)
    if last.flags & tracer.LATE:
        timing = LATE_END
    if len(chain) > 1:
        timing = CHAIN
    each = (end_ns - start_ns) / len(chain)
    for i, raw in enumerate(chain):
        yield start_ns + round(i * each), start_ns + round((i + 1) * each), timing, raw


def _usual_durations(timed: Iterable[Timed]) -> dict[tuple[int, ...], float]:
    """Median durations, keyed by kernel and grid, and by kernel alone.

    Uses launches that the tracer held back; without any, those on a busy stream; else those on an idle one.
    """
    idle, busy, held = (defaultdict[tuple[int, ...], list[int]](list) for _ in range(3))
    for start_ns, end_ns, timing, raw in timed:
        if timing in (EXACT, IDLE) and raw.kind == tracer.KERNEL_SPAN:
            found = held if raw.flags & tracer.STALLED else idle if timing == IDLE else busy
            found[_key(raw)].append(end_ns - start_ns)
            found[raw.row,].append(end_ns - start_ns)
    return {key: statistics.median(values) for key, values in {**idle, **busy, **held}.items()}


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
    usual_ns = usual.get(_key(raw), usual.get((raw.row,)))
    if usual_ns is not None and (timing in (LATE_END, SHORT) or (timing == IDLE and usual_ns <= SHORT_NS)):
        start_ns = min(start_ns, max(end_ns - round(usual_ns), raw.host_ns))
        end_ns = min(end_ns, start_ns + round(usual_ns))
    return Span(start_ns, end_ns, name_of(recording, raw), span_kind(raw), timing, raw)


def span_kind(raw: Any) -> str:
    if raw.kind == tracer.GRAPH:
        return "unknown" if raw.flags & tracer.COMM_SPAN else "graph"
    if raw.kind == tracer.KERNEL_SPAN:
        return "comm" if raw.flags & tracer.COMM_SPAN else "compute"
    return "comm" if raw.copy == COPIES.index("PtoP") else "memory"


COPIES = ("", "HtoD", "DtoH", "DtoD", "PtoP", "HtoH")


def name_of(recording: Recording, raw: Any) -> str:
    """The driver's name of a kernel; Kineto's name for a graph, memset or copy."""
    if raw.kind == tracer.KERNEL_SPAN:
        known = raw.row < len(recording.symbols)
        return recording.symbols[raw.row] if known else "(kernel without a name)"
    if raw.kind == tracer.GRAPH:
        return f"CUDA graph ({raw.graph_kernels} kernels)"
    if raw.kind == tracer.MEMSET_SPAN:
        return "Memset (Device)"
    return f"Memcpy {COPIES[raw.copy] if raw.copy < len(COPIES) else ''}".rstrip()


def graph_symbols(recording: Recording, raw: Any) -> list[str]:
    """The kernels of a graph, in the order of its nodes."""
    rows = recording.graph_rows[raw.graph : raw.graph + raw.graph_kernels]
    return [recording.symbols[row] for row in rows if row < len(recording.symbols)]


def span_profile(recording: Recording, steps: int) -> StepProfile | None:
    """Averages over the steps of a recording; None if it holds no span."""
    spans = spans_of(recording)
    if not spans or steps < 1:
        return None
    comm = union_spans((s.start_ns, s.end_ns) for s in spans if s.kind == "comm")
    compute = compute_time(spans)
    known = not any(s.kind == "unknown" for s in spans)
    by_name: dict[str, list[TimeSpan]] = defaultdict(list)
    launches: Counter[str] = Counter()
    for span in spans:
        if span.raw.kind == tracer.GRAPH:
            launches.update(graph_symbols(recording, span.raw))
        elif span.raw.kind == tracer.KERNEL_SPAN:
            launches[span.name] += 1
            if span.kind == "compute":
                by_name[span.name].append((span.start_ns, span.end_ns))
    ms = 1e-6 / steps
    kernels = {}
    for name, intervals in by_name.items():
        spent = union_spans(intervals)
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
