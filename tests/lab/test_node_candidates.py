"""Which candidates are raced on a GPU that is one rank of a node."""

from __future__ import annotations

import pytest

from weft.comm.node import load_node
from weft.tuning.lab import choose_candidates
from weft.workload import Workload


class NodeGpu:
    simulated = False

    def __init__(self, node: str) -> None:
        self._node = node

    def info(self):
        found = {"gpu": "some GPU", "sm_count": 132, "ranks": f"rank 0 of {self._node}"}
        return {**found, "node": self._node}


@pytest.mark.parametrize(
    ("node", "collective", "copied"),
    [
        ("dgx-h100", "all_gather", True),
        ("dgx-h100", "all_reduce", False),  # copy engines cannot reduce
        ("pcie-8", "all_gather", False),  # the node has none
        ("dgx-h100-2", "all_gather", False),  # they reach one domain
    ],
)
def test_copy_engines_are_raced_where_the_node_has_them(node, collective, copied):
    ranks = load_node(node).ranks
    workload = Workload(collective=collective, ranks=ranks)
    tried, _ = choose_candidates(NodeGpu(node), workload)
    assert any(one.policy.engine == "dma" for one in tried) == copied
    most = load_node(node).collective(collective, 1 << 30, ranks=ranks).ctas
    assert all((one.policy.max_ctas or 0) <= most for one in tried)  # as on a node, CTAs can only be lowered
