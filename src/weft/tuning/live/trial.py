"""Trial and Sample: requests and results of live tuning. Record: all steps of a job so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, median_low
from typing import Any, NamedTuple

from weft.policy import Policy
from weft.tuning.live.options import Facts
from weft.tuning.live.step_inputs import Inputs, StepInputs

POLICY_STALLED = "stalled"
PROGRAM_PAUSED = "paused"
"""Problem of a trial that took too long although its policy was reverted: the program itself paused."""
LONG_PAUSE = 3.0  # times a usual step: one that takes longer, where not all do, waits for the program itself
MOST_STEPS = 6000  # that a record holds; of older steps every other one is dropped


@dataclass(frozen=True)
class Trial:
    """The next step (or `steps` steps) of the job: run them under `policy`, then send a Sample."""

    policy: Policy
    steps: int = 1
    learn: bool = False
    """Profile these steps and send Facts."""
    then: tuple[Policy, ...] = ()
    """Policies of the single-step trials that follow in any case, whatever is sent in the meantime.

    They let a job run several trials without a rendezvous of its ranks. A driver that runs one trial at a
    time may ignore them.
    """
    light: bool = False
    """The watch: a timestamp per step is enough, no rank waits for another one's report."""
    settle: bool = False
    """No other policy is needed until further notice: release what was created for others."""
    say: str = ""
    """A line for the user, at this step."""


@dataclass(frozen=True)
class Sample:
    """The result of a trial."""

    ms: float
    """Wall time of one step (the mean of a trial's steps), on the slowest rank."""
    problem: str = ""
    """Why the trial does not count: it stalled, or the policy could not be applied."""
    facts: Facts | None = None
    """The profile, if requested."""
    paused_ms: float = 0.0
    """Time before the trial outside any step: ranks met; communicators were created or released."""
    copied: tuple[float, ...] = ()
    """Bytes that each rank copied from its host, per step, the leader first; a watch knows the leader's."""


class RecordedStep(NamedTuple):
    """A trial of one step or several, as a Record keeps it."""

    number: int
    ms: float
    policy: int
    """Index into the record's policies."""
    purpose: str
    """A key of PURPOSES."""
    inputs: Inputs | None
    met: bool
    """Ranks met before it."""


@dataclass(frozen=True)
class Note:
    """Something that happened at a step."""

    step: int
    text: str


