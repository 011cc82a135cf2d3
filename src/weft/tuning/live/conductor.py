"""Conductor: turns trials into decisions for all ranks at step boundaries, and their reports into samples.

Like a search, it is a generator: it yields decisions for `weft.ranks` and is sent the reports of all ranks.
During the watch it is sent only the leader's report. Each decision has a key `do`:
- `run`: run `each` steps for each entry of `order`, an index into `policies`. `learn`: profile these steps.
  `light`: the ranks do not report before the next decision;
- `prepare`: create what `policy` needs, then report whether that worked;
- `settle`: continue under `policy`, with `release` keep only what it needs, then report whether that worked
  and how long it took;
- `report`: wait for all steps so far and report their times;
- `end`, `abandon`: tuning is over. If all ranks are present, `abandon` names the `policy` to revert to.

Framework controls change only at meetings, where all ranks report whether they succeeded: between two
meetings every rank has the same buckets and the same groups, even if a rank fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.policy import Policy
from weft.ranks import ABANDON, Decision, Report
from weft.shim.communicators import agreed
from weft.tuning.live.levers import preparations
from weft.tuning.live.options import Facts, merge
from weft.tuning.live.search import LEARN, SearchMethod
from weft.tuning.live.trial import Sample, Trial
from weft.tuning.live.trial_length import LAG, MEET, lengths
from weft.tuning.live.tuned_job import TunedJob
from weft.tuning.live.watch import Watch

Conductor = Generator[Decision, list[Report], None]


class _AbandonError(Exception):
    """The ranks do not agree."""


@dataclass
class _State:
    """What all ranks have created, and the framework controls in force."""

    default: Policy
    ready: set[tuple[str, Any]] = field(default_factory=set)
    framework: dict[str, Any] = field(default_factory=dict)
    keys: list[str] | None = None
    """Communicators that can have siblings on all of their ranks; None if there is only one process."""

    def __post_init__(self) -> None:
        self.ready |= preparations(self.default)
        self.models = Policy().models
        # The default's framework controls count as in force only once all ranks have applied them.
        self.fallback = replace(self.default, **self.models)

    def forget(self, policy: Policy) -> None:
        """Record that all that neither the default nor this policy needs has been released."""
        self.ready &= preparations(self.default) | preparations(policy)

    def hear(self, reports: Sequence[Report]) -> None:
        """Note from the reports which communicators can be prepared on all of their ranks."""
        able = [[(str(key), int(size)) for key, size in report.get("preparable", ())] for report in reports]
        self.keys = agreed(able) if len(able) > 1 else None


def conduct(
    method: SearchMethod,
    default: Policy,
    watch: Callable[[TunedJob, int, int], Watch] | None = None,
    result: Callable[[TunedJob], dict[str, Any]] = TunedJob.to_dict,
) -> Conductor:
    """Yield all decisions of a tuning; the last is `end` or `abandon`. The first value yielded is a dummy.

    `watch`: makes the generator that runs after the search, from the search's outcome, the number of trials
    to decide in advance, and the steps per trial; None for no watch. `result`: makes an outcome's document.
    """
    reports = yield {}
    state = _State(default)
    try:
        _agree(reports)
        state.hear(reports)
        if default.changes_models:
            yield from _start(state)
        outcome = yield from _search(method, state)
        if watch is None:
            released_ms = yield from _settle(outcome.policy)
            if outcome.candidates_exist:  # otherwise there was no search
                outcome = replace(outcome, cost_ms=outcome.cost_ms + released_ms)
            yield {"do": "end", "policy": outcome.policy.to_dict(), "result": result(outcome)}
            return
        if not outcome.still_open:
            state.forget(outcome.policy)
        yield from _settle(outcome.policy, result(outcome), release=not outcome.still_open)
        state.models = outcome.policy.models
        each, ahead = lengths(outcome.default_ms or 0.0)
        yield from _watch(watch(outcome, ahead, each), state)
        yield {"do": "end", "policy": outcome.policy.to_dict(), "result": result(outcome)}
    except _AbandonError as error:
        yield {**ABANDON, "reason": str(error), "policy": state.fallback.to_dict()}


def _search(method: SearchMethod, state: _State) -> Generator[Decision, list[Report], TunedJob]:
    """Run a search; all ranks meet after each plan."""
    trial = next(method)
    while True:
        samples = yield from _play(trial, state)
        for sample in samples:
            try:
                trial = method.send(sample)
            except StopIteration as end:
                outcome: TunedJob = end.value
                return outcome


def _play(
    trial: Trial, state: _State, say: Sequence[str] = ()
) -> Generator[Decision, list[Report], list[Sample]]:
    """Run a trial and the trials sure to follow it; only the first one if framework controls differ."""
    plan = [trial.policy] * trial.steps if trial.learn else [trial.policy, *trial.then]
    if any(policy.models != plan[0].models for policy in plan):
        plan = plan[:1]  # framework controls change only at a meeting
    for policy in dict.fromkeys(plan):
        needed = preparations(policy)
        if not needed <= state.ready:
            problem = yield from _asked({"do": "prepare", "policy": policy.to_dict(), "keys": state.keys})
            if problem:
                return [Sample(math.inf, problem) for _ in plan]
            state.ready |= needed
    if plan[0].models != state.models:
        problem = yield from _change(plan[0], state)
        if problem:
            return [Sample(math.inf, problem) for _ in plan]
    each = 1 if trial.learn or trial.then else trial.steps
    reports = yield run(plan, learn=trial.learn, each=each, say=say)
    _agree(reports)
    state.hear(reports)
    samples = slowest(reports)
    if trial.learn:
        facts = [Facts.from_dict(report["facts"]) for report in reports if report.get("facts")]
        ms = sum(sample.ms for sample in samples) / len(samples)
        paused_ms = sum(sample.paused_ms for sample in samples)
        return [Sample(ms, samples[-1].problem, merge(facts) if facts else None, paused_ms)]
    return samples


def _start(state: _State) -> Conductor:
    """Put the default's framework controls into force, after a few steps that profile the models."""
    plain = replace(state.default, **Policy().models)
    reports = yield run([plain] * LEARN, learn=True)
    _agree(reports)
    state.hear(reports)
    prepare = {"do": "prepare", "policy": state.default.to_dict(), "keys": state.keys}
    problem = yield from _asked(prepare)
    problem = problem or (yield from _asked(_settlement(state.default, release=False)))
    if problem:
        raise _AbandonError(problem)
    state.models, state.fallback = state.default.models, state.default


