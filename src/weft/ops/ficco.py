"""The rule of FiCCO (Pal et al., arXiv:2512.10236) to choose a schedule, for comparison with weft's pick.

The paper chooses among its four finer schedules from static sizes: operations per byte compared with the
machine's, memory traffic MK + KN + MN, and M compared with K. Serial and whole shards are not candidates. It
reports that 81% of unseen cases are right, and that wrong ones lose about 14%. The text that we could read
does not give the thresholds, nor the schedule that each test selects. Nothing here was fitted:

1. M < K: there are few rows, so cut along K (`uniform-fused-2d`).
2. Fewer operations per byte than the machine can do: memory is the limit, so read w as seldom as possible
   (`uniform-fused-1d`, one GEMM per round).
3. w is most of the traffic: one GEMM per peer would read it repeatedly (`hetero-fused-1d`).
4. Otherwise memory traffic allows any cut, and there are two readings. `traffic`: multiply each piece as it
   arrives (`hetero-unfused-1d`). `decomposition`: smaller GEMMs are less efficient, so use one GEMM per round
   (`hetero-fused-1d`).

Nearly all large GEMMs reach step 4, so the reading determines how often the rule is right
(`weft.reproduce.schedule_rules` has every rule of this form).
"""

from __future__ import annotations

from weft.errors import UsageError
from weft.ops.case import Case
from weft.ops.pick import Pick
from weft.workload import DTYPE_BYTES

ENGINE = "dma"
"""The engine of all copies in the paper."""
RULE_READINGS = ("traffic", "decomposition")
"""The two readings of the rule's last test."""


def gemm_traffic(case: Case) -> tuple[float, float]:
    """Operations per byte of one rank's GEMM, and its traffic MK + KN + MN in bytes."""
    m, n, k = case.rows, case.n, case.k
    traffic = float(DTYPE_BYTES[case.dtype] * (m * k + k * n + m * n))
    return 2.0 * m * n * k / traffic, traffic


def machine_balance(case: Case) -> float:
    """Operations per byte of memory traffic that the GPU can do, by its data sheet."""
    spec = case.costs.profile.spec
    return spec.flops(case.dtype) / spec.memory_bytes_per_s


def ficco_pick(case: Case, reading: str = RULE_READINGS[0]) -> Pick:
    """The schedule that the rule selects, and why in one sentence."""
    if reading not in RULE_READINGS:
        raise UsageError(f"reading {reading!r} is not known; use one of {', '.join(RULE_READINGS)}")
    m, n, k = case.rows, case.n, case.k
    intensity, traffic = gemm_traffic(case)
    balance = machine_balance(case)
    if m < k:
        return Pick("uniform-fused-2d", ENGINE, f"M = {m} is less than K = {k}: cut along K")
    if intensity < balance:
        return Pick(
            "uniform-fused-1d",
            ENGINE,
            f"{intensity:.0f} operations per byte, and the machine can do {balance:.0f}: one GEMM per round",
        )
    weights = DTYPE_BYTES[case.dtype] * k * n
    share = 100 * weights / traffic
    if 2 * weights >= traffic:
        return Pick("hetero-fused-1d", ENGINE, f"w is {share:.0f}% of the traffic: read it once a round")
    if reading == "decomposition":
        return Pick("hetero-fused-1d", ENGINE, f"w is {share:.0f}% of the traffic: cut the GEMM least")
    return Pick(
        "hetero-unfused-1d", ENGINE, f"w is {share:.0f}% of the traffic: multiply each piece as it arrives"
    )
