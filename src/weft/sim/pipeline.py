"""The pipeline of a Workload under a Policy: launches, their streams and dependencies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weft.checks import check_choice
from weft.comm.node import Node
from weft.errors import UsageError
from weft.kernels import glob_regex
from weft.policy import Policy
from weft.sim.collective import CollectiveLaunch, collective
from weft.sim.kernels import ComputeKernel, ShapedKernel, kernels
from weft.sim.launches import Launch, LaunchKind
from weft.sim.profile import Profile
from weft.workload import MODES, Workload

COMM_STREAM = 100
"""First stream of collectives; compute streams start at 0."""


PLACING_US = 5.0
"""Time to place a collective that is ready. The placed head start is modelled as a wait until the previous
collective ends, when the collective's stream becomes ready, plus this time."""


@dataclass
class _Builder:
    """Collects launches and tracks the last one on each stream."""

    profile: Profile
    launches: list[Launch] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)

    def add(self, launch: Launch, stream: int, events: tuple[int, ...] = ()) -> int:
        """Add a launch to a stream; it waits for the stream's last launch and the launches in `events`."""
        figures = self.profile.figures
        after = [(index, figures.event_gap_us * 1e-6) for index in events]
        if stream in self.last:
            after.append((self.last[stream], figures.stream_gap_us * 1e-6))
        self.launches.append(replace(launch, stream=stream, after=tuple(after)))
        self.last[stream] = len(self.launches) - 1
        return self.last[stream]


def pipeline(
    workload: Workload,
    policy: Policy,
    mode: str,
    profile: Profile,
    *,
    ghost: bool = False,
    ctas: int | None = None,
    node: Node | None = None,
) -> list[Launch]:
    """All launches of a run.

    `ctas`: CTAs of each rank's collective if the policy does not set them; `node`: node profile that sets the
    collective's duration and kernel, None for the GPU's profile.
    """
    check_choice("mode", mode, MODES)
    controls = policy if mode == "overlap" else Policy()
    count = policy.max_ctas or ctas or int(profile.figures.comm_ctas)
    comm = collective(workload, profile, count, ghost=ghost, engine=policy.engine, node=node)
    plain = kernels(workload.compute, profile)
    shaped = [_shapes(plain, controls, profile, collectives=n > 0) for n in (0, 1)]
    if controls.sm_reserve >= profile.spec.sms:
        raise UsageError(
            f"compute.sm_reserve {controls.sm_reserve}: {profile.spec.title} has {profile.spec.sms} SMs"
        )
    build = _Builder(profile)
    ended: tuple[int, ...] = ()
    before: tuple[int, ...] = ()  # launches of the collective before the one in `ended`
    for i in range(workload.iterations):
        events: tuple[int, ...] = ()
        if mode != "comm":
            waits = ended if mode == "sequential" else before if controls.head_start == "placed" else ()
            events = (_compute(build, shaped[min(i, 1)], i, workload, controls, waits),)
        if mode != "compute":
            before, ended = ended, _communicate(build, comm, controls, profile, events)
    return build.launches


def head_start_s(policy: Policy) -> float:
    """Length of the modelled head start, in seconds; 0 if there is none."""
    return 1e-6 * (PLACING_US if policy.head_start == "placed" else policy.head_start_us)


def _shapes(
    plain: list[ComputeKernel], policy: Policy, profile: Profile, *, collectives: bool
) -> list[ShapedKernel]:
    """The kernels of an iteration at the policy's residency; `collectives`: a collective may be in flight."""
    found = []
    for kernel in plain:
        residency = policy.residency
        for rule in policy.rules:
            if glob_regex([rule.kernel]).fullmatch(kernel.name):
                residency = rule.residency
                break
        if policy.when == "overlap" and not collectives:
            residency = None
        found.append(kernel.shaped(profile, residency))
    return found


def _compute(
    build: _Builder,
    shaped: list[ShapedKernel],
    i: int,
    workload: Workload,
    policy: Policy,
    waits: tuple[int, ...],
) -> int:
    lane = i % min(workload.compute_streams, int(build.profile.figures.compute_queues))
    hold_s = head_start_s(policy)
    if hold_s and i:
        wait = Launch(name="head start", kind=LaunchKind.DELAY, seconds=hold_s)
        build.add(wait, lane, waits)
        waits = ()
    index = -1
    for one in shaped:
        launch = Launch(
            name=one.kernel.name,
            kind=one.kernel.kind,
            runs=one.runs,
            units=one.kernel.units,
            unit_bytes=one.kernel.unit_bytes,
            footprint=one.footprint,
            speed=one.speed,
            first_sm=policy.sm_reserve,
        )
        index = build.add(launch, lane, waits)
        waits = ()
    return index


def _communicate(
    build: _Builder, comm: CollectiveLaunch, policy: Policy, profile: Profile, events: tuple[int, ...]
) -> tuple[int, ...]:
    high = policy.priority == "high" and profile.figures.priority > 0
    first = len(build.launches)
    group = -1 if comm.launch.kind is LaunchKind.ENGINE else first
    launch = replace(comm.launch, priority=int(high), group=group)
    return tuple(build.add(launch, COMM_STREAM + rank, events) for rank in range(comm.members))
