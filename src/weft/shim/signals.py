"""Forwards signals between weft, the program it runs, and the process group of both."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ALL = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
FAULTS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
)
HARMLESS = frozenset((signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGTSTP))
_RECORD = struct.Struct("ii")
_WITNESS_S = 0.05  # short: one system call sends a signal to all processes of a group
_ANSWER_S = 10.0  # long: the witness must get to run even if no processor is free
_ASK = max(ALL)  # a process receives this one last of all its pending signals
_REMEMBER_S = 1.0
_PR_SET_PDEATHSIG = 1
_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat, from 1; the first after the name is 3
_NAME_BYTES = 15
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "mksh", "busybox", "ash")
# The terminal driver sends these to the whole foreground group, so the program gets its own copy.
_TERMINAL = frozenset(
    (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGHUP,
        signal.SIGWINCH,
        signal.SIGCONT,
    )
)


def from_terminal(info: signal.struct_siginfo) -> bool:
    """Whether the kernel sent this signal to the whole foreground group."""
    return info.si_code > 0 and info.si_signo in _TERMINAL


def of_own_write(info: signal.struct_siginfo) -> bool:
    """Whether a write of this process caused this signal.

    A write to a pipe without a reader or past the file size limit does. Python ignores such signals, but a
    blocked one stays pending.
    """
    by_itself = info.si_code == 0 and info.si_pid == os.getpid()
    return by_itself and info.si_signo in (signal.SIGPIPE, signal.SIGXFSZ)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel end this process when `parent` ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def inherited() -> dict[int, signal.Handlers]:
    """The dispositions that a program started directly would have inherited, where Python changed them.

    Python ignores SIGPIPE and SIGXFSZ from its start and does not remember their previous dispositions. Those
    were the default, except under a shell that ignores them (`trap '' PIPE`), whose commands ignore them too.
    """
    found: dict[int, signal.Handlers] = {}
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        ignored = number in _ignored_by_a_shell(os.getppid())
        found[number] = signal.SIG_IGN if ignored else signal.SIG_DFL
    for number in (signal.SIGINT, signal.SIGCHLD):
        kept = signal.getsignal(number) is signal.SIG_IGN
        found[number] = signal.SIG_IGN if kept else signal.SIG_DFL
    return found


def _ignored_by_a_shell(pid: int) -> Iterable[int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if fields.get("Name", "").strip() not in _SHELLS:
        return ()
    mask = int(fields.get("SigIgn", "0").strip() or "0", 16)
    return [number for number in range(1, 65) if mask >> (number - 1) & 1]


class Witness:
    """A process in the same group that reports the signals it receives.

    A signal sent to the whole group (`kill -TERM -PGID`, `timeout`) has already reached the program and must
    not be forwarded; a signal sent to weft alone must be. Only another member of the group can tell the two
    apart. In lists of processes it appears as `command`, the program: `pkill -f` and `killall` then select it
    when they select the program, and do not when they select weft alone.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.pid = -1
        self._seen: list[tuple[float, int, int]] = []
        reader, writer = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:  # no more processes are allowed: every signal is forwarded
            os.close(reader)
            os.close(writer)
            return
        if self.pid == 0:
            _watch(writer, parent, command)
        os.close(writer)
        self._reader = reader

    def saw(self, number: int, sender: int) -> bool:
        """Whether the whole group got this signal.

        The witness may not have run since. Therefore weft sends it `_ASK`, which it receives after all other
        pending signals.
        """
        if self.pid < 0:
            return False
        if self._noted(number, sender, _WITNESS_S):
            return True
        try:
            os.kill(self.pid, _ASK)
        except ProcessLookupError:
            return False
        answered = self._noted(_ASK, os.getpid(), _ANSWER_S)
        return answered and self._noted(number, sender, 0.0)

    def _noted(self, number: int, sender: int, wait_s: float) -> bool:
        """Whether the witness reports this signal within `wait_s`; consumes the report."""
        deadline = time.monotonic() + wait_s
        while True:
            for record in self._seen:
                if record[1:] == (number, sender):
                    self._seen.remove(record)
                    return True
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], max(0.0, left))
            if not (self._read() if ready else left > 0):
                return False

    def _read(self) -> bool:
        data = os.read(self._reader, 64 * _RECORD.size)
        now = time.monotonic()
        self._seen = [record for record in self._seen if now - record[0] < _REMEMBER_S]
        self._seen += [(now, number, sender) for number, sender in _RECORD.iter_unpack(data)]
        return bool(data)

    def end(self) -> None:
        if self.pid < 0:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._reader)
        self.pid = -1


def _appear_as(command: Sequence[str]) -> None:
    """Show this name and command line in lists of processes, as far as the space of its own allows."""
    with suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_bytes(os.fsencode(Path(command[0]).name)[:_NAME_BYTES])
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
        line = b"".join(os.fsencode(part) + b"\0" for part in command)
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(line[: end - start].ljust(end - start, b"\0"))


def _watch(writer: int, parent: int, command: Sequence[str]) -> NoReturn:
    try:
        die_with_parent(parent)
        _appear_as(command)
        os.closerange(0, writer)  # the witness must not hold the program's pipes open
        os.closerange(writer + 1, 4096)
        while True:
            info = signal.sigwaitinfo(ALL)
            if info.si_code <= 0:
                os.write(writer, _RECORD.pack(info.si_signo, info.si_pid))
    finally:
        os._exit(0)