def _change(policy: Policy, state: _State) -> Generator[Decision, list[Report], str]:
    """Have all ranks change their framework controls; if one cannot, all revert. Returns the reason."""
    problem = yield from _asked(_settlement(policy, release=False))
    if not problem:
        state.models = policy.models
        return ""
    yield from _settle(state.default, release=False)
    state.models = state.default.models
    return problem


def _watch(watch: Watch, state: _State) -> Conductor:
    """Run a watch, which decides several trials at a time in advance.

    All ranks meet only for another search, or when the number of steps per trial changes.
    """
    try:
        trial = next(watch)
        said = [trial.say] if trial.say else []
        unknown = 0  # decided trials whose times have not been sent yet
        trials = MEET[0]
        while True:
            if trial.light:
                if not unknown:
                    trials = max(MEET[0], len(trial.then) - LAG)
                plan = [trial.policy, *trial.then][unknown : unknown + trials]
                decision = run(plan, light=True, each=trial.steps, inputs=trial.inputs, say=said)
                reports = yield decision if plan else {"do": "report"}
                samples = slowest(reports)
                unknown += len(plan) - len(samples)
            else:
                if trial.settle:
                    yield from _settle(trial.policy)
                    state.forget(trial.policy)
                    state.models = trial.policy.models
                samples = yield from _play(trial, state, said)
            said = []
            for sample in samples:
                trial = watch.send(sample)
                said += [trial.say] if trial.say else []
    except StopIteration:
        return


def _settle(
    policy: Policy, result: dict[str, Any] | None = None, *, release: bool = True
) -> Generator[Decision, list[Report], float]:
    """Have all ranks run under a policy and release what it does not need.

    Returns how long the slowest rank has waited since its last step, in ms.
    """
    reports = yield _settlement(policy, result, release=release)
    problem = _problem(reports)
    if problem:
        raise _AbandonError(problem)
    return max(float(report.get("paused_ms", 0.0)) for report in reports)


def _settlement(policy: Policy, result: dict[str, Any] | None = None, *, release: bool) -> Decision:
    return {"do": "settle", "policy": policy.to_dict(), "release": release, "result": result}


def _asked(decision: Decision) -> Generator[Decision, list[Report], str]:
    return _problem((yield decision))


def _problem(reports: Sequence[Report]) -> str:
    """The first problem of any rank; empty if there is none."""
    return next((str(report["problem"]) for report in reports if report.get("problem")), "")


def run(
    plan: Sequence[Policy],
    *,
    learn: bool = False,
    light: bool = False,
    each: int = 1,
    inputs: bool = False,
    say: Sequence[str] = (),
) -> Decision:
    """The decision to run `each` steps under each policy of a plan."""
    policies = list(dict.fromkeys(plan))
    return {
        "do": "run",
        "policies": [policy.to_dict() for policy in policies],
        "order": [policies.index(policy) for policy in plan],
        "learn": learn,
        "light": light,
        "each": each,
        "inputs": inputs,
        "say": list(say),
    }


def slowest(reports: Sequence[Report]) -> list[Sample]:
    """One sample per step: its time on the slowest rank, and what each rank copied.

    A problem of any rank is a problem of every sample. The longest pause of any rank counts with the first.
    """
    problem = _problem(reports)
    count = max(len(report["ms"]) for report in reports)
    every = [[float(r["ms"][index]) for r in reports if index < len(r["ms"])] for index in range(count)]
    paused_ms = max(float(report.get("paused_ms", 0.0)) for report in reports)
    copied = list(zip(*(report.get("copied", ()) for report in reports), strict=False))
    return [
        Sample(
            max(times),
            problem,
            paused_ms=0.0 if index else paused_ms,
            copied=copied[index] if index < len(copied) else (),
        )
        for index, times in enumerate(every)
    ]


def _agree(reports: Sequence[Report]) -> None:
    """Check that all ranks are at the same step: ranks that report the same clock must agree on its count."""
    seen: dict[str, Any] = {}
    for report in reports:
        for name, count in report["clock"].items():
            if seen.setdefault(name, count) != count:
                raise _AbandonError(f"the ranks are not at the same step ({name}: {seen[name]} and {count})")
