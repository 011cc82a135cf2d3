"""Device names and their executors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.execute.base import Executor
from weft.ranks import launched_ranks
from weft.workload import BASELINE_CTAS

DEFAULT_SIMULATED = "sim:h100"
"""The device that `auto` means on a machine without a GPU."""


def has_gpu() -> bool:
    """Whether this machine has a GPU driver. Does not load it."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def resolve(device: str) -> str:
    """The device name, with `auto` replaced: the GPU of this machine, or a simulated one if it has none."""
    if device == "auto":
        return "cuda" if has_gpu() else DEFAULT_SIMULATED
    if device not in ("cuda", "cpu") and not device.startswith("sim:"):
        raise UsageError(f"device {device!r} is not known; use auto, cuda, cpu or sim:NAME")
    return device


def paper_device(device: str) -> str | None:
    """The device of the arXiv:2606.09200 node with this simulated GPU; None for other devices."""
    from weft.sim.profile import PAPER_NODE, PAPER_RANKS

    name = device.removeprefix("sim:").removesuffix(PAPER_NODE)
    return f"sim:{name}{PAPER_NODE}" if device.startswith("sim:") and name in PAPER_RANKS else None


def paper_ranks(device: str) -> int:
    """The number of ranks of a device from `paper_device`."""
    from weft.sim.profile import PAPER_NODE, PAPER_RANKS

    return PAPER_RANKS[device.removeprefix("sim:").removesuffix(PAPER_NODE)]


def check_device(device: str, node: str = "") -> None:
    """Reject an unknown simulated GPU or node, or a combination that does not fit. Starts nothing."""
    if device.startswith("sim:"):
        _simulated(device.removeprefix("sim:"), BASELINE_CTAS, node)
    elif node:
        _check_node(device)


def open_executor(
    device: str,
    *,
    baseline_ctas: int = BASELINE_CTAS,
    deadline_s: float = 60.0,
    under_shim: bool = True,
    node: str = "",
) -> Executor:
    """The executor for a device: one rank per process under torchrun, otherwise ghost ranks on one GPU.

    `node`: a node profile; the real or simulated GPU is then rank 0 of that node. Empty: none.
    """
    device = resolve(device)
    if device.startswith("sim:"):
        return _simulated(device.removeprefix("sim:"), baseline_ctas, node)
    check_device(device, node)
    if launched_ranks() > 1 and "RANK" in os.environ:
        from weft.execute.dist import DistExecutor

        return DistExecutor(device)
    if device == "cpu":
        raise UsageError("device cpu runs one rank per process; start it with torchrun --nproc-per-node 2")
    from weft.execute.worker import RemoteExecutor

    options: dict[str, Any] = {"baseline_ctas": None, "node": node} if node else {}
    options = options or {"baseline_ctas": baseline_ctas}
    return RemoteExecutor(options=options, deadline_s=deadline_s, under_shim=under_shim)


def _check_node(device: str) -> None:
    if device != "cuda" or (launched_ranks() > 1 and "RANK" in os.environ):
        raise UsageError(
            "--node is for one process on one GPU: use --device cuda, without torchrun, or --device sim:NAME"
        )


def _simulated(name: str, baseline_ctas: int, node: str) -> Executor:
    from weft.comm.node import load_node
    from weft.execute.sim import SimExecutor

    return SimExecutor(name, baseline_ctas=baseline_ctas, node=load_node(node) if node else None)
