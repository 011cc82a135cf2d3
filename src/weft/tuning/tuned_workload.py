"""TunedWorkload: the verdict on one workload with all measurements, and the `weft tune --json` document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import UsageError
from weft.execute.base import fraction_of_ideal
from weft.tuning.verdict import Measured, Verdict
from weft.workload import Workload

TIE = 0.005
"""Simulated times that differ by less than this share count as equal."""


@dataclass(frozen=True, kw_only=True)
class TunedWorkload:
    """The verdict on one workload on one device, with all measurements. Times are medians in ms."""

    verdict: Verdict
    device: str
    workload: Workload
    overlap_ms: float
    sequential_ms: float
    ideal_ms: float
    ranked_out: int = 0
    """Candidates that a simulated GPU ruled out before the race."""

    @property
    def best_ms(self) -> float:
        """Time of the chosen candidate."""
        return self.verdict.best_ms if self.verdict.best_ms is not None else self.overlap_ms

    @property
    def candidates(self) -> tuple[Measured, ...]:
        """Every candidate, sequential and plain overlap first."""
        return self.verdict.candidates

    def fraction_of_ideal(self, ms: float) -> float | None:
        """Share of the possible gain over sequential that `ms` reaches; None if hardly any is possible."""
        return fraction_of_ideal(ms, self.sequential_ms, self.ideal_ms)

    @property
    def text(self) -> str:
        """The verdict in one sentence that names the device."""
        verdict, where = self.verdict, self.device + (", simulated" if self.verdict.simulated else "")
        if not verdict.leave:
            return f"{verdict.text.removesuffix('.')} on {where}."
        if verdict.chosen == "sequential" and self.overlap_ms > self.best_ms * (1 + TIE):
            return f"Leave it alone, and do not overlap: sequential is fastest on {where}."
        base = "plain overlap" if verdict.chosen == "overlap" else verdict.chosen
        because = f" ({verdict.reason})" if verdict.reason else ""
        return f"Leave it alone: no control beats {base} beyond doubt on {where}{because}."

    def to_dict(self) -> dict[str, Any]:
        """The document of `weft tune --json`."""
        verdict = self.verdict
        return {
            "device": self.device,
            "simulated": verdict.simulated,
            "workload": self.workload.to_dict(),
            "sequential_ms": self.sequential_ms,
            "overlap_ms": self.overlap_ms,
            "best_ms": self.best_ms,
            "ideal_ms": self.ideal_ms,
            "fraction_of_ideal": self.fraction_of_ideal(self.best_ms),
            "policy": verdict.policy.to_dict(),
            "verdict": {**verdict.to_dict(), "text": self.text, "candidate": verdict.chosen},
            "ranked_out": self.ranked_out,
            "measurements": verdict.measurements,
            "candidates": [one.to_dict() for one in self.candidates],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> TunedWorkload:
        """From the document of `weft tune --json`, which is not trusted."""
        try:
            verdict = dict(document["verdict"])
            simulated = document.get("simulated") or str(document["device"]).startswith("sim:")
            filled = {
                **verdict,
                "source": "simulator" if simulated else "lab",
                "policy": document["policy"],
                "chosen": verdict["candidate"],
                "baseline": verdict.get("baseline", "plain overlap"),
                "best_ms": document["best_ms"],
                "baseline_ms": min(document["sequential_ms"], document["overlap_ms"]),
                "measurements": document.get("measurements") or 0,
            }
            return cls(
                verdict=replace(
                    Verdict.from_dict(filled),
                    candidates=tuple(Measured.from_dict(row) for row in document["candidates"]),
                ),
                device=str(document["device"]),
                workload=Workload.from_dict(document["workload"]),
                overlap_ms=float(document["overlap_ms"]),
                sequential_ms=float(document["sequential_ms"]),
                ideal_ms=float(document["ideal_ms"]),
                ranked_out=int(document.get("ranked_out") or 0),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UsageError(f"not a result of `weft tune`: {type(error).__name__} at {error}") from None
