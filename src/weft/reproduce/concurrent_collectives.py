"""ConCCL (arXiv:2412.14335): the share of the ideal speedup that a concurrent GEMM and collective reach.

The paper's setting, as far as its abstract and public notes describe it: a GEMM and a collective that do not
depend on each other, both ready at once. The first launch gets compute units first, so a collective that is
launched after a GEMM waits until all blocks of the GEMM have been placed. "Communication first" reverses the
order, a partition reserves compute units for the collective, and DMA needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from weft.execute.sim import SimExecutor
from weft.ops.case import ISSUE_S, Case
from weft.ops.simulate import flow_node
from weft.policy import Policy
from weft.reproduce.figure import HELD_OUT, INSPECTED, OnProgress, Reproduced
from weft.sim.core import simulate_launches
from weft.sim.flow import Task, flow
from weft.sim.launches import Launch, LaunchKind
from weft.workload import Compute, Workload

GPU_C3, RANKS_C3 = "mi300x", 8
PUBLISHED_PCT = {
    "concurrent": 21.0,
    "priority or partition": 42.0,
    "DMA, all compute units": 66.0,
    "DMA": 72.0,
}
"""Percent of the ideal speedup by strategy: GEMM first; the better of communication first and a partition;
copy engines; copy engines and, if it helps, 8 compute units fewer for the GEMM."""
PUBLISHED_SPEEDUP = 1.67
PUBLISHED_MEAN_SPEEDUP = 1.13
PUBLISHED_FEWER_PCT = {32: 17.0, 64: 27.0}
"""By number of compute units removed: how much longer a compute-bound GEMM takes, in percent."""
SHAPES_C3 = (
    (8192, 8192, 8192),
    (8192, 57344, 8192),
    (16384, 8192, 8192),
    (8192, 28672, 8192),
    (8192, 8192, 28672),
)
"""GEMM shapes of our choice; the parts of the paper that we could read do not list its own."""
COLLECTIVE_CTAS = {"all_gather": 32, "all_to_all": 64}
"""Collectives that copy engines can do, with the compute units that each needs for full bandwidth."""
COMM_SHARES = (0.5, 1.0, 2.0)
"""Time of the collective relative to the GEMM's. With five GEMMs and two collectives that makes 30 cases, as
in the paper."""
FEWER = 8
"""Compute units that ConCCL takes from a GEMM while copy engines run: one on each die."""


@dataclass(frozen=True)
class Scenario:
    """A GEMM and a collective that run at the same time, in seconds."""

    gemm_s: float
    comm_s: float
    taken_s: dict[str, float]
    """Time of both together, by strategy."""

    @property
    def ideal(self) -> float:
        """Speedup over sequential execution if neither slowed down the other."""
        return (self.gemm_s + self.comm_s) / max(self.gemm_s, self.comm_s)

    def speedup(self, strategy: str) -> float:
        return (self.gemm_s + self.comm_s) / self.taken_s[strategy]

    def share_pct(self, strategy: str) -> float:
        """Percent of the ideal speedup; 1 is subtracted from both speedups, as in the paper."""
        return 100 * (self.speedup(strategy) - 1) / (self.ideal - 1)


def concurrent_rows(progress: OnProgress) -> list[Reproduced]:
    """Mean shares of the ideal speedup by strategy, over GEMMs, collectives and their relative times."""
    run = SimExecutor(GPU_C3)
    cases = [(s, c, share) for s in SHAPES_C3 for c in COLLECTIVE_CTAS for share in COMM_SHARES]
    found = []
    for done, case in enumerate(cases, 1):
        found.append(scenario(run, *case))
        progress("concurrent collectives", done, len(cases))
    note = (
        f"mean of {len(found)} cases on a simulated MI300X, mean ideal speedup "
        f"{fmean(s.ideal for s in found):.2f}; "
        "nothing was fitted to it, but the setting was read with it in view"
    )

    def row(id_: str, cell: str, published: float, ours: float, unit: str, neutral: float) -> Reproduced:
        return Reproduced(
            id=id_,
            cell=cell,
            published=published,
            ours=ours,
            basis=INSPECTED,
            unit=unit,
            sign_right=ours > neutral,
            note=note,
        )

    rows = [
        row(
            "conccl/fraction-of-ideal",
            name,
            published,
            fmean(s.share_pct(name) for s in found),
            "% of ideal",
            0,
        )
        for name, published in PUBLISHED_PCT.items()
    ]
    speedups = {name: [s.speedup(name) for s in found] for name in ("concurrent", "DMA")}
    over = "x over sequential"
    rows += [
        row("conccl/speedup", "DMA, most", PUBLISHED_SPEEDUP, max(speedups["DMA"]), over, 1),
        row(
            "conccl/speedup",
            "concurrent, mean",
            PUBLISHED_MEAN_SPEEDUP,
            fmean(speedups["concurrent"]),
            over,
            1,
        ),
    ]
    return rows + _missing_rows(found) + _fewer_rows(run)


def concurrent_findings(rows: Sequence[Reproduced]) -> list[str]:
    """Sentences on which of ConCCL's figures hold; empty if `rows` has none of them."""
    shares = {one.cell: one.ours or 0.0 for one in rows if one.id == "conccl/fraction-of-ideal"}
    if not shares:
        return []
    ordered = [shares[name] for name in PUBLISHED_PCT]
    holds = "holds" if ordered == sorted(ordered) else "does not hold"
    return [
        f"ConCCL's order (GEMM first, then communication first or a partition, then DMA) {holds}: "
        f"{', '.join(f'{each:.0f}' for each in ordered)}% of the ideal speedup (published: "
        f"{', '.join(f'{each:.0f}' for each in PUBLISHED_PCT.values())}). Launch order explains the first; "
        "the others are too high: the model has compute units and memory bandwidth to share, and no cache "
        "that a collective and a GEMM take from each other. conccl/missing says how much is missing.",
    ]


