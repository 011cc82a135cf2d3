"""The shim's memory, as Python sees it. Mirrors csrc/layout.h; the only ctypes of the shim."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import zlib
from collections.abc import Iterator
from ctypes import c_char, c_int32, c_uint32, c_uint64
from functools import lru_cache
from pathlib import Path

from weft.errors import InputError, UnavailableError
from weft.kernels import comm_globs
from weft.policy import MAX_RULES, Policy

LAYOUT_VERSION = 1
CONTROL_MAGIC = b"weftctl"
PROCESS_MAGIC = b"weftprc"
PATTERN_BYTES = 128
COMM_PATTERNS = 64
NAME_BYTES = 512
ROWS = 4096
SHARDS = 16

POLICY_SET, PRIORITY_HIGH, WHEN_OVERLAP = 1, 2, 4

KINDS = ("compute", "comm", "weft")
APIS = {1: "cuda", 2: "hip"}
REASONS = (
    "shaped",
    "not asked",
    "no more blocks fit than asked",
    "no size of shared memory gives that residency",
    "its whole grid is resident at once (name it in a rule to shape it)",
    "no collective was in flight",
    "cooperative launch",
    "the driver refused the shaped launch",
)
COUNTERS = (
    "shape_failures",
    "prioritised",
    "priority_failures",
    "head_starts",
    "head_start_failures",
    "cooperative",
    "captured",
    "graph_launches",
    "unknown",
    "tracking_failures",
    "policy_changes",
)


class CRule(ctypes.Structure):
    _fields_ = (("pattern", c_char * PATTERN_BYTES), ("residency", c_uint32), ("unused", c_uint32))


class CPolicy(ctypes.Structure):
    _fields_ = (
        ("flags", c_uint32),
        ("residency", c_uint32),
        ("head_start_ns", c_uint32),
        ("rule_count", c_uint32),
        ("comm_count", c_uint32),
        ("unused", c_uint32),
        ("rules", CRule * MAX_RULES),
        ("comm", (c_char * PATTERN_BYTES) * COMM_PATTERNS),
    )


class CControl(ctypes.Structure):
    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("size", c_uint32),
        ("sequence", c_uint64),
        ("checksum", c_uint64),
        ("policy", CPolicy),
    )


class CRow(ctypes.Structure):
    _fields_ = (
        ("name", c_char * NAME_BYTES),
        ("kind", c_uint32),
        ("threads", c_uint32),
        ("shared_bytes", c_uint32),
        ("natural_blocks", c_uint32),
        ("shaped_blocks", c_uint32),
        ("shaped_bytes", c_uint32),
        ("reason", c_uint32),
        ("unused", c_uint32),
    )


class CCell(ctypes.Structure):
    _fields_ = (("launches", c_uint64), ("shaped", c_uint64))


class CProcess(ctypes.Structure):
    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("size", c_uint32),
        ("pid", c_uint32),
        ("rank", c_int32),
        ("api", c_uint32),
        ("rows_used", c_uint32),
        ("command", c_char * 256),
        ("counters", c_uint64 * 16),
        ("control", CControl),
        ("rows", CRow * ROWS),
        ("cells", (CCell * ROWS) * SHARDS),
    )


@lru_cache(maxsize=64)
def encode(policy: Policy | None) -> bytes:
    """A policy as the shim reads it; None: no policy of one's own. Residency 0 means: leave alone."""
    c = CPolicy()
    comm = comm_globs()
    assert len(comm) <= COMM_PATTERNS
    c.comm_count = len(comm)
    for i, glob in enumerate(comm):
        c.comm[i].value = glob.encode()
    if policy is None:
        return bytes(c)
    c.flags = POLICY_SET
    c.flags |= PRIORITY_HIGH if policy.priority == "high" else 0
    c.flags |= WHEN_OVERLAP if policy.when == "overlap" else 0
    c.residency = policy.residency or 0
    c.head_start_ns = round(policy.head_start_us * 1000)
    c.rule_count = len(policy.rules)
    for i, rule in enumerate(policy.rules):
        c.rules[i].pattern = rule.kernel.encode()
        c.rules[i].residency = rule.residency or 0
    return bytes(c)


def control_image(policy: Policy | None) -> bytes:
    """A fresh control file with this policy in it."""
    image = encode(policy)
    head = CControl(CONTROL_MAGIC, LAYOUT_VERSION, ctypes.sizeof(CControl), 2, zlib.adler32(image))
    return bytes(head)[: CControl.policy.offset] + image


def write_policy(path: Path, policy: Policy | None) -> None:
    """Change the policy of a running job (its control file) or of one process (its own file)."""
    with _mapped(path) as memory:
        control = _control_in(memory, path)
        image = encode(policy)
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
            with mmap.mmap(file.fileno(), 0) as memory:
                yield memory
    except (OSError, ValueError) as error:
        raise InputError(f"cannot open {path}: {error}; is the job still running?") from None


def _control_in(memory: mmap.mmap, path: Path) -> CControl:
    if memory[:7] == PROCESS_MAGIC and len(memory) >= ctypes.sizeof(CProcess):
        control: CControl = CProcess.from_buffer(memory).control
        return control
    if memory[:7] == CONTROL_MAGIC and len(memory) >= ctypes.sizeof(CControl):
        return CControl.from_buffer(memory)
    raise InputError(f"{path} is not a control block of this weft")


def read_process(path: Path) -> CProcess:
    """What one process has counted so far: a copy."""
    data = path.read_bytes()
    if len(data) < ctypes.sizeof(CProcess) or data[:7] != PROCESS_MAGIC:
        raise InputError(f"{path} is not a process file of this weft")
    process = CProcess.from_buffer_copy(data)
    if process.version != LAYOUT_VERSION or process.size != ctypes.sizeof(CProcess):
        raise InputError(f"{path} was written by another version of weft")
    return process


def attach() -> Path | None:
    """The file of this process's own policy and counters; None where the shim is not in this process."""
    try:
        function = ctypes.CDLL(None).weft_shim_attach
    except AttributeError:
        return None
    function.restype = ctypes.c_char_p
    path: bytes | None = function()
    return Path(path.decode()) if path else None


def injected() -> bool:
    """Whether this process was started under the shim."""
    return attach() is not None


def set_policy(policy: Policy | None) -> None:
    """Set the policy of this process; None gives the job's policy back its place."""
    path = attach()
    if path is None:
        raise UnavailableError(
            "this process was not started by weft: start it with `weft run -- python …` "
            "(which changes nothing by itself)"
        )
    write_policy(path, policy)
