"""All checks in order, and the next step to suggest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from weft.doctor import hardware, host_checks, nccl_checks, software, torch_checks
from weft.doctor.check import Check, guarded
from weft.doctor.command_checks import command_checks
from weft.doctor.environment import check_environment
from weft.doctor.machine import GpuFacts, Machine

LIMIT_S = 30.0
"""Time limit of a check, in seconds; longer than that of a child, whose error message is more specific."""

CHECKS: dict[str, Callable[[Machine, GpuFacts], list[Check]]] = {
    "driver": hardware.driver,
    "gpus": hardware.gpus,
    "torch": software.torch,
    "nccl": software.nccl,
    "nccl regression": nccl_checks.regressions,
    "zero CTAs": nccl_checks.zero_ctas,
    "copy engines": nccl_checks.copy_engines,
    "compile flags": torch_checks.compile_flags,
    "collective rules": software.collective_rules,
    "compiler": software.compiler,
    "shim": software.shim,
    "mps": software.mps,
    "green contexts": hardware.green_contexts,
    "priority": hardware.priority,
    "placed": hardware.placed,
    "clocks": host_checks.clocks,
    "shared memory": host_checks.shared_memory,
    "environment": lambda machine, facts: check_environment(machine.env),
}


def diagnose(
    machine: Machine | None = None,
    limit_s: float = LIMIT_S,
    on_start: Callable[[str], None] = lambda name: None,
    command: Sequence[str] | None = None,
) -> list[Check]:
    """All findings about this machine. Never raises; a check that takes over `limit_s` seconds is a `fail`.

    `on_start` is called with the name of each check before it runs. `command`: a command to check, too.
    """
    machine = machine or Machine()
    on_start("driver")
    facts = _query_gpus(machine, limit_s)
    findings: list[Check] = []
    for name, check in CHECKS.items():
        on_start(name)
        findings += guarded(name, partial(check, machine, facts), limit_s)
    if command is not None:
        on_start("command")
        findings += guarded("command", partial(command_checks, command, machine, facts), limit_s)
    return findings


def _query_gpus(machine: Machine, limit_s: float) -> GpuFacts:
    found: list[GpuFacts] = []

    def query() -> list[Check]:
        answer = machine.ask("gpus")
        found.append(GpuFacts(tuple(answer["gpus"]), answer["cuda"], answer["cuda_error"]))
        return []

    problems = guarded("driver", query, limit_s)
    return found[0] if found else GpuFacts(error=problems[0].detail if problems else None)


def next_step(findings: list[Check]) -> str:
    """One line: what to do next."""
    count = {status: sum(f.status == status for f in findings) for status in ("fail", "warn")}
    if count["fail"]:
        things = "failure" if count["fail"] == 1 else f"{count['fail']} failures"
        return f"Next: fix the {things} above, then run `weft doctor` again."
    if any(f.name == "gpus" and f.status == "skip" for f in findings):
        return "No GPU on this machine. Next: `weft analyze TRACE` on a profiler trace of your job."
    also = f" ({count['warn']} warning{'s' * (count['warn'] > 1)} above)" if count["warn"] else ""
    return f"Ready{also}. Next: `weft run --tune -- torchrun train.py`"
