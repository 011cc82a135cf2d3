"""A fake GPU: streams and events on a virtual clock, tensors on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

from weft.execute.base import PipelineSample, WrongResultError
from weft.policy import Policy
from weft.timeline import Timeline
from weft.workload import Workload


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, math.nan

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.gpu.current
        self.at = stream.free_at

    def query(self) -> bool:
        return self.gpu.launches_too_slow


class FakeStream:
    def __init__(self, gpu: FakeGpu, high: bool) -> None:
        self.gpu, self.high, self.free_at, self.number = gpu, high, 0.0, next(gpu.numbers)
        self.cuda_stream = self.number

    def wait_event(self, event: FakeEvent) -> None:
        assert not math.isnan(event.at), "waits for an event that was never recorded"
        self.free_at = max(self.free_at, event.at)

    def run(self, ms: float) -> None:
        self.free_at += ms


class FakeClocks:
    def read(self) -> dict[str, float]:
        return {"sm_mhz": 1980.0}


class FakeGpu:
    """Compute runs `compute_ms` on its lane, a collective `comm_ms` on every rank's stream."""

    name, sm_count, memory_bytes, device = "Fake", 132, 141 * 10**9, "cpu"
    out_of_memory: Any = MemoryError

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.clocks = FakeClocks()
        self.current = FakeStream(self, False)
        self.sleeps: list[float] = []
        self.launches_too_slow = False
        self.flushes = 0

    def stream(self, *, high: bool = False) -> FakeStream:
        return FakeStream(self, high)

    def event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    @contextlib.contextmanager
    def on(self, stream: FakeStream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass

    def elapsed_ms(self, start: FakeEvent, end: FakeEvent) -> float:
        return end.at - start.at

    def sleep(self, ms: float) -> None:
        self.sleeps.append(ms)
        self.current.run(ms)

    def flush_l2(self) -> None:
        self.flushes += 1

    def info(self) -> dict[str, Any]:
        return {"gpu": self.name}


class FakeRanksFactory:
    """Makes LocalRanks whose collectives also take time on the streams.

    `node`: one rank of a node, whose data stands for that of all other ranks.
    """

    def __init__(self, comm_ms: float = 3.0, broken: bool = False, node: bool = False) -> None:
        self.comm_ms, self.broken, self.mirrored, self.made = comm_ms, broken, node, []
        self.windows: list[int] = []

    def copies(self, kind: str, size: int) -> bool:
        return self.mirrored and kind == "all_gather"

    def ranks_here(self, size: int) -> int:
        return 1 if self.mirrored else size

    def __call__(self, size: int, ctas: int | None) -> Any:
        from weft.comm.local import LocalRanks

        self.made.append((size, ctas))
        inner, outer = LocalRanks(size), self

        class Timed:
            def __getattr__(self, name: str) -> Callable[..., None]:
                def issue(send: Any, recv: Any, streams: Any) -> None:
                    others = size - len(send)  # ghosts of a node, which have rank 0's data
                    getattr(inner, name)(
                        [*send, *send * others], [*recv, *(recv[0].clone() for _ in range(others))]
                    )
                    if outer.broken:
                        recv[-1][0] += 1
                    for stream in streams:
                        stream.run(outer.comm_ms * 8 / (ctas or 8))

                return issue

            def register(self, tensors: Any) -> None:
                outer.windows.append(tensors[0].data_ptr())

            def close(self) -> None:
                pass

        return Timed()

    def info(self) -> dict[str, Any]:
        return {"nccl": "fake"}


class FakeShim:
    def __init__(self) -> None:
        self.policies: list[Policy] = []
        self.followed: list[Any] = []

    def shape_launches(self, policy: Policy) -> None:
        self.policies.append(policy)

    def follow_rules(self) -> None:
        self.followed.append(self.policies[-1].comm_rules)


class ModelExecutor:
    """An executor that computes times from a formula, to test the bookkeeping only."""

    simulated = False

    def __init__(
        self, device: str = "model", behaviour: str = "", die_on: str = "", baseline_ctas: int = 8
    ) -> None:
        self.device, self.behaviour, self.die_on = device, behaviour, die_on
        self.calls = 0

    def measure(self, workload: Workload, policy: Policy, mode: str = "overlap") -> PipelineSample:
        import os
        import time

        self.calls += 1
        if self.behaviour == "hang" and policy.priority == "high":
            time.sleep(600)
        if self.behaviour == "die" and policy.priority == "high":
            os._exit(3)
        if self.behaviour == "crash" and policy.priority == "high":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
        if self.behaviour == "wrong" and policy.priority == "high":
            raise WrongResultError(f"{workload}: wrong")
        compute, comm = 4.0, workload.bytes / 3e8 * 8 / (policy.max_ctas or 8)
        ms = {
            "compute": compute,
            "comm": comm,
            "sequential": compute + comm,
            "overlap": max(compute, comm) * (1.1 if policy.priority == "high" else 1.3) + 0.2,
        }[mode]
        ms *= 1 + 0.003 * math.sin(self.calls)
        return PipelineSample(ms * workload.iterations, {"sm_mhz": 1980.0})

    def timeline(self, workload: Workload, policy: Policy, mode: str = "overlap") -> Timeline:
        from weft.execute.spans import from_rows

        return from_rows([(0, 100, 7, "gemm"), (50, 150, 8, "ncclDevKernel_AllReduce")])

    def info(self) -> dict[str, Any]:
        return {"gpu": self.device}

    def close(self) -> None:
        pass


def make_lab(**_: Any) -> Any:
    """The real one-GPU executor on the virtual clock, for a worker process."""
    from weft.execute.cuda import CudaExecutor

    return CudaExecutor(gpu=FakeGpu(), ranks=FakeRanksFactory(), shim=FakeShim())
