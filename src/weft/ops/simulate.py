"""Simulates schedules on a node: the time of a fused operation, its losses by cause, and its Timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weft.errors import UsageError
from weft.ops.case import (
    DMA_TRAFFIC,
    FUSED_ENGINES,
    ISSUE_S,
    KERNEL_S,
    ROW_BYTES,
    SM_COPY_SLOWED,
    SM_START_S,
    Case,
    gemm,
    gemm_with_copies,
    library_collective_s,
    schedule_candidates,
)
from weft.ops.schedule import Add, Matmul, Recv, Schedule, Send, Step, build
from weft.sim.fabric import SWITCH_GPUS, Fabric
from weft.sim.flow import Flowed, FlowNode, Task, flow
from weft.timeline import Kind, Timeline

MAX_PERIOD = 18
"""Most ranks that can be simulated individually if none represents others."""


@dataclass(frozen=True)
class ScheduleResult:
    """The simulation of one schedule; timeline and losses are rank 0's."""

    case: Case
    name: str
    engine: str
    tasks: Sequence[Task]
    flowed: Flowed

    @property
    def seconds(self) -> float:
        return self.flowed.total_s

    @property
    def ms(self) -> float:
        return 1e3 * self.flowed.total_s

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of rank 0: its kernels on stream 0, the copies from peer i on stream 100 + i."""
        shown = [i for i, task in enumerate(self.tasks) if task.rank == 0]
        shown.sort(key=lambda i: self.flowed.start_s[i])
        names = tuple(dict.fromkeys(self.tasks[i].name for i in shown))
        index = {name: i for i, name in enumerate(names)}
        comm = [self.tasks[i].moves for i in shown]
        streams = [
            0 if not moves else 100 + max(self.tasks[i].source, 0)
            for i, moves in zip(shown, comm, strict=True)
        ]
        return Timeline(
            start_ns=np.array([round(self.flowed.start_s[i] * 1e9) for i in shown], dtype=np.int64),
            end_ns=np.array([round(self.flowed.end_s[i] * 1e9) for i in shown], dtype=np.int64),
            stream=np.array(streams, dtype=np.int64),
            kind=np.array([Kind.COMM if moves else Kind.COMPUTE for moves in comm], dtype=np.uint8),
            name=np.array([index[self.tasks[i].name] for i in shown], dtype=np.int32),
            names=names,
            resources={"bytes": np.array([int(self.tasks[i].copied_bytes) for i in shown], dtype=np.int64)},
        )

    @cached_property
    def losses(self) -> Losses:
        return _losses(self)


@dataclass(frozen=True)
class Losses:
    """Where the time of a schedule goes: the seconds add up to its duration."""

    product_s: float
    """Time of the whole GEMM in one piece, alone."""
    decomposition_s: float
    """Additional time because the GEMM is cut."""
    contention_s: float
    """Additional time because copies run concurrently."""
    staging_s: float
    """Copies and sums on this rank."""
    exposed_s: float
    """Time in which nothing is computed: waiting for a transfer or a launch."""
    links_used: int
    """Most links into this rank that were busy at the same time."""
    links: int
    """Links into this rank."""

    def to_dict(self) -> dict[str, float]:
        """Milliseconds, for JSON."""
        times = ("product", "decomposition", "contention", "staging", "exposed")
        found: dict[str, float] = {
            f"{name}_ms": round(1e3 * getattr(self, f"{name}_s"), 6) + 0.0 for name in times
        }
        return {**found, "links_used": self.links_used, "links": self.links}


def simulate(case: Case, name: str, engine: str = "dma") -> ScheduleResult:
    """Simulate one schedule of a case with one engine."""
    if engine not in FUSED_ENGINES:
        raise UsageError(f"engine {engine!r} is not known; use one of {', '.join(FUSED_ENGINES)}")
    if case.fabric.period > MAX_PERIOD:
        raise UsageError(
            f"{case.ranks} ranks do not fill the switches of a PCIe tree evenly, and more than {MAX_PERIOD} "
            f"cannot be simulated one by one; use {case.ranks // SWITCH_GPUS * SWITCH_GPUS} ranks"
        )
    tasks = _library(case) if name == "serial" and engine == "sm" else _tasks(case, name)
    return ScheduleResult(case, name, engine, tasks, flow(flow_node(case, engine), tasks))


def exhaustive(case: Case, engines: tuple[str, ...] = FUSED_ENGINES) -> list[ScheduleResult]:
    """Simulate all candidates."""
    return [simulate(case, name, engine) for name, engine in schedule_candidates(case, engines)]


def flow_node(case: Case, engine: str) -> FlowNode:
    """The resources that the tasks of a case share."""
    figures, joined = case.costs.profile.figures, case.fabric
    shared = {
        "fabric": joined,
        "memory_bytes_per_s": figures.memory_tb_s * 1e12,
        "stream_gap_s": figures.stream_gap_us * 1e-6,
        "event_gap_s": figures.event_gap_us * 1e-6,
    }
    if engine == "dma":
        return FlowNode(**shared, lanes=joined.engines, start_s=joined.copy_start_s, traffic=DMA_TRAFFIC)  # type: ignore[arg-type]
    return FlowNode(
        **shared,  # type: ignore[arg-type]
        lanes=case.ranks - 1,
        start_s=SM_START_S,
        traffic=figures.comm_traffic * figures.comm_miss / 2,
        most_bytes_per_s=figures.comm_ctas * figures.cta_gb_s * 1e9 / SM_COPY_SLOWED,
        takes_sms=True,
    )


def _tasks(case: Case, name: str) -> list[Task]:
    """Tasks for the steps of the ranks that represent all. A Recv is the copy; a Send sets its start."""
    schedules = [build(case.operation, name, case.problem, rank) for rank in range(case.fabric.period)]
    issued = [[step for step in schedule.steps if not isinstance(step, Send)] for schedule in schedules]
    order = [(rank, step) for rank, steps in enumerate(issued) for step in steps]
    index = {(rank, step.id): i for i, (rank, step) in enumerate(order)}
    tasks: list[Task] = []
    for rank, steps in enumerate(issued):
        for i, step in enumerate(steps, 1):
            after = [index[rank, before] for before in step.after]
            if isinstance(step, Recv):
                after += _given(schedules, index, rank, step)
            tasks.append(_task(case, rank, step, tuple(after), i * ISSUE_S))
    return tasks


def _given(
    schedules: Sequence[Schedule], index: Mapping[tuple[int, str], int], rank: int, step: Recv
) -> list[int]:
    """The tasks that the peer must finish before its part can be pulled, on the rank that represents it."""
    ranks, stand_in = schedules[0].problem.ranks, step.peer % len(schedules)
    send = schedules[stand_in].sends.get(((rank + stand_in - step.peer) % ranks, step.round))
    if send is None:  # the stand-in does not have the last rows of an uneven split
        return []
    return [index[stand_in, before] for before in send.after if (stand_in, before) in index]


def _task(case: Case, rank: int, step: Step, after: tuple[int, ...], issue_s: float) -> Task:
    if isinstance(step, Recv):
        whole = step.target.cols == (case.n if case.operation == "matmul_reduce_scatter" else case.k)
        lost = 0 if whole else ROW_BYTES * step.target.rows
        return Task(
            name=f"copy from {step.peer}",
            rank=rank,
            after=after,
            issue_s=issue_s,
            source=step.peer,
            copied_bytes=step.bytes + lost,
        )
    if isinstance(step, Matmul):
        alone = gemm(case, *step.shape, parts=len(step.a), accumulate=step.accumulate)
        slowed = gemm_with_copies(case, *step.shape, parts=len(step.a), accumulate=step.accumulate)
        return Task(
            name="matmul {}x{}x{}".format(*step.shape),
            rank=rank,
            after=after,
            issue_s=issue_s,
            alone_s=alone.compute_s,
            shared_s=slowed.compute_s,
            memory_bytes=alone.memory_bytes,
        )
    word = "sum" if isinstance(step, Add) else "permute" if step.id.startswith("permute") else "stage"
    return Task(
        name=word,
        rank=rank,
        after=after,
        issue_s=issue_s,
        alone_s=KERNEL_S,
        shared_s=KERNEL_S,
        memory_bytes=step.bytes,
    )


def _library(case: Case) -> list[Task]:
    """The tasks of the serial schedule: the library's collective and the GEMM, in sequence."""
    whole = gemm(case, case.rows, case.n, case.k)
    compute = Task(
        name=f"matmul {case.rows}x{case.n}x{case.k}",
        rank=0,
        issue_s=ISSUE_S,
        alone_s=whole.compute_s,
        shared_s=whole.compute_s,
        memory_bytes=whole.memory_bytes,
    )
    move = Task(name=f"library {case.operation}", rank=0, issue_s=ISSUE_S, fixed_s=library_collective_s(case))
    first, last = (compute, move) if case.operation == "matmul_reduce_scatter" else (move, compute)
    return [first, replace(last, after=(0,), issue_s=2 * ISSUE_S)]


