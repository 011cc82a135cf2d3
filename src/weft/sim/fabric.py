"""Fabric: the links between the GPUs of a node, the routes, and how concurrent copies share the links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from weft.checks import check_choice, check_int
from weft.gpu.cost import NODE_LINKS, UNFITTED_LINKS, NodeLinks
from weft.gpu.specs import GpuSpec
from weft.sim.gemm import machine
from weft.sim.profile import PCIE_SHARE

TOPOLOGIES = ("mesh", "nvswitch", "ring", "pcie")
"""Topologies of a node. In addition, `host` has the peers in pinned host memory, for tests on one GPU."""
MAX_NODE_RANKS = 64
"""Most ranks of a node."""
SWITCH_GPUS = 4
"""Most GPUs under one PCIe switch; they share its link to the host bridge."""

# Overhead of a copy on an MI300X according to arXiv:2511.06605: 71% at 1 KiB, 54% at 64 KiB, 21% at
# 1 MiB, 2% at 16 MiB. 6 µs of overhead and 2.4 µs of latency before the first byte give 71, 61, 19 and 2%.
COPY_OVERHEAD_US = 6.0
"""The part of an AMD copy's start-up time that the paper counts as overhead; the other 2.4 µs are latency."""
_COPY_START_US = {"amd": COPY_OVERHEAD_US + 2.4, "nvidia": 4.0}
"""Delay from the issue of a DMA copy to its first byte, in µs; assumed for NVIDIA."""

Flow = tuple[int, int]
"""A copy in progress: (from rank, to rank)."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The unidirectional links of a node and the routes over them."""

    topology: str
    ranks: int
    gpu: str
    capacity: tuple[float, ...]
    """Bytes per second of each link."""
    routes: tuple[tuple[tuple[int, ...], ...], ...]
    """Links of each route, by source and destination rank."""
    period: int
    """Rotating all ranks by `period` maps the fabric onto itself, so simulating `period` ranks is enough."""
    engines: int
    """DMA engines of a GPU."""
    copy_start_s: float
    """Delay from the issue of a DMA copy to its first byte."""

    @cached_property
    def folded(self) -> dict[Flow, dict[int, float]]:
        """Load that a copy puts on each link per unit of its rate, if all of its rotations run concurrently.

        By (source, target), for targets below the period. Links that rotate into each other count as one.
        """
        orbit = self._orbits()
        sizes = Counter(orbit)
        turns = self.ranks // self.period
        weights: dict[Flow, dict[int, float]] = {}
        for target in range(self.period):
            for source in range(self.ranks):
                count = Counter(orbit[link] for link in self.routes[source][target])
                weights[source, target] = {link: times * turns / sizes[link] for link, times in count.items()}
        return weights

    def _orbits(self) -> list[int]:
        """For each link, the lowest-numbered link of its orbit under rotation of the ranks by `period`."""
        first = list(range(len(self.capacity)))

        def find(link: int) -> int:
            while first[link] != link:
                first[link] = first[first[link]]
                link = first[link]
            return link

        if self.period < self.ranks:
            for a in range(self.ranks):
                for b in range(self.ranks):
                    turned = self.routes[(a + self.period) % self.ranks][(b + self.period) % self.ranks]
                    for one, other in zip(self.routes[a][b], turned, strict=True):
                        low, high = sorted((find(one), find(other)))
                        first[high] = low
        return [find(link) for link in range(len(self.capacity))]

    @cached_property
    def in_links(self) -> int:
        """Number of links into a rank."""
        return len({self.routes[source][0][-1] for source in range(1, self.ranks)})

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Links from `source` to `target`."""
        return self.routes[source][target]

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Max-min fair rates of concurrent copies, in bytes per second."""
        routes = [self.routes[source][target] for source, target in flows]
        return fair(
            [dict.fromkeys(route, 1.0) for route in routes], dict(enumerate(self.capacity)), float("inf")
        )

    def peer_rate(self, source: int, target: int) -> float:
        """Bytes per second of one copy alone."""
        return min(self.capacity[link] for link in self.routes[source][target])


def fair(weights: Sequence[dict[int, float]], capacity: dict[int, float], most: float) -> list[float]:
    """Max-min fair rates of flows.

    `weights`: load of each flow on each link per unit of its rate; `most`: rate of a flow that uses no link.
    """
    rates = [0.0] * len(weights)
    active = {i for i, links in enumerate(weights) if links}
    for i in range(len(weights)):
        if i not in active:
            rates[i] = most
    level = 0.0
    users: dict[int, list[int]] = {}
    load: dict[int, float] = {}
    for i in active:
        for link, weight in weights[i].items():
            users.setdefault(link, []).append(i)
            load[link] = load.get(link, 0.0) + weight
    left = {link: capacity[link] for link in load}
    while active:
        room = min(left[link] / load[link] for link in load)
        level += room
        full = []
        for link, total in load.items():
            left[link] -= room * total
            if left[link] <= 1e-9 * capacity[link]:
                full.append(link)
        for link in full:
            for i in users[link]:
                if i in active:
                    active.discard(i)
                    rates[i] = level
                    for other, weight in weights[i].items():
                        load[other] -= weight
        load = {link: total for link, total in load.items() if total > 1e-9}
    return rates


