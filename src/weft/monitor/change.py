"""Changes the policy of a running job from outside: only controls that each rank may change by itself.

All processes of a job read its control block, each before its own next launch. That is enough for controls
that concern single launches. Controls that all ranks must change between the same two collectives (CTAs,
framework settings) need the ranks' agreement, which only the job itself can reach: they are refused here.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from weft.errors import UsageError
from weft.monitor.watch_job import JobWatch
from weft.policy import Policy, place_of
from weft.shim import binding, job_folder
from weft.shim.apply import not_applied

BY_LAUNCH = ("priority", "head_start", "head_start_us", "residency", "when", "rules", "sm_reserve")
"""Controls that one rank may change alone."""


def change_policy(watch: JobWatch, policy: Policy) -> Policy:
    """Put every process of the job under `policy`; returns the former policy. Raises UsageError."""
    _check_idle(watch)
    before = watch.policy()
    started = watch.job.policy
    for name in (f.name for f in fields(Policy) if f.name not in BY_LAUNCH):
        value = getattr(policy, name)
        if value != getattr(started, name):
            never = not_applied(replace(Policy(), **{name: value}), framework=True)
            raise UsageError(
                never[0]
                if never
                else f"{_key(name)} concerns all ranks at once and cannot be changed from outside: start the "
                "job with `weft run --policy FILE`, or let `weft run --tune` change it on all ranks together"
            )
    binding.write_policy(job_folder.control(watch.job.folder), policy)
    return before


def switch_off(watch: JobWatch) -> tuple[Policy, str]:
    """Remove every control that can be removed; returns the former policy, and the controls left, as text."""
    started = watch.job.policy
    stays = [f.name for f in fields(Policy) if f.name not in BY_LAUNCH]
    given = {name: getattr(started, name) for name in stays}
    kept = {name: value for name, value in given.items() if value != getattr(Policy(), name)}
    before = change_policy(watch, replace(Policy(), **kept))
    left = ", ".join(f"{_key(name)} {_value(name, value)}" for name, value in kept.items())
    return before, left


def _key(name: str) -> str:
    """The name of a field of Policy in a policy file."""
    return ".".join(filter(None, place_of(name)))


def _value(name: str, value: Any) -> str:
    """The value of a field of Policy as JSON, as in a policy file."""
    section, key = place_of(name)
    document = replace(Policy(), **{name: value}).to_dict()
    return json.dumps(document[section][key] if section else document[key])


def _check_idle(watch: JobWatch) -> None:
    """Raise if the job has ended, is being tuned, or has a process with its own policy."""
    if watch.state != "running":
        raise UsageError(f"the job {watch.job.name} is over")
    sample = watch.sample()
    if sample.tuning is not None and sample.tuning.phase != "over":
        raise UsageError(
            f"the job {watch.job.name} is being tuned ({sample.tuning.phase}): a change now would spoil what "
            "tuning measures; wait until it is over, or start the job without --tune"
        )
    own = watch.own_policies()
    if own:
        raise UsageError(
            f"process {own[0].pid} has a policy of its own (weft.overlap, or kept by live tuning), which "
            "outranks the job's: a change from outside would have no effect"
        )
