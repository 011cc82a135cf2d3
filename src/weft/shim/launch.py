"""Runs a command as if it had been started directly: its signals, its exit code, its terminal."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from weft.errors import CommandNotFoundError, UsageError

# The terminal sends these to the whole foreground group, the command included: weft only has to outlive it.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# These reach one process only, so weft hands them on.
_HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
_PR_SET_PDEATHSIG = 1


def run(command: list[str], env: Mapping[str, str]) -> int:
    """Run `command` to its end; returns what waitpid says of it."""
    reader, writer = os.pipe()  # carries the errno of a failed exec; closes by itself when exec succeeds
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _become(command, env, writer, parent)
    os.close(writer)
    previous = _take_signals(pid)
    try:
        with os.fdopen(reader, "rb") as pipe:
            failure = pipe.read()
        status = _wait(pid)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if failure:
        _explain(command[0], int(failure))
    return status


def end_like(status: int) -> NoReturn:
    """End this process as the command ended: the same exit code, or death by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        sys.stdout.flush()
        sys.stderr.flush()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own core, if any
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _become(command: list[str], env: Mapping[str, str], writer: int, parent: int) -> NoReturn:
    """In the child: turn into the command, or report why not."""
    try:
        # Had weft not been there, a SIGKILL would have hit the command itself.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.execvpe(command[0], command, dict(env))
    except OSError as error:
        os.write(writer, str(error.errno or 1).encode())
    finally:
        os._exit(127)


def _take_signals(pid: int) -> dict[int, signal.Handlers | None]:
    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    previous: dict[int, signal.Handlers | None] = {}
    for number in _FROM_TERMINAL:
        previous[number] = signal.signal(number, signal.SIG_IGN)  # type: ignore[assignment]
    for number in _HANDED_ON:
        previous[number] = signal.signal(number, hand_on)  # type: ignore[assignment]
    return previous


def _wait(pid: int) -> int:
    while True:
        try:
            return os.waitpid(pid, 0)[1]
        except InterruptedError:
            continue


def _explain(program: str, errno: int) -> NoReturn:
    if errno in (2, 20):
        raise CommandNotFoundError(f"{program}: command not found; check the name after `--` and your PATH")
    raise UsageError(f"{program}: {os.strerror(errno)}; give a program that can be executed")
