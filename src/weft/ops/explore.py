"""Explores one fused operation on a simulated node: every schedule, the pick, and why the best one wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.errors import UsageError
from weft.ops.case import Case, gemm, library_collective_s
from weft.ops.ficco import ficco_pick
from weft.ops.pick import Pick, pick
from weft.ops.simulate import ScheduleResult, exhaustive
from weft.policy import SCHEDULES

FINER = tuple(name for name in SCHEDULES if name not in ("serial", "shard"))
"""The finer schedules, as in FiCCO."""
_COLLECTIVES = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_to_all": "all_to_all_matmul",
}


def operation_of(collective: str) -> str:
    """The fused operation of a collective; also accepts the name of the operation itself."""
    name = collective.strip().lower().replace("-", "_")
    if name in _COLLECTIVES.values():
        return name
    if name not in _COLLECTIVES:
        raise UsageError(
            f"collective {collective!r} cannot be fused with a GEMM; use one of {', '.join(_COLLECTIVES)}"
        )
    return _COLLECTIVES[name]


@dataclass(frozen=True)
class Exploration:
    """The result of an exploration."""

    case: Case
    results: dict[tuple[str, str], ScheduleResult]
    """Simulation results, by schedule and engine."""
    picked: Pick

    def fastest(self, name: str) -> ScheduleResult:
        """The result of a schedule with its fastest engine; DMA, which takes no SM, wins ties."""
        return min(
            (r for (of, _), r in self.results.items() if of == name),
            key=lambda r: r.seconds * (1.0 if r.engine == "dma" else 1.001),
        )

    @property
    def best(self) -> ScheduleResult:
        return min((self.fastest(name) for name in SCHEDULES), key=lambda r: r.seconds)

    @property
    def serial(self) -> ScheduleResult:
        return self.fastest("serial")

    @property
    def gemm_s(self) -> float:
        return gemm(self.case, self.case.rows, self.case.n, self.case.k).seconds

    @property
    def ideal_s(self) -> float:
        """The longer of the GEMM and the library's collective: perfect overlap."""
        return max(self.gemm_s, library_collective_s(self.case))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        case, serial = self.case, self.serial
        regret = self.results[self.picked.schedule, self.picked.engine].seconds / self.best.seconds - 1
        return {
            "device": f"sim:{case.gpu}",
            "simulated": True,
            "operation": case.operation,
            "gemm": [case.m, case.n, case.k],
            "ranks": case.ranks,
            "dtype": case.dtype,
            "topology": case.topology,
            "product_ms": round(1e3 * self.gemm_s, 6),
            "collective_ms": round(1e3 * library_collective_s(case), 6),
            "ideal_ms": round(1e3 * self.ideal_s, 6),
            "bound": round(serial.seconds / self.ideal_s, 4),
            "schedules": [self._row(name) for name in SCHEDULES],
            "picked": self.picked.schedule,
            "picked_engine": self.picked.engine,
            "picked_regret_pct": round(100 * regret, 3),
            "why": self.picked.why,
            "rules": [self._rule("weft", self.picked), self._rule("ficco", ficco_pick(case))],
            "best": self.best.name,
            "best_engine": self.best.engine,
            "reason": reason(self),
        }

    def _rule(self, name: str, picked: Pick) -> dict[str, Any]:
        """The JSON row of a rule: its choice, compared with the best of all and of the finer schedules."""
        taken = (self.results.get((picked.schedule, picked.engine)) or self.fastest(picked.schedule)).seconds
        finer = min(self.fastest(each).seconds for each in FINER)
        return {
            "name": name,
            "picked": picked.schedule,
            "engine": picked.engine,
            "regret_pct": round(100 * (taken / self.best.seconds - 1), 3),
            "regret_of_finer_pct": round(100 * (taken / finer - 1), 3),
            "speedup_vs_serial": round(self.serial.seconds / taken, 4),
            "why": picked.why,
        }

    def _row(self, name: str) -> dict[str, Any]:
        found = self.fastest(name)
        return {
            "name": name,
            "ms": round(found.ms, 6),
            "speedup_vs_serial": round(self.serial.seconds / found.seconds, 4),
            "engine": found.engine,
            "engines_ms": {e: round(r.ms, 6) for (of, e), r in self.results.items() if of == name},
            **found.losses.to_dict(),
        }


def explore(case: Case) -> Exploration:
    """Run every schedule with every engine on the simulated node."""
    results = {(result.name, result.engine): result for result in exhaustive(case)}
    sizes = (case.m, case.n, case.k, case.ranks)
    return Exploration(case, results, pick(case.operation, *sizes, case.dtype, case.gpu, case.topology))


def reason(found: Exploration) -> str:
    """Why the best schedule wins, in one sentence."""
    best, serial = found.best, found.serial
    if best.name == "serial":
        rest = min((r for (name, _), r in found.results.items() if name != "serial"), key=lambda r: r.seconds)
        losses = rest.losses
        more = 100 * (rest.seconds / best.seconds - 1)
        return (
            f"serial wins: {rest.name}, the next best, takes {more:.1f}% more; cutting the GEMM costs it "
            f"{_ms(losses.decomposition_s)}, contention {_ms(losses.contention_s)}, and "
            f"{_ms(losses.exposed_s)} stay exposed"
        )
    losses, before = best.losses, serial.losses
    shard = found.fastest("shard")
    text = (
        f"{best.name} on {best.engine} hides {_ms(before.exposed_s - losses.exposed_s)} of serial's "
        f"{_ms(before.exposed_s)} exposed transfer and pays {_ms(losses.decomposition_s)} for the cut, "
        f"{_ms(losses.contention_s)} for contention and {_ms(losses.staging_s)} for staging"
    )
    if best.name != "shard" and losses.links_used > shard.losses.links_used:
        text += (
            f"; it keeps {losses.links_used} of {losses.links} links busy where shard has "
            f"{shard.losses.links_used} ({_ms(shard.losses.exposed_s)} exposed)"
        )
    return text


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return "0" if abs(ms) < 1e-6 else f"{ms:.0f} ms" if abs(ms) >= 1000 else f"{ms:.3g} ms"
