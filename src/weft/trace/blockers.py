"""Which compute kernels ready collectives wait for, and which control helps against each kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.kernels import MATRIX_KERNEL
from weft.timeline import Kind
from weft.trace.attribute import REASONS
from weft.trace.names import short_name
from weft.trace.record import Trace

if TYPE_CHECKING:
    from weft.gpu.specs import GpuSpec
    from weft.trace.analysis import RankAnalysis


class BlockingKernel(NamedTuple):
    """A kernel and the GPU resources it takes; -1 if the trace does not say."""

    name: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int


@dataclass(frozen=True)
class Wait:
    """One collective that was ready and waited behind a kernel. Times in nanoseconds."""

    kernel: BlockingKernel
    kernel_ns: int
    ready_ns: int
    """Time from the kernel's start until the collective was ready; 0 if it was ready before the kernel."""
    comm_ns: int
    ctas: int
    comm_threads: int
    comm_registers: int
    comm_shared_bytes: int


@dataclass(frozen=True)
class Blocker:
    """The kernels that delay one collective and call for the same control. Times in µs, means over ranks."""

    collective: str
    kernel: str
    """Name of the kernel that delays it longest."""
    says: str
    """Why that kernel calls for this control, in words."""
    control: str
    """`head_start`, `residency`, `priority`, or `none` if the kernel leaves room anyway."""
    residency: int
    """Blocks per SM to keep; 0 unless the control is `residency`."""
    waited_us: float
    exposed_us: float
    """The part of the collective's exposed time that these waits explain."""
    saved_us: float
    """The part of `exposed_us` on the critical path."""
    calls: float
    """Collectives per rank that waited."""
    waits: tuple[tuple[Wait, float], ...]
    """Each wait with its part of `saved_us`."""


def blockers(ranks: Sequence[RankAnalysis]) -> list[Blocker]:
    """Blockers by collective and control, the costliest first."""
    found: dict[tuple[str, str], list[tuple[Wait, int, int, int]]] = defaultdict(list)
    verdicts: dict[BlockingKernel, tuple[str, int, str]] = {}
    for rank in ranks:
        spec = device_spec(rank.trace)
        for collective, wait, waited, behind, saved in _waits(rank):
            verdicts.setdefault(wait.kernel, judge(spec, wait.kernel))
            found[collective, verdicts[wait.kernel][0]].append((wait, waited, behind, saved))
    out = []
    scale = 1e3 * max(len(ranks), 1)
    for (collective, _), waits in found.items():
        of_kernel: dict[BlockingKernel, int] = defaultdict(int)
        for wait, waited, _, _ in waits:
            of_kernel[wait.kernel] += waited
        worst = max(of_kernel, key=lambda kernel: of_kernel[kernel])
        control, residency, says = verdicts[worst]
        out.append(
            Blocker(
                collective=collective,
                kernel=worst.name,
                says=says,
                control=control,
                residency=residency,
                waited_us=sum(waited for _, waited, _, _ in waits) / scale,
                exposed_us=sum(behind for _, _, behind, _ in waits) / scale,
                saved_us=sum(saved for *_, saved in waits) / scale,
                calls=len(waits) / max(len(ranks), 1),
                waits=tuple((wait, saved / scale) for wait, _, _, saved in waits),
            )
        )
    return sorted(out, key=lambda blocker: -blocker.saved_us)


def _waits(rank: RankAnalysis) -> list[tuple[str, Wait, int, int, int]]:
    """Collectives that waited behind compute: name, wait, ns waited, ns exposed, ns exposed on the path."""
    timeline, why = rank.trace.timeline, rank.attribution
    behind = why.of("behind_compute")
    on_path = rank.path.saved_ns[:, REASONS.index("behind_compute")]
    compute = np.flatnonzero(timeline.kind == Kind.COMPUTE)
    begun, ended = timeline.start_ns[compute], timeline.end_ns[compute]
    longest = int((ended - begun).max()) if len(compute) else 0
    out = []
    for i in np.flatnonzero(behind > 0).tolist():
        span = int(rank.found.span[i])
        low, high = int(why.ready_ns[i]), int(timeline.start_ns[span])
        first, last = np.searchsorted(begun, (low - longest, high)).tolist()
        shared = np.minimum(high, ended[first:last]) - np.maximum(low, begun[first:last])
        if not len(shared) or shared.max() <= 0:
            continue
        k = first + int(np.argmax(shared))
        comm = _kernel(rank.trace, span)
        wait = Wait(
            kernel=_kernel(rank.trace, int(compute[k])),
            kernel_ns=int(ended[k] - begun[k]),
            ready_ns=max(low - int(begun[k]), 0),
            comm_ns=int(timeline.end_ns[span]) - high,
            ctas=max(comm.blocks, 1),
            comm_threads=comm.threads,
            comm_registers=comm.registers,
            comm_shared_bytes=comm.shared_bytes,
        )
        out.append(
            (short_name(comm.name), wait, int(shared[shared > 0].sum()), int(behind[i]), int(on_path[i]))
        )
    return out


def _kernel(trace: Trace, at: int) -> BlockingKernel:
    timeline = trace.timeline
    blocks, threads, registers, shared = (
        int(timeline.resources[key][at]) for key in ("blocks", "threads", "registers", "shared_bytes")
    )
    return BlockingKernel(timeline.names[timeline.name[at]], blocks, threads, registers, shared)


def device_spec(trace: Trace) -> GpuSpec | None:
    """The GPU of a trace: properties from the trace, missing ones from a preset. None for an unknown GPU."""
    from weft.gpu.probe import complete

    known = trace.properties
    name = trace.device_name

    def figure(key: str) -> int:
        value = known.get(key)
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


def judge(spec: GpuSpec | None, kernel: BlockingKernel) -> tuple[str, int, str]:
    """The control that this kernel calls for, the residency to keep (0 if unused), and why, in words."""
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
    if fits > 1 and MATRIX_KERNEL.search(name):  # it reuses what it loads, so fewer blocks per SM cost little
        return "residency", max(fits // 2, 1), waves
    return "priority", 0, waves
