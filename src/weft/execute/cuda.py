"""The lab on one GPU: rank 0 computes, and ghost ranks in the same process join its collectives.

With a node profile, its collectives are those of one rank of that node instead (weft.comm.paced).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from weft.checks import check_choice
from weft.errors import UnavailableError, UsageError
from weft.execute import spans
from weft.execute.base import MemoryFullError, PipelineSample
from weft.execute.compute import build_compute
from weft.execute.gpu import TorchGpu
from weft.execute.payload import Buffers
from weft.execute.pipeline import Pipeline
from weft.execute.rank_makers import NcclMaker, PacedMaker
from weft.policy import Policy
from weft.rules import CommRule
from weft.shim import apply, binding
from weft.timeline import Timeline
from weft.workload import BASELINE_CTAS, DTYPE_BYTES, MODES, Workload, check_resident

MAX_SPIN_MS = 80.0
"""Longest run time of the spin kernel that hides the launches."""


@dataclass
class Prepared:
    """A workload with its compute streams, callables and buffers."""

    workload: Workload
    lanes: list[Any]
    calls: list[Callable[[], object]]
    payload: Buffers
    spin_ms: float
    warm: set[Any] = field(default_factory=set)


class CudaExecutor:
    """Measures on the GPU of this machine. Residency and head start need the launch shim."""

    simulated = False

    def __init__(
        self,
        *,
        baseline_ctas: int | None = BASELINE_CTAS,
        node: str | None = None,
        gpu: Any = None,
        ranks: Any = None,
        shim: Any = None,
    ) -> None:
        """`baseline_ctas`: CTAs of a collective if the policy sets none; None: the library's choice."""
        self._gpu = gpu or TorchGpu()
        self._make_ranks = ranks or (PacedMaker(node) if node else NcclMaker())
        self._shim = shim if shim is not None else _find_shim()
        self.baseline_ctas = baseline_ctas
        self.device = f"cuda:{self._gpu.name}" + (f" as {node}" if node else "")
        self._communicators: dict[tuple[int, int | None, str], Any] = {}
        self._windows: set[tuple[tuple[int, int | None, str], int]] = set()
        self._streams: dict[str, list[Any]] = {"default": [], "high": []}
        self._lanes: list[Any] = []
        self._held: tuple[Any, Buffers] | None = None
        self._prepared: Prepared | None = None
        self._applied: Policy | None = None
        self._rules: tuple[tuple[CommRule, ...], int | None] | None = ((), None)

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        """Run the pipeline once, from the first compute to the last collective, and check the result."""
        prepared, pipeline = self._ready(workload, policy, mode)
        for _ in range(6):
            prepared.payload.poison()
            self._gpu.synchronize()
            begin, end, hidden = pipeline.issue(workload.iterations, prepared.spin_ms)
            self._gpu.synchronize()
            if mode != "compute":
                prepared.payload.check(workload)
            if hidden or prepared.spin_ms >= MAX_SPIN_MS:
                break
            prepared.spin_ms *= 2  # the GPU caught up with the launches, so the time includes gaps
        ms = self._gpu.elapsed_ms(begin, end)
        return PipelineSample(ms, {**self._gpu.clocks.read(), "launches_hidden": hidden})

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        """Run the pipeline once under the profiler; if that records no kernels, once more with events."""
        prepared, pipeline = self._ready(workload, policy, mode)

        def once() -> None:
            pipeline.issue(
                workload.iterations, 2 * prepared.spin_ms
            )  # launches are slower under the profiler
            self._gpu.synchronize()

        found = spans.record_timeline(once) if isinstance(self._gpu, TorchGpu) else None
        if found is not None and len(found):
            return found
        marks: list[tuple[str, Any, Any]] = []
        begin, _, _ = pipeline.issue(workload.iterations, prepared.spin_ms, marks)
        self._gpu.synchronize()
        return spans.from_marks(begin, marks, self._gpu.elapsed_ms)

    def info(self) -> dict[str, Any]:
        """The GPU, the versions, and whether the shim is loaded."""
        found = {**self._gpu.info(), "ranks": "ghost ranks in one process", "shim": self._shim is not None}
        return {**found, "baseline_ctas": self.baseline_ctas, **self._make_ranks.info()}

    def close(self) -> None:
        """Free the communicators and buffers."""
        for ranks in self._communicators.values():
            ranks.close()
        self._communicators.clear()
        self._windows.clear()
        self._prepared, self._held = None, None
        self._gpu.release()

    def _ready(self, workload: Workload, policy: Policy, mode: str) -> tuple[Prepared, Pipeline]:
        check_choice("mode", mode, MODES)
        ctas, here = policy.max_ctas or self.baseline_ctas, self._ranks_here(workload)
        acting = policy if mode == "overlap" else Policy()
        if acting.comm_rules:
            acting = replace(acting, max_ctas=ctas)  # for collectives without a rule
            ctas = acting.communicator_ctas(ctas)
        if here == workload.ranks and ctas is not None:
            check_resident(workload, ctas, self._gpu.sm_count)
        self._apply(acting, workload)
        prepared = self._prepare(workload)
        streams = self._rank_streams(acting.priority, here)
        collective = self._collective(workload, ctas, prepared.payload, streams, acting.engine)
        self._follow_rules(acting)
        wait_us = acting.head_start_us if self._shim is None else 0.0  # the shim waits by itself
        pipeline = Pipeline(self._gpu, prepared.lanes, prepared.calls, streams, collective, mode, wait_us)
        key = (mode == "compute", ctas, acting)
        if key not in prepared.warm:
            # Load the kernels on every lane. Controls that act after a collective need a second iteration.
            later = acting.head_start_mode != "none" or acting.when == "overlap" or acting.sm_reserve > 0
            least = 2 if later else 1
            pipeline.issue(max(least, workload.compute_streams), 0.0)
            self._gpu.synchronize()
            prepared.warm.add(key)
        return prepared, pipeline

    def _apply(self, policy: Policy, workload: Workload) -> None:
        can_copy = getattr(self._make_ranks, "copies", None)
        copies = can_copy is not None and can_copy(workload.collective, workload.ranks)
        refused = apply.not_applied(replace(policy, engine="sm") if copies else policy)
        if refused:
            raise UsageError(f"the lab cannot run this policy: {refused[0]}")
        if self._shim is None:
            needs = _needs_shim(policy)
            if needs:
                raise UnavailableError(
                    f"{needs} needs the launch shim, which is not loaded in this process; "
                    "use `weft bench`, or start it with `weft run -- python …`"
                )
        elif policy != self._applied:
            self._shim.shape_launches(policy)
            self._applied = policy

    def _follow_rules(self, policy: Policy) -> None:
        """Let the shim apply the policy's comm.rules, which it can once a communicator exists."""
        rules = (policy.comm_rules, policy.max_ctas) if policy.comm_rules else ((), None)
        if rules == self._rules:
            return
        self._rules = None  # until they are in force
        self._shim.follow_rules()
        self._rules = rules

    def _prepare(self, workload: Workload) -> Prepared:
        if self._prepared is not None and self._prepared.workload == workload:
            return self._prepared
        self._prepared = None
        while len(self._lanes) < workload.compute_streams:
            self._lanes.append(self._gpu.stream())
        lanes = self._lanes[: workload.compute_streams]
        try:
            found = self._buffers(workload)
            calls = []
            for number, lane in enumerate(lanes):
                with self._gpu.on(lane):
                    calls.append(build_compute(workload.compute, self._gpu.device, number))
            self._gpu.synchronize()
        except self._gpu.out_of_memory:
            self._held = None
            self._gpu.release()
            sent = 2 * workload.ranks * workload.elements * DTYPE_BYTES[workload.compute.dtype]
            raise MemoryFullError(
                f"{workload}: does not fit into {self._gpu.memory_bytes / 1e9:.0f} GB of GPU memory "
                f"(collective buffers alone: up to {sent / 1e9:.1f} GB); use fewer bytes, ranks or streams"
            ) from None
        spin_ms = min(MAX_SPIN_MS, 1.0 + 0.2 * workload.iterations * (1 + workload.compute.repeat / 8))
        self._prepared = Prepared(workload, lanes, calls, found, spin_ms)
        return self._prepared

    def _buffers(self, workload: Workload) -> Buffers:
        """The collective's buffers. They are kept, because most workloads of a suite can share them."""
        key = (workload.collective, workload.elements, workload.ranks, workload.compute.dtype)
        if self._held is None or self._held[0] != key:
            self._held = None  # free the old buffers first
            mirrored = getattr(self._make_ranks, "mirrored", False)
            made = Buffers.make(workload, self._gpu.device, self._ranks_here(workload), mirrored=mirrored)
            self._held = (key, made)
        return self._held[1]

    def _ranks_here(self, workload: Workload) -> int:
        """Number of ranks whose collectives run on this GPU."""
        count = getattr(self._make_ranks, "ranks_here", None)
        return count(workload.ranks) if count is not None else workload.ranks

    def _rank_streams(self, priority: str, count: int) -> list[Any]:
        streams = self._streams[priority]
        while len(streams) < count:
            streams.append(self._gpu.stream(high=priority == "high"))
        return streams[:count]

    def _collective(
        self, workload: Workload, ctas: int | None, data: Buffers, streams: list[Any], engine: str
    ) -> Callable[[], None]:
        """The function that issues the workload's collective for every rank."""
        key = (workload.ranks, ctas, engine)
        if key not in self._communicators:
            self._communicators[key] = self._make_ranks(workload.ranks, ctas)
        place = (key, data.recv[0].data_ptr())
        if engine == "dma" and place not in self._windows:
            self._windows.add(place)
            self._communicators[key].register(data.recv)
        issue = getattr(self._communicators[key], workload.collective)
        return lambda: issue(data.send, data.recv, streams)


def _needs_shim(policy: Policy) -> str:
    """The control that only the shim can apply; "" if there is none."""
    if policy.residency is not None or policy.rules:
        return "residency"
    if policy.comm_rules:
        return "comm.rules"
    if policy.head_start == "placed":
        return "the placed head start"
    if policy.engine == "dma":
        return "comm.engine dma"
    return "compute.sm_reserve" if policy.sm_reserve else ""


def _find_shim() -> Any:
    """The module that applies policies to launches, or None if the shim is not loaded."""
    return apply if binding.injected() else None
