"""Verdict: the conclusion of any tuner, either a policy and its gain, or "leave it alone" and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.errors import UsageError
from weft.policy import Policy

if TYPE_CHECKING:
    from weft.measure.result import RaceEntry
    from weft.tuning.candidates import Candidate

LEAVE = "leave it alone"
SOURCES = ("lab", "simulator", "callable", "live", "ops")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A candidate and its measured time."""

    candidate: str
    """The candidate's label."""
    mode: str
    policy: Policy
    ms: float | None
    """Median; None if the candidate could not be measured."""
    ci_ms: tuple[float, float] | None
    kept: bool
    """Whether the candidate stayed in the race to the end."""
    problem: str = ""
    """Why the candidate could not be measured or was dropped; empty otherwise."""

    @classmethod
    def of(cls, entry: RaceEntry[Candidate]) -> Measured:
        """Convert one entry of a race."""
        known, candidate = bool(entry.samples), entry.candidate
        return cls(
            candidate=candidate.label,
            mode=candidate.mode,
            policy=candidate.policy,
            ms=entry.ms if known else None,
            ci_ms=entry.ci_ms if known else None,
            kept=entry.kept,
            problem=entry.problem,
        )

    def to_dict(self) -> dict[str, Any]:
        """One row of `candidates` in the document of `weft tune --json`."""
        interval = None if self.ci_ms is None else list(self.ci_ms)
        return {**vars(self), "policy": self.policy.to_dict(), "ci_ms": interval}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Measured:
        """Inverse of `to_dict`."""
        low_high = row.get("ci_ms")
        return cls(
            candidate=str(row["candidate"]),
            mode=str(row["mode"]),
            policy=Policy.from_dict(row["policy"]),
            ms=None if row.get("ms") is None else float(row["ms"]),
            ci_ms=None if low_high is None else (float(low_high[0]), float(low_high[1])),
            kept=bool(row["kept"]),
            problem=str(row.get("problem") or ""),
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One tuner's conclusion about one workload, callable or job. Times are medians in ms."""

    source: str
    """Which tuner: `lab` (`weft tune` on a GPU), `simulator`, `callable` (`weft.tune`), `live` or `ops`."""
    policy: Policy
    """The policy to apply; for "leave it alone", the policy that was already in force."""
    chosen: str
    """Label of the chosen candidate; for "leave it alone", a baseline's label."""
    applies: bool
    """Whether `policy` is a change worth applying."""
    gain_pct: float = 0.0
    """Percentage of the baseline's time saved; 0 for "leave it alone"."""
    gain_ci_pct: tuple[float, float] = (0.0, 0.0)
    """95% confidence interval of the gain, from measurements made after the choice."""
    best_ms: float | None = None
    baseline_ms: float | None = None
    """Time of the baseline."""
    baseline: str = "overlap"
    """Name of the baseline that the gain is relative to."""
    reason: str = ""
    """Why to leave it alone; empty if a policy is to be applied."""
    measurements: int = 0
    """Number of measurements, or of a job's steps, behind the verdict."""
    candidates: tuple[Measured, ...] = field(default=(), repr=False)
    """All candidates tried, baselines first; empty for a verdict from the store."""
    stored: bool = False
    """Whether the verdict comes from the store rather than from a new measurement."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise UsageError(
                f"a verdict's source {self.source!r} is not known; use one of {', '.join(SOURCES)}"
            )

    @property
    def leave(self) -> bool:
        """Whether the verdict is "leave it alone"."""
        return not self.applies

    @property
    def simulated(self) -> bool:
        """Whether the verdict comes from a model instead of measurements."""
        return self.source == "simulator"

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        if self.leave:
            return f"Leave it alone: {self.reason or 'nothing was faster beyond doubt'}."
        low, high = self.gain_ci_pct
        spread = "" if self.simulated else f" (95%: {low:.1f} to {high:.1f})"
        return f"{self.chosen}: {self.gain_pct:.1f}%{spread} less time than {self.baseline}."

    def to_dict(self) -> dict[str, Any]:
        """The JSON document that the store keeps."""
        return {
            "source": self.source,
            "text": self.text,
            "choice": "apply" if self.applies else LEAVE,
            "policy": self.policy.to_dict(),
            "chosen": self.chosen,
            "gain_pct": self.gain_pct,
            "gain_ci_pct": list(self.gain_ci_pct),
            "best_ms": self.best_ms,
            "baseline_ms": self.baseline_ms,
            "baseline": self.baseline,
            "reason": self.reason,
            "measurements": self.measurements,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, stored: bool = False) -> Verdict:
        """A verdict from its JSON document; raises UsageError for any other document."""
        try:
            low, high = map(float, document["gain_ci_pct"])
            return cls(
                source=str(document["source"]),
                policy=Policy.from_dict(document["policy"]),
                chosen=str(document["chosen"]),
                applies=document["choice"] == "apply",
                gain_pct=float(document["gain_pct"]),
                gain_ci_pct=(low, high),
                best_ms=_number(document["best_ms"]),
                baseline_ms=_number(document["baseline_ms"]),
                baseline=str(document["baseline"]),
                reason=str(document["reason"]),
                measurements=int(document["measurements"]),
                stored=stored,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not a verdict of weft: {type(error).__name__} at {error}") from None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
