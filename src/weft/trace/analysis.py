"""The analysis of one run: figures, collectives, causes, price of overlap and advice, over all its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import InputError
from weft.timeline import OverlapFigures, Timeline
from weft.trace import checks
from weft.trace.advise import Advice, advise
from weft.trace.attribute import Attribution, attribute, transfer_times
from weft.trace.checks import in_order, numbered_by_host
from weft.trace.collectives import Collectives, collectives
from weft.trace.critical import CriticalPath, critical_path
from weft.trace.document import (
    causes_json,
    collective_rows,
    figures_json,
    path_json,
    price_json,
    reasons_json,
    summary_json,
    summed,
    us,
)
from weft.trace.match import Match, match
from weft.trace.modules import module_rows
from weft.trace.parallel import _Outcome
from weft.trace.price import KernelPrice, price_of_overlap
from weft.trace.record import Trace
from weft.trace.steps import StepFigures, step_figures


@dataclass(frozen=True, eq=False)
class RankAnalysis:
    """One GPU of the run."""

    trace: Trace
    figures: OverlapFigures
    found: Collectives
    matched: Match
    attribution: Attribution
    path: CriticalPath
    steps: tuple[StepFigures, ...]
    prices: tuple[KernelPrice, ...]

    @property
    def main_reasons(self) -> npt.NDArray[np.int64]:
        """Main reason (index into REASONS) why each span of the timeline is exposed; -1 if it is not."""
        out = np.full(len(self.trace.timeline), -1, dtype=np.int64)
        why = self.attribution
        if len(why.reason_ns):
            out[self.found.span] = np.where(why.exposed_ns > 0, np.argmax(why.reason_ns, axis=1), -1)
        return out

    @property
    def exposed_comm_us(self) -> float:
        """Communication during which no compute kernel ran, in µs."""
        return us(self.figures.exposed_ns)

    def to_json(self) -> dict[str, Any]:
        """The entry of `ranks` in the document of `weft analyze --json`. Times in µs, exact to 1 ns."""
        trace = self.trace
        return {
            "path": trace.path,
            "rank": trace.rank,
            "cycle": trace.cycle,
            "device": trace.device_name or None,
            "device_index": trace.device,
            "world_size": trace.world_size,
            "events": trace.events,
            "gpu_events": len(trace.timeline),
            "partial": trace.partial,
            "warnings": list(trace.warnings),
            **figures_json(self.figures),
            "steps": [
                {"name": step.name, "start_us": us(step.start_ns), **figures_json(step.figures)}
                for step in self.steps
            ],
            "collectives": collective_rows(self),
            "modules": module_rows(self),
            "attribution": causes_json(self.attribution.totals()),
            "reasons": reasons_json(self.attribution.reasons()),
            "critical_path": path_json(self.path),
            "price_of_overlap": price_json(self.prices),
            "clock_offset_us": us(self.matched.offset_ns),
            "matched_collectives": int(self.matched.matched.sum()),
        }


@dataclass(frozen=True, eq=False)
class Analysis:
    """The result of `weft.analyze`. Totals are over all ranks."""

    ranks: tuple[RankAnalysis, ...]
    advice: tuple[Advice, ...]
    warnings: tuple[str, ...] = ()

    @property
    def timelines(self) -> list[Timeline]:
        """The Timeline of each GPU, in the order of `ranks`."""
        return [rank.trace.timeline for rank in self.ranks]

    @property
    def partial(self) -> bool:
        """Whether a file was truncated or damaged, so that figures cover only part of it."""
        return any(rank.trace.partial for rank in self.ranks)

    @property
    def exposed_comm_us(self) -> float:
        """Exposed communication summed over ranks, in µs."""
        return us(sum(rank.figures.exposed_ns for rank in self.ranks))

    @property
    def comm_us(self) -> float:
        """Communication summed over ranks, in µs."""
        return us(sum(rank.figures.comm_ns for rank in self.ranks))

    @property
    def compute_us(self) -> float:
        """Compute summed over ranks, in µs."""
        return us(sum(rank.figures.compute_ns for rank in self.ranks))

    @property
    def overlap_us(self) -> float:
        """Communication that overlapped with compute, summed over ranks, in µs."""
        return us(sum(rank.figures.overlap_ns for rank in self.ranks))

    @property
    def overlap_pct(self) -> float:
        """Share of all communication that overlapped with compute, in percent."""
        comm = sum(rank.figures.comm_ns for rank in self.ranks)
        return 100.0 * sum(rank.figures.overlap_ns for rank in self.ranks) / comm if comm else 0.0

    @property
    def attribution(self) -> dict[str, float]:
        """Exposed µs by cause, summed over ranks."""
        return causes_json(summed(self.ranks, lambda rank: rank.attribution.totals()))

    def to_json(self) -> dict[str, Any]:
        """The document that `weft analyze --json` prints."""
        return {
            "ranks": [rank.to_json() for rank in self.ranks],
            "summary": summary_json(self),
            "advice": [item.to_json() for item in self.advice],
            "partial": self.partial,
            "warnings": list(self.warnings),
        }


def analyze_outcomes(files: Sequence[Path], in_folder: set[Path], outcomes: Sequence[_Outcome]) -> Analysis:
    """Analyzes what was read from each file. Files of a folder that are not traces become warnings."""
    traces: list[Trace] = []
    warnings: list[str] = []
    for file, outcome in zip(files, outcomes, strict=True):
        if isinstance(outcome, list):
            traces += outcome
        elif file in in_folder and len(files) > 1 and isinstance(outcome, InputError):
            warnings.append(f"left out: {outcome}")
        else:
            raise outcome
    if not traces:
        raise InputError(f"no usable trace; {warnings[0]}")
    return analyze_traces(in_order(numbered_by_host(traces)), warnings)


def analyze_traces(traces: Sequence[Trace], warnings: Sequence[str] = ()) -> Analysis:
    """Analyzes traces of one run."""
    found = [collectives(trace) for trace in traces]
    matched = match(traces, found)
    transfers = transfer_times(list(traces), found)
    ranks = tuple(
        _rank(trace, spans, pairing, transfers)
        for trace, spans, pairing in zip(traces, found, matched, strict=True)
    )
    own = [f"{rank.trace.path}: {w}" for rank in ranks for w in rank.trace.warnings]
    return Analysis(ranks, tuple(advise(ranks)), (*warnings, *checks.warnings(traces), *own))


def _rank(trace: Trace, found: Collectives, matched: Match, transfers: dict[int, int]) -> RankAnalysis:
    why = attribute(trace, found, matched, transfers)
    sms = trace.properties.get("numSms")
    return RankAnalysis(
        trace=trace,
        figures=trace.timeline.figures(),
        found=found,
        matched=matched,
        attribution=why,
        path=critical_path(trace, found, why),
        steps=step_figures(trace),
        prices=tuple(price_of_overlap(trace.timeline, sms if isinstance(sms, int) else None)),
    )