def default_topology(gpu: GpuSpec) -> str:
    """The usual topology of a node of eight GPUs of this type."""
    if gpu.name == "a40":
        return "pcie"
    return "mesh" if gpu.link_kind == "xgmi" else "nvswitch"


def node_links(gpu: GpuSpec, topology: str) -> NodeLinks:
    """Latency and bandwidth constants of the library's collectives on a node of these GPUs."""
    fitted = gpu.link_kind == "nvlink" and topology not in ("pcie", "host")
    return NODE_LINKS if fitted else UNFITTED_LINKS


@lru_cache(maxsize=512)
def fabric(topology: str, ranks: int, gpu: str) -> Fabric:
    """The fabric of a node of `ranks` GPUs; `gpu`: name or profile file."""
    if topology not in _BUILDERS:
        check_choice("topology", topology, TOPOLOGIES)
    check_int("ranks", ranks, 2, MAX_NODE_RANKS, optional=False)
    of = machine(gpu)
    # Fraction of the link rate that collectives reach, protocol overhead included.
    share = min(1.0, of.figures.bus_gb_s * 1e9 / of.spec.fabric_bytes_per_s) if of.spec.links else 1.0
    links, routes, period = _BUILDERS[topology](ranks, of.spec, share)
    return Fabric(
        topology=topology,
        ranks=ranks,
        gpu=gpu,
        capacity=tuple(links),
        routes=tuple(tuple(row) for row in routes),
        period=period,
        engines=of.spec.copy_engines,
        copy_start_s=_COPY_START_US[of.spec.vendor] * 1e-6,
    )


_Way = Callable[[int, int], tuple[int, ...]]
_Built = tuple[list[float], list[list[tuple[int, ...]]], int]


def _ways(ranks: int, way: _Way) -> list[list[tuple[int, ...]]]:
    return [[way(a, b) if a != b else () for b in range(ranks)] for a in range(ranks)]


def _mesh(ranks: int, gpu: GpuSpec, share: float) -> _Built:
    """A dedicated connection to every peer: NVLinks are divided evenly, xGMI has one link per peer."""
    peers = ranks - 1
    each = 1 if gpu.link_kind == "xgmi" else max(1, gpu.links // peers)
    rate = share * (each * gpu.link_bytes_per_s if gpu.links >= peers else gpu.fabric_bytes_per_s / peers)
    return [rate] * ranks**2, _ways(ranks, lambda a, b: (a * ranks + b,)), 1


def _nvswitch(ranks: int, gpu: GpuSpec, share: float) -> _Built:
    """All links of a GPU go to switches, which connect any pair of GPUs at full rate."""
    rate = share * gpu.fabric_bytes_per_s
    return [rate] * (2 * ranks), _ways(ranks, lambda a, b: (a, ranks + b)), 1


def _ring(ranks: int, gpu: GpuSpec, share: float) -> _Built:
    """Half of a GPU's links go to each neighbour; a copy takes the shorter direction around the ring."""
    rate = share * gpu.fabric_bytes_per_s / 2

    def way(a: int, b: int) -> tuple[int, ...]:
        forth = (b - a) % ranks
        if forth <= ranks - forth:
            return tuple((a + i) % ranks for i in range(forth))
        return tuple(ranks + (a - i) % ranks for i in range(ranks - forth))

    return [rate] * (2 * ranks), _ways(ranks, way), 1


def _pcie(ranks: int, gpu: GpuSpec, share: float) -> _Built:
    """GPUs are divided among switches; copies between switches share their links to the host bridge."""
    del share
    rate = PCIE_SHARE * gpu.pcie_bytes_per_s
    switches = -(-ranks // SWITCH_GPUS)
    each = -(-ranks // switches)

    def way(a: int, b: int) -> tuple[int, ...]:
        above, below = a // each, b // each
        if above == below:
            return (a, ranks + b)
        return (a, 2 * ranks + above, 2 * ranks + switches + below, ranks + b)

    period = 1 if switches == 1 else each if ranks % each == 0 else ranks
    return [rate] * (2 * ranks + 2 * switches), _ways(ranks, way), period


def _host(ranks: int, gpu: GpuSpec, share: float) -> _Built:
    """Every GPU has its own link to the host; host memory holds the peers' data."""
    del share
    rate = PCIE_SHARE * gpu.pcie_bytes_per_s
    return [rate] * (2 * ranks), _ways(ranks, lambda a, b: (a, ranks + b)), 1


_BUILDERS: dict[str, Callable[[int, GpuSpec, float], _Built]] = {
    "host": _host,
    "mesh": _mesh,
    "nvswitch": _nvswitch,
    "ring": _ring,
    "pcie": _pcie,
}
