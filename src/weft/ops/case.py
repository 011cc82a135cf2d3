"""Case: one fused operation on one node, and the cost of its GEMMs and of the library's collective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from weft.errors import UsageError
from weft.gpu.cost import GemmCost, node_collective_s
from weft.ops.schedule import OPERATIONS, Problem
from weft.policy import SCHEDULES
from weft.sim.fabric import Fabric, default_topology, fabric, node_links
from weft.sim.gemm import Gemms, gemms
from weft.workload import DTYPE_BYTES

FUSED_ENGINES = ("dma", "sm")
LIBRARY_COLLECTIVES = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "all_to_all_matmul": "all_to_all",
}
"""The collective of the library that each fused operation replaces."""
MAX_SIZE = 1 << 24
MAX_ELEMENTS = 1 << 40

ISSUE_S = 3e-6
"""Host time to issue one step (assumed: a launch or copy call and its event)."""
SM_START_S = 8e-6
"""From the issue of a library collective or send to its first byte (assumed: latency of small messages)."""
ROW_BYTES = 1600
"""Cost of each row of a non-contiguous copy, in bytes that could have been copied instead: an H200's copy
engine takes about 30 ns per row, at some 50 GB/s (benchmarks/results/ops/h200.md, 2d)."""
KERNEL_S = 2e-6
"""Duration of the shortest kernel."""
DMA_TRAFFIC = 2.0
"""Bytes of memory bandwidth that a GEMM loses, at each end, for each byte of a DMA copy. On an H200, copies
in and out at 50 GB/s each slowed a GEMM of 8192³ by 2.0%, which corresponds to 1.8, and a memory-bound GEMM
by 7.3%, which corresponds to 3.4 (benchmarks/results/ops/h200_characterize.json). The GEMM did not slow the
copies (-0.2%)."""
SM_COPY_SLOWED = 1.17
"""Factor by which a concurrent GEMM slows copies on SMs; same measurement, with 16 SMs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fused operation on one node."""

    operation: str
    m: int
    n: int
    k: int
    ranks: int
    dtype: str = "bf16"
    gpu: str = "h100"
    """Name of a preset, or a profile file."""
    topology: str = ""
    """Empty: the usual topology of the GPU."""

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise UsageError(f"operation {self.operation!r} is not known; use one of {', '.join(OPERATIONS)}")
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise UsageError(
                    f"{name.upper()} = {value!r} is not valid; use an integer from 1 to {MAX_SIZE}"
                )
        if max(self.m * self.k, self.k * self.n, self.m * self.n) > MAX_ELEMENTS:
            raise UsageError(
                f"{self.m}x{self.n}x{self.k}: a matrix of more than {MAX_ELEMENTS} elements fits on no GPU; "
                "use a smaller shape"
            )
        if not self.topology:
            object.__setattr__(self, "topology", default_topology(self.costs.profile.spec))
        _ = self.fabric

    @property
    def fabric(self) -> Fabric:
        return fabric(self.topology, self.ranks, self.gpu)

    @property
    def costs(self) -> Gemms:
        return gemms(self.gpu)

    @property
    def problem(self) -> Problem:
        return Problem(m=self.m, n=self.n, k=self.k, ranks=self.ranks, itemsize=DTYPE_BYTES[self.dtype])

    @property
    def rows(self) -> int:
        """Rows of rank 0's GEMM; in an all-to-all, rank 0 has the most."""
        if self.operation == "all_to_all_matmul":
            return -(-self.m // self.ranks) * self.ranks
        return self.m

    @property
    def shard_bytes(self) -> int:
        """Bytes that each rank receives from each peer."""
        columns = self.n if self.operation == "matmul_reduce_scatter" else self.k
        return -(-self.m // self.ranks) * columns * DTYPE_BYTES[self.dtype]


def schedule_candidates(case: Case, engines: tuple[str, ...] = FUSED_ENGINES) -> list[tuple[str, str]]:
    """The schedules and engines to choose from. Serial is the library's collective, on SMs if allowed.

    If GEMMs are persistent kernels, copies on SMs get no SM until a GEMM ends (on an H200 they took three
    times as long), so they are candidates only without DMA.
    """
    persistent = case.costs.profile.figures.persistent > 0
    usable = tuple(engine for engine in engines if engine == "dma" or not persistent) or engines
    serial = "sm" if "sm" in engines else "dma"
    finer = [name for name in SCHEDULES if name != "serial"]
    return [*((name, engine) for engine in usable for name in finer), ("serial", serial)]


def gemm(case: Case, m: int, n: int, k: int, *, parts: int = 1, accumulate: bool = False) -> GemmCost:
    """The cost of a GEMM alone."""
    return case.costs.cost(m, n, k, case.dtype, parts=parts, accumulate=accumulate)


def gemm_with_copies(
    case: Case, m: int, n: int, k: int, *, parts: int = 1, accumulate: bool = False
) -> GemmCost:
    """The cost of a GEMM on the SMs that the library's copies leave free."""
    of = case.costs.profile
    fewer = max(1, of.spec.sms - int(of.figures.comm_ctas))
    return case.costs.cost(m, n, k, case.dtype, parts=parts, accumulate=accumulate, sms=fewer)


def library_collective_s(case: Case) -> float:
    """Seconds of the library's collective: direct to every peer, or around a ring if that is faster."""
    figures = case.costs.profile.figures
    direct, ring = _loads(case.topology, case.ranks, case.gpu)
    kind = LIBRARY_COLLECTIVES[case.operation]
    link_rate = (case.ranks - 1) / direct
    if kind != "all_to_all":
        link_rate = max(link_rate, 1 / ring)
    rate = min(figures.comm_ctas * figures.cta_gb_s * 1e9, link_rate)
    links = node_links(case.costs.profile.spec, case.topology)
    return node_collective_s(kind, case.ranks * case.shard_bytes, case.ranks, rate, links)


@lru_cache(maxsize=512)
def _loads(topology: str, ranks: int, gpu: str) -> tuple[float, float]:
    """Seconds per byte of a shard: if each rank sends it to all others, and if it is passed around a ring."""
    joined = fabric(topology, ranks, gpu)
    direct, ring = [0.0] * len(joined.capacity), [0.0] * len(joined.capacity)
    for a in range(ranks):
        for b in range(ranks):
            for link in joined.routes[a][b]:
                direct[link] += 1.0
        for b in (a + 1, a - 1):
            for link in joined.routes[a][b % ranks]:
                ring[link] += 0.5
    pairs = list(zip(direct, ring, joined.capacity, strict=True))
    return max(d / c for d, _, c in pairs), max(r / c for _, r, c in pairs)
