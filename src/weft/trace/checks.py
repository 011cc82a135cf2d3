"""Warnings about the traces: missing or repeated ranks, stray times, ranks without communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import PurePath

import numpy as np

from weft.timeline import Kind
from weft.trace.record import Trace

STRAY_SHARE = 0.01
"""A group of spans is stray if it is at most this share of all spans and STRAY_SPAN holds too."""

STRAY_SPAN = 0.5
"""The gap between stray spans and the others is more than this share of the whole trace."""

MAX_NAMED = 8


def numbered_by_host(traces: Sequence[Trace]) -> list[Trace]:
    """Gives processes of several hosts different ranks, in the order of the hosts' first files.

    A profiler that sees one host numbers its processes from 0, on every host. If no two hosts have the same
    rank, the ranks are those of the job and stay as they are.
    """
    hosts: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.host and trace.rank is not None:
            hosts[trace.host].append(trace)
    ranks = [{trace.rank for trace in mine} for mine in hosts.values()]
    if sum(map(len, ranks)) == len(set().union(*ranks)):
        return list(traces)
    sizes = [max(trace.world_size or (trace.rank or 0) + 1 for trace in mine) for mine in hosts.values()]
    first = dict(zip(hosts, accumulate(sizes, initial=0), strict=False))
    return [
        replace(trace, rank=first[trace.host] + trace.rank, world_size=trace.world_size and sum(sizes))
        if trace.host and trace.rank is not None
        else trace
        for trace in traces
    ]


def in_order(traces: Sequence[Trace]) -> list[Trace]:
    """Sorts traces by rank, device and time. Successive traces of the same GPU get cycle numbers."""
    by_rank: dict[tuple[int, int], list[Trace]] = defaultdict(list)
    for at, trace in enumerate(traces):
        rank = trace.rank if trace.rank is not None else (1 << 31) + at
        by_rank[rank, trace.device].append(trace)
    out = []
    for _, mine in sorted(by_rank.items(), key=lambda item: item[0]):
        mine.sort(key=lambda trace: int(trace.timeline.start_ns[0]) if len(trace.timeline) else 0)
        apart = len(mine) > 1 and not _overlapping(mine)
        out += [replace(trace, cycle=number if apart else None) for number, trace in enumerate(mine)]
    return out


def warnings(traces: Sequence[Trace]) -> list[str]:
    """One line for each problem that makes the figures misleading."""
    return [*_repeated(traces), *_stray(traces), *_silent(traces), *_missing(traces)]


def _missing(traces: Sequence[Trace]) -> list[str]:
    world = max((trace.world_size or 0 for trace in traces), default=0)
    given = len({trace.rank for trace in traces if trace.rank is not None})
    if not 0 < given < world or not any((trace.timeline.kind == Kind.COMM).any() for trace in traces):
        return []
    return [
        f"traces of {given} of {world} ranks: time in which a collective waits for a rank that is not here "
        "counts as its own; give all ranks to tell them apart"
    ]


def _repeated(traces: Sequence[Trace]) -> list[str]:
    files: dict[tuple[int, int], list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.rank is not None and trace.cycle is None:
            files[trace.rank, trace.device].append(trace)
    out = []
    for (rank, _), mine in files.items():
        if len(mine) > 1:
            names = ", ".join(PurePath(trace.path).name for trace in mine[:3])
            out.append(
                f"rank {rank} appears {len(mine)} times at the same time ({names}): totals count it twice"
            )
    return out


def _overlapping(traces: list[Trace]) -> bool:
    """Whether traces, sorted by start, overlap in time: the same cycle twice, not two cycles."""
    ends = [int(trace.timeline.end_ns.max()) for trace in traces]
    return any(int(after.timeline.start_ns[0]) < end for after, end in zip(traces[1:], ends, strict=False))


def _stray(traces: Sequence[Trace]) -> list[str]:
    out = []
    for trace in traces:
        start = trace.timeline.start_ns
        if len(start) < 3:
            continue
        gaps = np.diff(start)
        at = int(np.argmax(gaps))
        few = min(at + 1, len(start) - at - 1)
        whole = int(trace.timeline.end_ns.max()) - int(start[0])
        if gaps[at] > STRAY_SPAN * whole and few <= max(STRAY_SHARE * len(start), 1):
            out.append(
                f"{trace.path}: {few} of {len(start)} GPU events are {gaps[at] / 1e9:.3g} s away from the "
                "rest; the span and the idle time include that gap"
            )
    return out


def _silent(traces: Sequence[Trace]) -> list[str]:
    silent = [trace for trace in traces if not (trace.timeline.kind == Kind.COMM).any()]
    if not silent or len(silent) == len(traces):
        return []
    named = ", ".join("?" if trace.rank is None else str(trace.rank) for trace in silent[:MAX_NAMED])
    more = f" and {len(silent) - MAX_NAMED} more" if len(silent) > MAX_NAMED else ""
    return [f"no communication in rank {named}{more}: its overlap is unknown, not 0%"]
