"""Overlap: how much a collective and compute slow each other, from the block-level simulator."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from weft.execute.sim import SimExecutor
from weft.gpu.collectives import Group
from weft.gpu.network import usual_network
from weft.gpu.specs import GpuSpec
from weft.plan.compute import Work
from weft.plan.config import AUTO
from weft.policy import Policy
from weft.sim.profile import names, profile
from weft.timeline import Kind
from weft.workload import Compute, Workload

# One kernel of each class: large enough to reach steady state, small enough to simulate in milliseconds.
KERNELS = {
    "gemm": Compute(kind="gemm", shape=(4096, 8192, 8192), repeat=4),
    "attention": Compute(kind="attention", shape=(1, 32, 8192, 128), repeat=4),
    "elementwise": Compute(kind="layer_norm", shape=(8192, 8192), repeat=4),
}
TABLE = Path(__file__).parent / "data" / "contention.json"
_SHARE = 0.7  # the collective takes this fraction of the compute it overlaps with, so that it can be hidden
ITERATIONS = 4
RANKS = 8
CANDIDATES = (
    Policy(priority="high"),
    Policy(priority="high", head_start_us=5.0),
    Policy(priority="high", head_start_us=5.0, max_ctas=8),
    Policy(priority="high", head_start_us=5.0, max_ctas=4),
    Policy(max_ctas=8),
    Policy(priority="high", head_start_us=5.0, max_ctas=32),
)
COPY = Policy(engine="dma")


@dataclass(frozen=True)
class Contention:
    """Slowdowns when a class of kernel overlaps with a class of collective under a policy."""

    stretch: float
    """Time of the collective while compute runs, relative to its time alone without any control."""
    loss: float
    """Seconds that compute loses for each second that the collective is in flight."""
    alone: float
    """Time of the collective alone under the policy, relative to its time alone without any control."""


def simulated_gpu(gpu: GpuSpec) -> str:
    """The GPU whose profile is simulated: this one or, if it has no profile, a related one."""
    if gpu.name in _profiles():
        return gpu.name
    if gpu.name.startswith("a100"):
        return "a100-40gb"
    return "h100" if gpu.vendor == "nvidia" else "mi300x"


@cache
def _profiles() -> frozenset[str]:
    return frozenset(names())


@cache
def contention(gpu: str, kernel: str, collective: str, rate_gb_s: float, policy: Policy) -> Contention:
    """The contention of a pair, from the shipped table or else simulated and cached.

    `rate_gb_s`: rate at which the network lets a rank send; 0: the collective stays inside the domain.
    """
    known = contention_table().get((gpu, kernel, collective, rate_gb_s, policy))
    return known or simulate_pair(gpu, kernel, collective, rate_gb_s, policy)


@cache
def contention_table() -> dict[tuple[str, str, str, float, Policy], Contention]:
    """Pairs simulated in advance by benchmarks/plan/contention.py; they cover most of what plans need."""
    document = json.loads(TABLE.read_text(encoding="utf-8"))
    policies = [Policy.from_dict(entry) for entry in document["policies"]]
    found = {}
    for line in document["pairs"]:
        gpu, kernel, collective, rate = line["pair"]
        for policy, entry in zip(policies, line["contention"], strict=True):
            if entry:
                found[gpu, kernel, collective, rate, policy] = Contention(*entry)
    return found


def simulate_pair(gpu: str, kernel: str, collective: str, rate_gb_s: float, policy: Policy) -> Contention:
    """Simulate the pair: the collective, with enough compute to hide it."""
    model = profile(gpu)
    if rate_gb_s:
        model = model.with_figures(bus_gb_s=min(rate_gb_s, model.figures.bus_gb_s))
    executor = SimExecutor(gpu, model=model)
    plain = Policy()
    work = Workload(
        compute=KERNELS[kernel], collective=collective, bytes=1 << 28, ranks=RANKS, iterations=ITERATIONS
    )
    compute_ms = executor.measure(work, plain, "compute").ms
    work = work.but(bytes=round(work.bytes * _SHARE * compute_ms / executor.measure(work, policy, "comm").ms))
    base_ms = executor.measure(work, plain, "comm").ms
    alone_ms = executor.measure(work, policy, "comm").ms
    both = executor.timeline(work, policy, "overlap")
    comm = both.kind == Kind.COMM
    spans = (both.end_ns - both.start_ns)[comm][:-1].mean() * 1e-6
    stretch = max(alone_ms / base_ms, spans * ITERATIONS / base_ms)
    total_ms = executor.measure(work, policy, "overlap").ms
    last_ms = alone_ms / ITERATIONS
    lost = max(0.0, total_ms - compute_ms - last_ms)
    loss = lost / (spans * (ITERATIONS - 1))
    return Contention(float(stretch), float(loss), float(max(1.0, alone_ms / base_ms)))


@dataclass(frozen=True)
class Hidden:
    """How much of a collective is hidden and exposed, in seconds."""

    alone_s: float
    hidden_s: float
    """The part of the collective that is not exposed."""
    exposed_s: float
    slows_compute_by_s: float
    policy: Policy | None
    """None: the collective overlaps with nothing."""

    @property
    def cost_s(self) -> float:
        return self.exposed_s + self.slows_compute_by_s


def hide(
    kind: str,
    alone_s: float,
    window: Work,
    floor: float,
    gpu: GpuSpec,
    group: Group,
    policy: Policy | str | None,
    most_s: float = math.inf,
) -> Hidden:
    """Overlap a collective with the compute of `window`, except its fraction `floor`, which stays exposed.

    `most_s`: its time alone on the GPU's usual network. NCCL opens channels for the available bandwidth, so a
    slower network holds fewer SMs for longer. The cost is at most its time alone, since a program can always
    wait for the collective.
    """
    apart = Hidden(alone_s, 0.0, alone_s, 0.0, None)
    if alone_s <= 0 or window.total <= 0:
        return apart
    options = _options(kind, group, policy)
    tried = (_hide(kind, apart, window, floor, gpu, group, p, most_s) for p in options)
    return min([apart, *tried], key=_cost)


def _cost(found: Hidden) -> float:
    return found.cost_s


def _options(kind: str, group: Group, policy: Policy | str | None) -> tuple[Policy, ...]:
    copies = kind in ("all_gather", "all_to_all", "p2p") and group.scope == "domain"
    if policy == AUTO:
        return (Policy(), *CANDIDATES, *((COPY,) if copies else ()))
    if isinstance(policy, Policy):
        # Copy engines cannot reduce, and do not reach beyond the domain.
        return (policy if copies or policy.engine != "dma" else replace(policy, engine="sm"),)
    return (Policy(),)


def _hide(
    kind: str,
    apart: Hidden,
    window: Work,
    floor: float,
    gpu: GpuSpec,
    group: Group,
    policy: Policy,
    most_s: float,
) -> Hidden:
    pair = mixed(kind, window, gpu, group, policy)
    overlapped = min(apart.alone_s * pair.stretch * (1.0 - floor), window.total)
    # After the window, the remainder runs alone on the GPU.
    exposed = (apart.alone_s - overlapped / pair.stretch) * pair.alone
    slowed = pair.loss * min(overlapped, most_s * pair.stretch)
    return Hidden(apart.alone_s, max(0.0, apart.alone_s - exposed), exposed, slowed, policy)


@cache
def network_rate_gb_s(gpu: str, group: Group) -> float:
    """Rate at which the usual network lets a rank send; 0 if the links inside the domain are slower.

    Rounded down to a power of two of rails, so that few rates have to be simulated.
    """
    rails = 2.0 ** math.floor(math.log2(group.per_domain))
    rate = usual_network(gpu).rail_bytes_per_s * rails / 1e9
    return rate if rate < profile(gpu).figures.bus_gb_s else 0.0


def mixed(kind: str, window: Work, gpu: GpuSpec, group: Group, policy: Policy) -> Contention:
    """The contention of a collective with a mix of kernels, each weighted by its share of the time."""
    busy = [(name, seconds) for name in KERNELS if (seconds := getattr(window, name)) > 0]
    total = sum(seconds for _, seconds in busy)
    if not total:
        return Contention(1.0, 0.0, 1.0)
    simulated = "all_to_all" if kind == "p2p" else kind
    # Pairs are simulated at the rate of the GPU's usual network, so that a faster network is never worse.
    name = simulated_gpu(gpu)
    rate = network_rate_gb_s(name, group) if group.scope == "network" else 0.0
    stretch = loss = alone = 0.0
    for kernel, seconds in busy:
        pair = contention(name, kernel, simulated, rate, policy)
        share = seconds / total
        stretch += share * pair.stretch
        loss += share * pair.loss
        alone += share * pair.alone
    return Contention(max(1.0, stretch), loss, alone)
