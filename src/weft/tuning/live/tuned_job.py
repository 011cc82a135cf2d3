"""TunedJob: live tuning's verdict on a job with all measurements, and its document."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from weft.policy import Policy
from weft.tuning.live.options import Facts, explain
from weft.tuning.live.proof import Proof
from weft.tuning.verdict import Verdict

_UNFINISHED = "; the job ended before this was measured any further"
RECORD_FILE = "steps.json"
"""File in the job's folder that holds all steps (`weft.tuning.live.trial.Record`)."""


@dataclass
class Tried:
    """A policy and the times of the steps run under it."""

    policy: Policy
    ms: list[float] = field(default_factory=list)
    proof_ms: list[float] = field(default_factory=list)
    """Times of its steps or blocks in the proof, which replace `ms` if there are any."""
    note: str = ""
    """Why it was dropped from the race; empty if it was not."""
    problem: str = ""
    """Why it may not be used at all: it stalled, was clearly slower, or could not be applied; else empty."""

    @property
    def typical_ms(self) -> float | None:
        """Median ms of a step; None if it was never measured."""
        times = [ms for ms in self.proof_ms or self.ms if math.isfinite(ms)]
        return median(times) if times else None

    def to_dict(self) -> dict[str, Any]:
        typical = self.typical_ms
        return {
            "label": self.policy.label,
            "policy": self.policy.to_dict(),
            "ms": None if typical is None else round(typical, 4),
            "steps": len(self.ms) + len(self.proof_ms),
            "note": self.problem or self.note,
        }


