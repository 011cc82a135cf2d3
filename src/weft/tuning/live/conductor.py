"""Conduct: from the method's trials to what every rank does at a step boundary, and back to samples.

Also a generator: it yields decisions for `agree`, is sent the reports of all ranks, and returns the Outcome.
What concerns communicators takes two exchanges: do it, then go on only if every rank could.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from weft.policy import Policy
from weft.ranks import ABANDON, Decision, Report
from weft.tuning.live.options import Facts, merge
from weft.tuning.live.outcome import Outcome
from weft.tuning.live.search import Method, Sample, Trial

Conductor = Generator[Decision, list[Report], None]


def conduct(method: Method, default: Policy) -> Conductor:
    """All decisions of a tuning; the last is `end` or `abandon`. What it yields first has no meaning."""
    reports = yield {}
    out_of_step = differing(reports)
    if out_of_step:
        yield {**ABANDON, "reason": out_of_step}
        return
    current, prepared = default, {default.max_ctas}
    trial = next(method)
    while True:
        problem = ""
        if trial.policy.max_ctas != current.max_ctas:
            problem = yield from _switch(trial.policy, prepared)
            current = default if problem else trial.policy
            if problem:
                yield from _asked({"do": "apply", "policy": default.to_dict()})
        if problem:
            sample = Sample(math.inf, problem)
        else:
            reports = yield run(trial)
            out_of_step = differing(reports)
            if out_of_step:
                yield {**ABANDON, "reason": out_of_step}
                return
            current, sample = trial.policy, slowest(reports)
        try:
            trial = method.send(sample)
        except StopIteration as end:
            yield from _end(end.value, current)
            return


def _switch(policy: Policy, prepared: set[int | None]) -> Generator[Decision, list[Report], str]:
    """Bring all ranks to other communicators, if need be new ones; returns why not, or nothing."""
    if policy.max_ctas not in prepared:
        problem = yield from _asked({"do": "prepare", "ctas": policy.max_ctas})
        if problem:
            return problem
        prepared.add(policy.max_ctas)
    return (yield from _asked({"do": "apply", "policy": policy.to_dict()}))


def _asked(decision: Decision) -> Generator[Decision, list[Report], str]:
    reports = yield decision
    return next((str(report["problem"]) for report in reports if report.get("problem")), "")


def _end(outcome: Outcome, current: Policy) -> Conductor:
    result = outcome.to_dict()
    if outcome.policy.max_ctas != current.max_ctas:
        problem = yield from _asked({"do": "apply", "policy": outcome.policy.to_dict()})
        if problem:
            yield {**ABANDON, "reason": problem}
            return
    yield {"do": "end", "policy": outcome.policy.to_dict(), "result": result}


def run(trial: Trial) -> Decision:
    """The decision that lets the job go on under a trial."""
    return {"do": "run", "policy": trial.policy.to_dict(), "steps": trial.steps, "learn": trial.learn}


def slowest(reports: Sequence[Report]) -> Sample:
    """What the trial took on the slowest rank; a problem on one rank is a problem of all."""
    problem = next((str(r["problem"]) for r in reports if r.get("problem")), "")
    facts = [Facts.from_dict(r["facts"]) for r in reports if r.get("facts")]
    ms = max(float(r["ms"]) for r in reports)
    return Sample(ms, problem, merge(facts) if facts else None)


def differing(reports: Sequence[Report]) -> str:
    """Why the ranks are not at the same step, or nothing. A clock is shared by the ranks that report it."""
    seen: dict[str, Any] = {}
    for report in reports:
        for name, count in report["clock"].items():
            if seen.setdefault(name, count) != count:
                return f"the ranks are not at the same step ({name}: {seen[name]} and {count})"
    return ""
