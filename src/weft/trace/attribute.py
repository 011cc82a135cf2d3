"""Why communication is exposed: each exposed nanosecond gets one reason, by the rules of docs/analyze.md.

At any moment the communication span that has been running longest owns the exposed time, so all of it is
divided among the spans. Within a span, the time until the last rank has entered is due to the slower rank. On
a stream that the program also computes on, the remaining time is due to stream order. Otherwise the analysis
moves the span to where it could have started: the extra time that would be hidden there is due to whatever
held it back. For the remaining exposed time, the compute kernel that ends it shows what compute waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Kind, Ns
from weft.trace.collectives import Collectives
from weft.trace.covered import Measure
from weft.trace.held import held, idle, same_stream
from weft.trace.match import Match
from weft.trace.ready import EVENT_NS, launch_latency_ns, queue_full, ready_times
from weft.trace.record import UNKNOWN_NS, Trace

REASONS = (
    "same_stream",
    "needed_by_compute",
    "waits_for_input",
    "queue_full",
    "launched_late",
    "behind_compute",
    "slower_rank",
    "pipeline_bubble",
    "nothing_to_hide_behind",
)
"""Why an exposed nanosecond is exposed; docs/analyze.md defines each."""

CAUSES = ("launched_late", "behind_compute", "slower_rank", "nothing_to_hide_behind")
"""The four groups of reasons, by what has to change: the CPU, the GPU's schedule, a rank, the program."""

GROUPS: Mapping[str, str] = {
    "same_stream": "nothing_to_hide_behind",
    "needed_by_compute": "nothing_to_hide_behind",
    "waits_for_input": "nothing_to_hide_behind",
    "queue_full": "launched_late",
    "launched_late": "launched_late",
    "behind_compute": "behind_compute",
    "slower_rank": "slower_rank",
    "pipeline_bubble": "slower_rank",
    "nothing_to_hide_behind": "nothing_to_hide_behind",
}
"""The group (one of CAUSES) of each reason."""

SKEW_TOLERANCE_NS = 10_000
"""Ranks that enter within this time of each other count as simultaneous: clocks are not known better."""

