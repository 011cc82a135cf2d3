"""Paced collectives under the shim: it treats them as NCCL's, with the controls of a policy and in traces."""

from __future__ import annotations

from weft.policy import CommRule, Policy

RANK = """
from weft.comm import nccl, paced
from weft.comm.node import load_node
from weft.policy import CommRule, Policy
from weft.shim import apply, communicators

class Tensor:
    dtype = "torch.float32"
    def __init__(self, count): self.count = count
    def numel(self): return self.count
    def data_ptr(self): return 1 << 32

class Stream:
    cuda_stream = 9

ranks = nccl.NcclRanks(paced.load_paced(load_node("dgx-h100")), 8, own=0)
def reduce(count=1 << 24):
    ranks.all_reduce([Tensor(count)], [Tensor(count)], [Stream()])
def gather(count=1 << 20):
    ranks.all_gather([Tensor(count)], [Tensor(8 * count)], [Stream()])
def ctas():
    return [r["grid"] for r in records() if r["name"].startswith("nccl")]
"""


def test_priority_limits_and_rules_reach_paced_collectives(program):
    start = Policy(
        priority="high", head_start_us=5.0, comm_rules=(CommRule(collective="all_gather", ctas=3, cluster=0),)
    )
    outcome = program(
        RANK
        + f"""
start = Policy.from_dict({start.to_dict()!r})
reduce(); gather()
launch(kernel("some_gemm"))
communicators.prepare(4, 5.0)
apply.apply(Policy(priority="high", max_ctas=4, comm_rules=start.comm_rules), start)
reduce(); gather()
apply.apply(start, start)
reduce()
found = communicators.communicators()
show([records(), ctas(), [[c.size, c.rank, c.collectives, c.path, c.bytes] for c in found]])
""",
        start,
    )
    launched, ctas, communicators = outcome.results
    named = [record for record in launched if record["name"].startswith("nccl")]
    assert [record["name"] for record in named[:2]] == [
        "ncclDevKernel_AllReduce_Sum_f32_PACED",
        "ncclDevKernel_AllGather_PACED",
    ]
    assert all(record["priority"] == -5 for record in named)
    whole = ctas[0]
    assert whole > 4
    assert ctas == [whole, 3, 4, 3, whole]
    assert [record["name"] for record in launched][2] == "weft_head_start"
    sizes = {"all_reduce": 3 << 26, "all_gather": 2 << 22}
    assert communicators == [[8, 0, 5, "config", sizes]]
    assert outcome.stats["comm_launches"] == 5
