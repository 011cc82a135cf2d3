"""Hardware checks: driver, links, green contexts, and measurements of priority and placement."""

from __future__ import annotations

from weft.doctor.check import Check
from weft.doctor.machine import GpuFacts, Machine
from weft.errors import UnavailableError

_NO_GPU = "run on a machine with a GPU; `weft analyze` works without one"
_NO_LIBRARY = "cannot open shared object"  # message of the dynamic loader
_NO_DEVICE = "(CUDA error 100)"  # CUDA_ERROR_NO_DEVICE, as weft.gpu.driver reports it
HONOURED = 2.0
"""If high priority speeds a small kernel up by at least this factor, priority counts as honoured; at most
`priority.WAVES` is possible."""


def driver(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether a GPU driver is present and works."""
    if facts.gpus:
        return [Check("driver", "ok", facts.gpus[0]["driver"])]
    error = facts.error or "no GPU is visible"
    hidden = machine.env.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (facts.cuda or _NO_DEVICE in error):
        fix = "unset CUDA_VISIBLE_DEVICES"
        return [Check("driver", "warn", f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", fix)]
    # A missing driver is not an error; a failing one is.
    if (_NO_LIBRARY in error or _NO_DEVICE in error) and not machine.which("nvidia-smi"):
        return [Check("driver", "skip", "no NVIDIA or AMD driver", _NO_GPU)]
    fix = "run `nvidia-smi`; if it also fails, reinstall or restart the driver (in a container: --gpus all)"
    return [Check("driver", "fail", error, fix)]


def gpus(machine: Machine, facts: GpuFacts) -> list[Check]:
    """The GPUs and how they are linked."""
    if not facts.gpus:
        return [Check("gpus", "skip", "none")]
    first = facts.gpus[0]
    size = f"{first['sms']} SMs, {first['memory_bytes'] / 2**30:.0f} GiB"
    detail = f"{len(facts.gpus)} x {first['name']} ({first['arch']}, {size})"
    if len(facts.gpus) == 1:
        links = first["active_links"]
        return [Check("gpus", "ok", detail + (f", {links} NVLinks up" if links else ""))]
    kinds = {peer for gpu in facts.gpus for peer in gpu["peers"]} - {"self"}
    detail += f", linked by {' and '.join(sorted(kinds))}"
    if "none" in kinds:
        fix = "`nvidia-smi topo -m`: turn off ACS and the IOMMU, or place ranks on GPUs with peer access"
        return [Check("gpus", "warn", f"{detail}: some pairs have no peer access", fix)]
    if kinds == {"pcie"}:
        fix = "expect communication to dominate; `weft analyze TRACE` shows how much is exposed"
        return [Check("gpus", "warn", detail, fix)]
    return [Check("gpus", "ok", detail)]


def green_contexts(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether SMs can be kept free of compute."""
    if not facts.cuda:
        return [Check("green contexts", "skip", "needs the CUDA driver")]
    if facts.cuda["green_contexts"]:
        return [Check("green contexts", "ok", "the driver can keep SMs free of compute (cuGreenCtxCreate)")]
    fix = "update the driver to CUDA 12.4 or newer (release 550) to reserve SMs for communication"
    return [Check("green contexts", "warn", "the driver has no cuGreenCtxCreate", fix)]


def priority(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether stream priority is honoured."""
    if facts.amd:
        detail = (
            "not measured on ROCm, which ignores stream priority by default since 2026 (rocm-systems #8485)"
        )
        return [Check("priority", "warn", detail, "compare `weft run --priority high` with a plain run")]
    if not facts.nvidia:
        return [Check("priority", "skip", "needs a GPU to measure")]
    try:
        effect = machine.ask("priority")
    except UnavailableError as error:
        return [
            Check(
                "priority", "fail", f"could not be measured: {error}", "run `nvidia-smi`: is the GPU usable?"
            )
        ]
    times = f"a small kernel on a full GPU ends after {effect['equal_ms']:.2f} ms"
    detail = f"{times}, at high priority {effect['high_ms']:.2f} ms: {effect['ratio']:.1f}x sooner"
    if not effect["conclusive"]:
        fix = "run again while no other process uses the GPU (`nvidia-smi`)"
        return [Check("priority", "warn", f"inconclusive, the GPU did not fill up: {detail}", fix)]
    if effect["ratio"] >= HONOURED:
        return [Check("priority", "ok", f"honoured: {detail}")]
    fix = "clear CUDA_LAUNCH_BLOCKING and CUDA_DEVICE_MAX_CONNECTIONS=1, stop MPS clients, and run again"
    return [Check("priority", "warn", f"not honoured: {detail}", fix)]


def placed(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether a wait for a collective's placement works, and ends before the collective does."""
    if facts.amd:
        return [
            Check("placed", "skip", "ROCm has no launch-completion event: `--head-start placed` does nothing")
        ]
    if not facts.nvidia:
        return [Check("placed", "skip", "needs a GPU to measure")]
    timed = "use a timed head start instead: `weft run --head-start 5`"
    try:
        effect = machine.ask("placement")
    except UnavailableError as error:
        return [Check("placed", "warn", f"`--head-start placed` does not work: {error}", timed)]
    times = f"a wait for a kernel's placement ends after {1000 * effect['waiter_ms']:.0f} µs"
    detail = f"{times}, the kernel after {1000 * effect['kernel_ms']:.0f} µs"
    if effect["works"]:
        return [Check("placed", "ok", detail)]
    return [Check("placed", "warn", f"{detail}: compute would wait for the whole collective", timed)]