def _losses(result: ScheduleResult) -> Losses:
    case, flowed = result.case, result.flowed
    whole = gemm(case, case.rows, case.n, case.k).seconds
    memory = case.costs.profile.figures.memory_tb_s * 1e12
    alone = staged = busy = 0.0
    for i, task in enumerate(result.tasks):
        if task.rank == 0 and not task.moves:
            seconds = max(task.alone_s, task.memory_bytes / memory)
            busy += flowed.end_s[i] - flowed.start_s[i]
            alone += seconds
            staged += seconds if not task.name.startswith("matmul") else 0.0
    return Losses(
        product_s=whole,
        decomposition_s=alone - staged - whole,
        contention_s=busy - alone,
        staging_s=staged,
        exposed_s=flowed.total_s - busy,
        links_used=_links_used(result),
        links=case.fabric.in_links,
    )


def _last(joined: Fabric, source: int) -> tuple[int, ...]:
    """The last link on the route from `source` to rank 0."""
    return joined.routes[source][0][-1:]


def _links_used(result: ScheduleResult) -> int:
    """Most links into rank 0 that were busy at once."""
    joined, flowed = result.case.fabric, result.flowed
    copies = [(i, t) for i, t in enumerate(result.tasks) if t.rank == 0 and t.is_copy]
    if not copies:
        return joined.in_links
    changes = [(flowed.start_s[i], 1, _last(joined, t.source)[0]) for i, t in copies]
    changes += [(flowed.end_s[i], -1, _last(joined, t.source)[0]) for i, t in copies]
    busy: dict[int, int] = {}
    most = 0
    for _, change, link in sorted(changes, key=lambda each: (each[0], each[1])):
        busy[link] = busy.get(link, 0) + change
        most = max(most, sum(1 for count in busy.values() if count))
    return most
