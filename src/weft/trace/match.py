"""Matches the same collective on several ranks, and aligns the ranks' clocks.

Hosts' clocks differ, but the ranks of a collective leave it together. So clocks are aligned by the ends of
matched collectives; the starts then show which rank came last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Ns
from weft.trace.collectives import Collectives
from weft.trace.record import Trace

# A rank leaves these only when all have entered. A broadcast's root or a sender may leave before that.
_JOINT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "other")

_MIN_COMMON = 2
"""Two ranks' clocks are compared only if they share at least this many collectives."""

_SHIFTS = range(-8, 9)
"""By how many collectives two ranks' profiling windows may be offset."""

_TRUSTED_SPREAD_NS = 200_000
"""Ends that scatter more than this (median deviation) do not reveal the clock offset."""


@dataclass(frozen=True, eq=False)
class Match:
    """The result of matching for one rank; one entry per communication span."""

    last_entered_ns: Ns
    """When the last rank entered, on this rank's clock; the span's own start if unmatched."""
    matched: npt.NDArray[np.bool_]
    offset_ns: int
    """This rank's clock minus that of the first rank of its run."""
    spread_ns: int
    """How far the ends of matched collectives scatter around that offset (median deviation)."""


def match(traces: Sequence[Trace], found: Sequence[Collectives]) -> list[Match]:
    """Matches collectives across the ranks of each run. A run with a single rank stays unmatched."""
    out = [_unmatched(t, c) for t, c in zip(traces, found, strict=True)]
    for run in _runs(traces):
        if len(run) > 1:
            for at, result in _match_run(run, traces, found).items():
                out[at] = result
    return out


def _unmatched(trace: Trace, found: Collectives) -> Match:
    start = trace.timeline.start_ns[found.span]
    return Match(start, np.zeros(len(start), dtype=bool), 0, 0)


def _runs(traces: Sequence[Trace]) -> list[list[int]]:
    """Traces that may belong to the same run: the n-th trace of every rank."""
    seen: Counter[int] = Counter()
    runs: dict[int, list[int]] = defaultdict(list)
    for at, trace in enumerate(traces):
        rank = trace.rank if trace.rank is not None else -1 - at
        runs[seen[rank]].append(at)
        seen[rank] += 1
    return list(runs.values())


_Key = tuple[str, str, int]


def _keys(trace: Trace, found: Collectives) -> list[_Key | None]:
    """Communicator, kind, and the number of the call among these, per span; None if it cannot be matched."""
    streams: dict[int, int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    keys: list[_Key | None] = []
    names = [
        (_communicator(trace, message), kind)
        for kind, message in zip(found.kind, _messages_of(trace, found), strict=True)
    ]
    stream = trace.timeline.stream[found.span].tolist()
    sequence = trace.sequence[found.span].tolist()
    for i, label in enumerate(found.label.tolist()):
        group, kind = names[label]
        if kind not in _JOINT and not (kind == "send_recv" and not group):
            keys.append(None)
            continue
        if not group:  # without a name, the stream stands for the communicator, in order of first use
            group = f"stream {streams.setdefault(stream[i], len(streams))}"
        number = sequence[i] if sequence[i] >= 0 else counts[group, kind]
        counts[group, kind] += 1
        keys.append((group, kind, number))
    return keys


def _messages_of(trace: Trace, found: Collectives) -> list[int]:
    first: dict[int, int] = {}
    for span, label in zip(found.span.tolist(), found.label.tolist(), strict=True):
        first.setdefault(label, int(trace.message[span]))
    return [first[i] for i in range(len(found.kind))]


def _communicator(trace: Trace, message: int) -> str:
    what = trace.messages[message]
    return f"{what.group} {what.members}".strip()


def _match_run(run: list[int], traces: Sequence[Trace], found: Sequence[Collectives]) -> dict[int, Match]:
    tables = {at: _table(traces[at], found[at]) for at in run}
    reference = run[0]
    offsets: dict[int, tuple[int, int, int]] = {reference: (0, 0, 0)}
    for at in run[1:]:
        relation = _relate(tables[reference], tables[at])
        if relation is not None:
            offsets[at] = relation
    aligned = [at for at in run if at in offsets]
    if len(aligned) < 2:
        return {}
    latest: dict[_Key, int] = {}
    members: Counter[_Key] = Counter()
    for at in aligned:
        offset, _, shift = offsets[at]
        for key, (start, _) in tables[at].items():
            moved = (key[0], key[1], key[2] - shift)
            latest[moved] = max(latest.get(moved, start - offset), start - offset)
            members[moved] += 1
    out = {}
    for at in aligned:
        offset, spread, shift = offsets[at]
        spans = found[at].span
        entered = traces[at].timeline.start_ns[spans].copy()
        end = traces[at].timeline.end_ns[spans]
        matched = np.zeros(len(spans), dtype=bool)
        for i, own in enumerate(_keys(traces[at], found[at])):
            common = (own[0], own[1], own[2] - shift) if own else None
            if common and members[common] > 1:
                matched[i] = True
                entered[i] = min(max(latest[common] + offset, int(entered[i])), int(end[i]))
        out[at] = Match(entered, matched, offset, spread)
    return out


_Table = dict[_Key, tuple[int, int]]


def _table(trace: Trace, found: Collectives) -> _Table:
    start, end = trace.timeline.start_ns[found.span].tolist(), trace.timeline.end_ns[found.span].tolist()
    keys = _keys(trace, found)
    return {key: (start[i], end[i]) for i, key in enumerate(keys) if key is not None}


def _relate(reference: _Table, other: _Table) -> tuple[int, int, int] | None:
    """Clock offset, its spread and the numbering shift that align two ranks best; None if none aligns them.

    The true shift makes all ends agree; a wrong one scatters them by the time between two collectives. The
    unshifted numbering wins unless another is clearly better.
    """
    best: tuple[int, int, int] | None = None
    for shift in sorted(_SHIFTS, key=abs):
        pairs = [
            (there[1] - here[1])
            for key, there in other.items()
            if (here := reference.get((key[0], key[1], key[2] - shift))) is not None
        ]
        if len(pairs) < max(_MIN_COMMON, min(len(reference), len(other)) // 2):
            continue
        ends = np.array(pairs, dtype=np.int64)
        offset = int(np.median(ends))
        spread = int(np.median(np.abs(ends - offset)))
        if best is None or spread * 4 < best[1]:
            best = (offset, spread, shift)
    if best is None or best[1] > _TRUSTED_SPREAD_NS:
        return None
    return best
