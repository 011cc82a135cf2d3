"""Collectives: against published curves, and the physics that must hold."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.gpu.collectives import Group, collective_s, group
from weft.gpu.network import NETWORKS, network
from weft.gpu.specs import spec
from weft.plan.figures import shipped
from weft.plan.traffic import token_copies

LINKS = shipped().links
TABLE = Path(__file__).parents[1] / "data" / "published_collectives.csv"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


def seconds(kind, size, g, gpu="h100", net="ndr400", **changes):
    return collective_s(kind, size, g, spec(gpu), network(net).but(**changes), LINKS)


def test_published_curves_from_16_mb_on():
    errors = []
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            if float(row["bytes"]) < 16e6:
                continue
            ranks, nodes = int(row["ranks"]), int(row["nodes"])
            found = seconds(
                row["collective"],
                float(row["bytes"]),
                Group(ranks, ranks // nodes, ranks),
                row["gpu"],
                row["network"],
            )
            errors.append(abs(math.log(found / (float(row["time_us"]) * 1e-6))))
    assert len(errors) > 80
    assert statistics.fmean(errors) < 0.10
    assert max(errors) < 0.5


@pytest.mark.parametrize(
    ("kind", "group_", "gpu", "net", "low", "high"),
    [
        # GB/s of bus bandwidth at 8 GB: nccl-tests issues 212 and 326, 309, Azure ND96asr_v4
        ("all_gather", Group(8, 8, 8), "h100", "ndr400", 340, 375),
        ("all_reduce", Group(8, 8, 8), "h100", "ndr400", 430, 490),
        ("all_reduce", Group(32, 8, 32), "h100", "ndr400", 320, 400),
        ("all_reduce", Group(16, 8, 16), "a100-80gb", "hdr200", 170, 200),
    ],
)
def test_bandwidth_of_large_messages(kind, group_, gpu, net, low, high):
    size = 8e9
    factor = (2 if kind == "all_reduce" else 1) * (group_.ranks - 1) / group_.ranks
    assert low < factor * size / seconds(kind, size, group_, gpu, net) / 1e9 < high


def test_groups_know_which_ranks_share_a_domain():
    net = network("ndr400")
    assert group(8, 1, net) == Group(8, 8, 8)
    assert group(16, 4, net) == Group(16, 2, 64)
    assert group(16, 8, net) == Group(16, 1, 128)
    assert group(64, 1, network("nvl72")).scope == "domain"
    assert group(6, 2, net).per_domain == 3


@given(
    kind=st.sampled_from(KINDS),
    size=st.floats(1e3, 1e11),
    ranks=st.sampled_from([2, 4, 8, 16, 64, 1024]),
    stride=st.sampled_from([1, 2, 8, 64]),
    gpu=st.sampled_from(["a100-80gb", "h100", "mi300x"]),
    faster=st.floats(1, 10),
)
@examples(150)
def test_more_bytes_never_faster_more_bandwidth_never_slower(kind, size, ranks, stride, gpu, faster):
    net = NETWORKS["ndr400"]
    g = group(ranks, stride, net)
    base = seconds(kind, size, g, gpu)
    assert base > 0
    assert seconds(kind, size * faster, g, gpu) >= base
    assert seconds(kind, size, g, gpu, rail_bytes_per_s=net.rail_bytes_per_s * faster) <= base
    assert seconds(kind, size, g, gpu, oversubscription=faster) >= base
    assert seconds(kind, size, g, gpu, latency_us=net.latency_us * faster) >= base


def test_oversubscription_is_met_only_beyond_the_leaf():
    near, far = group(16, 8, network("ndr400")), group(64, 8, network("ndr400"))
    assert seconds("all_gather", 1e9, near, oversubscription=4) == seconds("all_gather", 1e9, near)
    assert seconds("all_gather", 1e9, far, oversubscription=4) > 2 * seconds("all_gather", 1e9, far)


def test_nobody_to_talk_to_takes_no_time():
    assert seconds("all_reduce", 1e9, Group(1, 1, 1)) == 0
    assert seconds("all_reduce", 0, Group(8, 8, 8)) == 0


def test_a_broadcast_between_nodes_sends_everything_around_the_ring():
    """An all-gather's rank already has its own part: 15 of 16 are sent."""
    across = group(16, 1, network("ndr400"))
    all_of_it, part = seconds("broadcast", 1e11, across), seconds("all_gather", 1e11, across)
    assert all_of_it / part == pytest.approx(16 / 15, rel=1e-3)


@pytest.mark.parametrize(("ranks", "least_s"), [(1024, 5e-3), (16384, 0.05), (131072, 0.3)])
def test_a_ring_over_many_ranks_pays_for_every_hop(ranks, least_s):
    """NCCL's ring has as many hops as ranks: no gather over 131,072 of them takes milliseconds."""
    net = network("ndr400")
    took = collective_s("all_gather", 436e6, group(ranks, 1, net), spec("h100"), net, shipped().links)
    assert took > least_s


def test_tokens_are_sent_once_for_each_node_they_visit():
    net = network("ndr400")
    assert token_copies(8, group(64, 1, net), "copies") == 8
    eight = token_copies(8, group(64, 1, net), "node")
    assert 5 < eight < 8  # eight draws of eight nodes
    assert token_copies(8, group(64, 1, net), "node", 4) == 4
    assert token_copies(1, group(64, 1, net), "node") == pytest.approx(1)
    assert token_copies(8, group(8, 1, net), "node", 4) == pytest.approx(8 * (1 - (7 / 8) ** 8))


@pytest.mark.parametrize(("ranks", "published_gb_s"), [(8, 153), (32, 58), (64, 51)])
@pytest.mark.parametrize("width", [1, 2])
def test_dispatch_and_combine_of_deepep(ranks, published_gb_s, width):
    """DeepEP's own table for H800: 4,096 tokens of 7,168, each to at most four nodes; not used in any fit.

    Its row of 16 GPUs is left out: whether its bandwidth counts the node itself is not stated.
    """
    net, of = network("ndr400"), spec("h800")
    where = group(ranks, 1, net)
    sent = 4096 * 7168 * width * token_copies(8, where, "node", 4)
    took = collective_s("all_to_all", sent, where, of, net, shipped().links)
    assert sent / took / 1e9 == pytest.approx(published_gb_s, rel=0.25)
