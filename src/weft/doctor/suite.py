"""All checks in order, each under its guard, and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weft.doctor import hardware, software
from weft.doctor.check import Check, guarded
from weft.doctor.environment import environment
from weft.doctor.machine import Facts, Machine

LIMIT_S = 30.0
"""For one check. Above the limits of the child processes, whose own message is better."""

CHECKS: dict[str, Callable[[Machine, Facts], list[Check]]] = {
    "driver": hardware.driver,
    "gpus": hardware.gpus,
    "torch": software.torch,
    "nccl": software.nccl,
    "compiler": software.compiler,
    "shim": software.shim,
    "mps": software.mps,
    "green contexts": hardware.green_contexts,
    "priority": hardware.priority,
    "environment": lambda machine, facts: environment(machine.env),
}


def diagnose(
    machine: Machine | None = None,
    limit_s: float = LIMIT_S,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """Every finding about this machine. Never raises, and no check may take longer than `limit_s` seconds.

    `on_start` is told the name of each check before it runs.
    """
    machine = machine or Machine()
    on_start("driver")
    facts = _look(machine, limit_s)
    findings: list[Check] = []
    for name, check in CHECKS.items():
        on_start(name)
        findings += guarded(name, partial(check, machine, facts), limit_s)
    return findings


def _look(machine: Machine, limit_s: float) -> Facts:
    seen: list[Facts] = []

    def look() -> list[Check]:
        answer = machine.ask("gpus")
        seen.append(Facts(tuple(answer["gpus"]), answer["cuda"], answer["cuda_error"]))
        return []

    problems = guarded("driver", look, limit_s)
    return seen[0] if seen else Facts(error=problems[0].detail if problems else None)


def next_step(findings: list[Check]) -> str:
    """One line: what to do now."""
    count = {status: sum(f.status == status for f in findings) for status in ("fail", "warn")}
    if count["fail"]:
        things = "failure" if count["fail"] == 1 else f"{count['fail']} failures"
        return f"Next: fix the {things} above, then run `weft doctor` again."
    if any(f.name == "gpus" and f.status == "skip" for f in findings):
        return "No GPU here. Next: `weft analyze TRACE` on a profiler trace from your job."
    also = f" ({count['warn']} warning{'s' * (count['warn'] > 1)} above)" if count["warn"] else ""
    return f"Ready{also}. Next: `weft run --tune -- torchrun train.py`"
