"""StepInputs: the input sizes of a job's steps, from the bytes that its ranks copied from their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.measure.copied_by_policy import CopiedByPolicy
from weft.measure.input_sizes import InputSizes, SizedStep

_LEAST_MS, _MOST_MS = 1e-6, 1e9  # shorter and longer steps were not timed correctly
_MOST_RANKS = 16  # whose inputs a watch asks for: the leader reads those of each rank
_MOST_BYTES = 2.0**60  # a step cannot copy more; less than 0 means that a process restarted its count


class Inputs(NamedTuple):
    """The inputs of one step: the largest of all ranks, for which the others wait, and the leader's own."""

    largest: SizedStep | None
    """None if not all ranks have reported, as happens in a watch."""
    own: SizedStep
    watched: bool


class StepInputs:
    """Relates step times to input sizes, if the sizes vary and explain the times."""

    def __init__(self) -> None:
        self._largest, self._own = InputSizes(), InputSizes()
        self._before: tuple[float, ...] = ()
        self._ranks = 0
        self._by_policy = CopiedByPolicy()
        """The leader's sizes."""
        self._both_ms = [0.0, 0.0]
        """Sums over the steps whose inputs are known on all ranks: their times converted by the leader's
        input, and by the largest. The ratio makes the times of a watch comparable with those of a search."""
        self._depend = False
        """Whether the bytes copied depend on the policy or on the step's time, not only on the input."""

    def settle(self) -> None:
        """Take the inputs so far as the usual ones."""
        self._largest.settle()
        self._own.settle()

    @property
    def matter(self) -> bool:
        """Whether input sizes explain some of the step times."""
        return not self._depend and (self._largest.matter or self._own.matter)

    @property
    def of_all_ranks(self) -> bool:
        """Whether a watch should ask all ranks for their inputs."""
        useful = self.matter or (self._own.vary and not self._depend)
        return useful and 1 < self._ranks <= _MOST_RANKS

    @property
    def explain_nothing(self) -> bool:
        """Whether input sizes have explained no step times for long; earlier steps are not converted then."""
        return self._own.explains_nothing and self._largest.explains_nothing

    def of(self, ms: float, copied: Sequence[float], *, watched: bool, together: bool) -> Inputs | None:
        """The inputs of the next step, or of several timed `together`; None if unknown.

        `copied`: bytes by rank, the leader first; of a `watched` step perhaps only the leader's.
        """
        before, self._before = self._before, tuple(copied)
        timed = _LEAST_MS < ms < _MOST_MS
        if not timed or not any(copied) or min(copied) < 0 or max(copied) > _MOST_BYTES:
            return None
        if together or len(before) < len(copied):
            before = tuple(copied)
        self._ranks = max(self._ranks, len(copied))
        largest = SizedStep(ms, max(copied), max(before)) if len(copied) == self._ranks else None
        return Inputs(largest, SizedStep(ms, copied[0], before[0]), watched)

    def usual_ms(self, step: Inputs) -> float:
        """The time, in ms, that a step would have taken with the usual input."""
        if self._depend:
            return step.own.ms
        # `beyond` not in a search: a policy that makes the program copy more must not look faster there.
        if step.largest is not None and (self._largest.matter or not self._own.matter):
            return self._largest.usual_ms(step.largest, beyond=step.watched)
        by_own, by_largest = self._both_ms
        comparable = by_own > 0 and self._largest.matter
        usual_ms = self._own.usual_ms(step.own, beyond=step.watched)
        return usual_ms * (by_largest / by_own if comparable else 1.0)

    def note(self, step: Inputs | None, policy: int) -> None:
        """Learn from a step under one of the job's policies."""
        if step is None:
            return
        mattered = self._own.matter
        if self._own.outdated(step.own) and mattered:
            self._by_policy = CopiedByPolicy()  # the job's inputs have changed
        self._own.note(step.own, policy)
        if step.largest is not None:
            if self._largest.outdated(step.largest):
                self._both_ms = [0.0, 0.0]
            self._largest.note(step.largest, policy)
            if self._largest.matter:
                self._both_ms[0] += self._own.usual_ms(step.own)
                self._both_ms[1] += self._largest.usual_ms(step.largest)
        differs = self._by_policy.add(step.own.size, policy)
        self._depend = self._depend or (differs and self.matter)
