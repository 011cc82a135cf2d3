"""Fluid simulation of copies and kernels on the GPUs of a node: rates change only when a task starts or ends.

The kernels of a rank run in sequence. Copies share links max-min fairly. They slow concurrent kernels by the
memory bandwidth they use and, if SMs move the bytes, by the SMs they occupy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.sim.fabric import Fabric, fair

MEMORY_STALL = 0.5
"""Relative slowdown of a compute-bound kernel, per fraction of the memory bandwidth that copies use.

Fitted to one measurement: an all-gather of 64 MiB shards and a GEMM the size of 8192³ on eight H100 (pytorch
PR 172714) take 2.96 ms in sequence, 2.02 ms overlapped by shards with copies on SMs, and 1.77 ms with copy
engines; the model gives 2.99, 2.07 and 1.71 ms."""
LEAST_MEMORY = 0.25
"""Fraction of the memory bandwidth that copies always leave to kernels."""
_SAME_S = 1e-10
"""Events closer together than this are simultaneous."""
_ENDLESS = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One rank's kernel, copy from a peer, or library collective of fixed duration."""

    name: str
    rank: int
    after: tuple[int, ...] = ()
    """Indices of the tasks that this one waits for."""
    issue_s: float = 0.0
    """Time at which the host issues the task."""
    source: int = -1
    """Copy: source rank; -1 for other tasks."""
    copied_bytes: float = 0.0
    alone_s: float = 0.0
    """Kernel: duration of its arithmetic with all SMs."""
    shared_s: float = 0.0
    """Kernel: duration of its arithmetic on the SMs that copies leave free."""
    memory_bytes: float = 0.0
    """Kernel: device memory traffic in bytes."""
    fixed_s: float = 0.0
    """Library collective: duration."""

    @property
    def is_copy(self) -> bool:
        """Whether the task is a copy from a peer."""
        return self.source >= 0

    @property
    def moves(self) -> bool:
        """Whether the task is a copy or a collective; neither runs on the stream of the kernels."""
        return self.source >= 0 or self.fixed_s > 0


@dataclass(frozen=True, kw_only=True)
class FlowNode:
    """The resources that the tasks share."""

    fabric: Fabric
    memory_bytes_per_s: float
    lanes: int
    """Most concurrent copies of a rank."""
    start_s: float
    """Delay from the start of a copy to its first byte."""
    traffic: float
    """Bytes of memory traffic at each end per byte copied."""
    most_bytes_per_s: float = _ENDLESS
    """Limit on the bytes per second that a rank receives."""
    takes_sms: bool = False
    """Whether copies use SMs."""
    stream_gap_s: float = 0.0
    """Gap between the end of a kernel and the start of the rank's next one."""
    event_gap_s: float = 0.0
    """Gap between the end of a task and the start of one that waits for it on another stream."""


@dataclass(frozen=True)
class Flowed:
    """Start and end of each task, in seconds."""

    start_s: list[float]
    end_s: list[float]

    @property
    def total_s(self) -> float:
        """End of the last task, in seconds."""
        return max(self.end_s, default=0.0)


@dataclass
class _State:
    """Running and waiting tasks."""

    waits: list[int]
    ready_s: list[float]
    followers: list[list[int]]
    kernels: list[list[int]]
    """Kernels of each rank that have not started; the next one is last."""
    free_s: list[float]
    lanes: list[int]
    queues: list[list[int]]
    """Copies of each rank that are ready, in order of issue."""
    left: dict[int, float] = field(default_factory=dict)
    """Remaining bytes of active copies and remaining fractions of running kernels."""
    running: list[int] = field(default_factory=list)
    """Running kernel of each rank; -1 if none."""
    timers: list[tuple[float, int]] = field(default_factory=list)
    """(time, task): a copy is ready or moves its first byte, a collective starts or ends, a kernel starts."""


def slowed(arithmetic_s: float, memory_bytes: float, taken: float, memory_bytes_per_s: float) -> float:
    """Duration of a kernel while copies use `taken` bytes per second of device memory bandwidth."""
    share = min(taken / memory_bytes_per_s, 1 - LEAST_MEMORY)
    return max(
        arithmetic_s * (1 + MEMORY_STALL * share), memory_bytes / memory_bytes_per_s / (1 - share), 1e-9
    )


def flow(node: FlowNode, tasks: Sequence[Task]) -> Flowed:
    """Simulate the tasks of ranks 0 to `fabric.period` - 1; the other ranks behave like these."""
    return _Run(node, tasks).result()


