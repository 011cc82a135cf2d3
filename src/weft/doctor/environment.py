"""Environment variables that silently change or disable overlap: one rule per variable.

A rule takes the value and returns a finding, or None if the value is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.doctor.check import Check, Status

_Finding = tuple[Status, str, str] | None
"""Status, effect of the value, and the fix."""
VariableRule = Callable[[str], _Finding]
"""Maps the value of a variable to a finding."""


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "y", "yes", "t", "true", "on")


def _number(value: str) -> int | None:
    try:
        return int(value.strip())
    except ValueError:
        return None


def _if_on(status: Status, effect: str, fix: str) -> VariableRule:
    return lambda value: (status, effect, fix) if _is_on(value) else None


def _if_off(status: Status, effect: str, fix: str) -> VariableRule:
    def rule(value: str) -> _Finding:
        off = value.strip().lower() in ("0", "n", "no", "f", "false", "off")
        return (status, effect, fix) if off else None

    return rule


def _if_number(test: Callable[[int], bool], status: Status, effect: str, fix: str) -> VariableRule:
    def rule(value: str) -> _Finding:
        number = _number(value)
        if number is None:
            return "warn", "is not a number", "unset it or set a number"
        return (status, effect.format(number), fix) if test(number) else None

    return rule


def _connections(value: str) -> _Finding:
    number = _number(value)
    if number is None or not 1 <= number <= 32:
        return "warn", "is not a number from 1 to 32", "unset CUDA_DEVICE_MAX_CONNECTIONS"
    if number > 1:
        return "ok", "each stream has its own hardware queue; Megatron's tensor parallelism requires 1", ""
    effect = (
        "all streams share one hardware queue: kernels start in launch order, and a waiting kernel blocks the"
        " rest. Megatron's tensor parallelism relies on that order; FSDP and DDP lose overlap"
    )
    return (
        "warn",
        effect,
        "unset CUDA_DEVICE_MAX_CONNECTIONS (8 queues), unless the job overlaps tensor parallelism",
    )


def _serialize(value: str) -> _Finding:
    # 1 waits before a launch, 2 after it, 3 both.
    if not _number(value):
        return None
    return "fail", "every launch waits for the GPU: nothing overlaps", "unset it (it is a debugging option)"


def _debug_detail(value: str) -> _Finding:
    if value.strip().upper() != "DETAIL":
        return None
    return (
        "warn",
        "each collective is checked across ranks before it starts",
        "use INFO or OFF unless you are debugging",
    )


def _module_loading(value: str) -> _Finding:
    if value.strip().upper() == "EAGER":
        return "ok", "kernels load at start-up: slower start, no stall at a first launch", ""
    return "ok", "a kernel's first launch may wait for the GPU: warm up before you measure", ""


_FEW_CTAS = "at most {} SMs per collective: compute keeps more, but the links may not saturate"
_MANY_CTAS = "at least {} SMs per collective are taken from compute"
_TUNE_CTAS = "unset it, or time your step with 4, 8 and 16"

RULES: dict[str, VariableRule] = {
    "CUDA_LAUNCH_BLOCKING": _if_on(
        "fail", "every launch waits for the GPU: nothing overlaps", "unset CUDA_LAUNCH_BLOCKING"
    ),
    "HIP_LAUNCH_BLOCKING": _if_on(
        "fail", "every launch waits for the GPU: nothing overlaps", "unset HIP_LAUNCH_BLOCKING"
    ),
    "AMD_SERIALIZE_KERNEL": _serialize,
    "AMD_SERIALIZE_COPY": _serialize,
    "CUDA_DEVICE_MAX_CONNECTIONS": _connections,
    "GPU_MAX_HW_QUEUES": _if_number(
        lambda n: n <= 1,
        "warn",
        "all HIP streams share {} hardware queue: kernels of different streams run one after the other",
        "unset GPU_MAX_HW_QUEUES (4 queues)",
    ),
    "CUDA_MODULE_LOADING": _module_loading,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _if_on(
        "warn", "each free of a tensor waits for the GPU", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"
    ),
    "TORCH_DISTRIBUTED_DEBUG": _debug_detail,
    "TORCH_NCCL_BLOCKING_WAIT": _if_on(
        "warn",
        "wait() blocks the CPU until the collective completes, so no compute is queued behind it",
        "unset TORCH_NCCL_BLOCKING_WAIT",
    ),
    "NCCL_BLOCKING_WAIT": _if_on(
        "warn",
        "wait() blocks the CPU until the collective completes (old name of TORCH_NCCL_BLOCKING_WAIT)",
        "unset NCCL_BLOCKING_WAIT",
    ),
    "TORCH_NCCL_HIGH_PRIORITY": _if_off(
        "warn",
        "collectives run at the priority of compute and wait behind its blocks",
        "export TORCH_NCCL_HIGH_PRIORITY=1, or `weft run --priority high`",
    ),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": _if_off(
        "warn",
        "tensors of a collective are freed late; when memory is short, the allocator waits for the GPU",
        "export TORCH_NCCL_AVOID_RECORD_STREAMS=1",
    ),
    "TORCH_NCCL_CUDA_EVENT_CACHE": _if_off(
        "warn",
        "each collective creates and destroys its events, which can wait for the driver",
        "unset TORCH_NCCL_CUDA_EVENT_CACHE",
    ),
    "TORCH_NCCL_NAN_CHECK": _if_on(
        "warn", "a checking kernel runs before every collective", "unset TORCH_NCCL_NAN_CHECK"
    ),
    "NCCL_MAX_CTAS": _if_number(lambda n: n < 4, "warn", _FEW_CTAS, _TUNE_CTAS),
    "NCCL_MAX_NCHANNELS": _if_number(lambda n: n < 4, "warn", _FEW_CTAS, _TUNE_CTAS),
    "NCCL_MIN_CTAS": _if_number(lambda n: n > 16, "warn", _MANY_CTAS, _TUNE_CTAS),
    "NCCL_MIN_NCHANNELS": _if_number(lambda n: n > 16, "warn", _MANY_CTAS, _TUNE_CTAS),
    "NCCL_P2P_DISABLE": _if_on(
        "warn", "GPUs of a node exchange data through host memory", "unset NCCL_P2P_DISABLE"
    ),
    "NCCL_SHM_DISABLE": _if_on(
        "warn", "GPUs without peer access exchange data through the network", "unset NCCL_SHM_DISABLE"
    ),
    "NCCL_LAUNCH_ORDER_IMPLICIT": _if_on(
        "warn",
        "collectives of different communicators start in launch order: a waiting one blocks the others",
        "unset NCCL_LAUNCH_ORDER_IMPLICIT, unless communicators deadlock without it",
    ),
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": _if_number(
        lambda n: n < 100,
        "warn",
        "the process may use only {}% of the SMs",
        "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    ),
}


def check_environment(env: Mapping[str, str]) -> list[Check]:
    """A finding for each relevant variable that is set; a single `ok` if there is none."""
    found = [
        Check(f"env:{name}", status, f"{name}={env[name]}: {effect}", fix)
        for name, rule in RULES.items()
        if env.get(name, "").strip() and (verdict := rule(env[name]))
        for status, effect, fix in [verdict]
    ]
    quiet = all(check.status == "ok" for check in found)
    summary = [Check("environment", "ok", "no variable is set that disables overlap")] if quiet else []
    return summary + found
