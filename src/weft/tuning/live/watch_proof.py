"""Continues a proof that a search has left open, while the job is already being watched."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace

from weft.measure.sequential import Step
from weft.policy import Policy
from weft.tuning.live.proof import MORE, MOST_BLOCKS, PROMISING_DRAWS, Proof, draw_steps, mean_sample
from weft.tuning.live.trial import Sample, Trial
from weft.tuning.live.watch_plan import Planned
from weft.tuning.live.watch_trials import WatchTrials

MOST_DRAWS = 256  # for a proof that stays promising; half of its steps run under the policy
_UNUSABLE = "could not be timed"


class ProofTrials(WatchTrials):
    """The trials of a watch, including those of an open proof."""

    def finish_proof(self) -> Generator[Trial, Sample, None]:
        """Continue a proof that was promising when the search had used up its steps.

        If it succeeds, the gain is measured in blocks of steps, as in a search.
        """
        outcome = self.status.outcome
        proof = outcome.proof
        if proof is None or not outcome.still_open or self.budget.share <= 0:
            return
        first, under_policy = self.record.number, list[tuple[int, float]]()

        def after() -> None:
            """Update the outcome from what the proof shows now."""
            found = outcome.after(proof)
            default_ms = found.default_ms or 0.0
            extra_ms = sum(steps * (ms - default_ms) for steps, ms in under_policy)
            steps, cost_ms = outcome.steps + self.record.number - first, outcome.cost_ms + extra_ms
            self.status.outcome = replace(found, steps=steps, cost_ms=cost_ms)
            self.status.in_force = found.policy

        self.status.proving = True
        yield from self._draw(proof, lambda: _decided(proof), under_policy)
        if proof.proven():
            proof.first = proof.claim()
            after()  # the job may end meanwhile
            yield from self._draw(proof, lambda: proof.measured, under_policy)
        after()
        self.status.proving = False
        if self.status.outcome.kept:
            self.budget.in_vain = 0
            self.announce(f"proven in further steps: {self.status.outcome.text}")
        yield from self.release()

    def release(self) -> Generator[Trial, Sample, None]:
        """Release what the search created and the job does not need."""
        self.status.released_ms += (yield from self.settle(self.status.in_force)).paused_ms

    def settle(self, policy: Policy) -> Generator[Trial, Sample, Sample]:
        """Run a step before which all ranks release what this policy does not need."""
        return (yield from self.ask(Trial(policy, settle=True), "watch"))

    def _draw(
        self, proof: Proof, enough: Callable[[], bool], under_policy: list[tuple[int, float]]
    ) -> Generator[Trial, Sample, None]:
        """Run further draws of a proof, decided in advance, until `enough()`.

        `under_policy`: receives, for each trial under the proof's policy, its steps and their mean ms.
        """
        plan: deque[Planned] = deque()
        known, most = (proof.blocks, MOST_BLOCKS) if proof.in_blocks else (proof.drawn, MOST_DRAWS)
        known, undecided = list(known), True
        lengths: tuple[int, int] | None = None
        samples: list[Sample] = []
        while undecided or plan:
            lengths = lengths or self.new_lengths()
            if lengths and not plan:
                self.refit(*lengths)
                lengths = None
            runs, counted = (-(-steps // self.each) for steps in proof.run)
            while undecided and not lengths and len(plan) < self.ahead + 1 and len(known) < most:
                (arm, share), *_ = draw_steps(self.order, known, 1)
                policy = proof.policy if arm else self.default
                plan.extend([Planned(policy, arm, share, "proof")] * runs)
                known.append(Step(0.0, arm, share, 0))
            step = plan.popleft()
            number = self.record.number
            then = [one.policy for one in plan][: self.ahead]
            sample = yield from self.watched(step.policy, then, step.purpose)
            if not 0 < sample.ms < math.inf:
                sample = replace(sample, ms=1.0, problem=sample.problem or _UNUSABLE)
            elif step.arm:
                under_policy.append((self.each, sample.ms))
            samples.append(sample)
            if len(samples) == runs:
                proof.add(mean_sample(samples, counted), step.arm, step.share, number)
                samples = []
                undecided = undecided and not enough()


def _decided(proof: Proof) -> bool:
    """Whether there is an answer, or none is to be expected from more draws."""
    draws = len(proof.drawn)
    if proof.reached or proof.problem or draws >= MOST_DRAWS:
        return True
    if draws % MORE:  # what follows is slow, so do it only once per batch
        return False
    return proof.proven() is not None or (draws >= PROMISING_DRAWS and not proof.promising)
