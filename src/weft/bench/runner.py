"""Runs the cells of a suite on an executor and turns the measurements into rows."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from weft.bench.suites import Suite, SuiteCell
from weft.errors import UnavailableError, UsageError, WeftError
from weft.execute.base import Executor, HungError, MemoryFullError, References, WrongResultError
from weft.measure.intervals import bootstrap_ci
from weft.measure.race import race
from weft.measure.result import RaceEntry, RaceResult
from weft.policy import Policy
from weft.tuning.candidates import Candidate
from weft.tuning.lab import COMPUTE_ALONE, node_ctas
from weft.workload import DTYPE_BYTES, Workload

HANGS_ALLOWED = 2
"""A candidate that hung this often is not tried on further cells."""
MIN_BYTES = 1 << 20
"""Smallest collective of a sized workload."""

_STATUS: tuple[tuple[type[WeftError], str], ...] = (
    (HungError, "hung"),
    (MemoryFullError, "out of memory"),
    (WrongResultError, "wrong result"),
    (UsageError, "refused"),
    (UnavailableError, "unavailable"),
)


@dataclass
class Runner:
    """Runs cells in order within a time budget."""

    executor: Executor
    suite: Suite
    budget_s: float
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    on_sample: Callable[[SuiteCell, float | None], None] | None = None
    hangs: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)
    """Cells that the budget did not cover."""
    _facts: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    def run(self, skip: set[str]) -> Iterator[tuple[SuiteCell, list[dict[str, Any]]]]:
        """Yield each cell that is not in `skip` with its rows."""
        cells = [cell for cell in self.suite.cells if cell.name not in skip]
        costs = [cell.estimate_s(self.suite.baseline_ctas) for cell in cells]
        until = self.clock() + self.budget_s
        for number, cell in enumerate(cells):
            left = until - self.clock()
            if left <= 0:
                self.missing = [cell.name for cell in cells[number:]]
                return
            # Time that earlier cells saved or overran is divided among the remaining ones.
            yield cell, self.cell(cell, costs[number] * left / sum(costs[number:]))

    def cell(self, cell: SuiteCell, allowance_s: float) -> list[dict[str, Any]]:
        """Race one cell. Raises only errors that affect the whole suite, such as a missing GPU."""
        self._facts = {}
        try:
            workload = self._sized(cell)
        except WeftError as error:
            _raise_if_unavailable([error])
            return [self._failed(cell, cell.workload, c, error) for c in cell.candidates]
        baselines, others = cell.candidates[:2], cell.candidates[2:]
        tried = [*baselines, *(c for c in others if self.hangs[c.label] < HANGS_ALLOWED)]
        result = race(
            [*tried, COMPUTE_ALONE, _alone(cell.ctas)],
            lambda candidate: self._ms(cell, workload, candidate),
            baselines=(0, 1),
            aside=(len(tried), len(tried) + 1),
            rounds=cell.rounds,
            confirm=cell.confirm,
            seed=self.seed,
            deadline_s=allowance_s,
            clock=self.clock,
        )
        errors = [entry.error for entry in result.entries if entry.error]
        if len(errors) == len(result.entries):
            _raise_if_unavailable(errors)
        self.hangs.update(e.candidate.label for e in result.entries if isinstance(e.error, HungError))
        return self._rows(cell, workload, result)

    def _ms(self, cell: SuiteCell, workload: Workload, candidate: Candidate) -> float:
        try:
            sample = self.executor.measure(workload, candidate.policy, candidate.mode)
        except WeftError:
            self._report(cell, None)
            raise
        self._facts.setdefault(candidate.label, []).append(sample.facts)
        self._report(cell, sample.ms)
        return sample.ms

    def _report(self, cell: SuiteCell, ms: float | None) -> None:
        if self.on_sample is not None:
            self.on_sample(cell, ms)

    def _sized(self, cell: SuiteCell) -> Workload:
        """The workload with its collective sized to the cell's fraction of the compute time."""
        if cell.comm_share is None:
            return cell.workload

        def alone(workload: Workload, candidate: Candidate) -> float:
            return median(self._ms(cell, workload, candidate) for _ in range(3))

        part = cell.workload.ranks * DTYPE_BYTES[cell.workload.compute.dtype]
        wanted = cell.comm_share * alone(cell.workload.but(bytes=MIN_BYTES), COMPUTE_ALONE)
        per_iteration_s = wanted / 1e3 / cell.workload.iterations
        guess = cell.workload.but(bytes=MIN_BYTES)
        size = (
            per_iteration_s
            * (cell.ctas or self.suite.baseline_ctas)
            * 22e9
            / (guess.wire_bytes / guess.bytes)
        )
        for _ in range(5):  # each pass corrects the bandwidth estimate of the one before
            size = min(max(size, MIN_BYTES), float(8 << 30))
            sized = cell.workload.but(bytes=math.ceil(size / part) * part)
            took = alone(sized, _alone(cell.ctas))
            if abs(took / wanted - 1) < 0.03:
                break
            size = sized.bytes * wanted / took
        return cell.workload.but(bytes=math.ceil(min(max(size, MIN_BYTES), float(8 << 30)) / part) * part)

    def _rows(
        self, cell: SuiteCell, workload: Workload, result: RaceResult[Candidate]
    ) -> list[dict[str, Any]]:
        *entries, compute, comm = result.entries
        references = None
        if entries[0].samples and compute.samples and comm.samples:
            references = References(entries[0].ms, compute.ms, comm.ms, workload.iterations)
        rows = []
        comm_ms: dict[int | None, float | None] = {}
        for index, entry in enumerate(entries):
            row = self._row(cell, workload, entry, references)
            row["chosen"] = index == result.chosen
            if index in (1, result.chosen):
                row["overlap_rate"] = self._overlap_rate(workload, entry)
            if references is not None and entry.samples and entry.candidate.mode == "overlap":
                ctas = entry.candidate.policy.ctas_for(workload.collective, workload.whole_bytes)
                if ctas not in comm_ms:
                    comm_ms[ctas] = self._comm_ms(cell, workload, ctas, references)
                row |= self._own_figures(cell, workload, entry, references, comm_ms[ctas])
            rows.append(row)
        for candidate in cell.candidates:
            if self.hangs[candidate.label] >= HANGS_ALLOWED and not any(
                e.candidate is candidate for e in entries
            ):
                why = HungError(
                    f"{candidate.label} hung {self.hangs[candidate.label]} times before; not tried"
                )
                rows.append(self._failed(cell, workload, candidate, why))
        return [{**row, "of": len(rows)} for row in rows]

    def _row(
        self, cell: SuiteCell, workload: Workload, entry: RaceEntry[Candidate], references: References | None
    ) -> dict[str, Any]:
        row = self._blank(cell, workload, entry.candidate)
        row["status"], row["problem"] = _status(entry), entry.problem
        if not entry.samples:
            return row
        row |= {"ms": entry.ms, "ci_ms": list(entry.ci_ms), "samples_ms": entry.samples}
        row["facts"] = _summary(self._facts.get(entry.candidate.label, []))
        if entry.again:
            row |= {"again_ms": median(entry.again), "again_ci_ms": list(bootstrap_ci(entry.again))}
            row["again_samples_ms"] = entry.again
        if references is not None:
            row |= {
                "sequential_ms": references.sequential_ms,
                "compute_ms": references.compute_ms,
                "comm_ms": references.comm_ms,
                "ideal_ms": references.ideal_ms,
                "time_ratio": entry.ms / references.sequential_ms,
                "fraction_of_ideal": references.fraction_of_ideal(entry.ms),
            }
        return row

    def _blank(self, cell: SuiteCell, workload: Workload, candidate: Candidate) -> dict[str, Any]:
        return {
            "suite": self.suite.name,
            "cell": cell.name,
            "device": self.executor.device,
            "simulated": self.executor.simulated,
            "workload": workload.to_dict(),
            "comm_share": cell.comm_share,
            "baseline_ctas": self._baseline_ctas(cell, workload),
            "candidate": candidate.label,
            "mode": candidate.mode,
            "policy": candidate.policy.to_dict(),
            "ms": None,
            "ci_ms": None,
            "time_ratio": None,
            "overlap_rate": None,
            "fraction_of_ideal": None,
            "chosen": False,
            "status": "ok",
            "problem": "",
            "of": len(cell.candidates),
        }

    def _failed(
        self, cell: SuiteCell, workload: Workload, candidate: Candidate, error: WeftError
    ) -> dict[str, Any]:
        return {**self._blank(cell, workload, candidate), "status": _word(error), "problem": str(error)}

    def _overlap_rate(self, workload: Workload, entry: RaceEntry[Candidate]) -> float | None:
        if entry.failed or not entry.samples:
            return None
        try:
            timeline = self.executor.timeline(workload, entry.candidate.policy, entry.candidate.mode)
        except WeftError:
            return None  # only this figure is missing; the time was measured
        return timeline.figures().overlap_pct / 100

    def _comm_ms(
        self, cell: SuiteCell, workload: Workload, ctas: int | None, references: References
    ) -> float | None:
        """The time in ms of the collectives alone with this number of CTAs; None if it cannot be measured."""
        if ctas is None or ctas == cell.ctas:
            return references.comm_ms
        try:
            return median(self._ms(cell, workload, _alone(ctas)) for _ in range(3))
        except WeftError:
            return None

    def _own_figures(
        self,
        cell: SuiteCell,
        workload: Workload,
        entry: RaceEntry[Candidate],
        references: References,
        comm_ms: float | None,
    ) -> dict[str, Any]:
        """Own ideal and SM bound: `comm_ms` is the time of the policy's own collective."""
        if comm_ms is None:
            return {}
        own = References(references.compute_ms + comm_ms, references.compute_ms, comm_ms, workload.iterations)
        found = {"own_comm_ms": comm_ms, "fraction_of_own_ideal": own.fraction_of_ideal(entry.ms)}
        info = self.executor.info()
        sms, shared = int(info.get("sm_count") or 0), "ghost" in str(info.get("ranks"))
        if sms:
            own_ctas = entry.candidate.policy.ctas_for(workload.collective, workload.whole_bytes)
            ctas = own_ctas or self._baseline_ctas(cell, workload)
            bound = own.bound_ms(ctas * (workload.ranks if shared else 1), sms)
            found |= {"bound_ms": bound, "over_bound": entry.ms / bound}
        return found

    def _baseline_ctas(self, cell: SuiteCell, workload: Workload) -> int:
        """CTAs of a collective if the policy sets no limit."""
        node = self.executor.info().get("node")
        return cell.ctas or (node_ctas(str(node), workload) if node else self.suite.baseline_ctas)


def _summary(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the sensor readings; a boolean fact is true if it was true in every sample."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(key for one in facts for key in one):
        values = [one[name] for one in facts if name in one]
        found[name] = all(values) if isinstance(values[0], bool) else median(values)
    return found


def _alone(ctas: int | None) -> Candidate:
    return Candidate("collective alone", Policy(max_ctas=ctas), "comm")


def _word(error: WeftError) -> str:
    return next((word for kind, word in _STATUS if isinstance(error, kind)), "failed")


def _status(entry: RaceEntry[Candidate]) -> str:
    if entry.error is not None:
        return _word(entry.error)
    return "ok" if entry.kept else "dropped"


def _raise_if_unavailable(errors: list[WeftError]) -> None:
    """Raise if the GPU or NCCL is missing, because no other cell can run either."""
    if errors and all(isinstance(e, UnavailableError) and not isinstance(e, MemoryFullError) for e in errors):
        raise errors[0]
