"""Run a script as it is, and note when each of its steps ends (see stopwatch.py).

    python watched.py SCRIPT ARGUMENTS…

STRANGER_STEP   what ends a step: `optimizer` (a call of any optimizer's step), `forward` (the end of the
                outermost module's forward), or `self` (the script calls stopwatch.stamp itself)
STRANGER_IMPORTS  modules, separated by commas, to import before making a CUDA context and waiting for the
                file `gate` in STRANGER_FOLDER: a process can get ready while another one is measured
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import stopwatch


def wait_for_gate() -> None:
    """Make the slow imports, then wait until the GPU is free."""
    for name in filter(None, os.environ.get("STRANGER_IMPORTS", "").split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    folder = os.environ.get("STRANGER_FOLDER")
    if folder:
        (Path(folder) / "ready").touch()
    while folder and not (Path(folder) / "gate").exists():
        time.sleep(0.02)


class Outermost:
    """Ends a step when the outermost of nested calls returns."""

    def __init__(self) -> None:
        self.depth = 0

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            stopwatch.stamp()


def watch(kind: str) -> None:
    """Let torch note where a step ends."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    calls = Outermost()
    if kind == "optimizer":
        register_optimizer_step_pre_hook(calls.enter)
        register_optimizer_step_post_hook(calls.leave)
    elif kind == "forward":
        register_module_forward_pre_hook(calls.enter)
        register_module_forward_hook(calls.leave)


def main() -> None:
    wait_for_gate()
    watch(os.environ.get("STRANGER_STEP", "optimizer"))
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
