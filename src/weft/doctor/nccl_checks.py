"""NCCL: releases with known regressions, and zero-CTA settings that have no effect.

Each entry cites the public report. It covers releases for which the problem was reported, or before its fix.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.doctor.check import Check
from weft.doctor.machine import GpuFacts, Machine
from weft.errors import UnavailableError

Version = tuple[int, int, int]
ZERO_CTA: Version = (2, 28, 0)
"""First release with copy-engine collectives (NCCL_CTA_POLICY_ZERO)."""
COPIES_OF_TWO: Version = (2, 31, 2)
"""Before this release, the first copy between two ranks can hang."""
_GUIDE = "docs.nvidia.com/deeplearning/nccl, User Buffer Registration, Zero-CTA Optimization"
_OFF = ("0", "n", "no", "f", "false", "off")


@dataclass(frozen=True)
class Regression:
    """A reported problem of the releases from `first` to `last`, inclusive."""

    first: Version
    last: Version
    what: str
    report: str
    """URL of the public issue."""
    fix: str
    only_symmetric: bool = False
    """Affects only jobs that register symmetric memory or request zero CTAs."""


REGRESSIONS = (
    Regression(
        (2, 21, 5),
        (2, 21, 5),
        "grouped all-reduce and all-gather were reported to take 2.4 times as long as with 2.18.3",
        "https://github.com/NVIDIA/nccl/issues/1566",
        "pip install a newer nvidia-nccl-cu12, or do not group these calls",
    ),
    Regression(
        (2, 24, 0),
        (2, 29, 99),
        "ring all-reduce in fp32 was reported slower than with 2.22 on an H200 (2.24 and 2.29 were measured)",
        "https://github.com/NVIDIA/nccl/issues/1997",
        "compare your step with another NCCL, as by LD_PRELOAD=/path/to/libnccl.so.2",
    ),
    Regression(
        (2, 29, 0),
        (2, 29, 99),
        "small all-reduces (1 to 32 KiB) were reported slower than with 2.28 on 8 H100",
        "https://github.com/NVIDIA/nccl/issues/2094",
        "compare your step with NCCL 2.28 where collectives are small, as in tensor-parallel decoding",
    ),
    Regression(
        (2, 29, 7),
        (2, 29, 7),
        "collectives on symmetric memory were reported slower than with 2.29.2",
        "https://github.com/NVIDIA/nccl/issues/2058",
        "use 2.29.2, or a later release than 2.29.7",
        only_symmetric=True,
    ),
    Regression(
        (2, 27, 0),
        (2, 31, 1),
        "several symmetric windows in one allocation can corrupt data (fixed in 2.31.2)",
        "https://github.com/NVIDIA/nccl/issues/2198",
        "update NCCL to 2.31.2, or allocate each window by itself",
        only_symmetric=True,
    ),
    Regression(
        (2, 28, 0),
        (2, 31, 1),
        "the first copy-engine collective of a communicator of two ranks can hang (fixed in 2.31.2)",
        "https://github.com/NVIDIA/nccl/issues/2241",
        "update NCCL to 2.31.2 where two ranks use zero CTAs",
        only_symmetric=True,
    ),
    Regression(
        (2, 31, 0),
        (2, 31, 99),
        "all-to-all ignores the CTAs that a call asks for",
        "https://github.com/NVIDIA/nccl/issues/2421",
        "limit all-to-all by NCCL_MAX_P2P_NCHANNELS (nccl issue 1598)",
    ),
)


def installed_nccl(machine: Machine) -> Version | None:
    """The NCCL release that torch would load; None if there is none or its version is unknown."""
    path = machine.nccl(machine.torch())
    if path is None:
        return None
    try:
        number = int(machine.ask("nccl", str(path))["version"])
    except (UnavailableError, KeyError, ValueError):
        return None  # the check `nccl` reports why
    if number < 10000:
        return number // 1000, number // 100 % 10, number % 100
    return number // 10000, number // 100 % 100, number % 100


def regressions(machine: Machine, facts: GpuFacts) -> list[Check]:
    """A finding for each known report about the installed release."""
    version = installed_nccl(machine)
    if version is None:
        return []
    symmetric = asks_for_zero_ctas(machine) or "TORCH_SYMMMEM" in machine.env
    text = ".".join(map(str, version))
    return [
        Check("nccl regression", "warn", f"{text}: {known.what} ({known.report})", known.fix)
        for known in REGRESSIONS
        if known.first <= version <= known.last and (symmetric or not known.only_symmetric)
    ]


_ONE_GPU = (
    "one GPU: a copy within it runs on SMs; ghost ranks of a node (python -m weft.comm.ghost --node) "
    "represent collectives by copy engines as a delay with a local copy"
)


def copy_engines(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Which collectives copy engines can do here under a policy with comm.engine dma, and which not."""
    version = installed_nccl(machine)
    peers = {peer for gpu in facts.gpus for peer in gpu["peers"]} - {"self"}
    if len(facts.gpus) == 1:
        return [Check("copy engines", "ok", _ONE_GPU)]
    if version is None or not peers:
        return []
    text = ".".join(map(str, version))
    if version < ZERO_CTA:
        detail = f"NCCL {text} launches SM kernels for all collectives (comm.engine dma needs 2.28)"
    elif peers & {"pcie", "none"}:
        detail = "no NVLink between all GPUs: NCCL launches SM kernels for all collectives"
    else:
        two = "" if version >= COPIES_OF_TWO else "; not between two ranks, which may hang before 2.31.2"
        detail = (
            f"NCCL {text} can copy all-gather, all-to-all, gather and scatter in symmetric windows (FSDP2's "
            f"all-gathers under comm.engine dma){two}; reductions stay on SMs"
        )
    return [Check("copy engines", "ok", detail)]


