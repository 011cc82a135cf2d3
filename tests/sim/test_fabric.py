"""Topologies: links, routes and how concurrent copies share them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.errors import UsageError
from weft.ops.case import Case
from weft.ops.simulate import flow_node
from weft.sim.fabric import TOPOLOGIES, default_topology, fabric, fair
from weft.sim.flow import MEMORY_STALL, FlowNode, Task, flow
from weft.sim.gemm import machine


def all_to(target: int, ranks: int) -> list[tuple[int, int]]:
    return [(source, target) for source in range(ranks) if source != target]


def test_a_mesh_has_a_link_for_every_peer():
    mesh = fabric("mesh", 8, "mi300x")
    share = machine("mi300x").figures.bus_gb_s / (7 * 64)
    assert mesh.in_links == 7
    assert mesh.peer_rate(1, 0) == pytest.approx(64e9 * share)
    assert mesh.rates(all_to(0, 8)) == pytest.approx([64e9 * share] * 7)


def test_a_switch_gives_one_copy_the_full_rate_and_several_equal_shares():
    switch = fabric("nvswitch", 8, "h100")
    assert switch.peer_rate(3, 0) == pytest.approx(360e9)
    assert switch.rates(all_to(0, 8)) == pytest.approx([360e9 / 7] * 7)
    # Any permutation runs at full speed.
    assert switch.rates([(i, (i + 3) % 8) for i in range(8)]) == pytest.approx([360e9] * 8)


def test_a_copy_around_a_ring_uses_every_link_of_its_route():
    ring = fabric("ring", 8, "h100")
    assert len(ring.route(0, 1)) == 1
    assert len(ring.route(0, 3)) == len(ring.route(3, 0)) == 3
    assert not set(ring.route(0, 3)) & set(ring.route(3, 0))
    # Every rank copies from the rank three ahead: every link carries three copies.
    rates = ring.rates([((i + 3) % 8, i) for i in range(8)])
    assert rates == pytest.approx([ring.peer_rate(1, 0) / 3] * 8)


def test_gpus_under_a_pcie_switch_share_its_link_to_the_host_bridge():
    tree = fabric("pcie", 8, "a40")
    alone = tree.peer_rate(1, 0)
    assert tree.peer_rate(4, 0) == alone
    crossing = [(i + 4, i) for i in range(4)]
    assert tree.rates(crossing) == pytest.approx([alone / 4] * 4)
    # Copies under one switch do not use the bridge.
    assert tree.rates([*crossing, (1, 2)])[-1] == pytest.approx(alone * 3 / 4)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(6))
def test_rates_are_max_min_fair(topology, seed):
    draw = random.Random(f"{topology} {seed}")
    ranks = draw.randint(2, 12)
    joined = fabric(topology, ranks, draw.choice(["h100", "mi300x", "a100"]))
    flows = [tuple(draw.sample(range(ranks), 2)) for _ in range(draw.randint(1, 20))]
    rates = joined.rates(flows)
    load = [0.0] * len(joined.capacity)
    for (source, target), rate in zip(flows, rates, strict=True):
        for link in joined.route(source, target):
            load[link] += rate
    assert all(used <= room * (1 + 1e-9) for used, room in zip(load, joined.capacity, strict=True))
    for (source, target), rate in zip(flows, rates, strict=True):
        full = [x for x in joined.route(source, target) if load[x] >= joined.capacity[x] * (1 - 1e-6)]
        fastest = [
            max(r for (s, t), r in zip(flows, rates, strict=True) if x in joined.route(s, t)) for x in full
        ]
        assert any(rate >= other * (1 - 1e-6) for other in fastest), "a copy could be faster at no one's cost"


def test_weights_count_links_that_a_copy_uses_more_than_once():
    assert fair([{0: 2.0}, {0: 1.0}], {0: 6.0}, 9.0) == pytest.approx([2.0, 2.0])
    assert fair([{0: 1.0}, {0: 1.0, 1: 1.0}], {0: 6.0, 1: 1.0}, 9.0) == pytest.approx([5.0, 1.0])
    assert fair([{}], {}, 9.0) == [9.0]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("ranks", "lanes"), [(4, 3), (8, 7), (8, 2)])
def test_simulating_one_period_equals_simulating_all_ranks(topology, ranks, lanes):
    joined = fabric(topology, ranks, "h100")
    common = {
        "memory_bytes_per_s": 3e12,
        "lanes": lanes,
        "start_s": 4e-6,
        "traffic": 1.0,
        "event_gap_s": 2e-6,
    }

    def total(period: int) -> float:
        tasks: list[Task] = []
        for rank in range(period):
            first = len(tasks)
            tasks += [
                Task(name="copy", rank=rank, source=(rank + i) % ranks, copied_bytes=2e7, issue_s=3e-6 * i)
                for i in range(1, ranks)
            ]
            after = tuple(range(first, len(tasks)))
            tasks.append(
                Task(name="k", rank=rank, after=after, alone_s=1e-4, shared_s=1e-4, memory_bytes=1e8)
            )
        return flow(FlowNode(fabric=replace(joined, period=period), **common), tasks).total_s

    assert total(joined.period) == pytest.approx(total(ranks), rel=1e-6)


def test_a_kernel_is_slowed_by_the_memory_and_the_sms_that_copies_take():
    joined = fabric("nvswitch", 2, "h100")
    work = Task(name="k", rank=0, alone_s=1e-3, shared_s=1.2e-3, memory_bytes=1e6)
    copy = Task(name="copy", rank=0, source=1, copied_bytes=1e9)
    for takes_sms, seconds in ((False, 1e-3), (True, 1.2e-3)):
        shared = FlowNode(
            fabric=joined, memory_bytes_per_s=7.2e12, lanes=1, start_s=0.0, traffic=1.0, takes_sms=takes_sms
        )
        assert flow(shared, [work]).total_s == pytest.approx(1e-3)
        # 360 GB/s come in and as many go out: a tenth of the memory's bandwidth.
        slowed = flow(shared, [copy, work]).end_s[1]
        assert slowed == pytest.approx(seconds * (1 + 0.1 * MEMORY_STALL), rel=1e-6)


def test_the_overhead_of_a_dma_copy_is_near_measurements_on_an_mi300x():
    mesh = fabric("mesh", 8, "mi300x")
    start, rate = 6e-6, mesh.peer_rate(1, 0)  # of 8.4 µs, 2.4 are the copy's own latency
    for size, measured in ((1e3, 71), (64e3, 54), (1e6, 21), (16e6, 2)):
        share = 100 * start / (mesh.copy_start_s + size / rate)
        assert share == pytest.approx(measured, abs=10)


def test_the_usual_topology_of_a_gpu():
    names = {name: default_topology(machine(name).spec) for name in ("mi300x", "h100", "a40", "b200")}
    assert names == {"mi300x": "mesh", "h100": "nvswitch", "a40": "pcie", "b200": "nvswitch"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("star", 8, "h100"), "topology 'star' is not known"),
        (("mash", 8, "h100"), "did you mean 'mesh'"),
        (("mesh", 1, "h100"), "ranks 1 is not valid"),
        (("mesh", 65, "h100"), "ranks 65 is not valid"),
        (("mesh", 8, "h900"), "no GPU preset named 'h900'"),
    ],
)
def test_invalid_input_is_named(words, said):
    with pytest.raises(UsageError, match=said):
        fabric(*words)


def test_copy_engines_and_start_up_time_come_from_the_gpu():
    case = Case(operation="all_gather_matmul", m=64, n=64, k=64, ranks=8, gpu="mi300x")
    assert flow_node(case, "dma").lanes == machine("mi300x").spec.copy_engines
    assert flow_node(case, "sm").takes_sms
    assert not flow_node(case, "dma").takes_sms
