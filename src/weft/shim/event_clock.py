"""Computes when kernels ran, from CUDA events, their cost, and the delay between a host call and the GPU.

An event fires some time after the preceding kernel has ended, and the next kernel starts some time after the
event. On an H200 both delays together take 2.4 us if nothing else happens, 5 us while the host submits work,
and up to 8 us while collectives load the memory. The tracer therefore measures the delay in place: after some
kernels it inserts a probe, an empty kernel between two events.

Runs inside users' programs, so it uses only the standard library. Times are integer nanoseconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from weft.shim import tracer
from weft.shim.interval_sets import inside, union_spans
from weft.shim.tracer import Recording

PLACED_LATENCY_NS = 12_000
"""Most time from a collective's placement to the event after its stamp; a longer time is a wait for SMs."""
USUAL_LATENCY_NS = 8_000
"""Assumed latency if every collective of a recording waited, so that it cannot be derived from them."""

SUBMITTED_NS = 4_000
"""An event that fires within this time of its submission shows only that the operation had already ended."""
LATE_NS = 1_000
"""Delays at most this much above the smallest one nearby are those of an idle stream."""
NEIGHBOURS = 128
EMPTY_NS = 620
"""The duration that a profiler shows for an empty kernel."""
MOST_OVERHEAD_NS = 10_000
LEAST_PROBES, NEAR_PROBES = 3, 15
END_SHARE = 0.65
"""The share of an event's excess cost that lies between the end of a kernel and the event; the remaining cost
lies between the event and the next kernel. Measured on an H200."""
BUSY_STREAM, HELD_STREAM, IDLE_STREAM = "busy", "held", "idle"
"""Kinds of streams, on which events cost different times: with work queued, held back by the tracer, idle."""
DOORBELL_SHARE = 0.4
"""How much later than an event a kernel on an idle stream starts, as a share of the time between an event and
the kernel queued behind it. Measured on an H200, where it is 1.0 of 2.4 us."""


class EventClock:
    """The timing of one recording. The host and GPU clocks drift, so delays come from nearby launches."""

    def __init__(self, recording: Recording) -> None:
        spin_ns, twice_ns, stamp_ns, _ = recording.header.calibrated_ns
        self.overhead_ns = _overhead(spin_ns, twice_ns, stamp_ns)
        """From an event to the start of the next kernel, if all work is queued and the host is idle."""
        self.doorbell_ns = round(DOORBELL_SHARE * self.overhead_ns)
        self.stamp_ns = min(max(stamp_ns - self.overhead_ns, 0), MOST_OVERHEAD_NS)
        """From the start of a stamp to the following event."""
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
        self._probes = _Probes(recording.spans, self._valid_probes(recording.spans))
        self.latency_ns = self._placed_latency(recording.spans)

    def _valid_probes(self, spans: Iterable[Any]) -> list[tuple[Any, int]]:
        """Spans followed by a probe, and how much longer the probe took than on an idle GPU.

        A probe is valid only if the host had queued all of it before the GPU reached it. Otherwise the time
        between its events contains the host's calls.
        """
        found = []
        for raw in spans:
            if raw.again_ns >= 0:
                delay_ns = self.delay_ns(raw.host_ns) or 0
                if raw.after_ns >= raw.host_placed_ns + delay_ns:
                    found.append((raw, raw.again_ns - raw.after_ns - EMPTY_NS - self.overhead_ns))
        return found

    def delay_ns(self, host_ns: int) -> int | None:
        """The time from a host call to its execution on the GPU; None if no event is known."""
        if not self._starts:
            return None
        i = max(0, bisect_right(self._starts, host_ns) - 1)
        return round(min(self._delays[max(0, i - 1) : i + 2]))

    def earliest_ns(self, raw: Any, free_ns: int) -> tuple[int, bool]:
        """When an operation starts unless it waits for SMs, and whether its stream waited for the host.

        The stream becomes free at `free_ns`.
        """
        ready_ns = max(raw.before_ns, free_ns)
        delay_ns = self.delay_ns(raw.host_ns)
        queued = raw.kind in (tracer.KERNEL_SPAN, tracer.GRAPH)
        excess_ns = self._probes.excess_ns(
            ready_ns, HELD_STREAM if raw.flags & tracer.STALLED else BUSY_STREAM
        )
        behind_ns = self.overhead_ns + round((1 - END_SHARE) * excess_ns) if queued else 0
        if delay_ns is None:
            return (raw.host_ns if ready_ns < 0 else ready_ns + behind_ns), False
        submitted_ns = raw.host_end_ns + delay_ns + queued * self.doorbell_ns
        if ready_ns < 0 or submitted_ns > ready_ns + behind_ns:
            return submitted_ns, True
        return ready_ns + behind_ns, False

    def end_ns(self, raw: Any, *, idle: bool) -> int:
        """When an operation ended. `idle`: its stream waited for the host."""
        kind = HELD_STREAM if raw.flags & tracer.STALLED else IDLE_STREAM if idle else BUSY_STREAM
        return int(raw.after_ns - round(END_SHARE * self._probes.excess_ns(raw.after_ns, kind)))

    def placed_ns(self, raw: Any, earliest_ns: int) -> int:
        """When a collective was placed."""
        if self._at_once(raw):
            return earliest_ns
        gap_ns = raw.placed_ns - earliest_ns
        if gap_ns > 3 * self.latency_ns:  # the stamp was already queued behind the collective
            late_ns = round(END_SHARE * self._probes.excess_ns(raw.placed_ns, BUSY_STREAM))
            return int(raw.placed_ns - self.stamp_ns - late_ns)
        return int(earliest_ns + max(0, gap_ns - self.latency_ns))

    def _at_once(self, raw: Any) -> bool:
        """Whether a collective was placed before the event for its placement was submitted."""
        delay_ns = self.delay_ns(raw.host_ns)
        return delay_ns is not None and bool(raw.placed_ns <= raw.host_placed_ns + delay_ns + SUBMITTED_NS)

    def _placed_latency(self, spans: Iterable[Any]) -> int:
        """The smallest observed time from a collective's placement to the event after its stamp.

        That is the time on free SMs.
        """
        both = [s for s in spans if s.placed_ns >= 0 and s.before_ns >= 0 and not self._at_once(s)]
        gaps = (s.placed_ns - self.earliest_ns(s, -1)[0] for s in both)
        least = min((gap for gap in gaps if gap >= 0), default=USUAL_LATENCY_NS)
        return int(least) if least < PLACED_LATENCY_NS else USUAL_LATENCY_NS


