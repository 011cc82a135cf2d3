"""The latest steps of a process, in a small file in the job's folder that others can read while it runs.

StepWriter   inside the process: a few stores into shared memory at the end of each step
StepReader   outside the process: the number of steps, their times, and the state of live tuning

The writer runs in the user's program, so this module uses only the standard library.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("weft.shim")

_HEAD = struct.Struct(
    "=8sIiiI QQ 32s 160s"
)  # magic, version, pid, rank, world, steps, last end, phase, policy
_MAGIC, _VERSION = b"weftstp\0", 1
_STEPS, _END = 24, 32  # offsets of the two numbers that change with each step
_PHASE, _POLICY = 40, 72
_PHASE_BYTES, _POLICY_BYTES = 32, 160
STEPS_VARIABLE = "WEFT_STEPS"
"""Environment variable: if set, every torch process of the job publishes its steps."""
KEPT_STEPS = 256
"""Number of latest steps whose times are kept."""
_SIZE = _HEAD.size + 8 * KEPT_STEPS


def step_file(pid: int) -> str:
    """The file name in the job's folder for the process `pid`."""
    return f"steps.{pid}"


class StepWriter:
    """Publishes the steps of this process. Never raises; does nothing if there is no job folder."""

    def __init__(self, rank: int, world: int) -> None:
        self._memory: mmap.mmap | None = None
        self._steps = self._end_ns = 0
        folder = os.environ.get("WEFT_JOB", "")
        try:
            path = Path(folder, step_file(os.getpid()))
            if not folder or not Path(folder).is_dir():
                return
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(number, 0, _SIZE)  # a full disk must fail here, not at a later store
                self._memory = mmap.mmap(number, _SIZE)
            finally:
                os.close(number)
            _guard(self._memory)
            _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION, os.getpid(), rank, world, 0, 0, b"", b"")
        except (OSError, ValueError) as error:
            _log.debug("steps are not published: %s", error)

    def step(self, count: int = 1) -> None:
        """Record that `count` steps have ended; each gets their mean time."""
        if self._memory is None:
            return
        now = time.monotonic_ns()
        if self._end_ns:
            self._keep(min(count, KEPT_STEPS), (now - self._end_ns) // count)
            self._steps += count
        self._end_ns = now
        struct.pack_into("=QQ", self._memory, _STEPS, self._steps, now)

    def _keep(self, count: int, took_ns: int) -> None:
        """Store the time of the next `count` steps in the ring, wrapping at its end."""
        assert self._memory is not None
        at, times = self._steps % KEPT_STEPS, struct.pack("=Q", took_ns)
        first = min(count, KEPT_STEPS - at)
        for place, number in ((at, first), (0, count - first)):
            start = _HEAD.size + 8 * place
            self._memory[start : start + 8 * number] = times * number

    def tuning(self, phase: str, policy: str) -> None:
        """Publish the phase of live tuning and the label of the policy in force."""
        if self._memory is not None:
            texts = phase.encode()[: _PHASE_BYTES - 1], policy.encode()[: _POLICY_BYTES - 1]
            struct.pack_into("=32s160s", self._memory, _PHASE, *texts)


def _guard(memory: mmap.mmap) -> None:
    """Make the shim, if loaded, protect the process when the file is truncated while in use."""
    try:
        guard = ctypes.CDLL(None).weft_shim_guard
    except AttributeError:
        _log.debug("the shim is not loaded: a truncated step file would be a bus error")
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)))


@dataclass(frozen=True)
class StepTimes:
    """The steps of a process so far."""

    pid: int
    rank: int
    world: int
    count: int
    end_ns: int
    """CLOCK_MONOTONIC at the end of the last step; 0 if none has ended."""
    times_ms: tuple[float, ...]
    """Times of the latest steps, oldest first."""
    phase: str
    policy: str


class StepReader:
    """The open step file of a process. Raises OSError or ValueError if it is not one of this weft."""

    def __init__(self, path: Path) -> None:
        from weft.files import open_regular  # imported here to keep it out of the writing program

        self._number = open_regular(path)
        try:
            self.pid = self.read().pid
        except BaseException:
            os.close(self._number)
            raise

    def read(self) -> StepTimes:
        data = os.pread(self._number, _SIZE, 0)
        if len(data) < _SIZE or data[:8] != _MAGIC:
            raise ValueError("not a step file of this weft")
        _, version, pid, rank, world, count, end_ns, phase, policy = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise ValueError("a step file of another version of weft")
        ring = struct.unpack_from(f"={KEPT_STEPS}Q", data, _HEAD.size)
        kept = [ring[i % KEPT_STEPS] for i in range(max(0, count - KEPT_STEPS), count)]
        return StepTimes(
            pid=pid,
            rank=rank,
            world=world,
            count=count,
            end_ns=end_ns,
            times_ms=tuple(ns / 1e6 for ns in kept),
            phase=_text(phase),
            policy=_text(policy),
        )

    def close(self) -> None:
        os.close(self._number)


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode(errors="replace")
