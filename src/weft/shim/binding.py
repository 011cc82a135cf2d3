"""Reads and writes the shim's files from Python, and reaches the shim in this process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, UnavailableError
from weft.policy import Policy
from weft.shim.layout import (
    CHUNK_ROWS,
    CHUNKS_OFFSET,
    CONTROL_MAGIC,
    LAYOUT_VERSION,
    MOST_CHUNKS,
    PROCESS_BYTES,
    PROCESS_MAGIC,
    SHARDS,
    CCell,
    CChunk,
    CControl,
    CHead,
    CRow,
)
from weft.shim.policy_image import encode_policy


@dataclass(frozen=True)
class Process:
    """A copy of one process's file, which holds its counters and its own policy."""

    head: CHead
    chunks: list[CChunk]

    @property
    def control(self) -> CControl:
        """The process's own policy."""
        control: CControl = self.head.control
        return control

    def rows(self) -> Iterator[tuple[CRow, list[CCell]]]:
        """Each kernel's row, with its counters per shard."""
        for number in range(min(self.head.rows_used, len(self.chunks) * CHUNK_ROWS)):
            chunk, place = self.chunks[number // CHUNK_ROWS], number % CHUNK_ROWS
            yield chunk.rows[place], [chunk.cells[shard][place] for shard in range(SHARDS)]


def write_policy(path: Path, policy: Policy | None, track: bool = False) -> None:
    """Change the policy of a running job (in its control file) or of one process (in its own file)."""
    with _mapped(path) as memory:
        control = _control_in(memory, path)
        image = encode_policy(policy, track)
        control.sequence |= 1
        ctypes.memmove(ctypes.addressof(control) + CControl.policy.offset, image, len(image))
        control.checksum = zlib.adler32(image)
        control.sequence += 1
        del control


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one writer at a time; the shim reads without a lock
            os.posix_fallocate(file.fileno(), 0, ctypes.sizeof(CControl))
            if os.pread(file.fileno(), 7, 0) == PROCESS_MAGIC:  # its policy is a hole until first written
                os.posix_fallocate(file.fileno(), 0, ctypes.sizeof(CHead))
            with mmap.mmap(file.fileno(), 0) as memory:
                yield memory
    except (OSError, ValueError) as error:
        raise InputError(f"cannot open {path}: {error}; is the job still running?") from None


def _control_in(memory: mmap.mmap, path: Path) -> CControl:
    if memory[:7] == PROCESS_MAGIC and len(memory) >= ctypes.sizeof(CHead):
        control: CControl = CHead.from_buffer(memory).control
        return control
    if memory[:7] == CONTROL_MAGIC and len(memory) >= ctypes.sizeof(CControl):
        return CControl.from_buffer(memory)
    raise InputError(f"{path} is not a control block of this weft")


def read_process(path: Path) -> Process:
    """Copy one process's counters and policy from its file."""
    with path.open("rb") as file:
        try:
            head = read_head(file.fileno())
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        size = ctypes.sizeof(CChunk)
        file.seek(CHUNKS_OFFSET)
        rows = file.read(min(MOST_CHUNKS, -(-head.rows_used // CHUNK_ROWS)) * size)
    return Process(head, [CChunk.from_buffer_copy(rows, at) for at in range(0, len(rows) - size + 1, size)])


def read_head(number: int) -> CHead:
    """Copy the head of a process's open file. Raises InputError."""
    data = os.pread(number, ctypes.sizeof(CHead), 0)
    if len(data) < ctypes.sizeof(CHead) or data[:7] != PROCESS_MAGIC:
        raise InputError("not a process file of this weft")
    head = CHead.from_buffer_copy(data)
    if head.version != LAYOUT_VERSION or head.size != PROCESS_BYTES:
        raise InputError("written by another version of weft")
    return head


def attach() -> Path | None:
    """The file with this process's own policy and counters; None if the shim is not loaded in it."""
    try:
        function = ctypes.CDLL(None).weft_shim_attach
    except AttributeError:
        return None
    function.restype = ctypes.c_char_p
    path: bytes | None = function()
    return Path(path.decode()) if path else None


def copied_bytes() -> Callable[[], int]:
    """A function that returns how many bytes this process has copied from host to device so far."""
    try:
        function = ctypes.CDLL(None).weft_shim_copied_bytes
    except AttributeError:
        return lambda: 0
    function.restype, function.argtypes = ctypes.c_uint64, ()
    counted: Callable[[], int] = function
    return counted


def injected() -> bool:
    """Whether this process was started under the shim."""
    return attach() is not None


def set_policy(policy: Policy | None, track: bool = False) -> None:
    """Set the policy of this process; None restores the job's policy.

    `track` counts the launches made while a collective is in flight (`beside` in the statistics) and shapes
    nothing by itself.
    """
    path = attach()
    if path is None:
        raise UnavailableError(
            "this process was not started by weft: start it with `weft run -- python …` "
            "(which changes nothing by itself)"
        )
    write_policy(path, policy, track)
