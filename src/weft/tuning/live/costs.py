"""Costs: what communication costs a step, by cause, from the shim's trace. They show which levers to try.

Exposed communication is split by kind: gradient reductions are exposed after the computation (the tail),
parameter gathers before it. This runs inside users' programs, so it uses only the standard library.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from weft.shim.event_clock import PLACED_LATENCY_NS
from weft.shim.interval_sets import common, total, union_spans
from weft.shim.spans import Span, compute_time

_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}
_Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class CommCosts:
    """Milliseconds per step, averaged over the recorded steps."""

    exposed_ms: dict[str, float] = field(default_factory=dict)
    """Communication during which no compute kernel runs, by kind of collective."""
    late_ms: float = 0.0
    """Time during which collectives waited for SMs while compute kernels ran."""
    slowed_ms: float = 0.0
    """Extra time of compute kernels because collectives ran at the same time."""
    held_ms: float = 0.0
    """SM time that the collectives' blocks take, as whole-GPU time; unavoidable for collectives on SMs."""

    @property
    def cost_ms(self) -> float:
        """Avoidable time per step: exposed plus slowed, minus the SM time that collectives always take."""
        return max(0.0, sum(self.exposed_ms.values()) + self.slowed_ms - self.held_ms)


def comm_costs(spans: Sequence[Span], steps: int, sms: int) -> CommCosts | None:
    """The costs over `steps` recorded steps on a GPU with `sms` SMs; None if they cannot be determined."""
    if steps < 1 or sms < 1 or any(span.kind == "unknown" for span in spans):
        return None
    comm = [span for span in spans if span.kind == "comm"]
    compute = [span for span in spans if span.kind in ("compute", "graph")]
    busy = compute_time(spans)
    carried = union_spans((span.start_ns, span.end_ns) for span in comm)
    ms = 1e-6 / steps
    held = sum((s.end_ns - s.start_ns) * min(1.0, math.prod(s.raw.grid) / sms) for s in comm)
    waits = union_spans(
        (s.raw.before_ns, s.start_ns - PLACED_LATENCY_NS) for s in comm if s.raw.before_ns >= 0
    )
    return CommCosts(
        exposed_ms={kind: ns * ms for kind, ns in _exposed(comm, carried, busy).items()},
        late_ms=common(waits, busy) * ms,
        slowed_ms=_slowed(compute, carried, held / max(1, total(carried))) * ms,
        held_ms=held * ms,
    )


def _exposed(comm: Iterable[Span], carried: _Intervals, busy: _Intervals) -> dict[str, float]:
    """Exposed nanoseconds by kind; where kinds overlap, their common time is split in proportion."""
    by_kind: dict[str, _Intervals] = defaultdict(list)
    for span in comm:
        by_kind[_kind(span.name)].append((span.start_ns, span.end_ns))
    alone = {}
    for kind, intervals in by_kind.items():
        own = union_spans(intervals)
        alone[kind] = float(total(own) - common(own, busy))
    every, whole = sum(alone.values()), total(carried) - common(carried, busy)
    return {kind: ns * whole / every for kind, ns in alone.items()} if every else alone


def _slowed(compute: Sequence[Span], carried: _Intervals, share: float) -> float:
    """Nanoseconds that compute kernels lost to collectives, compared with launches of the same kernel alone.

    A kernel that never ran alone is assumed to lose the SMs that collectives hold, a `share` of the GPU.
    """
    overlapped = {id(span): common([(span.start_ns, span.end_ns)], carried) for span in compute}
    alone: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for span in compute:
        if not overlapped[id(span)]:
            alone[_same(span)].append(span.end_ns - span.start_ns)
    lost = 0.0
    for span in compute:
        inside = overlapped[id(span)]
        if inside:
            took = span.end_ns - span.start_ns
            usual = alone.get(_same(span))
            lost += min(inside, max(0.0, took - median(usual))) if usual else inside * min(1.0, share)
    return lost


def _same(span: Span) -> tuple[object, ...]:
    return (span.name, *span.raw.grid)


def _kind(name: str) -> str:
    """The kind of a collective, from its kernel's name."""
    plain = name.lower().replace("_", "")
    return next((kind for part, kind in _COLLECTIVES.items() if part in plain), "other")