def asks_for_zero_ctas(machine: Machine) -> bool:
    """Whether the environment requests collectives without SMs from NCCL."""
    return machine.env.get("NCCL_CTA_POLICY", "").strip().upper() in ("2", "ZERO", "NCCL_CTA_POLICY_ZERO")


def zero_ctas(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether a request for copy-engine collectives can take effect: NCCL falls back silently."""
    if not asks_for_zero_ctas(machine):
        return []
    policy = f"NCCL_CTA_POLICY={machine.env['NCCL_CTA_POLICY']}"
    version = installed_nccl(machine)
    if version is not None and version < ZERO_CTA:
        detail = f"{policy} is not in force: NCCL {'.'.join(map(str, version))} has no zero-CTA policy"
        return [Check("zero CTAs", "warn", detail, "update NCCL to 2.28 or newer, or unset NCCL_CTA_POLICY")]
    for name in ("NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE"):
        value = machine.env.get(name, "").strip().lower()
        if value in _OFF if name != "NCCL_P2P_DISABLE" else value in ("1", "y", "yes", "t", "true", "on"):
            detail = f"{policy} is not in force: {name}={value} rules out symmetric windows, which it needs"
            return [Check("zero CTAs", "warn", detail, f"unset {name}")]
    if facts.gpus and {peer for gpu in facts.gpus for peer in gpu["peers"]} & {"pcie", "none"}:
        detail = f"{policy} is not in force between GPUs without NVLink: NCCL launches its SM kernels"
        return [Check("zero CTAs", "warn", detail, "unset NCCL_CTA_POLICY on this machine")]
    detail = (
        f"{policy} holds only for all-gather, all-to-all, gather and scatter whose buffers are registered as "
        f"symmetric windows; all others silently launch SM kernels ({_GUIDE})"
    )
    fix = (
        "check it: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints `Copy Engine` for each such call, and a "
        "trace (`weft run --trace`) shows copies in place of ncclDevKernel"
    )
    return [Check("zero CTAs", "warn", detail, fix)]
