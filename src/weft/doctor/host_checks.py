"""Host limits that silently slow a job: a container's shared memory, clocks below their maximum."""

from __future__ import annotations

from weft.doctor.check import Check
from weft.doctor.machine import GpuFacts, Machine
from weft.report import words

LEAST_SHARED_BYTES = 1 << 30
"""Minimum size of /dev/shm, where NCCL and torch's data loaders put buffers. Docker's default is 64 MiB."""
_QUERY = (
    "index",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.applications.graphics",
    "clocks_throttle_reasons.active",
)
_REASONS = {
    0x2: "an application or locked clock",
    0x4: "the power cap",
    0x8: "a hardware slowdown",
    0x20: "software thermal limits",
    0x40: "hardware thermal limits",
    0x80: "a power brake",
}
_LOCKED = 0x2
_ENOUGH = 0.95
"""An application clock of at least this share of the maximum clock is not a restriction."""


def shared_memory(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether /dev/shm has room for NCCL and for data loaders."""
    size = machine.filesystem_bytes("/dev/shm")
    if size is None:
        return [Check("shared memory", "skip", "no /dev/shm on this machine")]
    text = f"/dev/shm has {words.size(size)}"
    where = ", in a container" if machine.in_container() else ""
    if size >= LEAST_SHARED_BYTES:
        return [Check("shared memory", "ok", text + where)]
    detail = f"{text}{where}: NCCL without peer access, and data loaders with workers, may fail or fall back"
    fix = (
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    )
    return [Check("shared memory", "warn", detail, fix)]


def clocks(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether a GPU's clock is held below its maximum."""
    tool = machine.which("nvidia-smi") if facts.nvidia else None
    if tool is None:
        return []
    code, out, _ = machine.run([tool, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
    if code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    known = [row for row in rows if len(row) == len(_QUERY)]
    held = [text for row in known if (text := _held(*row))]
    if not held:
        return [Check("clocks", "ok", "no clock is locked or held down")] if known else []
    fix = (
        "nvidia-smi -rgc and nvidia-smi -rac undo locked and application clocks; power and heat are the "
        "machine's (for comparing runs, equal locked clocks on all GPUs are fine)"
    )
    return [Check("clocks", "warn", "; ".join(held), fix)]


def _held(index: str, now: str, most: str, application: str, active: str) -> str:
    """What holds a GPU's clock down; empty if nothing does."""
    try:
        reasons, highest = int(active, 16), int(most)
    except ValueError:
        return ""
    found = [text for bit, text in _REASONS.items() if reasons & bit and bit != _LOCKED]
    limited = application.isdecimal() and int(application) < _ENOUGH * highest
    if limited:
        found.append(f"application clocks of {application} MHz")
    elif reasons & _LOCKED:
        found.append("locked clocks")
    if not found:
        return ""
    return f"GPU {index} runs at {now} of {highest} MHz, held by {' and '.join(found)}"