@dataclass(frozen=True, kw_only=True)
class TunedJob:
    """What live tuning concludes about a job; `verdict` is the conclusion in the form all tuners share."""

    policy: Policy
    """The policy that the job continues with; the default if it is left alone."""
    kept: bool
    """Whether a changed policy is kept."""
    default: Policy = field(default_factory=Policy)
    """The policy that the job was started with."""
    gain_pct: float = 0.0
    """Percentage of a step's time saved by the change; 0 if the job is left alone."""
    ci_pct: tuple[float, float] = (0.0, 0.0)
    """95% confidence interval of the measured gain."""
    reason: str = ""
    """Why the job is left alone; empty if it is not."""
    source: str = ""
    """Where the policy came from; empty if from this job's own search."""
    steps: int = 0
    """Steps of the job that tuning used, excluding warm-up."""
    warm_up_steps: int = 0
    cost_ms: float = 0.0
    """Extra time in and between these steps, compared with the default; negative if time was saved."""
    noise_pct: float = 0.0
    """Scatter of one step, in percent of its time."""
    default_ms: float | None = None
    best_ms: float | None = None
    tried: Sequence[Tried] = ()
    facts: Facts = field(default_factory=Facts)
    levers: Sequence[tuple[str, float | None]] = ()
    """The levers tried, in order, each with the bound of its gain in ms per step (None if unknown)."""
    proof: Proof | None = None
    """The last proof; if it is still open and promising, the watch continues it."""

    def after(self, proof: Proof, source: str = "") -> TunedJob:
        """This outcome with the result of a proof. Both policies' times come from the proof's own steps."""
        claim, policy = proof.claim(), proof.policy
        gain, low, high = claim.less_pct
        about = {one.policy: one for one in self.tried}
        for arm, one in ((0, self.default), (1, policy)):
            known = about.get(one, Tried(one))
            about[one] = dataclasses.replace(known, proof_ms=proof.times(arm))
        shown = dataclasses.replace(
            self, tried=tuple(about.values()), proof=proof, default_ms=about[self.default].typical_ms
        )
        if claim.proven:
            ends, best_ms = (low, high), about[policy].typical_ms
            return dataclasses.replace(
                shown, policy=policy, kept=True, gain_pct=gain, ci_pct=ends, source=source, best_ms=best_ms
            )
        if proof.problem:
            return dataclasses.replace(
                shown, reason=f"{policy.label} {proof.problem}", best_ms=shown.default_ms
            )
        found = f"its gain of {gain:.1f}% {claim.interval_text} is not proven"
        if gain <= 0:
            found = f"its proof showed no gain: {gain:.1f}% {claim.interval_text}"
        reason = f"{policy.label} was best, but {found}"
        return dataclasses.replace(shown, reason=reason, best_ms=shown.default_ms)

    @property
    def still_open(self) -> bool:
        """Whether more steps may well prove the best candidate, without meetings of all ranks."""
        proof = self.proof
        if self.kept or proof is None or proof.in_blocks:  # blocks have settled the question
            return False
        return proof.promising and not proof.at_meetings

    @property
    def candidates_exist(self) -> bool:
        """Whether there was any candidate to try."""
        return any(one.policy != self.default for one in self.tried)

    @property
    def text(self) -> str:
        """The outcome in one sentence."""
        used = f"{self.steps} steps" if self.steps != 1 else "1 step"
        if cost_ms := round(self.cost_ms):
            used += f" that took {abs(cost_ms)} ms {'more' if cost_ms > 0 else 'less'} than without tuning"
        if not self.kept:
            return f"left alone after {used}: {self.reason}{self._rest}"
        low, high = self.ci_pct
        found = f", from {self.source}" if self.source else ""
        times = (
            f" ({self.default_ms:.4g} to {self.best_ms:.4g} ms)" if self.default_ms and self.best_ms else ""
        )
        return (
            f"{self.policy.label}{found}: {self.gain_pct:.1f}% less time per step{times} "
            f"(95%: {low:.1f} to {high:.1f}), found in {used}{self._rest}"
        )

    @property
    def _rest(self) -> str:
        """The possible further gain, and how a control of this policy may affect results."""
        left, span = self.left_ms, self.facts.span_ms
        rest = f"; at most {100 * left / span:.1f}% more could be gained" if left is not None and span else ""
        kernels = "; GEMMs may use other cuBLAS kernels than before" if self.policy.sm_reserve else ""
        return rest + (kernels if self.kept else "")

    @property
    def left_ms(self) -> float | None:
        """The largest possible further gain per step, by the traced costs; None if unknown.

        It is what communication costs a step, without the SM time that collectives take anyway, minus what
        the policy has saved.
        """
        costs, span = self.facts.costs, self.facts.span_ms
        if costs is None or span is None:
            return None
        return max(0.0, costs.cost_ms - span * self.gain_pct / 100)

    @property
    def verdict(self) -> Verdict:
        """The conclusion in the form all tuners share."""
        return Verdict(
            source="live",
            policy=self.policy,
            chosen=self.policy.label,
            applies=self.kept,
            gain_pct=self.gain_pct,
            gain_ci_pct=self.ci_pct,
            best_ms=self.best_ms,
            baseline_ms=self.default_ms,
            baseline=self.default.label,
            reason=self.reason,
            measurements=self.steps,
        )

    def _bound(self) -> dict[str, Any] | None:
        """The cost of communication per step, how much of it remains, and the bound of each lever."""
        costs = self.facts.costs
        if costs is None:
            return None
        return {
            "cost_ms": round(costs.cost_ms, 4),
            "left_ms": None if self.left_ms is None else round(self.left_ms, 4),
            **{name: _rounded(value) for name, value in dataclasses.asdict(costs).items()},
            "levers": [{"lever": name, "bound_ms": _rounded(bound)} for name, bound in self.levers],
        }

    def to_dict(self) -> dict[str, Any]:
        """The key `tuning` of `weft run --stats`."""
        return {
            "state": "kept" if self.kept else "left alone",
            "text": self.text,
            "verdict": self.verdict.to_dict(),
            "policy": self.policy.to_dict(),
            "gain_pct": round(self.gain_pct, 3),
            "ci": [round(value, 3) for value in self.ci_pct],
            "steps": self.steps,
            "warm_up_steps": self.warm_up_steps,
            "noise_pct": round(self.noise_pct, 3),
            "default_ms": self.default_ms,
            "best_ms": self.best_ms,
            "reason": self.reason,
            "source": self.source,
            "candidates": [one.to_dict() for one in self.tried],
            "cost_ms": round(self.cost_ms, 1),
            "watch": None,
            "bound": self._bound(),
            "explanation": explain(self.facts),
            "facts": {
                "collectives_per_step": self.facts.collectives,
                "step_ms": self.facts.span_ms,
                "comm_ms": self.facts.comm_ms,
                "exposed_ms": self.facts.exposed_ms,
                "ctas": self.facts.ctas,
                "cta_choices": list(self.facts.cta_choices),
                "why_no_ctas": self.facts.why_no_ctas,
                "cta_choices_at_start": list(self.facts.cta_choices_at_start),
                "start_settings": list(self.facts.start_settings),
                "world": self.facts.world,
                "processes": self.facts.ranks_at_work,
                "workload": self.facts.workload,
            },
        }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round(number, 4) for name, number in value.items()}
    return value if value is None else round(value, 4)


