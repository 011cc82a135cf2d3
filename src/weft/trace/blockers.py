"""Which compute kernels ready collectives wait for, and what those kernels leave room for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.timeline import Kind
from weft.trace.names import short_name
from weft.trace.record import Trace

if TYPE_CHECKING:
    from weft.gpu.specs import GpuSpec
    from weft.trace.analysis import RankAnalysis

# Matrix kernels reuse what they load, so fewer per SM cost little. Memory-bound kernels need them all.
_MATRIX = re.compile(r"gemm|matmul|nvjet|cutlass|conv|attention|flash|fmha|mfma|_mm_|\bmm\b", re.IGNORECASE)

Kernel = tuple[str, int, int, int, int]
"""Name, blocks, threads per block, registers per thread, shared bytes per block."""


@dataclass(frozen=True)
class Blocker:
    """A kind of compute kernel that holds up one collective. Times in µs, means over ranks."""

    collective: str
    kernel: str
    """The one that holds it up longest, of those that take the same control."""
    says: str
    """What its resources say, in words."""
    control: str
    """`head_start`, `residency`, `priority`, or `none` if it leaves room anyway."""
    residency: int
    """Blocks per SM to keep, for `residency`."""
    waited_us: float
    exposed_us: float
    """What of the collective's exposed time this wait explains."""
    calls: float
    """Collectives per rank that waited."""


def blockers(ranks: Sequence[RankAnalysis]) -> list[Blocker]:
    """Blockers by collective and control, the costliest first."""
    waited: dict[tuple[str, str], dict[Kernel, float]] = defaultdict(lambda: defaultdict(float))
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], float] = defaultdict(float)
    verdicts: dict[Kernel, tuple[str, int, str]] = {}
    for rank in ranks:
        spec = device_spec(rank.trace)
        for collective, behind_ns, kernels in _waits(rank):
            whole = sum(kernels.values())
            for kernel, ns in kernels.items():
                verdicts.setdefault(kernel, judge(spec, kernel))
                key = (collective, verdicts[kernel][0])
                waited[key][kernel] += ns / 1e3 / len(ranks)
                exposed[key] += behind_ns * ns / whole / 1e3 / len(ranks)
                calls[key] += ns / whole / len(ranks)
    out = []
    for key, of_kernel in waited.items():
        worst = max(of_kernel.items(), key=lambda item: item[1])[0]
        control, residency, says = verdicts[worst]
        total = sum(of_kernel.values())
        out.append(Blocker(key[0], worst[0], says, control, residency, total, exposed[key], calls[key]))
    return sorted(out, key=lambda blocker: -blocker.exposed_us)


def _waits(rank: RankAnalysis) -> list[tuple[str, int, dict[Kernel, int]]]:
    """Collectives that waited behind compute: name, what that exposed, and the kernels waited for."""
    timeline, why = rank.trace.timeline, rank.attribution
    behind = why.of("behind_compute")
    compute = np.flatnonzero(timeline.kind == Kind.COMPUTE)
    begun, ended = timeline.start_ns[compute], timeline.end_ns[compute]
    longest = int((ended - begun).max()) if len(compute) else 0
    out = []
    for i in np.flatnonzero(behind > 0).tolist():
        span = int(rank.found.span[i])
        low, high = int(why.ready_ns[i]), int(timeline.start_ns[span])
        first = int(np.searchsorted(begun, low - longest))
        last = int(np.searchsorted(begun, high))
        kernels: dict[Kernel, int] = defaultdict(int)
        for k in range(first, last):
            shared = min(high, int(ended[k])) - max(low, int(begun[k]))
            if shared > 0:
                kernels[_kernel(rank.trace, int(compute[k]))] += shared
        if kernels:
            out.append((short_name(timeline.names[timeline.name[span]]), int(behind[i]), kernels))
    return out


def _kernel(trace: Trace, at: int) -> Kernel:
    timeline = trace.timeline
    blocks, threads, registers, shared = (
        int(timeline.resources[key][at]) for key in ("blocks", "threads", "registers", "shared_bytes")
    )
    return (timeline.names[timeline.name[at]], blocks, threads, registers, shared)


def device_spec(trace: Trace) -> GpuSpec | None:
    """The GPU of a trace: what the trace says of it, and a preset for the rest. None for an unknown one."""
    from weft.gpu.probe import complete

    told = trace.properties
    name = trace.device_name

    def figure(key: str) -> int:
        value = told.get(key)
        return value if isinstance(value, int) and value > 0 else 0

    if not name or not figure("computeMajor"):
        return None
    live = {
        "sms": figure("numSms"),
        "warp_size": figure("warpSize"),
        "max_threads_per_sm": figure("maxThreadsPerMultiprocessor"),
        "registers_per_sm": figure("regsPerMultiprocessor"),
        "shared_bytes_per_sm": figure("sharedMemPerMultiprocessor"),
    }
    vendor = "amd" if figure("warpSize") == 64 or "amd" in name.lower() else "nvidia"
    return complete(name, vendor, (figure("computeMajor"), figure("computeMinor")), live)[0]


def judge(spec: GpuSpec | None, kernel: Kernel) -> tuple[str, int, str]:
    """The control that this kernel calls for, the residency to keep, and why in words."""
    from weft.gpu.occupancy import blocks_per_sm

    name, blocks, threads, registers, shared = kernel
    if spec is None or min(blocks, threads) < 1 or min(registers, shared) < 0:
        return "priority", 0, "its resources are not in the trace"
    fits = blocks_per_sm(spec, threads, registers, shared)
    if fits < 1:
        return "priority", 0, "its resources do not fit this GPU"
    each = f"{fits} block{'s' if fits > 1 else ''} per SM fit{'' if fits > 1 else 's'}"
    if blocks < spec.sms:
        return "none", 0, f"{blocks} blocks on {spec.sms} SMs leave room"
    if blocks <= fits * spec.sms:
        return "head_start", 0, f"{blocks} blocks, all resident at once: {each}"
    waves = f"{blocks} blocks, {blocks / (fits * spec.sms):.1f} waves: {each}"
    if fits > 1 and _MATRIX.search(name):
        return "residency", max(fits // 2, 1), waves
    return "priority", 0, waves
