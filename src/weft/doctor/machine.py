"""Machine: every query that checks make of the machine, so that tests can replace them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.doctor import libraries
from weft.doctor.child import ask_child
from weft.doctor.libraries import Torch

COMMAND_LIMIT_S = 10.0
"""Time limit of a command, in seconds."""


def run_command(
    command: Sequence[str], text: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command with `text` on stdin; (-1, "", reason) if it cannot run."""
    try:
        done = subprocess.run(
            list(command), input=text, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, "", str(error)
    return done.returncode, done.stdout, done.stderr


def filesystem_bytes(path: str) -> int | None:
    """Size of the file system at a path; None if there is none."""
    try:
        facts = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return facts.f_frsize * facts.f_blocks


def in_container() -> bool:
    """Whether this process runs in a container, judged by the files that containers have."""
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        return True
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


@dataclass(frozen=True)
class Machine:
    """The queries of the checks. The defaults query the real machine."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ask: Callable[..., dict[str, Any]] = ask_child
    """Runs a query in a child process; see `weft.doctor.child`."""
    run: Callable[..., tuple[int, str, str]] = run_command
    which: Callable[[str], str | None] = shutil.which
    torch: Callable[[], Torch | None] = libraries.find_torch
    nccl: Callable[[Torch | None], Path | None] = libraries.find_nccl
    shim: Callable[[], Path] = libraries.find_shim
    """Path of the shim; raises UnavailableError if it is not built."""
    filesystem_bytes: Callable[[str], int | None] = filesystem_bytes
    in_container: Callable[[], bool] = in_container
    preload: Callable[[Mapping[str, str]], None] = libraries.try_preload
    """Raises if a process with this environment cannot load the libraries of LD_PRELOAD."""


@dataclass(frozen=True)
class GpuFacts:
    """The result of querying the GPUs once, shared by several checks."""

    gpus: tuple[dict[str, Any], ...] = ()
    cuda: dict[str, Any] | None = None
    error: str | None = None
    """Why there is no CUDA driver, or why the query failed."""

    @property
    def nvidia(self) -> bool:
        """Whether there is an NVIDIA GPU."""
        return any(gpu["vendor"] == "nvidia" for gpu in self.gpus)

    @property
    def amd(self) -> bool:
        """Whether there is an AMD GPU."""
        return any(gpu["vendor"] == "amd" for gpu in self.gpus)
