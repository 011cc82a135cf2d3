"""Variables that silently change or kill overlap: one table, one rule per variable.

A rule looks at the value and tells what it does, or nothing where the value is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.doctor.check import Check, Status

Verdict = tuple[Status, str, str] | None
"""Status, what the value does, and the fix."""
Rule = Callable[[str], Verdict]


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "y", "yes", "t", "true", "on")


def _number(value: str) -> int | None:
    try:
        return int(value.strip())
    except ValueError:
        return None


def _if_on(status: Status, effect: str, fix: str) -> Rule:
    return lambda value: (status, effect, fix) if _is_on(value) else None


def _if_off(status: Status, effect: str, fix: str) -> Rule:
    def rule(value: str) -> Verdict:
        off = value.strip().lower() in ("0", "n", "no", "f", "false", "off")
        return (status, effect, fix) if off else None

    return rule


def _if_number(test: Callable[[int], bool], status: Status, effect: str, fix: str) -> Rule:
    def rule(value: str) -> Verdict:
        number = _number(value)
        if number is None:
            return "warn", "is not a number", "unset it or give a number"
        return (status, effect.format(number), fix) if test(number) else None

    return rule


def _connections(value: str) -> Verdict:
    number = _number(value)
    if number is None or not 1 <= number <= 32:
        return "warn", "is not a number from 1 to 32", "unset CUDA_DEVICE_MAX_CONNECTIONS"
    if number > 1:
        return "ok", "streams have hardware queues of their own; Megatron's tensor parallelism asks for 1", ""
    effect = (
        "all streams share one hardware queue: kernels start in launch order and a waiting one holds up the"
        " rest. Megatron's tensor parallelism relies on that order; FSDP and DDP lose overlap"
    )
    return (
        "warn",
        effect,
        "unset CUDA_DEVICE_MAX_CONNECTIONS (8 queues), unless the job overlaps tensor parallelism",
    )


def _serialize(value: str) -> Verdict:
    # 1 waits before a launch, 2 after it, 3 both.
    if not _number(value):
        return None
    return "fail", "every launch waits for the GPU: nothing overlaps", "unset it (a debugging aid)"


def _debug_detail(value: str) -> Verdict:
    if value.strip().upper() != "DETAIL":
        return None
    return (
        "warn",
        "each collective is checked across ranks before it starts",
        "use INFO or OFF outside of debugging",
    )


def _module_loading(value: str) -> Verdict:
    if value.strip().upper() == "EAGER":
        return "ok", "kernels load at the start: slower start, no stall at a first launch", ""
    return "ok", "a kernel's first launch may wait for the GPU: warm up before you measure", ""


_FEW_CTAS = "at most {} SMs per collective: compute keeps more, the links may not fill"
_MANY_CTAS = "at least {} SMs per collective are taken from compute"
_TUNE_CTAS = "unset it, or time your step with 4, 8 and 16"

RULES: dict[str, Rule] = {
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
        "wait() stops the CPU until the collective is done, so no compute is queued behind it",
        "unset TORCH_NCCL_BLOCKING_WAIT",
    ),
    "NCCL_BLOCKING_WAIT": _if_on(
        "warn",
        "wait() stops the CPU until the collective is done (old name of TORCH_NCCL_BLOCKING_WAIT)",
        "unset NCCL_BLOCKING_WAIT",
    ),
    "TORCH_NCCL_HIGH_PRIORITY": _if_off(
        "warn",
        "collectives run at the priority of compute and wait behind its blocks",
        "export TORCH_NCCL_HIGH_PRIORITY=1, or `weft run --priority high`",
    ),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": _if_off(
        "warn",
        "tensors of a collective are freed late; short of memory, the allocator then waits for the GPU",
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
        "warn", "GPUs that are no peers exchange data through the network", "unset NCCL_SHM_DISABLE"
    ),
    "NCCL_LAUNCH_ORDER_IMPLICIT": _if_on(
        "warn",
        "collectives of different communicators start in launch order: one that waits holds up the others",
        "unset NCCL_LAUNCH_ORDER_IMPLICIT, unless communicators deadlock without it",
    ),
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": _if_number(
        lambda n: n < 100,
        "warn",
        "the process may use {}% of the SMs only",
        "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    ),
}


def environment(env: Mapping[str, str]) -> list[Check]:
    """A finding for each variable that is set and matters; one `ok` where there is none."""
    found = [
        Check(f"env:{name}", status, f"{name}={env[name]}: {effect}", fix)
        for name, rule in RULES.items()
        if env.get(name, "").strip() and (verdict := rule(env[name]))
        for status, effect, fix in [verdict]
    ]
    quiet = all(check.status == "ok" for check in found)
    summary = [Check("environment", "ok", "no variable is set that disables overlap")] if quiet else []
    return summary + found