def _overhead(spin_ns: int, twice_ns: int, stamp_ns: int) -> int:
    """The cost of an event on an idle GPU.

    Derived from an empty kernel between two events, or else from two kernels of known difference; 0 if the
    tracer measured neither.
    """
    if stamp_ns >= 0:
        found = stamp_ns - EMPTY_NS
    elif spin_ns >= 0 and twice_ns >= 0:
        found = 2 * spin_ns - twice_ns - EMPTY_NS
    else:
        return 0
    return min(max(found, 0), MOST_OVERHEAD_NS)


class _Probes:
    """How much more events cost in place than on an idle GPU, while collectives run and while none runs."""

    def __init__(self, spans: Iterable[Any], valid: Iterable[tuple[Any, int]]) -> None:
        self._comm = union_spans(
            (max(s.before_ns, s.placed_ns), s.after_ns)
            for s in spans
            if s.flags & tracer.COMM_SPAN and s.kind == tracer.KERNEL_SPAN and s.before_ns >= 0
        )
        self._comm_starts = [start for start, _ in self._comm]
        self._found: dict[tuple[str, bool], list[tuple[int, int]]] = defaultdict(list)
        for raw, excess_ns in valid:
            held = raw.flags & tracer.STALLED
            kind = HELD_STREAM if held else BUSY_STREAM if raw.before_ns < 0 else IDLE_STREAM
            self._found[kind, self._in_comm(raw.after_ns)].append((raw.after_ns, excess_ns))
        for found in self._found.values():
            found.sort()

    def excess_ns(self, at_ns: int, kind: str) -> int:
        """The excess cost at `at_ns` on a stream of this kind: the median of the nearest such probes."""
        during = self._in_comm(at_ns)
        found = self._found.get((kind, during), [])
        if len(found) < LEAST_PROBES and kind != IDLE_STREAM:
            # Whether a collective loads the memory matters more than whether the host submits.
            alike = self._found.get((IDLE_STREAM, True), []) if during else []
            found = max(found, alike or self._found.get((kind, False), []), key=len)
        if not found:
            return 0
        i = bisect_left(found, (at_ns, 0))
        first = max(0, min(i - NEAR_PROBES // 2, len(found) - NEAR_PROBES))
        near = statistics.median(excess for _, excess in found[first : first + NEAR_PROBES])
        return round(min(max(near, 0), MOST_OVERHEAD_NS))

    def _in_comm(self, at_ns: int) -> bool:
        return inside(at_ns, self._comm, self._comm_starts)
