"""Why communication is exposed: each exposed nanosecond gets one cause, by the rules of docs/analyze.md.

Each communication span owns the time in which it is the longest-running one, so the spans share out exposed
time without a rest. Within a span: what passes until the last rank has entered is the slower rank's. For the
rest the span is moved, in thought, to where it could have started; what more would have been hidden there is
the price of what held it back. What no such move hides had nothing to hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Intervals, Kind, Ns, subtract, union
from weft.trace.collectives import Collectives
from weft.trace.kineto import UNKNOWN_NS, Trace
from weft.trace.match import Match

CAUSES = ("launched_late", "behind_compute", "slower_rank", "nothing_to_hide_behind")

SKEW_TOLERANCE_NS = 10_000
"""Ranks that enter within this of each other came together: clocks are not known better."""

MAX_LATENCY_NS = 20_000
"""More than this between a launch and a start is no launch latency any more."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """Exposed nanoseconds per communication span and cause; each row adds up to what the span owns."""

    exposed_ns: Ns
    cause_ns: npt.NDArray[np.int64]
    """One column per entry of CAUSES."""
    waited_behind_ns: Ns
    """How long each span was ready and waited beside compute, exposed or not."""
    ready_ns: Ns
    """When each span could have started at the earliest by its launch and dependencies."""

    def totals(self, rows: npt.NDArray[np.bool_] | slice = slice(None)) -> dict[str, int]:
        """Nanoseconds by cause over the given spans."""
        sums = self.cause_ns[rows].sum(axis=0).tolist() if len(self.cause_ns) else [0] * len(CAUSES)
        return dict(zip(CAUSES, sums, strict=True))


class Measure:
    """How much of any interval a set of disjoint intervals covers, in O(log n)."""

    def __init__(self, intervals: Intervals) -> None:
        self._start, self._end = intervals
        zero = np.zeros(1, dtype=np.int64)
        self._before: Ns = np.concatenate((zero, np.cumsum(self._end - self._start)))

    def until(self, t: Ns) -> Ns:
        """Covered time before t."""
        if not len(self._end):
            return np.zeros_like(t)
        at = np.searchsorted(self._start, t, side="right")
        beyond = np.where(at > 0, np.maximum(self._end[at - 1] - t, 0), 0)
        covered: Ns = self._before[at] - beyond
        return covered

    def between(self, low: Ns, high: Ns) -> Ns:
        """Covered time in [low, high); 0 where high is below low."""
        return self.until(np.maximum(low, high)) - self.until(low)


def attribute(trace: Trace, found: Collectives, matched: Match) -> Attribution:
    """Shares out the exposed time of one rank."""
    timeline = trace.timeline
    start, end = timeline.start_ns[found.span], timeline.end_ns[found.span]
    compute = Measure(timeline.covered(Kind.COMPUTE))
    idle = Measure(_idle(trace))

    owned_from = _owned_from(start, end)
    exposed = (end - owned_from) - compute.between(owned_from, end)

    entered = np.where(matched.last_entered_ns > start + SKEW_TOLERANCE_NS, matched.last_entered_ns, start)
    work = end - entered
    hidden = compute.between(entered, end)
    in_wait = np.minimum(entered, end)
    waiting = np.maximum(in_wait - owned_from, 0) - compute.between(
        owned_from, np.maximum(in_wait, owned_from)
    )

    ready, dependency = _ready(trace, found, start)
    skewed = entered > start
    unstarved = _replay(trace, found, start, end, work, ready, skewed)
    unlaunched = np.minimum(_replay(trace, found, start, end, work, dependency, skewed), unstarved)

    rest = exposed - waiting
    slower = np.where(skewed, compute.between(start, start + work) - hidden, 0)
    slower = np.clip(slower, 0, rest)
    rest = rest - slower
    at_unstarved = compute.between(unstarved, unstarved + work)
    behind = np.clip(at_unstarved - hidden, 0, rest)
    rest = rest - behind
    at_unlaunched = compute.between(unlaunched, unlaunched + work) + idle.between(
        unlaunched, np.minimum(unlaunched + work, start)
    )
    late = np.clip(at_unlaunched - np.maximum(at_unstarved, hidden), 0, rest)
    late = np.clip(late + _starved_by_cpu(trace, owned_from, end), 0, rest)
    late = np.where(_nothing_launched(trace, found, start, end), rest, late)
    rest = rest - late
    return Attribution(
        exposed_ns=exposed,
        cause_ns=np.stack((late, behind, waiting + slower, rest), axis=1),
        waited_behind_ns=compute.between(np.minimum(ready, start), start),
        ready_ns=ready,
    )


def _idle(trace: Trace) -> Intervals:
    """When neither compute nor communication ran, between the first and the last span."""
    timeline = trace.timeline
    busy = timeline.covered(Kind.COMPUTE, Kind.COMM)
    if not len(timeline):
        return busy
    whole = union(timeline.start_ns.min()[None], timeline.end_ns.max()[None])
    return subtract(whole, busy)


def _owned_from(start: Ns, end: Ns) -> Ns:
    """From where on a span is the longest-running one; its end if it never is."""
    if not len(start):
        return start
    earlier = np.concatenate((start[:1], np.maximum.accumulate(end)[:-1]))
    owned: Ns = np.minimum(np.maximum(start, earlier), end)
    return owned


def _ready(trace: Trace, found: Collectives, start: Ns) -> tuple[Ns, Ns]:
    """When each span could have started: by launch and data dependency, and by data dependency alone.

    A start that the trace does not explain counts as ready: nothing is blamed without evidence.
    """
    launch = trace.launch_ns[found.span]
    dependency = _dependency_end(trace, found)
    known = (launch != UNKNOWN_NS) & (launch <= start) & (dependency <= start) & ~_shared_launch(trace, found)
    latency = np.minimum(launch_latency_ns(trace), np.where(known, start - launch, 0))
    ready = np.where(known, np.maximum(launch + latency, dependency), start)
    # Without a dependency to go by, nothing says that an earlier launch would have been possible.
    by_data = np.where(known & (dependency != UNKNOWN_NS), dependency, ready)
    return ready, np.minimum(by_data, ready)


def launch_latency_ns(trace: Trace) -> int:
    """The usual time from a launch to the start on an idle GPU: the 10th percentile over all spans."""
    known = trace.launch_ns != UNKNOWN_NS
    if not known.any():
        return 0
    wait = trace.timeline.start_ns[known] - trace.launch_ns[known]
    return int(np.clip(np.percentile(wait, 10), 0, MAX_LATENCY_NS))


def _shared_launch(trace: Trace, found: Collectives) -> npt.NDArray[np.bool_]:
    """Spans launched together with others, as by a CUDA graph: their order inside is not known."""
    values, inverse, counts = np.unique(trace.correlation, return_inverse=True, return_counts=True)
    shared = (counts > 1) & (values >= 0)
    out: npt.NDArray[np.bool_] = shared[inverse.reshape(-1)][found.span]
    return out


def _dependency_end(trace: Trace, found: Collectives) -> Ns:
    """The end of what a collective had to wait for; UNKNOWN_NS where nothing can be said.

    A recorded event wait names it. Else it is the last other work that the same CPU thread launched before: a
    process group makes its stream wait for the caller's stream.
    """
    timeline = trace.timeline
    order = np.lexsort((timeline.start_ns, trace.launch_ns, trace.thread))
    launched = trace.launch_ns[order] != UNKNOWN_NS
    order = order[launched]
    other = timeline.kind[order] != Kind.COMM
    place = np.where(other, np.arange(len(order)), -1)
    last = np.maximum.accumulate(place) if len(place) else place
    before = np.full(len(timeline), -1, dtype=np.int64)
    same = np.zeros(len(order), dtype=bool)
    same[last >= 0] = trace.thread[order[last[last >= 0]]] == trace.thread[order[last >= 0]]
    before[order[same]] = order[last[same]]
    of_comm = before[found.span]
    out = np.where(of_comm >= 0, timeline.end_ns[of_comm], UNKNOWN_NS)
    return _recorded_waits(trace, found, out) if len(trace.waits) else out


def _recorded_waits(trace: Trace, found: Collectives, guess: Ns) -> Ns:
    """Replaces the guess where the trace recorded which event the stream waited for.

    Correlation ids grow with each call, so the work before an event's record has smaller ones.
    """
    timeline = trace.timeline
    waits = trace.waits[np.argsort(trace.waits[:, 0], kind="stable")]
    ends: dict[int, tuple[Ns, Ns]] = {}
    for stream in np.unique(waits[:, 3]).tolist():
        here = np.flatnonzero((timeline.stream == stream) & (trace.correlation >= 0))
        here = here[np.argsort(trace.correlation[here], kind="stable")]
        ends[stream] = (trace.correlation[here], np.maximum.accumulate(timeline.end_ns[here]))
    of_stream = {stream: waits[waits[:, 1] == stream] for stream in np.unique(waits[:, 1]).tolist()}
    out = guess.copy()
    for i, span in enumerate(found.span.tolist()):
        mine = of_stream.get(int(timeline.stream[span]))
        last = (
            -1 if mine is None else int(np.searchsorted(mine[:, 0], trace.launch_ns[span], side="right")) - 1
        )
        if mine is None or last < 0:
            continue
        correlation, end = ends[int(mine[last, 3])]
        before = int(np.searchsorted(correlation, mine[last, 2])) - 1
        if before >= 0 and end[before] <= timeline.start_ns[span]:
            out[i] = end[before]
    return out


def _replay(
    trace: Trace, found: Collectives, start: Ns, end: Ns, work: Ns, ready: Ns, skewed: npt.NDArray[np.bool_]
) -> Ns:
    """Where each span would have started, held only by `ready` and by the span before it on its stream.

    A span that waits for another rank ends when that rank lets it, so it stays where it is.
    """
    free: dict[int, int] = {}
    out = start.copy()
    columns = (
        trace.timeline.stream[found.span].tolist(),
        start.tolist(),
        end.tolist(),
        work.tolist(),
        ready.tolist(),
        skewed.tolist(),
    )
    for i, (stream, begun, ended, worked, could, skew) in enumerate(zip(*columns, strict=True)):
        if skew:
            free[stream] = ended
            continue
        moved = min(max(could, free.get(stream, UNKNOWN_NS)), begun)
        out[i] = moved
        free[stream] = moved + worked
    return out


def _nothing_launched(trace: Trace, found: Collectives, start: Ns, end: Ns) -> npt.NDArray[np.bool_]:
    """Spans that started as soon as they were launched, with no compute launched to run beside them.

    A CPU that waits for the GPU at that time is not late: it has nothing to launch.
    """
    launch = trace.launch_ns[found.span]
    timeline = trace.timeline
    mask = timeline.kind == Kind.COMPUTE
    begun, launched = timeline.start_ns[mask], trace.launch_ns[mask]
    if not len(begun):
        return np.zeros(len(start), dtype=bool)
    prompt = (launch != UNKNOWN_NS) & (start - launch <= _prompt_ns(trace)) & ~_shared_launch(trace, found)
    following = np.searchsorted(begun, start, side="left")
    next_launch = launched[np.minimum(following, len(begun) - 1)]
    empty = (following < len(begun)) & (next_launch >= end)
    running = Measure(timeline.covered(Kind.COMPUTE)).between(start, end) > 0
    blocked = Measure(trace.blocking).between(start, end) > 0
    out: npt.NDArray[np.bool_] = prompt & empty & ~running & ~blocked
    return out


def _prompt_ns(trace: Trace) -> int:
    """A start within this of the launch came as soon as it could."""
    return 2 * max(launch_latency_ns(trace), 1_000)


def _starved_by_cpu(trace: Trace, owned_from: Ns, end: Ns) -> Ns:
    """Exposed time that ended because the CPU at last launched compute that ran beside the collective.

    Such compute did not depend on the collective and started as soon as it was launched.
    """
    timeline = trace.timeline
    mask = timeline.kind == Kind.COMPUTE
    out = np.zeros(len(end), dtype=np.int64)
    if not mask.any() or not len(end):
        return out
    compute = timeline.covered(Kind.COMPUTE)
    launch = trace.launch_ns[mask]
    begun = timeline.start_ns[mask]
    prompt = (launch != UNKNOWN_NS) & (begun - launch <= _prompt_ns(trace))
    # Of each stretch of compute, the span that opens it.
    first = np.searchsorted(begun, compute.start, side="left")
    opened_promptly, launched = prompt[first], launch[first]
    low = np.searchsorted(compute.start, owned_from, side="right")
    high = np.searchsorted(compute.start, end, side="left")
    for i in np.flatnonzero(high > low).tolist():
        for k in range(int(low[i]), int(high[i])):
            gap_from = max(int(owned_from[i]), int(compute.end[k - 1]) if k else int(owned_from[i]))
            if opened_promptly[k] and launched[k] > gap_from:
                out[i] += int(compute.start[k]) - gap_from
    return out
