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

_Interval = tuple[int, int]

PLACED_LATENCY_NS = 12_000
"""From a collective's placement to the event behind its stamp, at most: more is a wait for SMs."""
USUAL_LATENCY_NS = 8_000
"""Where every collective of a recording waited, so that the latency cannot be told from it."""

SUBMITTED_NS = 4_000
"""An event that fires so soon after its submission tells only that the operation was over by then."""
LATE_NS = 1_000
"""Delays this much above the least seen nearby are those of an idle stream."""
NEIGHBOURS = 128
SHORT_NS = 10_000
"""A kernel that takes no longer when held back gets that duration wherever its stream was idle."""
EMPTY_NS = 600
"""What a profiler shows for a kernel that does nothing."""
MOST_OVERHEAD_NS = 10_000
LEAST_LAGS, MOST_LAG_NS = 4, 5_000
DOORBELL_SHARE = 0.4
"""How much later than an event a kernel of an idle stream starts, as a share of the time between an event and
the kernel queued behind it. From an H200, where it is 1.0 of 2.4 us."""

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
    clock = _Clock(recording)
    timed = [found for lane in by_lane.values() for found in _lane(lane, clock)]
    timed = _without_lag(timed, clock.lag_ns)
    usual = _usual_durations(timed)
    spans = [_span(recording, *found, usual) for found in timed]
    return sorted(spans, key=lambda span: span.raw.host_ns)


Timed = tuple[int, int, str, Any]


class _Clock:
    """What events cost, and how long the GPU takes to do what the host asks of an idle stream.

    The clocks of host and GPU drift, so the delay is taken from the neighbourhood.
    """

    def __init__(self, recording: Recording) -> None:
        spin_ns, twice_ns, stamp_ns, pair_ns = recording.header.calibrated_ns
        known = spin_ns >= 0 and twice_ns >= 0
        self.overhead_ns = min(max(2 * spin_ns - twice_ns - EMPTY_NS, 0), MOST_OVERHEAD_NS) if known else 0
        """From an event to the start of the kernel behind it, where all is queued."""
        self.doorbell_ns = round(DOORBELL_SHARE * self.overhead_ns)
        self.stamp_ns = min(max(stamp_ns - self.overhead_ns, 0), MOST_OVERHEAD_NS)
        """From the start of a stamp to the event behind it."""
        found = [
            (s.host_ns, s.before_ns - s.host_front_ns, s.before_ns - s.host_ns)
            for s in recording.spans
            if s.before_ns >= 0
        ]
        self._starts: list[int] = []
        self._delays: list[float] = []
        for at in range(0, len(found), NEIGHBOURS):
            near = found[at : at + NEIGHBOURS]
            least = min(delay for _, delay, _ in near)
            self._starts.append(near[0][0])
            self._delays.append(
                statistics.median(after for _, delay, after in near if delay <= least + LATE_NS)
            )
        self.latency_ns = self._placed_latency(recording.spans)
        self.lag_ns = _lag(recording.spans, pair_ns)

    def delay_ns(self, host_ns: int) -> int | None:
        """From the return of a call to the GPU's doing it."""
        if not self._starts:
            return None
        i = max(0, bisect_right(self._starts, host_ns) - 1)
        return round(min(self._delays[max(0, i - 1) : i + 2]))

    def earliest_ns(self, raw: Any, free_ns: int) -> tuple[int, bool]:
        """When an operation starts unless it has to wait for SMs, and whether its stream waited for the host.

        The stream is free at `free_ns`.
        """
        ready_ns = max(raw.before_ns, free_ns)
        delay_ns = self.delay_ns(raw.host_ns)
        queued = raw.kind in (tracer.KERNEL_SPAN, tracer.GRAPH)
        if delay_ns is None:
            return (raw.host_ns if ready_ns < 0 else ready_ns + queued * self.overhead_ns), False
        submitted_ns = raw.host_end_ns + delay_ns + queued * self.doorbell_ns
        free_ns = ready_ns + queued * self.overhead_ns
        return (submitted_ns, True) if ready_ns < 0 or submitted_ns > free_ns else (free_ns, False)

    def placed_ns(self, raw: Any, earliest_ns: int) -> int:
        """When a collective was placed."""
        if self._at_once(raw):
            return earliest_ns
        gap_ns = raw.placed_ns - earliest_ns
        if gap_ns > 3 * self.latency_ns:  # the stamp was in the queue behind it
            return int(raw.placed_ns - self.stamp_ns)
        return int(earliest_ns + max(0, gap_ns - self.latency_ns))

    def _at_once(self, raw: Any) -> bool:
        """Whether a collective was placed before the event that tells so had even been submitted."""
        delay_ns = self.delay_ns(raw.host_ns)
        return delay_ns is not None and bool(raw.placed_ns <= raw.host_placed_ns + delay_ns + SUBMITTED_NS)

    def _placed_latency(self, spans: Iterable[Any]) -> int:
        """From a collective's placement on free SMs to the event behind its stamp: the least seen."""
        both = [s for s in spans if s.placed_ns >= 0 and s.before_ns >= 0 and not self._at_once(s)]
        gaps = (s.placed_ns - self.earliest_ns(s, -1)[0] for s in both)
        least = min((gap for gap in gaps if gap >= 0), default=USUAL_LATENCY_NS)
        return int(least) if least < PLACED_LATENCY_NS else USUAL_LATENCY_NS


