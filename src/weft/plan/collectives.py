"""Collectives: how long one takes alone, by ring, tree or hierarchy, whichever is fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.gpu.cost import link_bytes_per_s, node_collective_s, size_factor, switch_reduces
from weft.gpu.specs import GpuSpec
from weft.plan.figures import Links
from weft.plan.network import Network


@dataclass(frozen=True)
class Group:
    """Ranks that take part, and how many of them share an NVLink domain."""

    ranks: int
    per_domain: int
    span: int
    """GPUs from the first to the last rank: what decides on oversubscription."""

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.per_domain)

    @property
    def scope(self) -> str:
        return "domain" if self.domains == 1 else "network"


def group(ranks: int, stride: int, network: Network) -> Group:
    """Ranks that are `stride` GPUs apart."""
    per_domain = max(1, min(ranks, network.domain // stride if stride <= network.domain else 1))
    while ranks % per_domain:
        per_domain -= 1
    return Group(ranks, per_domain, ranks * stride)


def rail_rate(g: Group, network: Network, links: Links) -> float:
    """Bytes per second that one rank sends between domains."""
    beyond = network.oversubscription if g.span > network.leaf_gpus else 1.0
    lost = 1.0 + links.congestion * math.log2(max(1.0, g.span / network.domain))
    return network.rail_bytes_per_s * links.network_share / beyond / lost


def collective_s(kind: str, bytes_: float, g: Group, gpu: GpuSpec, network: Network, links: Links) -> float:
    """Seconds of a collective alone. `bytes_`: the larger buffer of a rank, as in Workload."""
    if g.ranks < 2 or bytes_ <= 0:
        return 0.0
    if kind == "p2p":
        return _p2p(bytes_, g, gpu, network, links)
    if g.domains == 1:
        rate = link_bytes_per_s(gpu, links)
        return node_collective_s(kind, bytes_, g.ranks, rate, links, in_switch=switch_reduces(gpu))
    if kind == "all_to_all":
        return links.launch_us * 1e-6 + _all_to_all(bytes_, g, gpu, network, links)
    rounds = 2 if kind == "all_reduce" else 1
    ways = [rounds * _ring(bytes_, g, gpu, network, links)]
    if g.per_domain > 1:
        ways.append(rounds * _hierarchy(bytes_, g, gpu, network, links))
    if kind == "all_reduce":
        ways.append(_tree(bytes_, g, gpu, network, links))
    return links.launch_us * 1e-6 + min(ways)


def _hop_s(network: Network, links: Links) -> float:
    return (network.latency_us + links.network_us) * 1e-6


def _ring(bytes_: float, g: Group, gpu: GpuSpec, network: Network, links: Links) -> float:
    """Reduce-scatter or all-gather around a ring; every domain is left over as many rails as it has ranks."""
    rails = g.per_domain * rail_rate(g, network, links)
    rate = min(link_bytes_per_s(gpu, links), rails) if g.per_domain > 1 else rails
    latency = (g.ranks - g.domains) * links.domain_us * 1e-6 + g.domains * network.latency_us * 1e-6
    sent = bytes_ * (g.ranks - 1) / g.ranks
    return latency + sent * size_factor(bytes_, links) / rate


def _hierarchy(bytes_: float, g: Group, gpu: GpuSpec, network: Network, links: Links) -> float:
    """Inside the domain first, then each rank with its peers along its rail."""
    inner = bytes_ * (g.per_domain - 1) / g.per_domain / link_bytes_per_s(gpu, links)
    outer = bytes_ / g.per_domain * (g.domains - 1) / g.domains / rail_rate(g, network, links)
    latency = (g.per_domain - 1) * links.domain_us * 1e-6
    latency += math.ceil(math.log2(g.domains)) * _hop_s(network, links)
    return latency + (inner + outer) * size_factor(bytes_, links)


def _tree(bytes_: float, g: Group, gpu: GpuSpec, network: Network, links: Links) -> float:
    """Up and down a double tree between domains; inside each a chain, or the switch."""
    rate = link_bytes_per_s(gpu, links)
    hops = 2 * (g.per_domain - 1) * links.domain_us * 1e-6
    sent = 2.0 * bytes_ / rate
    if switch_reduces(gpu):
        hops = 2 * links.domain_us * 1e-6
        sent = 2 * bytes_ * (g.ranks - 1) / g.ranks / (rate * links.switch_gain)
    # A node sends its half up and down in both trees; two nodes just exchange halves.
    crossing = bytes_ if g.domains == 2 and switch_reduces(gpu) else 2 * bytes_
    sent = max(sent, crossing / (g.per_domain * rail_rate(g, network, links)))
    hops += 2 * math.ceil(math.log2(g.domains)) * _hop_s(network, links)
    return hops + sent * size_factor(bytes_, links)


def _all_to_all(bytes_: float, g: Group, gpu: GpuSpec, network: Network, links: Links) -> float:
    near = bytes_ * (g.per_domain - 1) / g.ranks / link_bytes_per_s(gpu, links)
    far = bytes_ * (g.ranks - g.per_domain) / g.ranks / rail_rate(g, network, links)
    return max(near, far) * size_factor(bytes_, links) + _hop_s(network, links)


def _p2p(bytes_: float, g: Group, gpu: GpuSpec, network: Network, links: Links) -> float:
    if g.domains == 1:
        return links.launch_us * 1e-6 + bytes_ / link_bytes_per_s(gpu, links)
    return links.launch_us * 1e-6 + _hop_s(network, links) + bytes_ / rail_rate(g, network, links)