BUBBLE_FACTOR = 1.5
"""A send or receive that takes more than this many times the fastest of its size waited for a stage."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """Exposed nanoseconds per communication span and reason; each row adds up to the exposed time it owns."""

    exposed_ns: Ns
    reason_ns: npt.NDArray[np.int64]
    """One column per entry of REASONS."""
    waited_behind_ns: Ns
    """How long each span was ready but waited while compute ran, whether exposed or not."""
    ready_ns: Ns
    """The earliest time each span could have started, given its launch and dependencies."""
    owned_from_ns: Ns
    """When each span becomes the one that has been running longest; its end if it never does."""

    @property
    def cause_ns(self) -> npt.NDArray[np.int64]:
        """Nanoseconds per span and cause, one column per entry of CAUSES."""
        columns = [[GROUPS[reason] == cause for reason in REASONS] for cause in CAUSES]
        return self.reason_ns @ np.array(columns, dtype=np.int64).T

    def of(self, reason: str) -> Ns:
        """Nanoseconds of one reason, per span."""
        column: Ns = self.reason_ns[:, REASONS.index(reason)]
        return column

    def reasons(self, rows: npt.NDArray[np.bool_] | slice = slice(None)) -> dict[str, int]:
        """Nanoseconds by reason over the given spans."""
        sums = self.reason_ns[rows].sum(axis=0).tolist() if len(self.reason_ns) else [0] * len(REASONS)
        return dict(zip(REASONS, sums, strict=True))

    def totals(self, rows: npt.NDArray[np.bool_] | slice = slice(None)) -> dict[str, int]:
        """Nanoseconds by cause over the given spans."""
        return grouped(self.reasons(rows))


def grouped(reasons: Mapping[str, int]) -> dict[str, int]:
    """Adds up amounts by reason into the four causes."""
    return {cause: sum(ns for key, ns in reasons.items() if GROUPS[key] == cause) for cause in CAUSES}


def attribute(
    trace: Trace, found: Collectives, matched: Match, transfers: Mapping[int, int] | None = None
) -> Attribution:
    """Attributes the exposed time of one rank. `transfers`: see `transfer_times`."""
    timeline = trace.timeline
    start, end = timeline.start_ns[found.span], timeline.end_ns[found.span]
    compute = Measure(timeline.covered(Kind.COMPUTE))

    owned_from = _owned_from(start, end)
    exposed = (end - owned_from) - compute.between(owned_from, end)

    entered = np.where(matched.last_entered_ns > start + SKEW_TOLERANCE_NS, matched.last_entered_ns, start)
    point_to_point = np.array([kind == "send_recv" for kind in found.kind], dtype=bool)[found.label]
    entered = np.maximum(entered, _sent(found, start, end, point_to_point, transfers or {}))
    work = end - entered
    hidden = compute.between(entered, end)
    in_wait = np.minimum(entered, end)
    waiting = np.maximum(in_wait - owned_from, 0) - compute.between(
        owned_from, np.maximum(in_wait, owned_from)
    )

    ready, by_data, data = ready_times(trace, found, start)
    skewed = entered > start
    unstarved = _replay(trace, found, start, end, work, ready, skewed)
    unlaunched = np.minimum(_replay(trace, found, start, end, work, by_data, skewed), unstarved)

    left = _Rest(exposed)
    of_ranks = left.take(waiting) + left.take(
        np.where(skewed, compute.between(start, start + work) - hidden, 0)
    )
    ordered = left.take(np.where(same_stream(trace, found), exposed, 0))
    at_unstarved = compute.between(unstarved, unstarved + work)
    behind = left.take(at_unstarved - hidden)
    at_unlaunched = compute.between(unlaunched, unlaunched + work) + Measure(idle(trace)).between(
        unlaunched, np.minimum(unlaunched + work, start)
    )
    late = left.take(at_unlaunched - np.maximum(at_unstarved, hidden))
    launch = trace.launch_ns[found.span]
    in_queue = Measure(queue_full(trace)).between(unlaunched, np.maximum(launch, unlaunched))
    held_by_queue = 2 * in_queue > np.maximum(launch, unlaunched) - unlaunched

    next_compute = held(trace, found, owned_from, entered)
    host = left.take(next_compute.by_host_ns)
    queue = left.take(next_compute.by_queue_ns)
    needed = left.take(next_compute.by_collective_ns)
    prompt = (data != UNKNOWN_NS) & (start - data <= max(EVENT_NS, 2 * launch_latency_ns(trace)))
    reasons = {
        "same_stream": ordered,
        "needed_by_compute": needed,
        "waits_for_input": np.where(prompt, left.rest, 0),
        "queue_full": queue + np.where(held_by_queue, late, 0),
        "launched_late": host + np.where(held_by_queue, 0, late),
        "behind_compute": behind,
        "slower_rank": np.where(point_to_point, 0, of_ranks),
        "pipeline_bubble": np.where(point_to_point, of_ranks, 0),
        "nothing_to_hide_behind": np.where(prompt, 0, left.rest),
    }
    return Attribution(
        exposed_ns=exposed,
        reason_ns=np.stack([reasons[reason] for reason in REASONS], axis=1),
        waited_behind_ns=compute.between(np.minimum(ready, start), start),
        ready_ns=ready,
        owned_from_ns=owned_from,
    )


class _Rest:
    """Exposed time per span that has no reason yet."""

    def __init__(self, exposed: Ns) -> None:
        self.rest = exposed

    def take(self, wanted: Ns) -> Ns:
        """Takes as much of `wanted` as is left, and returns it."""
        taken: Ns = np.clip(wanted, 0, self.rest)
        self.rest = self.rest - taken
        return taken


def transfer_times(traces: list[Trace], found: list[Collectives]) -> dict[int, int]:
    """Nanoseconds of the shortest send or receive of each size over all ranks: a transfer when nobody waits.

    Keys are bytes; -1 stands for unknown sizes. Sizes that occur only once are left out. NCCL runs all-to-all
    with the same kernels as sends, so unknown sizes count only in a run without all-to-all.
    """
    seen: dict[int, list[int]] = {}
    mixed = False
    for trace, mine in zip(traces, found, strict=True):
        mixed |= "all_to_all" in mine.kind
        point_to_point = np.array([kind == "send_recv" for kind in mine.kind], dtype=bool)[mine.label]
        length = (trace.timeline.end_ns - trace.timeline.start_ns)[mine.span]
        for size, ns in zip(
            mine.bytes[point_to_point].tolist(), length[point_to_point].tolist(), strict=True
        ):
            seen.setdefault(size, []).append(ns)
    return {size: min(times) for size, times in seen.items() if len(times) > 1 and (size >= 0 or not mixed)}


def _sent(
    found: Collectives,
    start: Ns,
    end: Ns,
    point_to_point: npt.NDArray[np.bool_],
    transfers: Mapping[int, int],
) -> Ns:
    """When each send or receive began to move data; its start if there is no sign that it waited."""
    begun = start.copy()
    for i in np.flatnonzero(point_to_point).tolist():
        needed = transfers.get(int(found.bytes[i]))
        if needed is not None and end[i] - start[i] > BUBBLE_FACTOR * needed + SKEW_TOLERANCE_NS:
            begun[i] = end[i] - needed
    return begun


def _owned_from(start: Ns, end: Ns) -> Ns:
    """When each span becomes the one that has been running longest; its end if it never does."""
    if not len(start):
        return start
    earlier = np.concatenate((start[:1], np.maximum.accumulate(end)[:-1]))
    owned: Ns = np.minimum(np.maximum(start, earlier), end)
    return owned


def _replay(
    trace: Trace, found: Collectives, start: Ns, end: Ns, work: Ns, ready: Ns, skewed: npt.NDArray[np.bool_]
) -> Ns:
    """When each span would have started, limited only by `ready` and the previous span on its stream.

    The other rank determines when a span that waits for it ends, so such a span is not moved.
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
