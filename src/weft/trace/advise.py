"""Which controls could hide what is exposed, what they could gain, and the command to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.trace.analysis import RankAnalysis


@dataclass(frozen=True)
class Advice:
    """One thing to try. `gain_us` is the least and most that one rank of this trace could save, in µs."""

    control: str
    title: str
    detail: str
    collective: str | None
    gain_us: tuple[float, float]
    command: str | None

    def to_json(self) -> dict[str, Any]:
        """The entry of `advice` in the document."""
        return {
            "control": self.control,
            "title": self.title,
            "detail": self.detail,
            "collective": self.collective,
            "gain_us": list(self.gain_us),
            "command": self.command,
        }


def advise(ranks: Sequence[RankAnalysis]) -> list[Advice]:
    """What to try, the most promising first; never empty."""
    return []
