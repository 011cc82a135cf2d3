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
"""Problem of a trial that took too long even after its policy was reverted: the program itself paused."""
LONG_PAUSE = 3.0  # times a usual step: a longer one waited for the program itself, unless all steps do
MOST_STEPS = 6000  # trials that a record holds; beyond this, every other ordinary one of the watch is dropped


@dataclass(frozen=True)
class Trial:
    """The next step (or `steps` steps) of the job: run them under `policy`, then send a Sample."""

    policy: Policy
    steps: int = 1
    learn: bool = False
    """Profile these steps and send Facts."""
    then: tuple[Policy, ...] = ()
    """Policies of the trials sure to follow, whatever samples are sent in the meantime.

    They let a job run several trials without a rendezvous of its ranks. A driver that runs one trial at a
    time may ignore them.
    """
    light: bool = False
    """Whether this is a trial of the watch: a timestamp is enough, and no rank waits for others' reports."""
    inputs: bool = False
    """In a watch: whether all ranks report what they copy from their hosts, not only the leader."""
    settle: bool = False
    """Whether to release what other policies need, because none of them is needed until further notice."""
    say: str = ""
    """A line for the user, at this step."""


@dataclass(frozen=True)
class Sample:
    """The result of a trial."""

    ms: float
    """Wall time of one step (the mean of a trial's steps) on the slowest rank."""
    problem: str = ""
    """Why the trial does not count (it stalled, or the policy could not be applied); empty if it counts."""
    facts: Facts | None = None
    """The profile, if requested."""
    paused_ms: float = 0.0
    """Time outside steps before the trial: ranks met, or communicators were created or released."""
    copied: tuple[float, ...] = ()
    """Bytes per step that each rank copied from its host, the leader first; a watch may know only that."""


class RecordedStep(NamedTuple):
    """A trial of one or more steps, as a Record keeps it."""

    number: int
    ms: float
    policy: int
    """Index into the record's policies."""
    purpose: str
    """A key of PURPOSES."""
    inputs: Inputs | None
    met: bool
    """Whether the ranks met before it."""


@dataclass(frozen=True)
class Note:
    """Something that happened at a step."""

    step: int
    text: str


@dataclass
class Record:
    """Every step of the job that live tuning has timed, for the HTML page and for estimates."""

    number: int = 0
    """Number of steps so far."""
    policies: list[Policy] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    paused_ms: float = 0.0
    """Total time so far outside steps."""
    inputs: StepInputs = field(default_factory=StepInputs)

    def add(self, trial: Trial, sample: Sample, purpose: str) -> float:
        """Add one trial's result; returns the ms that a step of it would have taken with the usual input."""
        self.paused_ms += sample.paused_ms
        if trial.policy not in self.policies:
            self.policies.append(trial.policy)
        policy = self.policies.index(trial.policy)
        together = trial.steps > 1
        inputs = self.inputs.of(sample.ms, sample.copied, watched=trial.light, together=together)
        kept = None if self.inputs.explain_nothing else inputs
        step = RecordedStep(self.number, sample.ms, policy, purpose, kept, met=sample.paused_ms > 0)
        usual_ms = self.usual_ms(step)
        self.inputs.note(inputs, policy)
        self.steps.append(step)
        if math.isfinite(sample.ms):  # otherwise no step ran: the policy could not be prepared
            self.number += trial.steps
        if len(self.steps) > MOST_STEPS:
            self._thin()
        return usual_ms

    def usual_ms(self, step: RecordedStep) -> float:
        """Ms that a step would have taken with the usual input, as far as that is known now."""
        return step.ms if step.inputs is None else self.inputs.usual_ms(step.inputs)

    def usual_times(self, first: int) -> list[float]:
        """The times of all trials since step `first`, converted to the usual input."""
        return [self.usual_ms(step) for step in self.steps if step.number >= first]

    def extra_ms(self, first: int, default: Policy, usual_ms: float) -> float:
        """How many ms longer the steps since step `first` took than under the default without tuning.

        They are compared with default steps that no meeting preceded, or with `usual_ms` if there are none.
        Steps in which the program itself pauses are left out.
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
            slow = bool(times) and median_low(times) > longest_ms  # because of the policy
            new = 0 if pauses or policy == own else 1  # the first step, in which its communicators connect
            counted = times if slow else [*times[:new], *(ms for ms in times[new:] if ms <= longest_ms)]
            extra_ms += sum(ms - usual_ms for ms in counted)
        return extra_ms

    def note(self, text: str) -> None:
        self.notes.append(Note(self.number, text))

    def _thin(self) -> None:
        """Drop every other ordinary step of the watch, or of all steps if there are none."""
        plain = [index for index, step in enumerate(self.steps) if step.purpose == "watch"]
        dropped = set(plain[::2] or range(0, len(self.steps), 2))
        self.steps = [step for index, step in enumerate(self.steps) if index not in dropped]

    def to_dict(self, labels: Sequence[str]) -> dict[str, Any]:
        """The JSON document; `labels` are the policies' names, in order."""
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
    """Yield one trial and record its sample; returns it with its time converted to the usual input."""
    if trial.say:
        record.note(trial.say)
    sample = yield trial
    usual_ms = record.add(trial, sample, "pause" if sample.problem == PROGRAM_PAUSED else purpose)
    return sample if usual_ms == sample.ms else replace(sample, ms=usual_ms)


def ask_all(
    policies: Sequence[Policy], record: Record, purpose: str
) -> Generator[Trial, Sample, list[Sample]]:
    """Run single-step trials in a given order, decided in advance; run them again if the program paused."""
    samples = yield from _ask_in_order(policies, record, purpose)
    if any(sample.problem == PROGRAM_PAUSED for sample in samples):  # for example to evaluate
        again = yield from _ask_in_order(policies, record, purpose)
        # A second pause in a row counts as the policies' fault.
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
