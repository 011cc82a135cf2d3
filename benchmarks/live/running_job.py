"""An example of this repository as a running job: its step, and live tuning's controls on it."""

from __future__ import annotations

import runpy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from configs import EXAMPLES, RANKS, Config

from weft.kernels import is_comm
from weft.policy import Policy
from weft.shim import binding, stats
from weft.timeline import Kind, intersect, union
from weft.tuning.live.controls import LaunchControls
from weft.tuning.live.options import Facts

NAME = 120  # characters kept of a kernel's name
PROFILED = 2  # steps


class Job:
    """The job under measurement."""

    def __init__(self, step: Callable[[int], Any]) -> None:
        self._step, self._number = step, 0
        self._controls = LaunchControls(Policy(), RANKS, models=True)
        self._prepared: set[Policy] = set()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step(self._number)
            self._number += 1

    def profile(self) -> Facts:
        """What live tuning knows about the job before its trials."""
        self._controls.learn()
        self.steps(PROFILED)
        return self._controls.facts(PROFILED)

    def apply(self, policy: Policy) -> None:
        """Apply a policy from the next step on."""
        if policy not in self._prepared:
            self._controls.synchronize()
            self._controls.prepare(policy, None)
            self._prepared.add(policy)
            self._controls.apply(policy)
            self.steps(2)  # new communicators connect, new reducers order their buckets
        self._controls.apply(policy)

    def ms(self, policy: Policy, count: int) -> float:
        """Milliseconds of a step under a policy."""
        self.apply(policy)
        return self.ms_as_is(count)

    def ms_as_is(self, count: int) -> float:
        """Milliseconds of a step, after two uncounted steps."""
        self.steps(2)
        start = _now()
        self.steps(count)
        return _ms_between(start, _now()) / count

    def silence(self) -> None:
        """Turn collectives into no-ops from now on: wrong results, but the time of compute alone."""
        for group in groups():
            for lane in group._lanes.values():
                lane.ranks = _Silent()


class _Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def run(config: Config, loop: Callable[[Callable[[int], Any], Any], None]) -> None:
    """Run the example with a ghost rank and with `loop` in place of its loop over steps."""
    from weft.comm import ghost

    ghost.impersonate(RANKS)
    sys.path.insert(0, str(EXAMPLES))
    import common

    common.loop = loop
    sys.argv = [*config.arguments(steps=1), "--any-order"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def groups() -> list[Any]:
    """The process groups of ghosts."""
    import torch.distributed as dist

    from weft.comm.ghost import GhostGroup

    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, GhostGroup)]


def look(job: Job, count: int = 3) -> dict[str, Any]:
    """Profile some steps with torch: the share of communication, and the kernels that overlap with it.

    Comes last, because the profiler makes later launches cost more.
    """
    import torch

    from weft.execute import spans

    def once() -> None:
        job.steps(count)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    timeline = spans.record_timeline(once) if torch.cuda.is_available() else None
    if timeline is None or not len(timeline):
        return {"share_pct": None, "kernels": []}
    figures, comm = timeline.figures(), timeline.covered(Kind.COMM)
    per_step = 1e-6 / count
    blocks = _blocks_per_sm()
    kernels = []
    for index, name in enumerate(timeline.names):
        mine = timeline.name == index
        if timeline.kind[mine][0] != Kind.COMPUTE:
            continue
        spent = union(timeline.start_ns[mine], timeline.end_ns[mine])
        shared = intersect(spent, comm).total_ns
        row = {"name": name[:NAME], "ms": spent.total_ns * per_step, "beside_ms": shared * per_step}
        kernels.append(row | {"blocks_per_sm": blocks.get(name[:NAME])})
    kernels.sort(key=lambda kernel: -kernel["beside_ms"])
    return {
        "share_pct": 100 * figures.comm_ns / figures.span_ns,
        "comm_ms": figures.comm_ns * per_step,
        "exposed_ms": figures.exposed_ns * per_step,
        "compute_ms": figures.compute_ns * per_step,
        "idle_ms": figures.idle_ns * per_step,
        "kernels": kernels[:12],
    }


def _blocks_per_sm() -> dict[str, int]:
    """Blocks per SM that fit of each compute kernel, by demangled name."""
    path = binding.attach()
    found: dict[str, int] = {}
    for row, _ in binding.read_process(path).rows() if path is not None else ():
        symbol = row.name.decode(errors="replace")
        if not is_comm(symbol):
            name = stats.demangle(symbol)[:NAME]
            found[name] = max(row.natural_blocks, found.get(name, 0))
    return found


def software() -> tuple[str, str]:
    """The versions of NCCL and torch, and the device."""
    import torch

    if not torch.cuda.is_available():
        return "", "cpu"
    from weft.comm import nccl

    return nccl.load_nccl().version_text, f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _now() -> Any:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return 1e3 * (end - start)
    end.synchronize()
    return float(start.elapsed_time(end))


def alone_ms(job: Job, count: int) -> float:
    """Milliseconds of a step without communication. Nothing can be measured afterwards."""
    job.apply(Policy())
    job.silence()
    return statistics.median(job.ms_as_is(count) for _ in range(3))