def final(status: Any, untimed: int = 0) -> dict[str, Any]:
    """The document of a watched job, as it stands now. `status`: its `WatchStatus`.

    `untimed`: steps that have ended since, whose times the watch has not received.
    """
    outcome: TunedJob = status.outcome
    if status.reverted:
        why = f"{outcome.policy.label} was reverted: {status.reverted}"
        outcome = dataclasses.replace(
            outcome, kept=False, policy=status.in_force, gain_pct=0.0, ci_pct=(0.0, 0.0), reason=why
        )
    outcome = dataclasses.replace(outcome, cost_ms=outcome.cost_ms + status.released_ms)
    lately, gain_pct = status.lately_ms, status.gain_pct if outcome.kept else 0.0
    less = gain_pct < outcome.gain_pct
    shown = outcome
    if lately is not None or less:
        shown = dataclasses.replace(outcome, gain_pct=gain_pct, ci_pct=status.ci_pct)
    watched = {**status.to_dict(), "steps": status.steps + untimed}
    document = {**shown.to_dict(), "watch": watched}
    if less:
        document["text"] += f"; its proof showed {outcome.gain_pct:.1f}%; later checks showed less"
    if lately is not None:
        document["text"] += f"; at the end a step took {lately:.4g} ms on average"
    if status.proving and outcome.kept:
        document["text"] += _UNFINISHED
    return document


def unfinished(outcome: TunedJob) -> dict[str, Any]:
    """The document of a job that ended while a proven policy's gain was still being measured."""
    document = outcome.to_dict()
    document["text"] += _UNFINISHED
    return document


def stopped(reason: str, **more: Any) -> dict[str, Any]:
    """The same document for tuning that did not finish; unknown values are None."""
    return {
        **TunedJob(policy=Policy(), kept=False, reason=reason).to_dict(),
        "state": "stopped",
        "text": f"left alone: {reason}",
        **dict.fromkeys(("policy", "noise_pct", "facts")),
        **more,
    }


def result_file(rank: int) -> str:
    """Name of the file in the job's folder that holds a rank's result."""
    return f"tuning.{rank}.json"


def read_result(folder: Path) -> dict[str, Any]:
    """The lowest rank's result from the job's folder; if there is none, a document that says why."""
    found = sorted(folder.glob("tuning.*.json"), key=lambda path: int(path.name.split(".")[1]))
    if found:
        result: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
        return result
    if (folder / "tuning.loaded").exists():
        return stopped("no process of this job initialised torch.distributed")
    return stopped(
        "no process of this job loaded weft's tuner: it needs torch 2.5 or later, without "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0, `python -I` or `python -E`"
    )


def read_record(folder: Path) -> dict[str, Any]:
    """All steps of a job, from its folder; empty if there are none."""
    try:
        found = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def why_nothing_to_try(facts: Facts) -> str:
    """The reason to leave a job alone in which no candidate could matter."""
    if not facts.launches and not facts.cta_choices:
        return facts.why_no_ctas or "nothing can be changed in this job: no GPU kernel was launched"
    if not facts.collectives:
        return "no collective was launched in a step"
    return facts.why_no_ctas or "no control could make a difference"


def why_none_was_better(facts: Facts, tried: Sequence[Tried], default: Policy, noise_pct: float) -> str:
    """The reason to leave a job alone in which no measured candidate was ahead."""
    base = next((median(one.ms) for one in tried if one.policy == default and one.ms), None)
    parts = []
    for one in tried:
        if one.policy == default:
            continue
        if one.problem:
            parts.append(f"{one.policy.label} {one.problem}")
        elif base and one.ms:
            parts.append(f"{one.policy.label} {100 * (median(one.ms) / base - 1):+.1f}%")
    beside = facts.beside
    about = ""
    if not facts.launches:
        about = ""
    elif not beside:
        about = "no compute kernel overlapped with a collective; "
    elif not any(kernel.can_be_shaped for kernel in beside):
        about = "kernels that overlap with collectives hold one block per SM or are memory-bound; "
    results = ", ".join(parts)
    return f"{about}nothing was faster ({results}; step times vary by {noise_pct:.1f}%)"