@dataclass
class Record:
    """Every step of the job that live tuning has observed, for the page and for cycles."""

    number: int = 0
    """Steps so far."""
    policies: list[Policy] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    paused_ms: float = 0.0
    """Time so far that belongs to no step."""
    inputs: StepInputs = field(default_factory=StepInputs)

    def add(self, trial: Trial, sample: Sample, purpose: str) -> float:
        """Note the result of one trial; returns what a step of it would have taken with the usual input."""
        self.paused_ms += sample.paused_ms
        if trial.policy not in self.policies:
            self.policies.append(trial.policy)
        policy = self.policies.index(trial.policy)
        together = trial.steps > 1
        inputs = self.inputs.of(sample.ms, sample.copied, light=trial.light, together=together)
        kept = None if self.inputs.explain_nothing else inputs
        step = RecordedStep(self.number, sample.ms, policy, purpose, kept, met=sample.paused_ms > 0)
        usual_ms = self.usual_ms(step)
        self.inputs.note(inputs, policy)
        self.steps.append(step)
        if math.isfinite(sample.ms):  # else no step ran: what the policy needs could not be made
            self.number += trial.steps
        if len(self.steps) > MOST_STEPS:
            self._thin()
        return usual_ms

    def usual_ms(self, step: RecordedStep) -> float:
        """What a step would have taken with the usual input, as far as that is known now."""
        return step.ms if step.inputs is None else self.inputs.usual_ms(step.inputs)

    def usual_times(self, first: int) -> list[float]:
        """The times of all steps since that one, with the usual input."""
        return [self.usual_ms(step) for step in self.steps if step.number >= first]

    def extra_ms(self, first: int, default: Policy, usual_ms: float) -> float:
        """How much longer the steps since that one took than under the default without tuning.

        Such steps are those under the default that no rank waited for others before. `usual_ms`: of one, if
        there is none. Steps in which the program itself pauses are left out.
        """
        own = self.policies.index(default) if default in self.policies else -1
        undisturbed, others = list[float](), defaultdict[int, list[float]](list)
        ends = [*(step.number for step in self.steps[1:]), self.number]
        for step, end in zip(self.steps, ends, strict=True):
            if step.number < first or step.purpose in ("warm-up", "pause") or not math.isfinite(step.ms):
                continue
            as_without = step.policy == own and step.purpose != "profile" and not step.met
            times = undisturbed if as_without else others[step.policy]
            times.extend([self.usual_ms(step)] * (end - step.number))
        undisturbed = undisturbed or [usual_ms]
        longest_ms = LONG_PAUSE * median(undisturbed)
        usual_ms = fmean(ms for ms in undisturbed if ms <= longest_ms)
        pauses = max([*undisturbed, *others[own]]) > longest_ms
        extra_ms = 0.0
        for policy, times in others.items():
            slow = bool(times) and median_low(times) > longest_ms  # the policy itself is
            new = 0 if pauses or policy == own else 1  # what it needs comes into use
            counted = times if slow else [*times[:new], *(ms for ms in times[new:] if ms <= longest_ms)]
            extra_ms += sum(ms - usual_ms for ms in counted)
        return extra_ms

    def note(self, text: str) -> None:
        self.notes.append(Note(self.number, text))

    def _thin(self) -> None:
        """Drop every other ordinary step of the watch."""
        plain = [index for index, step in enumerate(self.steps) if step.purpose == "watch"]
        dropped = set(plain[::2] or range(0, len(self.steps), 2))
        self.steps = [step for index, step in enumerate(self.steps) if index not in dropped]

    def to_dict(self, labels: Sequence[str]) -> dict[str, Any]:
        """As JSON; `labels` name the policies in order."""
        return {
            "steps": self.number,
            "policies": list(labels),
            "times": [[step.number, round(step.ms, 4), step.policy, step.purpose] for step in self.steps],
            "notes": [[note.step, note.text] for note in self.notes],
        }


PURPOSES = {
    "warm-up": "warm-up",
    "profile": "profiled",
    "search": "candidates compared",
    "proof": "winner and default in random order",
    "watch": "watched",
    "probe": "probe of the default",
    "check": "policy and default in random order",
    "wait": "default, until a check is decided",
    "pause": "measured again: the program paused",
}


def ask(trial: Trial, record: Record, purpose: str) -> Generator[Trial, Sample, Sample]:
    """Yield one trial and note its sample; its time as if its steps had had the job's usual inputs."""
    if trial.say:
        record.note(trial.say)
    sample = yield trial
    usual_ms = record.add(trial, sample, "pause" if sample.problem == PROGRAM_PAUSED else purpose)
    return sample if usual_ms == sample.ms else replace(sample, ms=usual_ms)


def ask_all(
    policies: Sequence[Policy], record: Record, purpose: str
) -> Generator[Trial, Sample, list[Sample]]:
    """Single-step trials in a given order, decided in advance; once more if the program paused meanwhile."""
    samples = yield from _ask_in_order(policies, record, purpose)
    if any(sample.problem == PROGRAM_PAUSED for sample in samples):  # such as for an evaluation
        again = yield from _ask_in_order(policies, record, purpose)
        # Twice in a row is taken for the policies' fault.
        samples = [
            replace(one, problem=POLICY_STALLED) if one.problem == PROGRAM_PAUSED else one for one in again
        ]
    return samples


def _ask_in_order(
    policies: Sequence[Policy], record: Record, purpose: str
) -> Generator[Trial, Sample, list[Sample]]:
    samples = []
    for index, policy in enumerate(policies):
        trial = Trial(policy, then=tuple(policies[index + 1 :]))
        samples.append((yield from ask(trial, record, purpose)))
    return samples
