"""The time of a collective that runs alone, from its kind, size, ranks and the links between them.

`collective_s` is the only model of network time; plans and node profiles use it. Its inputs are a `Group`
(ranks, and how many share an NVLink domain), a GPU, a `Network` and the fitted `Links`. Inside a node it uses
`weft.gpu.cost`. Between nodes, all-gather and reduce-scatter run around a ring, as in NCCL: every rank is a
hop, so the latency grows with the number of ranks. All-reduce uses the ring or NCCL's double tree, whichever
is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.gpu.cost import link_bytes_per_s, node_collective_s, size_factor, switch_reduces
from weft.gpu.network import Links, Network
from weft.gpu.specs import GpuSpec


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, and how many of them share an NVLink domain."""

    ranks: int
    per_domain: int
    span: int
    """Number of GPUs from the first to the last rank; it decides whether oversubscription applies."""

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.per_domain)

    @property
    def scope(self) -> str:
        return "domain" if self.domains == 1 else "network"


def group(ranks: int, stride: int, network: Network) -> Group:
    """The Group of `ranks` ranks that are `stride` GPUs apart."""
    per_domain = max(1, min(ranks, network.domain // stride if stride <= network.domain else 1))
    while ranks % per_domain:
        per_domain -= 1
    return Group(ranks, per_domain, ranks * stride)


def rail_rate(g: Group, network: Network, links: Links) -> float:
    """Bytes per second that one rank sends between domains."""
    beyond = network.oversubscription if g.span > network.leaf_gpus else 1.0
    lost = 1.0 + links.congestion * math.log2(max(1.0, g.span / network.domain))
    return network.rail_bytes_per_s * links.network_share / beyond / lost


def collective_s(
    kind: str,
    bytes_: float,
    g: Group,
    gpu: GpuSpec,
    network: Network,
    links: Links,
    *,
    flow_bytes: float = 0.0,
) -> float:
    """Seconds of a collective that runs alone.

    `kind`: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `reduce` or `p2p`.
    `bytes_`: the larger buffer of a rank, as in Workload. `flow_bytes`: if the collective is one of several
    buckets without gaps between them, their total size, because they fill the links together; otherwise 0.
    """
    inside = Inside(link_bytes_per_s(gpu, links), switch_reduces(gpu))
    return group_collective_s(kind, bytes_, g, inside, network, links, flow_bytes=flow_bytes)


@dataclass(frozen=True)
class Inside:
    """The links inside a domain."""

    bytes_per_s: float
    """Bytes per second that a rank sends in a large collective."""
    reduces: bool
    """Whether the switch can reduce."""


def group_collective_s(
    kind: str,
    bytes_: float,
    g: Group,
    inside: Inside,
    network: Network,
    links: Links,
    *,
    flow_bytes: float = 0.0,
    algorithm: str | None = None,
) -> float:
    """`collective_s` with given links inside a domain, and optionally a given algorithm.

    `algorithm` of an all-reduce: `ring`, `tree`, `nvls` or `nvlstree`; None: the fastest.
    """
    if g.ranks < 2 or bytes_ <= 0:
        return 0.0
    start = links.launch_us * 1e-6
    if kind == "p2p":
        return start + _p2p(bytes_, g, inside, network, links)
    if g.domains == 1:
        return node_collective_s(
            kind,
            bytes_,
            g.ranks,
            inside.bytes_per_s,
            links,
            in_switch=inside.reduces,
            algorithm="nvls" if algorithm == "nvlstree" else algorithm,
        )
    factor = size_factor(max(bytes_, flow_bytes), links)
    if kind == "all_to_all":
        return start + _all_to_all(bytes_, g, inside, network, links) * factor + _hop_s(network, links)
    if kind == "all_reduce":
        ring = 2 * _ring(bytes_, g, inside, network, links, factor)
        tree = _tree(bytes_, g, inside, network, links, factor)
        return start + (ring if algorithm == "ring" else tree if algorithm else min(ring, tree))
    if kind in ("broadcast", "reduce"):  # each rank passes on all bytes, not (ranks - 1) / ranks
        bytes_ *= g.ranks / (g.ranks - 1)
    return start + _ring(bytes_, g, inside, network, links, factor)


def _hop_s(network: Network, links: Links) -> float:
    return (network.latency_us + links.network_us) * 1e-6


def _ring(bytes_: float, g: Group, inside: Inside, network: Network, links: Links, factor: float) -> float:
    """Seconds of a reduce-scatter or all-gather around a ring. A domain sends over one rail per rank."""
    rails = g.per_domain * rail_rate(g, network, links)
    rate = min(inside.bytes_per_s, rails) if g.per_domain > 1 else rails
    latency = (g.ranks - g.domains) * links.ring_us * 1e-6 + g.domains * _hop_s(network, links)
    sent = bytes_ * (g.ranks - 1) / g.ranks
    return latency + sent * factor / rate


def _tree(bytes_: float, g: Group, inside: Inside, network: Network, links: Links, factor: float) -> float:
    """Seconds up and down a double tree between domains, with a chain or the switch inside each domain."""
    rate = inside.bytes_per_s
    hops = 2 * (g.per_domain - 1) * links.domain_us * 1e-6
    sent = 2.0 * bytes_ / rate
    if inside.reduces:
        hops = 2 * links.domain_us * 1e-6
        sent = 2 * bytes_ * (g.ranks - 1) / g.ranks / (rate * links.switch_gain)
    # A node sends half of the data up and down in each of the two trees; two nodes only exchange halves.
    crossing = bytes_ if g.domains == 2 and inside.reduces else 2 * bytes_
    sent = max(sent, crossing / (g.per_domain * rail_rate(g, network, links)))
    hops += 2 * math.ceil(math.log2(g.domains)) * _hop_s(network, links)
    return hops + sent * factor


def _all_to_all(bytes_: float, g: Group, inside: Inside, network: Network, links: Links) -> float:
    """Seconds at full bandwidth; transfers inside domains and between them overlap."""
    near = bytes_ * (g.per_domain - 1) / g.ranks / inside.bytes_per_s
    far = bytes_ * (g.ranks - g.per_domain) / g.ranks / rail_rate(g, network, links)
    return max(near, far)


def _p2p(bytes_: float, g: Group, inside: Inside, network: Network, links: Links) -> float:
    if g.domains == 1:
        return bytes_ / inside.bytes_per_s
    return _hop_s(network, links) + bytes_ / rail_rate(g, network, links)
