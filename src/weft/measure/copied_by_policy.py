"""CopiedByPolicy: tests whether a policy changes how much a program copies; if so, bytes do not show inputs.

Inputs that are sorted by length, or become longer, differ between any two stretches of a job. So steps are
compared only with nearby steps under the first policy, and only the first of many successive steps under one
policy counts. If all steps under the two policies differ, weaker evidence from nearby steps suffices.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_SHORT = 4  # in runs of up to this many steps under one policy, all count; in longer runs only the first
_NEARBY = 16  # runs in a stretch, which are compared with each other
_STRETCHES = 8  # earlier stretches that are kept per policy
_FIRST = 64  # first steps per policy, which are compared wherever they were
_APART = 4.0  # standard errors that count as a difference: by chance once in 16,000 comparisons
_ALSO_NEARBY = 2.0  # also needed nearby if the first steps differ; changing inputs reach it only by chance


class CopiedByPolicy:
    """Compares the sizes of steps under each policy with those under the first step's policy."""

    def __init__(self) -> None:
        self._other = -1
        self._policy: int | None = None
        self._run: list[float] = []
        """Sizes since the last change of policy, at most _SHORT + 1."""
        self._runs = 0
        self._nearby: dict[int, list[float]] = {}
        self._before: dict[int, list[tuple[float, float]]] = {}
        """By policy, for each earlier stretch: result of `above` against the first policy's sizes."""
        self._first: dict[int, list[float]] = {}

    def add(self, size: float, policy: int) -> bool:
        """Add a step; returns whether the run of another policy that it ends copied more or less than the
        first policy does."""
        differs = policy != self._policy and self._policy is not None and self._end_run(self._policy)
        self._other = policy if self._policy is None else self._other
        self._policy = policy
        if len(self._run) <= _SHORT:
            self._run.append(size)
        if len(first := self._first.setdefault(policy, [])) < _FIRST:
            first.append(size)
        return differs

    def _end_run(self, policy: int) -> bool:
        run = self._run
        if self._runs == _NEARBY:
            self._close()
        self._runs += 1
        # Steps drawn one by one differ only by chance; blocks of steps also differ by their inputs.
        self._nearby.setdefault(policy, []).extend(run if len(run) <= _SHORT else run[:1])
        self._run = []
        if policy == self._other:
            return False
        here = above(self._nearby[policy], self._nearby.get(self._other, []))
        nearby = _errors([here, *self._before.get(policy, [])])
        if abs(nearby) <= _ALSO_NEARBY:
            return False
        first = _errors([above(self._first[policy], self._first.get(self._other, []))])
        return abs(nearby) > _APART or first * math.copysign(1, nearby) > _APART

    def _close(self) -> None:
        """End this stretch and begin another."""
        others = self._nearby.pop(self._other, [])
        for policy, sizes in self._nearby.items():
            before = self._before.setdefault(policy, [])
            if others and len(before) < _STRETCHES:
                before.append(above(sizes, others))
        self._nearby.clear()
        self._runs = 0


def _errors(parts: Sequence[tuple[float, float]]) -> float:
    """How many standard errors the sizes are above the others, over all parts together."""
    more, variance = (sum(values) for values in zip(*parts, strict=True))
    return more / math.sqrt(variance) if variance else 0.0


def above(sizes: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mann-Whitney statistic: how often sizes are above others, minus its mean; and its chance variance."""
    ordered, count = sorted(others), len(sizes) * len(others)
    larger = sum(bisect_left(ordered, size) + bisect_right(ordered, size) for size in sizes) / 2
    return larger - count / 2, count * (len(sizes) + len(others) + 1) / 12
