"""Published figures next to ours, cell by cell, and the document that `weft reproduce` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.errors import UsageError

INSPECTED = "inspected"
"""Basis of a figure that was known when the model, the reading or the assumptions were chosen."""
HELD_OUT = "held out"
"""Basis of a figure to which nothing in the model was adjusted."""

OnProgress = Callable[[str, int, int], None]
"""Called with a name for the current work, the number of its parts that are done, and the total number."""


def no_progress(what: str, done: int, of: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """One published figure and ours."""

    id: str
    """Figure or claim of the paper, such as `fig2/A40`."""
    cell: str
    """Cell of that figure, such as `8x16` (grid X x Y)."""
    published: float | None
    """None if the paper gives no number."""
    ours: float | None
    """None if it could not be computed; `note` says why."""
    basis: str
    """INSPECTED or HELD_OUT."""
    unit: str = ""
    sign_right: bool | None = None
    """Whether our effect has the published sign; None if there is no sign to compare."""
    ours_range: tuple[float, float] | None = None
    """Lowest and highest value of ours over the assumptions it depends on; None if there is no range."""
    note: str = ""

    @property
    def error(self) -> float | None:
        """Ours minus the published figure; None if one of them is missing."""
        return None if self.published is None or self.ours is None else self.ours - self.published

    def to_dict(self) -> dict[str, Any]:
        """One entry of `figures` in the document."""
        rounded = {key: _round(value) for key, value in asdict(self).items()}
        limits = None if self.ours_range is None else [_round(value) for value in self.ours_range]
        return {**rounded, "ours_range": limits, "error": _round(self.error)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Reproduced:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError for any other document."""
        limits, sign = document.get("ours_range"), document.get("sign_right")
        return cls(
            id=str(document["id"]),
            cell=str(document["cell"]),
            published=_number(document["published"]),
            ours=_number(document["ours"]),
            basis=str(document["basis"]),
            unit=str(document.get("unit", "")),
            sign_right=None if sign is None else bool(sign),
            ours_range=None if limits is None else (float(limits[0]), float(limits[1])),
            note=str(document.get("note", "")),
        )


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
    """All comparisons for one paper."""

    paper: str
    title: str
    device: str
    """The devices that were used, such as `sim:a40-paper, …` or the GPU's name."""
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

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Reproduction:
        """From the document of `weft reproduce --json`, which is not trusted. Raises UsageError."""
        try:
            return cls(
                paper=str(document["paper"]),
                title=str(document["title"]),
                device=str(document["device"]),
                simulated=bool(document["simulated"]),
                figures=tuple(Reproduced.from_dict(one) for one in document["figures"]),
                summary=dict(document["summary"]),
                bars=tuple(
                    Target(
                        name=str(bar["name"]),
                        value=float(bar["value"]),
                        target=str(bar["target"]),
                        met=bool(bar["met"]),
                        note=str(bar.get("note", "")),
                    )
                    for bar in document["bars"]
                ),
                assumptions=tuple(map(str, document["assumptions"])),
                findings=tuple(map(str, document["findings"])),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UsageError(f"not a result of `weft reproduce`: {type(error).__name__} at {error}") from None


def same_sign(ours: float, published: float, neutral: float = 0.0, within: float = 0.02) -> bool | None:
    """Whether two effects are on the same side of `neutral`; None if the published one is too close to it."""
    if abs(published - neutral) <= within:
        return None
    return (ours - neutral) * (published - neutral) > 0


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _round(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