def _lag(spans: Sequence[Any], pair_ns: int) -> int:
    """How much later than usual events fire while collectives run: told by two events in a row."""
    comm = union_spans(
        (s.before_ns, s.after_ns) for s in spans if s.flags & tracer.COMM_SPAN and s.before_ns >= 0
    )
    starts = [start for start, _ in comm]
    found = [s.again_ns - s.after_ns for s in spans if s.again_ns >= 0 and _inside(s.after_ns, comm, starts)]
    if len(found) < LEAST_LAGS or pair_ns < 0:
        return 0
    return int(min(max(round(statistics.median(found)) - pair_ns, 0), MOST_LAG_NS))


def _inside(at_ns: int, intervals: Sequence[_Interval], starts: Sequence[int]) -> bool:
    i = bisect_right(starts, at_ns) - 1
    return i >= 0 and at_ns < intervals[i][1]


def _lane(lane: Sequence[Any], clock: _Clock) -> Iterable[Timed]:
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
            yield from _chain(chain, free_ns, clock)
        free_ns, chain = max(raw.after_ns, raw.again_ns), []


def _chain(chain: Sequence[Any], free_ns: int, clock: _Clock) -> Iterable[Timed]:
    """One operation, or several kernels without an event between them, which share the time equally."""
    first, last = chain[0], chain[-1]
    end_ns = last.after_ns
    start_ns, idle = clock.earliest_ns(first, free_ns)
    timing = EXACT
    if first.placed_ns >= 0:
        start_ns = max(start_ns, clock.placed_ns(first, start_ns))
    elif first.flags & tracer.COMM_SPAN and first.kind == tracer.KERNEL_SPAN:
        timing = FRONT_ONLY
    if idle and first.kind == tracer.KERNEL_SPAN and not first.flags & (tracer.STALLED | tracer.COMM_SPAN):
        soon_ns = last.host_end_ns + (clock.delay_ns(last.host_ns) or 0) + SUBMITTED_NS
        timing = SHORT if end_ns <= soon_ns else IDLE
    start_ns = max(min(start_ns, end_ns), free_ns)
    if last.flags & tracer.LATE:
        timing = LATE_END
    if len(chain) > 1:
        timing = CHAIN
    each = (end_ns - start_ns) / len(chain)
    for i, raw in enumerate(chain):
        yield start_ns + round(i * each), start_ns + round((i + 1) * each), timing, raw


def _without_lag(timed: Sequence[Timed], lag_ns: int) -> list[Timed]:
    """Kernels that end while a collective runs, without the time that the event behind them took."""
    comm = union_spans((start, end) for start, end, _, raw in timed if span_kind(raw) == "comm")
    starts = [start for start, _ in comm]
    found = []
    for start_ns, end_ns, timing, raw in timed:
        late = (
            raw.kind in (tracer.KERNEL_SPAN, tracer.GRAPH)
            and span_kind(raw) != "comm"
            and _inside(end_ns, comm, starts)
        )
        found.append((start_ns, max(start_ns, end_ns - lag_ns) if late else end_ns, timing, raw))
    return found


def _usual_durations(timed: Iterable[Timed]) -> dict[tuple[int, ...], float]:
    """By kernel and grid, and by kernel alone.

    From launches that were held back; where there are none, from a busy stream; else from an idle one.
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
    """The driver's name of a kernel; for the rest, what Kineto would call it."""
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


# --- intervals ---------------------------------------------------------------------------------------------


def union_spans(intervals: Iterable[_Interval]) -> list[_Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[_Interval]) -> int:
    return sum(end - start for start, end in intervals)


def common(first: Sequence[_Interval], second: Sequence[_Interval]) -> int:
    """How long both last at once; both disjoint and in order."""
    starts = [start for start, _ in second]
    shared = 0
    for start, end in first:
        at = max(0, bisect_right(starts, start) - 1)
        while at < len(second) and second[at][0] < end:
            shared += max(0, min(end, second[at][1]) - max(start, second[at][0]))
            at += 1
    return shared


def span_profile(recording: Recording, steps: int) -> StepProfile | None:
    """The averages of a recording of so many steps; None where it holds no span."""
    spans = spans_of(recording)
    if not spans or steps < 1:
        return None
    comm = union_spans((s.start_ns, s.end_ns) for s in spans if s.kind == "comm")
    compute = union_spans((s.start_ns, s.end_ns) for s in spans if s.kind in ("compute", "graph"))
    known = not any(s.kind == "unknown" for s in spans)
    by_name: dict[str, list[_Interval]] = defaultdict(list)
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