class _Run:
    def __init__(self, node: FlowNode, tasks: Sequence[Task]) -> None:
        self.node, self.tasks = node, tasks
        ranks = node.fabric.period
        self.start = [-1.0] * len(tasks)
        self.end = [-1.0] * len(tasks)
        self.now = 0.0
        self.changed = True
        """Whether the set of active copies has changed since the rates were computed."""
        self.copying: dict[int, float] = {}
        self.busy: list[float] = []
        self.rates: dict[tuple[tuple[int, int], ...], list[float]] = {}
        self.capacity = dict(enumerate(node.fabric.capacity))
        self.weights = dict(node.fabric.folded)
        if node.most_bytes_per_s < _ENDLESS:
            first = len(node.fabric.capacity)
            for (source, target), links in node.fabric.folded.items():
                self.weights[source, target] = {**links, first + target: 1.0}
                self.capacity[first + target] = node.most_bytes_per_s
        followers: list[list[int]] = [[] for _ in tasks]
        kernels: list[list[int]] = [[] for _ in range(ranks)]
        for i, task in enumerate(tasks):
            for before in task.after:
                followers[before].append(i)
            if not task.moves:
                kernels[task.rank].append(i)
        for queue in kernels:
            queue.reverse()
        self.state = _State(
            waits=[len(task.after) for task in tasks],
            ready_s=[task.issue_s for task in tasks],
            followers=followers,
            kernels=kernels,
            free_s=[0.0] * ranks,
            lanes=[node.lanes] * ranks,
            queues=[[] for _ in range(ranks)],
            running=[-1] * ranks,
        )

    def result(self) -> Flowed:
        for i, task in enumerate(self.tasks):
            if not task.after:
                self._ready(i)
        self._wake()
        while self.state.left or self.state.timers:
            speeds = self._speeds()
            step = min((left / speeds[i] for i, left in self.state.left.items()), default=_ENDLESS)
            if self.state.timers:
                step = min(step, self.state.timers[0][0] - self.now)
            self._advance(max(0.0, step), speeds)
            self._wake()
        return Flowed(self.start, self.end)

    def _speeds(self) -> dict[int, float]:
        """Speed of each active task: bytes per second of a copy, fraction per second of a kernel."""
        tasks, state = self.tasks, self.state
        if self.changed:
            self._share()
        speeds, busy = dict(self.copying), self.busy
        for rank, i in enumerate(state.running):
            if i >= 0:
                task = tasks[i]
                copying = self.node.takes_sms and state.lanes[rank] < self.node.lanes
                arithmetic = task.shared_s if copying else task.alone_s
                taken = self.node.traffic * busy[rank]
                speeds[i] = 1.0 / slowed(arithmetic, task.memory_bytes, taken, self.node.memory_bytes_per_s)
        return speeds

    def _share(self) -> None:
        """Share the links among the active copies. Sets of copies recur, so their rates are cached."""
        tasks, ranks = self.tasks, self.node.fabric.period
        moving = [i for i in self.state.left if tasks[i].is_copy]
        moving.sort(key=lambda i: (tasks[i].source, tasks[i].rank))
        key = tuple((tasks[i].source, tasks[i].rank) for i in moving)
        rates = self.rates.get(key)
        if rates is None:
            rates = fair([self.weights[pair] for pair in key], self.capacity, _ENDLESS)
            self.rates[key] = rates
        self.copying = dict(zip(moving, rates, strict=True))
        self.busy = [0.0] * ranks
        for (source, target), rate in zip(key, rates, strict=True):
            self.busy[target] += rate
            self.busy[source % ranks] += rate
        self.changed = False

    def _advance(self, step: float, speeds: dict[int, float]) -> None:
        state = self.state
        self.now += step
        ended = []
        for i in state.left:
            state.left[i] -= step * speeds[i]
            if state.left[i] <= _SAME_S * speeds[i]:
                ended.append(i)
        for i in ended:
            del state.left[i]
            self._ended(i)

    def _ended(self, i: int) -> None:
        task, state, gap = self.tasks[i], self.state, self.node.event_gap_s
        self.end[i] = self.now
        if task.is_copy:
            self.changed = True
            state.lanes[task.rank] += 1
            self._feed(task.rank)
        elif not task.fixed_s:
            state.running[task.rank] = -1
            state.free_s[task.rank] = self.now + self.node.stream_gap_s
            self._next_kernel(task.rank)
        for follower in state.followers[i]:
            other = self.tasks[follower]
            # Consecutive kernels of a rank need no event.
            late = gap if task.moves or other.moves else 0.0
            state.ready_s[follower] = max(state.ready_s[follower], self.now + late)
            state.waits[follower] -= 1
            if not state.waits[follower]:
                self._ready(follower)

    def _ready(self, i: int) -> None:
        """All dependencies of a task have ended; it may start at `ready_s`."""
        task, state = self.tasks[i], self.state
        if task.moves:
            heapq.heappush(state.timers, (max(state.ready_s[i], self.now), i))
        else:
            self._next_kernel(task.rank)

    def _next_kernel(self, rank: int) -> None:
        state = self.state
        if state.running[rank] >= 0 or not state.kernels[rank]:
            return
        i = state.kernels[rank][-1]
        if not state.waits[i]:
            state.kernels[rank].pop()
            state.running[rank] = i
            heapq.heappush(state.timers, (max(state.ready_s[i], state.free_s[rank], self.now), i))

    def _wake(self) -> None:
        """Process the timers that are due: activate copies, start kernels, end collectives."""
        state = self.state
        while state.timers and state.timers[0][0] <= self.now + _SAME_S:
            _, i = heapq.heappop(state.timers)
            task = self.tasks[i]
            if task.fixed_s:
                if self.start[i] >= 0:
                    self._ended(i)
                else:
                    self.start[i] = self.now
                    heapq.heappush(state.timers, (self.now + task.fixed_s, i))
            elif not task.is_copy:
                self.start[i] = self.now
                state.left[i] = 1.0
            elif self.start[i] >= 0:
                self.changed = True
                state.left[i] = max(task.copied_bytes, 1.0)
            else:
                heapq.heappush(state.queues[task.rank], i)
                self._feed(task.rank)

    def _feed(self, rank: int) -> None:
        """Assign free lanes to waiting copies."""
        state = self.state
        while state.lanes[rank] and state.queues[rank]:
            i = heapq.heappop(state.queues[rank])
            state.lanes[rank] -= 1
            self.start[i] = self.now
            heapq.heappush(state.timers, (self.now + self.node.start_s, i))
