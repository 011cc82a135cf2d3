"""The rule of FiCCO (Pal et al., arXiv:2512.10236) for a schedule, next to weft's own pick.

The paper chooses among its four finer schedules from static sizes: operations per byte against the machine's,
memory traffic MK + KN + MN, and M against K; serial and whole shards are no candidates. It reports 81% of
unseen cases right, and about 14% lost where it is wrong. Its thresholds are not stated in what we could read;
this reading derives them from the sizes, and nothing in it was fitted:

1. M < K: rows are few, so cut along K (`uniform-fused-2d`).
2. Fewer operations per byte than the machine can do: memory decides, so read w as seldom as possible
   (`uniform-fused-1d`, one GEMM a round).
3. w is most of the traffic: a GEMM for each peer would read it again and again (`hetero-fused-1d`).
4. Otherwise x and the result are: each piece is multiplied as it arrives (`hetero-unfused-1d`).
"""

from __future__ import annotations

from weft.ops.case import Case
from weft.ops.pick import Pick
from weft.workload import DTYPE_BYTES

ENGINE = "dma"
"""The paper's copies are all by DMA engines."""


def ficco_pick(case: Case) -> Pick:
    """The schedule that the rule names, and why in one sentence."""
    m, n, k = case.rows, case.n, case.k
    read, weights, written = m * k, k * n, m * n
    traffic = read + weights + written
    intensity = 2 * m * n * k / (DTYPE_BYTES[case.dtype] * traffic)
    spec = case.costs.profile.spec
    balance = spec.flops(case.dtype) / spec.memory_bytes_per_s
    if m < k:
        return Pick("uniform-fused-2d", ENGINE, f"M = {m} is less than K = {k}: cut along K")
    if intensity < balance:
        return Pick(
            "uniform-fused-1d",
            ENGINE,
            f"{intensity:.0f} operations for each byte, of {balance:.0f} that the machine can do: "
            "one GEMM a round",
        )
    share = 100 * weights / traffic
    if 2 * weights >= traffic:
        return Pick("hetero-fused-1d", ENGINE, f"w is {share:.0f}% of the traffic: read it once a round")
    return Pick(
        "hetero-unfused-1d", ENGINE, f"w is {share:.0f}% of the traffic: multiply each piece as it arrives"
    )
