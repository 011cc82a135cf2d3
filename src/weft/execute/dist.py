"""One rank per process (torchrun): the same Workload over torch.distributed, on GPUs or, with gloo, on CPUs.

All ranks make the same calls in the same order. Every time returned is that of the slowest rank, so that a
race makes the same decisions on every rank.
"""

from __future__ import annotations

import math
import time
from typing import Any

from weft.checks import check_choice
from weft.comm import dist as groups
from weft.errors import UnavailableError, UsageError, WeftError
from weft.execute import payload, spans
from weft.execute.base import PipelineSample, WrongResultError
from weft.execute.compute import build_compute
from weft.execute.gpu import TorchGpu
from weft.policy import Policy
from weft.ranks import Ranks
from weft.rules import CommRule
from weft.shim import apply, binding
from weft.timeline import Timeline
from weft.workload import MODES, Workload


class DistExecutor:
    """Runs this process's rank. CPUs are for correctness only: their times mean little."""

    simulated = False

    def __init__(self, device: str = "cuda") -> None:
        try:
            import torch
        except ImportError:
            raise UnavailableError("ranks are measured through PyTorch: pip install torch") from None
        self.rank, self.size = groups.start_group(device)
        self._ranks = Ranks()
        self._cuda = device == "cuda"
        self._gpu = TorchGpu(torch.cuda.current_device()) if self._cuda else None
        self._where = self._gpu.device if self._gpu else torch.device("cpu")
        name = self._gpu.name if self._gpu else "gloo"
        self.device = f"{device}:{self.size}x{name}"
        self._groups = groups.Groups(device)
        self._prepared: tuple[Workload, list[Any], Any, Any] | None = None
        self._lanes: list[Any] = []
        self._rules: tuple[CommRule, ...] = ()

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        """Run the pipeline once on every rank and check this rank's result."""
        try:
            return self._measure(workload, policy, mode)
        except RuntimeError as error:  # raised by torch.distributed when a peer is gone
            first = next(iter(str(error).strip().splitlines()), "no message")
            raise WeftError(
                f"{workload}: rank {self.rank} lost a peer (did another rank exit?): {first}"
            ) from None

    def _measure(self, workload: Workload, policy: Policy, mode: str) -> PipelineSample:
        calls, send, recv = self._ready(workload, policy, mode)
        if workload.collective == "all_reduce":
            recv.copy_(send)
        else:
            recv.fill_(math.nan)
        group = self._groups.get(
            policy.communicator_ctas(policy.max_ctas) if mode == "overlap" else policy.max_ctas,
            policy.priority if mode == "overlap" else "default",
        )
        import torch.distributed as dist

        dist.barrier()
        run = self._gpu_pipeline if self._cuda else self._cpu_pipeline
        ms = run(workload, calls, send, recv, group, mode)
        problem = "" if mode == "compute" else self._wrong(workload, recv)
        if any(self._ranks.gather(bool(problem))):
            raise WrongResultError(problem or f"{workload}: another rank received a wrong result")
        facts = self._gpu.clocks.read() if self._gpu else {}
        return PipelineSample(self._ranks.most(ms), facts)

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        """The timeline of this rank's GPU; empty on a CPU."""
        if not self._cuda:
            return spans.from_rows([])

        def once() -> None:
            self.measure(workload, policy, mode)

        found = spans.record_timeline(once)
        return found if found is not None else spans.from_rows([])

    def info(self) -> dict[str, Any]:
        """The GPU, versions, ranks and backend."""
        own = self._gpu.info() if self._gpu else {}
        return {**own, "ranks": f"{self.size} processes", "backend": "nccl" if self._cuda else "gloo"}

    def clock(self) -> float:
        """Rank 0's monotonic clock in seconds, so that all ranks agree on deadlines."""
        return self._ranks.clock()

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _ready(self, workload: Workload, policy: Policy, mode: str) -> tuple[list[Any], Any, Any]:
        check_choice("mode", mode, MODES)
        self._apply(policy if mode == "overlap" else Policy())
        workload = self._own(workload)
        if self._prepared is None or self._prepared[0] != workload:
            import torch

            self._prepared = None
            send = payload.make_send(workload, self.rank, self._where)
            recv = torch.empty(payload.buffer_sizes(workload)[1], dtype=send.dtype, device=self._where)
            lanes = range(workload.compute_streams if self._cuda else 1)
            calls = [build_compute(workload.compute, self._where, lane) for lane in lanes]
            for call in calls:
                call()  # compile and load kernels outside of the measurement
            self._prepared = (workload, calls, send, recv)
        return self._prepared[1:]

    def _own(self, workload: Workload) -> Workload:
        """The workload with as many ranks as processes."""
        return workload.but(ranks=self.size)

    def _apply(self, policy: Policy) -> None:
        if policy.comm_rules and not self._cuda:
            raise UsageError("comm.rules are for NCCL; gloo has no such choices")
        waits = policy.head_start_mode != "none"
        if not (policy.residency or policy.rules or policy.sm_reserve or policy.comm_rules or waits):
            wanted = None
        elif not self._cuda:
            return  # a CPU has no kernel launches
        else:
            wanted = policy
        if binding.injected():
            apply.shape_launches(wanted or Policy())
            if policy.comm_rules or self._rules:
                apply.follow_rules()  # the barrier before each run has made a communicator
            self._rules = policy.comm_rules
            return
        if wanted is not None:
            raise UnavailableError(
                f"{policy}: needs the launch shim; start it with `weft run -- torchrun … -m weft bench …`"
            )

    def _wrong(self, workload: Workload, recv: Any) -> str:
        workload = self._own(workload)
        positions = payload.sample_positions(workload, 0, self._where)
        got = recv[positions].to(payload.torch_dtype("fp64"))
        wanted = payload.expected_values(workload, self.rank, positions, op="max")
        if bool((got == wanted).all()):
            return ""
        where = int((got != wanted).nonzero()[0])
        return (
            f"{workload}: {workload.collective} gave rank {self.rank} {float(got[where])} at element "
            f"{int(positions[where])} instead of {float(wanted[where])}"
        )

    def _cpu_pipeline(
        self, workload: Workload, calls: list[Any], send: Any, recv: Any, group: Any, mode: str
    ) -> float:
        start, work = time.perf_counter(), None
        for _ in range(workload.iterations):
            if mode != "comm":
                calls[0]()
            if work is not None:
                work.wait()  # collectives share one buffer, so the previous one must end first
            if mode != "compute":
                work = groups.issue(workload.collective, send, recv, group)
                if mode == "sequential":
                    work.wait()
        if work is not None:
            work.wait()
        return 1e3 * (time.perf_counter() - start)

    def _gpu_pipeline(
        self, workload: Workload, calls: list[Any], send: Any, recv: Any, group: Any, mode: str
    ) -> float:
        gpu = self._gpu
        assert gpu is not None
        while len(self._lanes) < workload.compute_streams + 1:
            self._lanes.append(gpu.stream())
        side, *lanes = self._lanes[: workload.compute_streams + 1]
        begin, end = gpu.event(timing=True), gpu.event(timing=True)
        with gpu.on(lanes[0]):
            gpu.flush_l2()
            gpu.sleep(2.0 + 0.2 * workload.iterations)
            begin.record(lanes[0])
        for stream in (*lanes[1:], side):
            stream.wait_event(begin)
        for i in range(workload.iterations):
            lane, call = lanes[i % len(lanes)], calls[i % len(lanes)]
            if mode != "comm":
                with gpu.on(lane):
                    call()
            if mode != "compute":
                computed = gpu.event()
                computed.record(lane if mode != "comm" else lanes[0])
                side.wait_event(computed)
                with gpu.on(side):  # the collective and this stream wait for each other
                    groups.issue(workload.collective, send, recv, group).wait()
                if mode == "sequential":
                    for later in lanes:
                        later.wait_stream(side)
        for stream in (*lanes[1:], side):
            lanes[0].wait_stream(stream)
        end.record(lanes[0])
        gpu.synchronize()
        return gpu.elapsed_ms(begin, end)
