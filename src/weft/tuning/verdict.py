"""Verdict: what a tuner concludes, and the race that leads to it on any executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import WeftError
from weft.execute.base import Executor, References
from weft.measure.race import ROUNDS, Entry, Result, race, ratio_ci
from weft.policy import Policy
from weft.tuning.candidates import Candidate
from weft.workload import Workload

LEAVE = "leave it alone"
COMPUTE = Candidate("compute alone", mode="compute")
COMM = Candidate("collective alone", mode="comm")
SIMULATED_GAIN = 0.02
"""A simulated gain below this share is within the model's error, and no reason to change anything."""
SIMULATED_TIE = 0.005
"""Simulated times closer than this share count as equal."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome for one workload on one device. Times are medians of the whole pipeline, in ms."""

    device: str
    simulated: bool
    workload: Workload
    policy: Policy
    """What to apply; the neutral policy where nothing beat the baselines."""
    chosen: str
    """Label of the candidate, `sequential` or `overlap` where it is best to leave things alone."""
    best_ms: float
    overlap_ms: float
    references: References
    gain_pct: float
    """Percent less time than the better of sequential and plain overlap; 0 for "leave it alone"."""
    gain_ci_pct: tuple[float, float]
    entries: tuple[Entry[Candidate], ...]
    reason: str = ""
    """Why it is left alone; empty where a policy is to be applied."""
    ranked_out: int = 0
    """Candidates that a simulated GPU ruled out before the race."""
    measurements: int = 0

    @property
    def leave(self) -> bool:
        """Whether nothing was seen to beat both sequential and plain overlap."""
        return self.policy.is_neutral

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        where = f"{self.device}{', simulated' if self.simulated else ''}"
        if not self.leave:
            low, high = self.gain_ci_pct
            spread = "" if self.simulated else f" (95%: {low:.1f} to {high:.1f})"
            than = "sequential" if self.references.sequential_ms < self.overlap_ms else "plain overlap"
            return f"{self.chosen}: {self.gain_pct:.1f}%{spread} less time than {than} on {where}."
        if self.chosen == "sequential" and self.overlap_ms > self.best_ms * (1 + SIMULATED_TIE):
            return f"Leave it alone, and do not overlap: sequential is fastest on {where}."
        base = "plain overlap" if self.chosen == "overlap" else self.chosen
        return f"Leave it alone: no control beats {base} beyond doubt on {where}{self._because}."

    @property
    def _because(self) -> str:
        return f" ({self.reason})" if self.reason else ""

    def to_dict(self) -> dict[str, Any]:
        """The document of `weft tune --json`."""
        return {
            "device": self.device,
            "simulated": self.simulated,
            "workload": self.workload.to_dict(),
            "sequential_ms": self.references.sequential_ms,
            "overlap_ms": self.overlap_ms,
            "best_ms": self.best_ms,
            "ideal_ms": self.references.ideal_ms,
            "fraction_of_ideal": self.references.fraction_of_ideal(self.best_ms),
            "policy": self.policy.to_dict(),
            "verdict": {
                "text": self.text,
                "choice": LEAVE if self.leave else "apply",
                "candidate": self.chosen,
                "gain_pct": self.gain_pct,
                "gain_ci_pct": list(self.gain_ci_pct),
                "reason": self.reason,
            },
            "ranked_out": self.ranked_out,
            "measurements": self.measurements,
            "candidates": [_row(entry) for entry in self.entries],
        }


