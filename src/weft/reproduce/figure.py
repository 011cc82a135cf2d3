"""Published figures and ours, cell by cell, and the document of `weft reproduce`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LOOKED_AT = "looked at"
"""Basis of a figure that was known while the model, the reading or its assumptions were chosen."""
NOT_LOOKED_AT = "not looked at"
"""Basis of a figure to which nothing in the model was adjusted."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is being computed, how many parts of it are done, and how many there are."""


def no_progress(what: str, done: int, of: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """One published figure and ours."""

    id: str
    """Figure or claim of the paper, such as `fig2/A40`."""
    cell: str
    """Which cell of it, such as `8x16` (grid X x Y)."""
    published: float | None
    """None if the paper gives no number."""
    ours: float | None
    """None if it could not be computed; `note` says why."""
    basis: str
    unit: str = ""
    sign_right: bool | None = None
    """Whether our effect has the published sign; None where there is no sign to compare."""
    ours_range: tuple[float, float] | None = None
    """Over the assumptions that the figure depends on."""
    note: str = ""

    @property
    def error(self) -> float | None:
        """Ours minus the published figure."""
        return None if self.published is None or self.ours is None else self.ours - self.published

    def to_dict(self) -> dict[str, Any]:
        """One entry of `figures` in the document."""
        rounded = {key: _round(value) for key, value in asdict(self).items()}
        limits = None if self.ours_range is None else [_round(value) for value in self.ours_range]
        return {**rounded, "ours_range": limits, "error": _round(self.error)}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure of merit with its target."""

    name: str
    value: float
    target: str
    met: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Everything that was compared for one paper."""

    paper: str
    title: str
    device: str
    """What it ran on, such as `sim:a40-paper, …` or the GPU's name."""
    simulated: bool
    figures: tuple[Reproduced, ...]
    summary: Mapping[str, Any]
    bars: tuple[Target, ...] = ()
    assumptions: tuple[str, ...] = ()
    findings: tuple[str, ...] = field(default=())
    """What holds, what does not, and why: one sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """The document of `weft reproduce --json`."""
        return {
            "paper": self.paper,
            "title": self.title,
            "device": self.device,
            "simulated": self.simulated,
            "figures": [one.to_dict() for one in self.figures],
            "summary": dict(self.summary),
            "bars": [asdict(bar) for bar in self.bars],
            "assumptions": list(self.assumptions),
            "findings": list(self.findings),
        }


def same_sign(ours: float, published: float, neutral: float = 0.0, within: float = 0.02) -> bool | None:
    """Whether two effects are on the same side of `neutral`; None where the published one is within noise."""
    if abs(published - neutral) <= within:
        return None
    return (ours - neutral) * (published - neutral) > 0


def _round(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
