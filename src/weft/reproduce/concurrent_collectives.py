"""ConCCL (arXiv:2412.14335): the share of the ideal gain that concurrent GEMMs and collectives reach."""

from __future__ import annotations

from statistics import fmean

from weft.execute.base import References
from weft.execute.sim import SimExecutor
from weft.policy import Policy
from weft.reproduce.figure import NOT_LOOKED_AT, OnProgress, Reproduced
from weft.workload import Compute, Workload

PUBLISHED_PCT = {"concurrent": 21.0, "priority or partition": 42.0, "DMA": 72.0}
PUBLISHED_SPEEDUP = 1.67
SHAPES_C3 = ((8192, 8192, 8192), (16384, 8192, 8192), (8192, 28672, 8192), (8192, 8192, 28672))
"""GEMMs of the reading; the paper's own are not in what we could read."""
COLLECTIVES_C3 = ("all_gather", "all_to_all")
"""Collectives that copy engines can do."""
COMM_SHARES = (0.5, 1.0, 2.0)
"""Time of the collective relative to the GEMM's."""
SM_RESERVES = (8, 16, 32)


def concurrent_rows(progress: OnProgress) -> list[Reproduced]:
    """Mean fractions of ideal by strategy, over GEMMs, collectives and their relative lengths."""
    run = SimExecutor("mi300x")
    fractions: dict[str, list[float]] = {name: [] for name in PUBLISHED_PCT}
    fastest = 0.0
    cases = [(s, c, share) for s in SHAPES_C3 for c in COLLECTIVES_C3 for share in COMM_SHARES]
    for done, (shape, collective, share) in enumerate(cases, 1):
        workload = _sized(run, shape, collective, share)
        sequential, compute, comm = (
            run.measure(workload, Policy(), mode).ms for mode in ("sequential", "compute", "comm")
        )
        references = References(sequential, compute, comm, workload.iterations)
        times = {name: _best_ms(run, workload, policies) for name, policies in _strategies().items()}
        for name, ms in times.items():
            fraction = references.fraction_of_ideal(ms)
            if fraction is not None:
                fractions[name].append(100 * fraction)
        fastest = max(fastest, references.sequential_ms / times["DMA"])
        progress("concurrent collectives", done, len(cases))
    note = f"mean of {len(cases)} cases on a simulated MI300X; negative where overlap loses"
    rows = [
        Reproduced(
            id="conccl/fraction-of-ideal",
            cell=name,
            published=PUBLISHED_PCT[name],
            ours=fmean(values),
            basis=NOT_LOOKED_AT,
            unit="% of ideal",
            sign_right=fmean(values) > 0,
            note=note,
        )
        for name, values in fractions.items()
    ]
    rows.append(
        Reproduced(
            id="conccl/speedup",
            cell="DMA, most",
            published=PUBLISHED_SPEEDUP,
            ours=fastest,
            basis=NOT_LOOKED_AT,
            unit="x over sequential",
            sign_right=fastest > 1,
            note=note,
        )
    )
    return rows


def _strategies() -> dict[str, list[Policy]]:
    high = Policy(priority="high")
    parts = [Policy(sm_reserve=n, priority=p) for n in SM_RESERVES for p in ("default", "high")]
    return {
        "concurrent": [Policy()],
        "priority or partition": [high, *parts],
        "DMA": [Policy(engine="dma")],
    }


def _best_ms(run: SimExecutor, workload: Workload, policies: list[Policy]) -> float:
    return min(run.measure(workload, policy).ms for policy in policies)


def _sized(run: SimExecutor, shape: tuple[int, int, int], collective: str, share: float) -> Workload:
    """A collective that, alone, takes about `share` of the GEMM's time."""
    compute = Compute(kind="gemm", shape=shape)
    guess = Workload(compute=compute, collective=collective, bytes=1 << 28, ranks=8, iterations=8)
    for _ in range(3):  # start-up latency makes the time not quite proportional to the bytes
        wanted = share * run.measure(guess, Policy(), "compute").ms
        guess = guess.but(
            bytes=max(1 << 20, int(guess.bytes * wanted / run.measure(guess, Policy(), "comm").ms))
        )
    return guess