def decide(
    executor: Executor,
    workload: Workload,
    candidates: Sequence[Candidate],
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    deadline_s: float | None = None,
    on_sample: Callable[[int, float | None], None] | None = None,
    ranked_out: int = 0,
) -> Verdict:
    """Race the candidates, of which the first two are sequential and plain overlap.

    A simulated GPU has no noise, so one round tells all. Raises the executor's error where a baseline cannot
    run at all. `ranked_out`: how many others a model ruled out before, for the record.
    """
    everyone = [*candidates, COMPUTE, COMM]
    once = executor.simulated
    result = race(
        everyone,
        lambda c: executor.measure(workload, c.policy, c.mode).ms,
        baselines=(0, 1),
        aside=(len(candidates), len(candidates) + 1),
        rounds=1 if once else rounds,
        min_rounds=1 if once else 3,
        confirm=0 if once else 5,
        seed=seed,
        deadline_s=deadline_s,
        clock=getattr(executor, "clock", time.monotonic),  # ranks must agree on when time is up
        on_sample=on_sample,
    )
    return replace(_verdict(executor, workload, result, len(candidates)), ranked_out=ranked_out)


def _verdict(executor: Executor, workload: Workload, result: Result[Candidate], count: int) -> Verdict:
    entries = result.entries
    for entry in (*entries[:2], *entries[count:]):
        if entry.error is not None:
            raise entry.error
    sequential, overlap, compute, comm = entries[0], entries[1], entries[count], entries[count + 1]
    references = References(sequential.ms, compute.ms, comm.ms, workload.iterations)
    baseline = result.best_baseline
    chosen = result.chosen
    if chosen is None or baseline is None:
        raise WeftError(f"{workload}: nothing could be measured on {executor.device}; see `weft doctor`")
    if executor.simulated:
        chosen = _simplest(entries[:count], chosen)
        if entries[chosen].ms > (1 - SIMULATED_GAIN) * entries[baseline].ms:
            chosen = baseline
    best, base = entries[chosen], entries[baseline]
    middle, low, high = ratio_ci(best.again or best.samples, base.again or base.samples)
    reason = ""
    if chosen in result.baselines:
        reason = _nearest(entries[2:count], base, "the model's error" if executor.simulated else "the noise")
    elif not executor.simulated and high >= 1.0:
        reason = f"{best.candidate.label} was ahead, but not when measured again"
    if reason or chosen in result.baselines:
        chosen, best, middle, low, high = baseline, base, 1.0, 1.0, 1.0
    return Verdict(
        device=executor.device,
        simulated=executor.simulated,
        workload=workload,
        policy=Policy() if chosen in result.baselines else best.candidate.policy,
        chosen=best.candidate.label,
        best_ms=best.ms,
        overlap_ms=overlap.ms,
        references=references,
        gain_pct=100 * (1 - middle),
        gain_ci_pct=(100 * (1 - high), 100 * (1 - low)),
        entries=tuple(entries[:count]),
        reason=reason,
        measurements=result.measurements,
    )


def _nearest(others: Sequence[Entry[Candidate]], base: Entry[Candidate], within: str) -> str:
    """How close the others came to the baseline that stays."""
    measured = [entry for entry in others if entry.samples and not entry.failed]
    if not measured:
        return "no other candidate can run here" if others else "no control can matter here"
    first = min(measured, key=lambda entry: entry.ms)
    change = 100 * (first.ms / base.ms - 1)
    how = f"within {within}" if change < 0 else "no gain"
    return f"nearest: {first.candidate.label}, {change:+.1f}%, {how}"


def _simplest(entries: Sequence[Entry[Candidate]], chosen: int) -> int:
    """Of the candidates that a model cannot tell from the fastest, the one with the fewest controls."""
    near = [i for i, e in enumerate(entries) if e.ms <= entries[chosen].ms * (1 + SIMULATED_TIE)]
    return min(near, key=lambda i: (len(entries[i].candidate.label.split("+")), entries[i].ms))


def _row(entry: Entry[Candidate]) -> dict[str, Any]:
    known = bool(entry.samples)
    return {
        "candidate": entry.candidate.label,
        "mode": entry.candidate.mode,
        "policy": entry.candidate.policy.to_dict(),
        "ms": entry.ms if known else None,
        "ci_ms": list(entry.ci_ms) if known else None,
        "kept": entry.kept,
        "problem": entry.problem,
    }
