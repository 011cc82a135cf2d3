"""Simulates what a control would change for one collective that waited behind compute.

The wait is rebuilt as launches of `weft.sim`: the kernel that held the SMs, with its blocks and their
resources, and the collective, which becomes ready when it did in the trace. The simulator then places the
blocks, without and with the control.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.errors import WeftError
from weft.gpu.occupancy import blocks_per_sm, shared_bytes_for
from weft.policy import Policy
from weft.sim.core import simulate_launches
from weft.sim.launches import Footprint, Launch, LaunchKind, Speed
from weft.sim.pipeline import head_start_s
from weft.sim.profile import Profile, footprint
from weft.sim.profile import profile as named_profile
from weft.trace.blockers import Wait

_log = logging.getLogger("weft.trace")

RATE = 1e9
"""Work per second of a block. Contention between blocks is not modelled: the trace's durations include it."""

_MAX_WAVES = 32
"""Larger grids are simulated with fewer, longer blocks: what matters is how often an SM becomes free."""

TILE_NS = 30_000
"""Time of a persistent kernel for one tile: 128x256 with a depth of 8192 on an H200."""

TICK_NS = 1_000
"""Times are rounded to this, so that similar waits are simulated only once."""


@dataclass(frozen=True)
class Saving:
    """What a control changes for one wait."""

    share: float
    """Share of the wait that is saved: 1 if the collective starts as soon as it is ready."""
    compute_later_ns: float
    """How much later the kernel ends."""


def saving(wait: Wait, policy: Policy, profile_name: str) -> Saving:
    """Simulates one wait without and with a policy; saves nothing if the kernels cannot be placed."""
    rounded = replace(
        wait,
        ready_ns=round(wait.ready_ns / TICK_NS) * TICK_NS,
        kernel_ns=max(round(wait.kernel_ns / TICK_NS), 1) * TICK_NS,
        comm_ns=max(round(wait.comm_ns / TICK_NS), 1) * TICK_NS,
    )
    try:
        plain = _outcome(rounded, Policy(), profile_name)
        changed = _outcome(rounded, policy, profile_name)
    except WeftError as error:
        _log.debug("cannot simulate %s: %s", wait.kernel.name, error)
        return Saving(0.0, 0.0)
    waited = plain[0] - rounded.ready_ns * 1e-9
    share = (plain[0] - changed[0]) / waited if waited > 0 else 0.0
    return Saving(min(max(share, 0.0), 1.0), (changed[1] - plain[1]) * 1e9)


@lru_cache(maxsize=4096)
def _outcome(wait: Wait, policy: Policy, profile_name: str) -> tuple[float, float]:
    """When the collective starts and when the kernel ends, in seconds of simulated time."""
    profile = named_profile(profile_name)
    gpu, kernel = profile.spec, wait.kernel
    shared = kernel.shared_bytes
    if policy.residency is not None:
        shared = shared_bytes_for(gpu, kernel.threads, kernel.registers, shared, policy.residency) or shared
    place = footprint(gpu, kernel.name, kernel.threads, kernel.registers, shared)
    launches: list[Launch] = []
    # If both become ready together they wait for the same event, and the compute stream reacts first.
    hold = head_start_s(policy)
    if hold:
        launches.append(Launch(name="head start", kind=LaunchKind.DELAY, seconds=hold, stream=0))
    launches.append(replace(_compute(wait, profile, place), after=((0, 0.0),) if hold else ()))
    compute = len(launches) - 1
    offset = max(wait.ready_ns * 1e-9, profile.figures.event_gap_us * 1e-6)
    launches.append(Launch(name="ready", kind=LaunchKind.DELAY, seconds=offset, stream=1))
    comm = _collective(wait, profile)
    launches.append(
        Launch(
            name="collective",
            comm=True,
            stream=1,
            priority=int(policy.priority == "high" and profile.figures.priority > 0),
            runs=((wait.ctas, wait.comm_ns * 1e-9 * RATE),),
            footprint=comm,
            speed=Speed(block_rate=RATE),
            group=len(launches),
            after=((len(launches) - 1, 0.0),),
        )
    )
    done = simulate_launches(profile.machine(), launches)
    return float(done.start_s[-1]), float(done.end_s[compute])


def _compute(wait: Wait, profile: Profile, place: Footprint) -> Launch:
    """The kernel that held the SMs; with the GPU to itself it takes as long as in the trace.

    If all its blocks are resident at once it counts as persistent: they share the work. Otherwise
    it is a grid whose blocks share their SM equally; half of the blocks that fit already keep it busy.
    """
    gpu, kernel = profile.spec, wait.kernel
    fits = max(blocks_per_sm(gpu, kernel.threads, kernel.registers, kernel.shared_bytes), 1)
    resident = fits * gpu.sms
    seconds = wait.kernel_ns * 1e-9
    if kernel.blocks <= resident and profile.figures.persistent:
        rounds = max(round(wait.kernel_ns / TILE_NS), 1)
        return Launch(
            name=kernel.name,
            kind=LaunchKind.POOL,
            runs=((kernel.blocks, 0.0),),
            units=rounds * kernel.blocks,
            unit_bytes=seconds / rounds * RATE,
            footprint=place,
            speed=Speed(block_rate=RATE),
        )
    blocks = min(kernel.blocks, _MAX_WAVES * resident)
    waves = max(blocks / resident, 1.0)
    speed = Speed(sm_rate=fits * RATE, block_rate=RATE if fits == 1 else 2 * RATE)
    return Launch(name=kernel.name, runs=((blocks, seconds / waves * RATE),), footprint=place, speed=speed)


def _collective(wait: Wait, profile: Profile) -> Footprint:
    figures = profile.figures
    threads = wait.comm_threads if wait.comm_threads > 0 else int(figures.comm_threads)
    registers = wait.comm_registers if wait.comm_registers > 0 else int(figures.comm_registers)
    shared = max(wait.comm_shared_bytes, 0) or round(figures.comm_shared_kib * 1024)
    return footprint(profile.spec, "collective", threads, registers, shared)
