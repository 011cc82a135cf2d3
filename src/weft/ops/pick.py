"""Picks a schedule and an engine from sizes alone, and explains the pick. Nothing is measured.

A constant-time estimate decides if it is clear. It is not clear if several candidates are close, if the gain
over serial is small, or if the estimate is rough (below PCIe switches, on a ring with few DMA engines). Then
the candidates whose estimates are close to the best are simulated, and the simulator decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.errors import UsageError
from weft.ops.case import FUSED_ENGINES, Case, gemm, library_collective_s, schedule_candidates
from weft.ops.estimate import is_rough, seconds

_MARGIN = 0.01
"""Smallest gain over serial, as a fraction of serial's time, for a schedule to be picked."""
DOUBT = 0.25
"""Smaller estimated gains are confirmed by simulation, except for gathered whole shards."""
CLOSE, CLOSE_ROUGH = 0.12, 0.25
"""Estimates this close to the best may be in the wrong order: 99% of their errors are below 5%, but some
reach this. The second value is for rough estimates (benchmarks/ops/fit_pick.py)."""
CONFIRMED, CONFIRMED_UNLIKE = 5, 3
"""Most candidates to simulate if the estimate is not clear. The second value is for ranks with different
routes, where a simulation takes ten times as long."""
LEAST_GAIN_S = 1e-6
"""Smallest gain in seconds. Latencies of launches and events are known only to whole µs."""
_TIE = 0.002
"""Estimates within this fraction of each other count as equal."""


@dataclass(frozen=True)
class Pick:
    """What to run, and why in one sentence."""

    schedule: str
    engine: str
    why: str
    seconds: float = 0.0
    """Expected time, from the estimate or, if that was not clear, from simulation."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A schedule with an engine, and its estimated time."""

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
    engines: tuple[str, ...] = FUSED_ENGINES,
) -> Pick:
    """The schedule and engine for a fused operation of these sizes, as one rank sees them.

    `gpu`: name of a preset, or a profile file. `topology`: mesh, nvswitch, ring, pcie, or empty for the GPU's
    usual one. `engines`: the available ones. Results are cached.
    """
    if not engines:
        raise UsageError(f"no engine to pick from; give one of {', '.join(FUSED_ENGINES)}")
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
    rest = [e for e in found if e is not serial]
    best = _sure(case, rest, serial) or _simulated(case, rest, serial) or serial
    return Pick(best.schedule, best.engine, why(case, best, serial), best.seconds)


def _least_gain_s(serial_s: float) -> float:
    return max(_MARGIN * serial_s, LEAST_GAIN_S)


def _first(found: Sequence[Estimate]) -> Estimate | None:
    """The fastest; among equals the first, in the order of candidates: DMA before SMs, simple before fine."""
    least = min((e.seconds for e in found), default=0.0)
    return next((e for e in found if e.seconds <= least * (1 + _TIE)), None)


def _sure(case: Case, found: Sequence[Estimate], serial: Estimate) -> Estimate | None:
    """The fastest, if no other is close and its gain is certain; else None."""
    best = _first(found)
    if best is None or is_rough(case):
        return None
    if serial.seconds - best.seconds < _least_gain_s(serial.seconds):
        return None
    exact = best.schedule == "shard" and case.operation != "matmul_reduce_scatter"
    if not exact and best.seconds > serial.seconds * (1 - DOUBT):
        return None
    alone = all(e is best or e.seconds > best.seconds * (1 + CLOSE) for e in found)
    return best if alone else None


def _simulated(case: Case, found: Sequence[Estimate], serial: Estimate) -> Estimate | None:
    """The fastest by simulation among the close candidates; None if serial is, or none can be simulated."""
    from weft.ops.simulate import MAX_PERIOD, simulate

    if case.fabric.period > MAX_PERIOD:
        return None
    ordered = sorted(found, key=lambda e: e.seconds)
    times: dict[tuple[str, str], float] = {}
    alike = case.fabric.period == 1
    close = CLOSE_ROUGH if is_rough(case) else CLOSE
    most_s = serial.seconds * (1 + close) - LEAST_GAIN_S
    for one in ordered[: CONFIRMED if alike else CONFIRMED_UNLIKE]:
        if one.seconds > most_s:
            break
        taken_s = simulate(case, one.schedule, one.engine).seconds
        times[one.schedule, one.engine] = taken_s
        most_s = min(most_s, taken_s * (1 + close))
    if not times:
        return None
    serial_s = simulate(case, "serial", serial.engine).seconds
    least_s = _least_gain_s(serial_s)
    taken = [(e, times.get((e.schedule, e.engine), serial_s)) for e in found]
    return _first([replace(e, seconds=taken_s) for e, taken_s in taken if serial_s - taken_s >= least_s])


def estimates(case: Case, engines: tuple[str, ...] = FUSED_ENGINES) -> list[Estimate]:
    """The estimated time of every candidate."""
    return [
        Estimate(name, engine, seconds(case, name, engine))
        for name, engine in schedule_candidates(case, engines)
    ]


def why(case: Case, best: Estimate, serial: Estimate) -> str:
    """Explain a pick in one sentence."""
    whole = gemm(case, case.rows, case.n, case.k)
    moved = case.shard_bytes * (case.ranks - 1)
    share = library_collective_s(case) / max(whole.seconds, 1e-12)
    flops = 2.0 * case.m * case.n * case.k / max(moved, 1)
    time = f"takes {share:.2g} of the GEMM's time"
    lead = f"moving {_bytes(moved)} {time} ({flops:.0f} operations per byte)"
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
            f"({piece.waves} tiles for each of {sms} SMs), and every copy pays its start-up time"
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
