"""Runs a command as if it had been started directly: its signals, its exit code, its terminal."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from weft.errors import CommandNotFoundError, UsageError
from weft.shim import signals

STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
ENOUGH = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
"""Signals that end weft at once, without a report: their sender does not want to wait."""


def original_environment() -> dict[str, str]:
    """The environment that weft was started with, without the LC_CTYPE that Python may add (PEP 538)."""
    env = dict(os.environ)
    with suppress(OSError):
        given = Path("/proc/self/environ").read_bytes()
        if given and not any(entry.startswith(b"LC_CTYPE=") for entry in given.split(b"\0")):
            env.pop("LC_CTYPE", None)
    return env


def hold_signals() -> set[int | signal.Signals]:
    """Block signals until `run` forwards them; returns the previous mask, which `run` needs."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, signals.ALL)


def run(
    command: list[str],
    env: Mapping[str, str],
    mask: set[int | signal.Signals],
    *,
    keep: tuple[int, ...] = (),
    every_s: float = 3600.0,
    now_and_then: Callable[[], None] = lambda: None,
) -> int:
    """Run `command` with the signal mask `mask` until it ends; returns its wait status.

    Every signal that can be caught is blocked meanwhile (`hold_signals`) and forwarded as it arrives, so no
    signal ends weft and thereby the program. weft closes its own standard input and output unless they are in
    `keep`, so that a reader sees the program close them. `now_and_then` runs every `every_s` seconds. Signals
    stay blocked after the command has ended: `end` unblocks them once they can no longer change the status.
    """
    hold_signals()
    inherited = signals.inherited()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignoring it would discard the exit status
    witness = signals.Witness(command)
    try:
        early = signal.sigpending() - {signal.SIGCHLD}  # sent before the command existed to get its own copy
        pid = _start(command, env, mask, inherited)
        for number in early:
            info = signal.sigtimedwait({number}, 0)
            if info is None or not signals.of_own_write(info):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        _let_go(keep)
        return _attend(pid, witness, every_s, now_and_then)
    except BaseException:
        _discard_pending()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    finally:
        witness.end()


def end(status: int, report: Callable[[], None]) -> NoReturn:
    """Call `report`, then end this process as the command ended, even if the report fails."""

    def at_once(number: int, frame: FrameType | None) -> None:
        end_like(status)

    try:
        for number in signals.ALL - signals.FAULTS - signals.HARMLESS:
            with suppress(OSError, ValueError):  # libc reserves a few signals
                signal.signal(number, at_once if number in ENOUGH else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ALL)
        report()
    except BaseException as error:
        with suppress(BaseException):
            print(f"weft: the report failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        end_like(status)


def end_like(status: int) -> NoReturn:
    """End this process as the command ended: the same exit code, or death by the same signal."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own core, if any
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


# --- the child ----------------------------------------------------------------------------------------------


def _start(
    command: list[str],
    env: Mapping[str, str],
    mask: set[int | signal.Signals],
    inherited: dict[int, signal.Handlers],
) -> int:
    if sys.stdout is not None:
        sys.stdout.flush()
    reader, writer = os.pipe()  # carries the errno of a failed exec; closed automatically if exec succeeds
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise UsageError(f"{command[0]}: cannot start a process: {error.strerror}") from None
    if pid == 0:
        os.close(reader)
        _become(command, env, writer, parent, mask, inherited)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        failure = pipe.read()
    if failure:
        os.waitpid(pid, 0)
        _explain(command[0], int(failure))
    return pid


def _become(
    command: list[str],
    env: Mapping[str, str],
    writer: int,
    parent: int,
    mask: set[int | signal.Signals],
    inherited: dict[int, signal.Handlers],
) -> NoReturn:
    """In the child: exec the command, or report the error to the parent."""
    try:
        signals.die_with_parent(parent)  # without weft, the SIGKILL would have gone to the command itself
        for number, handler in inherited.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _execute(command, dict(env))
    except OSError as error:
        os.write(writer, str(error.errno or 1).encode())
    except ValueError:  # a NUL byte in an argument
        os.write(writer, b"22")
    finally:
        os._exit(127)


def _execute(command: list[str], env: dict[str, str]) -> None:
    """As the libc's execvp, which Python's is not: a script without `#!` is one for the shell."""
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        script = shutil.which(command[0], path=env.get("PATH"))
        if error.errno != errno.ENOEXEC or script is None:
            raise
        os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], env)


def _explain(program: str, number: int) -> NoReturn:
    if number in (errno.ENOENT, errno.ENOTDIR):
        raise CommandNotFoundError(f"{program}: command not found; check the name after `--` and your PATH")
    raise UsageError(f"{program}: {os.strerror(number)}; give a program that can be executed")


# --- the parent ---------------------------------------------------------------------------------------------


def _let_go(keep: tuple[int, ...]) -> None:
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in {0, 1} - set(keep):
            with suppress(OSError):
                os.fstat(number)  # raises if it was already closed: it then stays closed
                os.dup2(null, number, inheritable=False)
        if null > 2:
            os.close(null)


def _attend(pid: int, witness: signals.Witness, every_s: float, now_and_then: Callable[[], None]) -> int:
    while True:
        status = _state_of(pid)
        if status is not None and not os.WIFSTOPPED(status):
            return status
        if status is not None:
            _stop_like(os.WSTOPSIG(status))
            continue
        info = signal.sigtimedwait(signals.ALL, every_s)
        if info is None:
            now_and_then()
        elif info.si_signo == signal.SIGCHLD and info.si_code > 0:
            continue
        elif not signals.from_terminal(info) and not (
            info.si_code <= 0 and witness.saw(info.si_signo, info.si_pid)
        ):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, info.si_signo)


def _state_of(pid: int) -> int | None:
    """The command's wait status; None if it has not changed.

    Also reaps orphans, which weft inherits if it runs as the init process.
    """
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return 0
        if found == pid:
            return status
        if found == 0:
            return None


def _stop_like(number: int) -> None:
    """Stop this process by the same signal as the command, so that the waiting shell sees it stop."""
    if number not in STOPS:
        number = signal.SIGSTOP
    if number != signal.SIGSTOP:
        signal.sigtimedwait({number}, 0)  # discard our own copy from the terminal, or we would stop twice
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    if number != signal.SIGSTOP:
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _discard_pending() -> None:
    """Drop signals that arrived after the command had ended: they must not change the exit status."""
    while signal.sigpending():
        if signal.sigtimedwait(signals.ALL, 0) is None:
            return
