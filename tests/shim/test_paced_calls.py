"""Paced collectives under the shim: it treats them like NCCL's, in the controls of a policy and in traces."""

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
communicators.prepare(4, 60.0)
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


WINDOW = (
    RANK
    + """
from ctypes import byref, c_size_t
from weft.shim.nccl_binding import NcclArena

class At(Tensor):
    def __init__(self, count, address): self.count, self.address = count, address
    def data_ptr(self): return self.address

def gather_into(address, count=1 << 20):
    ranks.all_gather([At(count, 1 << 33)], [At(8 * count, address)], [Stream()])

def ends(i):
    library().fake_finish(c_void_p(9))
    return wait_until(lambda: library().fake_wait_is_over(i))

def wait_until(holds):
    import time
    for _ in range(2000):
        if holds(): return True
        time.sleep(0.005)
    return False

(comm,) = [c.key for c in communicators.communicators()]
arena = NcclArena(int(comm, 16), 64 << 20)
arena.register()
"""
)


def test_gathers_in_windows_are_delays_without_a_kernel(program):
    """comm.engine dma, as NCCL does it: kernels outside of windows, for reductions, where the driver cannot delay
    a stream, and in a graph capture."""
    outcome = program(
        WINDOW
        + """
pending = []
for _ in range(2):
    gather_into(arena.address)
    pending.append(library().fake_wait_is_over(library().fake_waits() - 1))
    assert ends(library().fake_waits() - 1)
kernels = ctas()
library().fake_fail(b"cuStreamWaitValue32_v2", 1, 801)
gather_into(arena.address)
gather_into(1 << 34)
reduce()
call("cuStreamBeginCapture_v2", c_void_p(9), 0)
gather_into(arena.address)
arena.close()
show([pending, kernels, library().fake_waits(), [r["name"] for r in records() if r["name"].startswith("nccl")]])
""",
        Policy(engine="dma"),
    )
    gathered, reduced = "ncclDevKernel_AllGather_PACED", "ncclDevKernel_AllReduce_Sum_f32_PACED"
    assert outcome.results == [[0, 0], [], 2, [gathered, gathered, reduced, gathered]]
    engine = outcome.stats["engine"]
    assert (engine["copied"], engine["kernels"]) == (2, 4)
    (said,) = engine["represented_as"]
    assert said == "delay with a local copy, 368.8 GB/s (340 to 370, published), as on dgx-h100"
    assert f"2 collectives copied without an SM kernel ({said})" in outcome.stderr
