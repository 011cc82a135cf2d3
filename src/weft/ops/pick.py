"""Pick a schedule and an engine from sizes alone, and say why. Nothing is measured.

An estimate decides, in constant time. A pick in doubt is simulated once before it is believed: one with a
small gain, and any where the ranks of a node are not alike (below PCIe switches).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from weft.errors import UsageError
from weft.ops.case import ENGINES, Case, candidates, collective_s, gemm
from weft.ops.estimate import seconds

MARGIN = 0.01
"""What a schedule must gain over serial by the estimate to be picked."""
DOUBT = 0.25
"""An estimated gain below this is simulated before it is believed, except of gathered whole shards."""
CONFIRMED_AT_MOST = 3
"""How many candidates are simulated where the estimate alone is not sure enough."""
LEAST_GAIN_S = 3e-6
"""A smaller gain is within the error of the latencies of launches, copies and small collectives."""
TIE = 0.002
"""Estimates this close are equal."""


@dataclass(frozen=True)
class Pick:
    """What to run, and why in one sentence."""

    schedule: str
    engine: str
    why: str
    seconds: float = 0.0
    """By the estimate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A schedule with an engine and its time by the estimate."""

    schedule: str
    engine: str
    seconds: float


def pick(
    operation: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    dtype: str = "bf16",
    gpu: str = "h100",
    topology: str = "",
    *,
    engines: tuple[str, ...] = ENGINES,
) -> Pick:
    """The schedule and engine for a fused operation of these sizes, as one rank sees them.

    `gpu` is a preset's name or a profile file, `topology` mesh, nvswitch, ring, pcie or empty for the GPU's
    usual one, `engines` those that are there. The same call is answered from memory.
    """
    if not engines:
        raise UsageError(f"no engine to pick from; give one of {', '.join(ENGINES)}")
    return _pick(operation, m, n, k, ranks, dtype, gpu, topology, tuple(engines))


@lru_cache(maxsize=4096)
def _pick(
    operation: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    dtype: str,
    gpu: str,
    topology: str,
    engines: tuple[str, ...],
) -> Pick:
    case = Case(operation=operation, m=m, n=n, k=k, ranks=ranks, dtype=dtype, gpu=gpu, topology=topology)
    found = estimates(case, engines)
    (serial,) = (e for e in found if e.schedule == "serial")
    least = max(MARGIN * serial.seconds, LEAST_GAIN_S)
    faster = [e for e in found if serial.seconds - e.seconds >= least]
    best = _confirmed(case, faster, serial) or serial
    return Pick(best.schedule, best.engine, why(case, best, serial), best.seconds)


def _first(found: list[Estimate]) -> Estimate | None:
    """The fastest; of those that are as good the first, from simple to fine, DMA before SMs."""
    least = min((e.seconds for e in found), default=0.0)
    return next((e for e in found if e.seconds <= least * (1 + TIE)), None)


def _confirmed(case: Case, found: list[Estimate], serial: Estimate) -> Estimate | None:
    """The fastest that is sure to beat serial; the simulator has the last word on those in doubt."""
    from weft.ops.simulate import simulate

    alike, scatters = case.fabric.period == 1, case.operation == "matmul_reduce_scatter"

    left = list(found)
    for _ in range(CONFIRMED_AT_MOST):
        best = _first(left)
        if best is None:
            break
        exact = best.schedule == "shard" and not scatters
        clear = exact or best.seconds < serial.seconds * (1 - DOUBT)
        if alike and clear:
            return best
        if (
            simulate(case, best.schedule, best.engine).seconds
            < simulate(case, "serial", serial.engine).seconds
        ):
            return best
        left.remove(best)
    return None


def estimates(case: Case, engines: tuple[str, ...] = ENGINES) -> list[Estimate]:
    """The time of every candidate."""
    return [Estimate(name, engine, seconds(case, name, engine)) for name, engine in candidates(case, engines)]


def why(case: Case, best: Estimate, serial: Estimate) -> str:
    """One sentence."""
    whole = gemm(case, case.rows, case.n, case.k)
    moved = case.shard_bytes * (case.ranks - 1)
    share = collective_s(case) / max(whole.seconds, 1e-12)
    flops = 2.0 * case.m * case.n * case.k / max(moved, 1)
    time = f"takes {share:.2g} of the GEMM's time"
    lead = f"moving {_bytes(moved)} {time} ({flops:.0f} operations for each byte)"
    return f"{best.schedule} on {best.engine}: {lead}, and {_reason(case, best, serial)}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _reason(case: Case, best: Estimate, serial: Estimate) -> str:
    rows, links = -(-case.m // case.ranks), case.fabric.in_links
    sms = case.costs.profile.spec.sms
    gain = f"{serial.seconds / best.seconds:.2f}x of serial's speed is expected"
    if best.schedule == "serial":
        piece = gemm(case, rows, case.n, case.k)
        loss = 100 * (case.ranks * piece.seconds / gemm(case, case.rows, case.n, case.k).seconds - 1)
        return (
            f"cutting it {case.ranks} ways hides less than it costs: the pieces take {loss:+.0f}% "
            f"({piece.waves} tiles for each of {sms} SMs), and every copy has its start"
        )
    if best.schedule == "shard":
        return f"whole shards of {rows} rows keep the SMs full while one copy at a time goes: {gain}"
    every = f"pieces from all {case.ranks - 1} peers at once keep {links} link{'s' if links > 1 else ''} busy"
    if best.schedule == "uniform-fused-2d":
        cut = "N" if case.operation == "matmul_reduce_scatter" else "K"
        return f"{every}, cut along {cut} so that all {case.m} rows stay one GEMM: {gain}"
    if best.schedule == "uniform-fused-1d":
        return f"{every}, and a round's rows, the local ones too, fill {sms} SMs as one GEMM: {gain}"
    hides = "last" if case.operation == "matmul_reduce_scatter" else "first"
    kind = "one GEMM a round" if best.schedule == "hetero-fused-1d" else "each multiplied as it arrives"
    return f"{every}, {kind}, and the local shard's GEMM hides the {hides} transfer: {gain}"
