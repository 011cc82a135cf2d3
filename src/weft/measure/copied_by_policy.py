"""CopiedByPolicy: does a policy change how much a program copies? Then that does not tell its inputs.

Inputs that are sorted by length, or become longer, differ between any two stretches of a job. So steps are
compared with those under the first policy nearby, and of many successive steps under one policy only the
first counts. Where all steps under the two policies differ, less has to be seen nearby.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_SHORT = 4  # steps of a run under one policy that all count
_NEARBY = 16  # runs that are compared with each other
_STRETCHES = 8  # of so many runs, that are compared for a policy
_FIRST = 64  # steps under a policy that are compared wherever they were
_APART = 4.0  # standard errors: by chance once in 16,000 comparisons
_ALSO_NEARBY = 2.0  # the same nearby, where the first steps are apart: inputs that change come here by chance


class CopiedByPolicy:
    """The sizes of steps by their policy, compared with those under the policy of the first step."""

    def __init__(self) -> None:
        self._other = -1
        self._policy: int | None = None
        self._run: list[float] = []
        """The sizes since the policy has changed."""
        self._runs = 0
        self._nearby: dict[int, list[float]] = {}
        self._before: dict[int, list[tuple[float, float]]] = {}
        """By policy: of each earlier stretch how much the sizes were above those of the first policy."""
        self._first: dict[int, list[float]] = {}

    def add(self, size: float, policy: int) -> bool:
        """Note a step; whether the policy of the steps before copies more than the first one, or less."""
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
        # Steps whose policy was drawn for each of them differ by chance only, blocks of them by their inputs.
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
        """Begin another stretch."""
        others = self._nearby.pop(self._other, [])
        for policy, sizes in self._nearby.items():
            before = self._before.setdefault(policy, [])
            if others and len(before) < _STRETCHES:
                before.append(above(sizes, others))
        self._nearby.clear()
        self._runs = 0


def _errors(parts: Sequence[tuple[float, float]]) -> float:
    """How many standard errors sizes are above others, by all parts together."""
    more, variance = (sum(values) for values in zip(*parts, strict=True))
    return more / math.sqrt(variance) if variance else 0.0


def above(sizes: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """How often sizes are above others rather than below, and its variance by chance (Mann, Whitney)."""
    ordered, count = sorted(others), len(sizes) * len(others)
    larger = sum(bisect_left(ordered, size) + bisect_right(ordered, size) for size in sizes) / 2
    return larger - count / 2, count * (len(sizes) + len(others) + 1) / 12
