"""A collective as a launch: its blocks and their rate."""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm.node import Node, Paced
from weft.errors import UsageError
from weft.gpu.cost import NODE_LINKS, node_transfer_s, switch_reduces
from weft.gpu.occupancy import blocks_per_sm
from weft.sim.core import DeadlockError
from weft.sim.fabric import default_topology, node_links
from weft.sim.launches import Launch, LaunchKind, Speed
from weft.sim.profile import Profile, footprint
from weft.workload import DTYPE_BYTES, Workload, collective_ctas

KERNEL_NAMES = {
    "all_reduce": "ncclDevKernel_AllReduce",
    "all_gather": "ncclDevKernel_AllGather",
    "reduce_scatter": "ncclDevKernel_ReduceScatter",
    "all_to_all": "ncclDevKernel_SendRecv",
}
"""Kernel name of each collective."""
FREE_CHANNELS = 16
"""CTAs that the library chooses for a point-to-point collective on one GPU."""
REDUCING = ("all_reduce", "reduce_scatter")
"""Collectives that reduce; copy engines cannot run them."""


@dataclass(frozen=True)
class CollectiveLaunch:
    """One rank's launch of a collective, and the number of ranks on the simulated GPU."""

    launch: Launch
    members: int


def collective(
    workload: Workload, profile: Profile, ctas: int, *, ghost: bool, engine: str, node: Node | None = None
) -> CollectiveLaunch:
    """The collective of one iteration with `ctas` blocks for each rank.

    `ghost`: all ranks share this GPU, as in the lab; otherwise each has its own, and one rank is simulated.
    `node`: node profile that sets the duration and the kernel of a rank's part; None: the GPU's profile does.

    Raises DeadlockError if the blocks cannot all be resident at once.
    """
    if engine == "dma":
        return CollectiveLaunch(_copied(workload, profile, ghost=ghost, node=node), 1)
    figures, count = profile.figures, collective_ctas(workload, ctas)
    members = workload.ranks if ghost else 1
    name = KERNEL_NAMES[workload.collective]
    size = int(figures.comm_threads), int(figures.comm_registers), round(figures.comm_shared_kib * 1024)
    part = _part(workload, ctas, node) if node and not ghost else None
    if part:
        count, size = part.ctas, (part.threads, part.registers, part.shared_bytes)
    place = footprint(profile.spec, name, *size)
    _check_resident(workload, profile, members * count, members, blocks_per_sm(profile.spec, *size))
    if ghost:
        start_s = figures.event_gap_us * 1e-6
        rate = getattr(figures, f"ghost_{workload.collective}_gb_s") * 1e9
        # All-gather and reduce-scatter have as many loads in flight as all-reduce; what makes them slower is
        # not memory latency. Point-to-point transfers do depend on it.
        fastest = figures.ghost_all_reduce_gb_s * 1e9
        if workload.collective == "all_to_all":
            # Measured on an H200: a cap on CTAs does not change the total rate of point-to-point channels.
            rate *= FREE_CHANNELS / count
            fastest = rate
    elif part and node:
        start_s = min(node.constants["launch_us"], part.us / 2) * 1e-6
        rate = fastest = workload.wire_bytes / (part.us * 1e-6 - start_s) / count
    else:
        start_s = NODE_LINKS.launch_us * 1e-6
        rate = fastest = workload.wire_bytes / _node_transfer_s(workload, profile, count) / count
    traffic = figures.comm_traffic
    work = workload.wire_bytes * traffic
    speed = Speed(
        block_rate=rate * traffic,
        window_bytes=max(rate, fastest) * traffic * figures.comm_latency_ns * 1e-9,
        miss=figures.comm_miss,
        spare=max(1.0, fastest / rate),
        start_s=start_s,
    )
    launch = Launch(name=name, comm=True, runs=((count, work / count),), footprint=place, speed=speed)
    return CollectiveLaunch(launch, members)


def _part(workload: Workload, ctas: int, node: Node) -> Paced:
    return node.collective(workload.collective, _larger_bytes(workload), ctas, workload.ranks)


def _larger_bytes(workload: Workload) -> int:
    return workload.elements * DTYPE_BYTES[workload.compute.dtype]


def _node_transfer_s(workload: Workload, profile: Profile, ctas: int) -> float:
    """Seconds for which the blocks of a collective move bytes between the GPUs of a node."""
    figures, gpu = profile.figures, profile.spec
    larger_bytes = _larger_bytes(workload)
    rate = min(ctas * figures.cta_gb_s, figures.bus_gb_s) * 1e9
    links = node_links(gpu, default_topology(gpu))
    # A bus far below NVLink's rate means that another network is the bottleneck; its switches do not reduce.
    in_switch = switch_reduces(gpu) and figures.bus_gb_s * 1e9 > 0.5 * gpu.fabric_bytes_per_s
    return node_transfer_s(
        workload.collective, larger_bytes, workload.ranks, rate, links, in_switch=in_switch
    )


def _copied(workload: Workload, profile: Profile, *, ghost: bool, node: Node | None) -> Launch:
    """A collective on copy engines, which use no SM and cannot reduce."""
    if workload.collective in REDUCING:
        raise UsageError(
            f"comm.engine dma: copy engines cannot reduce, so {workload.collective} needs SMs; use engine sm"
        )
    if ghost:
        raise UsageError("comm.engine dma: a copy within one GPU runs on SMs; simulate a node with sim:NAME")
    if node:
        seconds = 1e-6 * node.copied(workload.collective, _larger_bytes(workload), workload.ranks).us
    else:
        seconds = workload.wire_bytes / (profile.figures.bus_gb_s * 1e9)
    return Launch(name="Memcpy PtoP", kind=LaunchKind.ENGINE, comm=True, seconds=seconds)


def _check_resident(workload: Workload, profile: Profile, needed: int, members: int, per_sm: int) -> None:
    room = profile.spec.sms * per_sm
    if needed > room:
        raise DeadlockError(
            f"{workload}: {members} rank{'s' if members > 1 else ''} of {needed // members} CTAs need "
            f"{needed} block slots at once, {profile.spec.title} has {room}, and the collective would hang "
            f"(as on a real GPU): set comm.max_ctas to {max(1, room // members // 2)} or less"
        )
