"""A small event-driven GPU that runs programs of several ranks and writes what a profiler would have seen.

A rank is a list of host actions. Each GPU has a compute and a communication stream. A collective waits for the
compute issued before it (as a process group does), ends on all ranks at once, and overlaps with compute only if
that compute leaves it room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trace_building import GEMM, TraceBuilder

LATENCY_NS = 4_000
CALL_NS = 2_000
COMPUTE_STREAM, COMM_STREAM = 7, 20


@dataclass
class Op:
    kind: str  # "compute", "comm", "host" or "wait": a wait holds later compute until all issued comm is done
    ns: int = 0
    greedy: bool = False  # compute that takes every SM, so that no collective can start meanwhile
    after: int | None = None  # a collective that waits only for the n-th compute, by an event recorded there


def compute(ns: int, greedy: bool = False) -> Op:
    return Op("compute", ns, greedy)


def comm(ns: int, after: int | None = None) -> Op:
    return Op("comm", ns, after=after)


def host(ns: int) -> Op:
    return Op("host", ns)


def wait() -> Op:
    return Op("wait")


@dataclass
class _Work:
    kind: str
    ns: int
    launch: int
    greedy: bool
    needs_compute: int  # index of the last compute that must be over, -1 for none
    needs_comm: int  # likewise for communication
    recorded: bool = False
    start: int = -1
    end: int = -1


@dataclass
class _Rank:
    computes: list[_Work] = field(default_factory=list)
    comms: list[_Work] = field(default_factory=list)
    compute_at: int = 0
    comm_at: int = 0


def run(programs: list[list[Op]], clocks_ns: list[int]) -> list[TraceBuilder]:
    """Runs the ranks together; every rank must issue the same number of collectives."""
    ranks = [_issue(program) for program in programs]
    while any(r.compute_at < len(r.computes) or r.comm_at < len(r.comms) for r in ranks):
        _start_next(ranks)
    return [_trace(rank, number, len(ranks), clocks_ns[number]) for number, rank in enumerate(ranks)]


def _issue(program: list[Op]) -> _Rank:
    rank, now, waits_for = _Rank(), 0, -1
    for op in program:
        if op.kind == "host":
            now += op.ns
        elif op.kind == "wait":
            waits_for = len(rank.comms) - 1
        elif op.kind == "compute":
            rank.computes.append(_Work("compute", op.ns, now, op.greedy, -1, waits_for))
            now += CALL_NS
        else:
            last = len(rank.computes) - 1 if op.after is None else op.after
            rank.comms.append(_Work("comm", op.ns, now, False, last, -1, recorded=op.after is not None))
            now += CALL_NS
    return rank


def _start_next(ranks: list[_Rank]) -> None:
    """Starts whichever work can start first; at the same time, compute goes first."""
    ready = []
    for number, rank in enumerate(ranks):
        if rank.compute_at < len(rank.computes):
            when = _compute_start(rank, rank.computes[rank.compute_at])
            if when is not None:
                ready.append((when, 0, number))
        if rank.comm_at < len(rank.comms):
            when = _comm_start(rank, rank.comms[rank.comm_at])
            if when is not None:
                ready.append((when, 1, number))
    assert ready, "the programs deadlock"
    when, is_comm, number = min(ready)
    rank = ranks[number]
    if not is_comm:
        work = rank.computes[rank.compute_at]
        work.start, work.end = when, when + work.ns
        rank.compute_at += 1
        return
    at = rank.comm_at
    rank.comms[at].start = when
    rank.comm_at += 1
    same = [r.comms[at] for r in ranks]
    if all(work.start >= 0 for work in same):
        end = max(work.start for work in same) + max(work.ns for work in same)
        for work in same:
            work.end = end


def _compute_start(rank: _Rank, work: _Work) -> int | None:
    before = rank.computes[rank.compute_at - 1].end if rank.compute_at else 0
    if work.needs_comm >= 0:
        if rank.comms[work.needs_comm].end < 0:
            return None
        before = max(before, rank.comms[work.needs_comm].end)
    return max(before, work.launch + LATENCY_NS)


def _comm_start(rank: _Rank, work: _Work) -> int | None:
    before = 0
    if rank.comm_at:
        before = rank.comms[rank.comm_at - 1].end
        if before < 0:
            return None
    if work.needs_compute >= 0:
        if rank.computes[work.needs_compute].end < 0:
            return None
        before = max(before, rank.computes[work.needs_compute].end)
    when = max(before, work.launch + LATENCY_NS)
    for running in rank.computes[: rank.compute_at]:
        if running.greedy and running.start <= when < running.end:
            when = running.end
    return when


def _trace(rank: _Rank, number: int, world: int, clock_ns: int) -> TraceBuilder:
    out = TraceBuilder(rank=number, world_size=world, clock_ns=clock_ns)
    correlations: dict[int, int] = {}
    jobs = sorted([(w.launch, i, w) for i, w in enumerate(rank.computes)], key=lambda j: j[:2])
    for launch, i, work in jobs:
        correlations[i] = out.gpu(GEMM, work.start, work.end, stream=COMPUTE_STREAM, launch=launch)
    for work in rank.comms:
        if work.recorded:
            # CUDA's correlation ids grow with each call: the record comes right after the compute it marks.
            out.span(
                "cuda_sync", "Stream Wait Event", work.launch - 100, work.launch - 100, pid=9, tid=1,
                stream=COMM_STREAM, wait_on_stream=COMPUTE_STREAM,
                wait_on_cuda_event_record_corr_id=correlations[work.needs_compute] + 1,
            )  # fmt: skip
        out.collective(work.start, work.end, stream=COMM_STREAM, launch=work.launch)
    return out
