"""The result of a race: every candidate with its measurements, the choice, and whether it was confirmed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from weft.errors import WeftError
from weft.measure.intervals import bootstrap_ci, ratio_ci

_T = TypeVar("_T")


@dataclass
class RaceEntry(Generic[_T]):
    """A candidate and its measurements in ms."""

    candidate: _T
    samples: list[float] = field(default_factory=list)
    kept: bool = True
    problem: str = ""
    """Why it could not be measured or was dropped; empty if it stayed to the end."""
    error: WeftError | None = None
    again: list[float] = field(default_factory=list)
    """Fresh measurements after the choice, for the winner and the baselines."""

    @property
    def failed(self) -> bool:
        """Whether it could not be measured."""
        return self.error is not None

    @property
    def ms(self) -> float:
        """Median; infinite without samples."""
        return median(self.samples) if self.samples else math.inf

    @property
    def ci_ms(self) -> tuple[float, float]:
        """95% confidence interval of the median."""
        return bootstrap_ci(self.samples)


@dataclass
class RaceResult(Generic[_T]):
    """All entries in the given order, and the index of the chosen one (None if nothing could be measured)."""

    entries: list[RaceEntry[_T]]
    baselines: tuple[int, ...]
    aside: tuple[int, ...] = ()
    chosen: int | None = None
    unconfirmed: int | None = None
    """The candidate that led the race but not its confirmation; a baseline is chosen instead."""
    measurements: int = 0
    out_of_time: bool = False

    @property
    def best(self) -> _T | None:
        """The chosen candidate, or None."""
        return None if self.chosen is None else self.entries[self.chosen].candidate

    @property
    def best_baseline(self) -> int | None:
        """Index of the fastest baseline that could be measured, or None."""
        alive = [i for i in self.baselines if self.entries[i].samples]
        return min(alive, key=lambda i: self.entries[i].ms, default=None)

    def ratio(self, index: int) -> tuple[float, float, float]:
        """Ratio of a candidate's time to the best baseline's, and its 95% interval.

        Taken from the confirmation if there was one.
        """
        baseline = self.best_baseline
        if baseline is None or index == baseline:
            return 1.0, 1.0, 1.0
        entry, base = self.entries[index], self.entries[baseline]
        return ratio_ci(entry.again or entry.samples, base.again or base.samples)

    def nearest(self) -> tuple[int, float] | None:
        """Index of the fastest candidate that is not a baseline, and its time relative to the best baseline,
        minus 1; None without either."""
        others = [
            i
            for i, entry in enumerate(self.entries)
            if i not in (*self.baselines, *self.aside) and entry.samples and not entry.failed
        ]
        baseline = self.best_baseline
        if not others or baseline is None:
            return None
        first = min(others, key=lambda i: self.entries[i].ms)
        return first, self.entries[first].ms / self.entries[baseline].ms - 1