def _missing_rows(found: Sequence[Scenario]) -> list[Reproduced]:
    """The factor by which every concurrent run would have to be slower to give the published shares."""
    rows = []
    for name, published in PUBLISHED_PCT.items():
        reached = fmean(100 * s.speedup(name) / (s.ideal - 1) for s in found)
        rows.append(
            Reproduced(
                id="conccl/missing",
                cell=name,
                published=None,
                ours=reached / (published + fmean(100 / (s.ideal - 1) for s in found)),
                basis=INSPECTED,
                unit="x as long as simulated",
                note="what would give the published share; not used anywhere",
            )
        )
    return rows


def _fewer_rows(run: SimExecutor) -> list[Reproduced]:
    """The slowdown of a GEMM with fewer compute units."""
    rows = []
    for count, published in PUBLISHED_FEWER_PCT.items():
        losses = []
        for shape in SHAPES_C3:
            gemm = run.launches(_workload(shape, "all_gather"), Policy(), "compute")
            fewer = [replace(launch, first_sm=count) for launch in gemm]
            losses.append(100 * (_seconds(run, fewer) / _seconds(run, gemm) - 1))
        rows.append(
            Reproduced(
                id="conccl/gemm-slowdown",
                cell=f"{count} compute units fewer",
                published=published,
                ours=fmean(losses),
                basis=HELD_OUT,
                unit="% more time",
                sign_right=fmean(losses) > 0,
                note=f"mean of {len(losses)} compute-bound GEMMs",
            )
        )
    return rows


def scenario(run: SimExecutor, shape: tuple[int, int, int], collective: str, share: float) -> Scenario:
    """Simulate all strategies for a collective that, alone, takes about `share` times as long as the GEMM."""
    ctas = COLLECTIVE_CTAS[collective]
    policy = Policy(max_ctas=ctas)
    work = _workload(shape, collective)
    gemm = run.launches(work, policy, "compute")
    gemm_s = _seconds(run, gemm)
    for _ in range(3):  # start-up latency makes the time not quite proportional to the bytes
        comm_s = _seconds(run, run.launches(work, policy, "comm"))
        work = work.but(bytes=max(1 << 20, int(work.bytes * share * gemm_s / comm_s)))
    comm = run.launches(work, policy, "comm")
    kept = [replace(launch, first_sm=ctas) for launch in gemm]
    fewer_s = _seconds(run, [replace(launch, first_sm=FEWER) for launch in gemm])
    full_dma_s = _dma_s(work, gemm_s)
    return Scenario(
        gemm_s,
        _seconds(run, comm),
        {
            "concurrent": _seconds(run, _in_order(gemm, comm)),
            "priority or partition": min(
                _seconds(run, _in_order(comm, gemm)), _seconds(run, _in_order(comm, kept))
            ),
            "DMA, all compute units": full_dma_s,
            "DMA": min(full_dma_s, _dma_s(work, fewer_s)),
        },
    )


def _workload(shape: tuple[int, int, int], collective: str) -> Workload:
    compute = Compute(kind="gemm", shape=shape)
    return Workload(compute=compute, collective=collective, bytes=1 << 28, ranks=RANKS_C3, iterations=1)


def _seconds(run: SimExecutor, launches: Sequence[Launch]) -> float:
    return simulate_launches(run.profile.machine(), list(launches)).total_s


def _in_order(first: Sequence[Launch], then: Sequence[Launch]) -> list[Launch]:
    """Join two independent lists of launches; the second is issued one host call later."""
    wait = Launch(name="host", kind=LaunchKind.DELAY, seconds=ISSUE_S, stream=then[0].stream)
    after = ((len(first), 0.0),)
    joined = [*first, wait, *(replace(launch, after=after) for launch in then)]
    return [replace(launch, group=i if launch.group >= 0 else -1) for i, launch in enumerate(joined)]


def _dma_s(work: Workload, gemm_s: float) -> float:
    """Seconds of the GEMM and the collective's DMA copies, all ready at once; they share memory bandwidth."""
    m, n, k = work.compute.shape
    case = Case(operation="all_gather_matmul", m=m, n=n, k=k, ranks=work.ranks, gpu=GPU_C3)
    gemm = Task(
        name="GEMM",
        rank=0,
        issue_s=ISSUE_S,
        alone_s=gemm_s,
        shared_s=gemm_s,
        memory_bytes=case.costs.cost(m, n, k, case.dtype).memory_bytes,
    )
    peers = range(1, work.ranks)
    copies = [
        Task(
            name="copy",
            rank=0,
            source=i,
            issue_s=(1 + i) * ISSUE_S,
            copied_bytes=work.wire_bytes / len(peers),
        )
        for i in peers
    ]
    return flow(flow_node(case, "dma"), [gemm, *copies]).total_s
