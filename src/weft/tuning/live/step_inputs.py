"""StepInputs: the inputs of a job's steps, by what its ranks copied from their hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.measure.input_sizes import InputSizes, SizedStep, apart

_COMPARED, _FEWEST = 64, 8  # steps under a policy whose sizes are compared, at most and at least
_APART = 4.0  # standard errors: by chance once in 16,000 comparisons


class Inputs(NamedTuple):
    """Of one step: the largest of all ranks', for which the others wait, and the leader's own.

    A watch hears only from the leader: there, the largest is not known.
    """

    largest: SizedStep | None
    own: SizedStep


class StepInputs:
    """Step times by the sizes of their inputs, where they vary and explain the times."""

    def __init__(self) -> None:
        self._largest, self._own = InputSizes(), InputSizes()
        self._before: tuple[float, ...] = ()
        self._policy: int | None = None
        self._sizes: dict[int, list[float]] = {}
        """By policy: the first sizes on the leader."""
        self._depend = False
        """A policy has changed what is copied, or a step's time has: then it tells nothing of the input."""

    def settle(self) -> None:
        """The usual inputs are those so far."""
        self._largest.settle()
        self._own.settle()

    @property
    def matter(self) -> bool:
        """Whether they explain some of the step times."""
        return not self._depend and (self._largest.matter or self._own.matter)

    @property
    def _explain_nothing(self) -> bool:
        return self._own.explains_nothing and self._largest.explains_nothing

    def of(self, ms: float, copied: Sequence[float], *, light: bool, together: bool) -> Inputs | None:
        """The inputs of the next step, or of several timed `together`; None: not known.

        `copied`: bytes by rank, the leader first; of a `light` trial only the leader's.
        """
        before, self._before = self._before, tuple(copied)
        if not any(copied) or self._explain_nothing or not 0 < ms < math.inf:
            return None
        if together or len(before) < len(copied):
            before = tuple(copied)
        largest = None if light else SizedStep(ms, max(copied), max(before))
        return Inputs(largest, SizedStep(ms, copied[0], before[0]))

    def usual_ms(self, step: Inputs) -> float:
        """The time of a step as if it had had the usual input."""
        if self._depend:
            return step.own.ms
        if step.largest is not None:
            return self._largest.usual_ms(step.largest)
        return self._own.usual_ms(step.own)

    def note(self, step: Inputs | None, policy: int) -> None:
        """Learn from a step under one of the job's policies: from the steps under one of them."""
        if step is None:
            return
        sizes = [(self._own, step.own), *([(self._largest, step.largest)] if step.largest else [])]
        others = [learns.foreign(one) for learns, one in sizes]
        if self._policy is None or any(others):
            self._policy = policy
            self._sizes.clear()
        if policy == self._policy:
            for learns, one in sizes:
                learns.note(one)
        self._compare(step.own.size, policy)

    def _compare(self, size: float, policy: int) -> None:
        """Whether the steps under a policy have the same inputs as those that were learned from."""
        seen = self._sizes.setdefault(policy, [])
        if len(seen) == _COMPARED:
            return
        seen.append(size)
        learned = self._sizes.get(self._policy or 0, [])
        if policy != self._policy and len(seen) >= _FEWEST and len(seen) % 4 == 0 and self.matter:
            self._depend = apart(seen, learned) > _APART
