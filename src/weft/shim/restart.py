"""Restarts a program under the shim if it was started without weft."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys

from weft.errors import UnavailableError
from weft.shim import binding

RESTARTED = "WEFT_RESTARTED"
"""Environment variable: set if this process is already a restart."""


def restart() -> None:
    """Start this program again under `weft run`, unless it already runs there. Call it first in the program.

    The call does not return: the program starts again with the same arguments, and there the call does
    nothing. Code before the call runs twice. Works for scripts, modules (`python -m`) and each rank of
    torchrun. A notebook or an interactive prompt cannot be started again and gets an error that says so.
    """
    if binding.injected():
        return
    reason = _why_not()
    if reason:
        raise UnavailableError(f"this process cannot be started again: {reason}; start it with `{command()}`")
    sys.stdout.flush()
    sys.stderr.flush()
    weft_run = [sys.executable, "-m", "weft", "run", "--quiet", "--"]
    program = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, [*weft_run, *program], {**os.environ, RESTARTED: "1"})


def require() -> None:
    """Raise if `weft run` did not start this process; the error names the command or line that fixes it."""
    if not binding.injected():
        line = "" if _why_not() else ", or put `weft.restart()` first in the program"
        raise UnavailableError(f"this process was not started by weft run: start it with `{command()}`{line}")


def command() -> str:
    """The command that starts this program under the shim."""
    if _interactive():
        return "weft run -- python SCRIPT"
    return shlex.join(["weft", "run", "--", *sys.orig_argv])


def _why_not() -> str:
    if os.environ.get(RESTARTED):
        return "it was, and the launch shim did not load (see `weft doctor`)"
    if _interactive():
        return "it has no script (a notebook, a prompt or standard input)"
    if multiprocessing.parent_process() is not None:
        return "it is a child of multiprocessing: restart the program that starts it"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "its ranks are connected already: call weft.restart() before init_process_group"
    return ""


def _interactive() -> bool:
    words = sys.orig_argv[1:]
    script = any(not word.startswith("-") for word in words)
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or bool(sys.flags.interactive) or not script
