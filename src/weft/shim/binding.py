"""The shim's memory, as Python sees it. Mirrors csrc/layout.h; the only ctypes of the shim."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from ctypes import c_char, c_double, c_int, c_int32, c_uint32, c_uint64
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from weft.errors import InputError, UnavailableError
from weft.kernels import comm_globs
from weft.policy import (
    ALGORITHMS,
    CTA_POLICIES,
    MAX_COMM_RULES,
    MAX_RULES,
    NCCL_COLLECTIVES,
    PLACED_BOUND_US,
    PROTOCOLS,
    CommRule,
    Policy,
)

LAYOUT_VERSION = 4
CONTROL_MAGIC = b"weftctl"
PROCESS_MAGIC = b"weftprc"
PATTERN_BYTES = 128
COMM_PATTERNS = 64
NAME_BYTES = 512
SHARDS = 16
CHUNK_ROWS = 16
_CHUNKS = 512
PAGE = 4096

POLICY_SET, PRIORITY_HIGH, WHEN_OVERLAP, TRACK, HEAD_START_PLACED, ENGINE_DMA = 1, 2, 4, 8, 16, 32

KINDS = ("compute", "comm", "weft", "unknown")
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
    "this driver does not tell the kernel's name (CUDA 12.3 and newer do)",
    "the program has more kernels than weft keeps facts of",
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
    "routed",
    "split_failures",
    "unlisted",
    "unhandled",
    "placed_events",
    "placed_ready",
    "placed_timeouts",
    "placed_captured",
    "placed_busy",
    "placed_failures",
    "sm_reserved",
    "sm_reserve_own",
    "sm_reserve_determinism",
    "sm_reserve_failures",
    "sm_reserve_others",
    "per_call",
    "config_refused",
    "tuned",
    "tuner_failures",
    "rules_unapplied",
    "comm_bytes",
    "placed_behind",
    "engine_copied",
    "engine_kernels",
    "engine_unsure",
    "engine_no_window",
    "engine_other_kind",
    "engine_old_nccl",
    "engine_two_ranks",
    "engine_own_policy",
    "engine_nodes",
    "engine_refused",
)
NCCL_PATHS = ("none", "config", "tuner", "refused")
"""How rules for collectives reach NCCL: not at all, by each call's configuration, by the tuner plugin.
`refused`: a configuration was not taken, and plain calls are made."""


class CRule(ctypes.Structure):
    _fields_ = (("pattern", c_char * PATTERN_BYTES), ("residency", c_uint32), ("unused", c_uint32))


class CCommRule(ctypes.Structure):
    _fields_ = (
        ("min_bytes", c_uint64),
        ("max_bytes", c_uint64),
        ("operations", c_uint32),
        ("ctas", c_uint32),
        ("cluster", c_uint32),
        ("algorithm", c_uint32),
        ("protocol", c_uint32),
        ("cta_policy", c_uint32),
        ("chunk", c_uint64),
    )


class CPolicy(ctypes.Structure):
    _fields_ = (
        ("flags", c_uint32),
        ("residency", c_uint32),
        ("head_start_ns", c_uint32),
        ("rule_count", c_uint32),
        ("comm_count", c_uint32),
        ("sm_reserve", c_uint32),
        ("rules", CRule * MAX_RULES),
        ("comm", (c_char * PATTERN_BYTES) * COMM_PATTERNS),
        ("comm_rule_count", c_uint32),
        ("comm_ctas", c_uint32),
        ("comm_rules", CCommRule * MAX_COMM_RULES),
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
        ("grid_blocks", c_uint32),
    )


class CCell(ctypes.Structure):
    _fields_ = (("launches", c_uint64), ("shaped", c_uint64), ("beside", c_uint64))


class CChunk(ctypes.Structure):
    _fields_ = (("rows", CRow * CHUNK_ROWS), ("cells", (CCell * CHUNK_ROWS) * SHARDS))


class CHead(ctypes.Structure):
    """What a process's file begins with; chunks of rows follow from the next page on."""

    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("size", c_uint32),
        ("pid", c_uint32),
        ("rank", c_int32),
        ("api", c_uint32),
        ("rows_used", c_uint32),
        ("command", c_char * 256),
        ("nccl_version", c_uint32),
        ("nccl_path", c_uint32),
        ("nccl_tuner", c_uint32),
        ("nccl_user_tuner", c_uint32),
        ("counters", c_uint64 * 64),
        ("control", CControl),
    )


CHUNKS_OFFSET = -(-ctypes.sizeof(CHead) // PAGE) * PAGE
PROCESS_BYTES = -(-(CHUNKS_OFFSET + _CHUNKS * ctypes.sizeof(CChunk)) // PAGE) * PAGE


@dataclass(frozen=True)
class Process:
    """What one process has counted: a copy of its file."""

    head: CHead
    chunks: list[CChunk]

    @property
    def control(self) -> CControl:
        """The process's own policy."""
        control: CControl = self.head.control
        return control

    def rows(self) -> Iterator[tuple[CRow, list[CCell]]]:
        """Each kernel's row, with its counters by shard."""
        for number in range(min(self.head.rows_used, len(self.chunks) * CHUNK_ROWS)):
            chunk, place = self.chunks[number // CHUNK_ROWS], number % CHUNK_ROWS
            yield chunk.rows[place], [chunk.cells[shard][place] for shard in range(SHARDS)]


@lru_cache(maxsize=64)
def encode_policy(policy: Policy | None, track: bool = False) -> bytes:
    """A policy as the shim reads it; None: no policy of this process's own. Residency 0 means unchanged.

    `track`: note which kernels are launched while a collective is in flight, whatever the policy asks for.
    """
    c = CPolicy()
    c.flags = TRACK if track else 0
    comm = comm_globs()
    assert len(comm) <= COMM_PATTERNS
    c.comm_count = len(comm)
    for i, glob in enumerate(comm):
        c.comm[i].value = glob.encode()
    if policy is None:
        return bytes(c)
    c.flags |= POLICY_SET
    c.flags |= PRIORITY_HIGH if policy.priority == "high" else 0
    c.flags |= WHEN_OVERLAP if policy.when == "overlap" else 0
    c.residency = policy.residency or 0
    placed = policy.head_start == "placed"
    c.flags |= HEAD_START_PLACED if placed else 0
    c.flags |= ENGINE_DMA if policy.engine == "dma" else 0
    c.head_start_ns = round((policy.head_start_us or (PLACED_BOUND_US if placed else 0)) * 1000)
    c.sm_reserve = policy.sm_reserve
    c.rule_count = len(policy.rules)
    for i, rule in enumerate(policy.rules):
        c.rules[i].pattern = rule.kernel.encode()
        c.rules[i].residency = rule.residency or 0
    c.comm_rule_count = len(policy.comm_rules)
    c.comm_ctas = policy.max_ctas or 0 if policy.comm_rules else 0
    for i, of_collectives in enumerate(policy.comm_rules):
        c.comm_rules[i] = _encode_comm_rule(of_collectives)
    return bytes(c)


def operation_bits(collective: str) -> int:
    """A collective of a rule as the shim's mask of operations."""
    names = ("send", "recv") if collective == "send_recv" else (collective,)
    return sum(1 << NCCL_OPERATIONS.index(name) for name in names)


def _encode_comm_rule(rule: CommRule) -> CCommRule:
    """0 in a field means NCCL's own choice."""
    names = NCCL_COLLECTIVES if rule.collective is None else (rule.collective,)
    return CCommRule(
        min_bytes=rule.min_bytes,
        max_bytes=2**64 - 1 if rule.max_bytes is None else rule.max_bytes,
        operations=sum(map(operation_bits, names)),
        ctas=rule.ctas or 0,
        cluster=0 if rule.cluster is None else rule.cluster + 1,
        algorithm=0 if rule.algorithm is None else ALGORITHMS.index(rule.algorithm) + 1,
        protocol=0 if rule.protocol is None else PROTOCOLS.index(rule.protocol) + 1,
        cta_policy=0 if rule.cta_policy is None else CTA_POLICIES.index(rule.cta_policy),
        chunk=rule.chunk or 0,
    )


def control_image(policy: Policy | None) -> bytes:
    """A fresh control file with this policy in it."""
    image = encode_policy(policy)
    head = CControl(CONTROL_MAGIC, LAYOUT_VERSION, ctypes.sizeof(CControl), 2, zlib.adler32(image))
    return bytes(head)[: CControl.policy.offset] + image


def write_policy(path: Path, policy: Policy | None, track: bool = False) -> None:
    """Change the policy of a running job (its control file) or of one process (its own file)."""
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
            if os.pread(file.fileno(), 7, 0) == PROCESS_MAGIC:  # its policy is a hole until it is written
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
    """What one process has counted so far: a copy."""
    with path.open("rb") as file:
        try:
            head = read_head(file.fileno())
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        size = ctypes.sizeof(CChunk)
        file.seek(CHUNKS_OFFSET)
        rows = file.read(min(_CHUNKS, -(-head.rows_used // CHUNK_ROWS)) * size)
    return Process(head, [CChunk.from_buffer_copy(rows, at) for at in range(0, len(rows) - size + 1, size)])


def read_head(number: int) -> CHead:
    """What the open file of a process begins with: a copy. Raises InputError."""
    data = os.pread(number, ctypes.sizeof(CHead), 0)
    if len(data) < ctypes.sizeof(CHead) or data[:7] != PROCESS_MAGIC:
        raise InputError("not a process file of this weft")
    head = CHead.from_buffer_copy(data)
    if head.version != LAYOUT_VERSION or head.size != PROCESS_BYTES:
        raise InputError("written by another version of weft")
    return head


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


def set_policy(policy: Policy | None, track: bool = False) -> None:
    """Set the policy of this process; None gives the job's policy back its place.

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


# --- NCCL: mirrors csrc/nccl.h ---------------------------------------------------------------------------

NCCL_OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
)
LIMITS = 16
CALLS = 4096
WHY_BYTES = 256
NOT_THERE = "this process was not started by weft: start it with `weft run -- python …`"


class CCommunicator(ctypes.Structure):
    _fields_ = (
        ("key", c_uint64),
        ("collectives", c_uint64),
        ("point_to_point", c_uint64),
        ("bytes", c_uint64 * len(NCCL_OPERATIONS)),
        ("rank", c_int32),
        ("size", c_int32),
        ("device", c_int32),
        ("max_ctas", c_int32),
        ("order", c_uint32),
        ("routed_to", c_int32),
        ("prepared", c_int32 * LIMITS),
        ("why_not", c_char * WHY_BYTES),
        ("path", c_int32),
        ("version", c_int32),
        ("tuner", c_int32),
        ("unused", c_uint32),
    )


class CCall(ctypes.Structure):
    _fields_ = (
        ("number", c_uint64),
        ("key", c_uint64),
        ("bytes", c_uint64),
        ("host_ns", c_uint64),
        ("operation", c_uint32),
        ("routed", c_uint32),
    )


_CALLBACK = ctypes.CFUNCTYPE(None, c_uint64, c_uint64)
_callbacks: list[Any] = []  # a thread may still be inside one that was taken away
_callback_errors = 0


@cache
def _nccl() -> Any:
    """The shim's functions for NCCL, or None where it is not in this process."""
    if attach() is None:
        return None
    shim = ctypes.CDLL(None)
    try:
        shim.weft_nccl_prepare.argtypes = (c_int, c_double, ctypes.c_char_p, ctypes.c_size_t)
        shim.weft_nccl_prepare_keys.argtypes = (
            c_int,
            c_double,
            ctypes.POINTER(c_uint64),
            c_int,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        shim.weft_nccl_route.argtypes = (c_int, ctypes.c_char_p, ctypes.c_size_t)
        shim.weft_nccl_follow_policy.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        shim.weft_nccl_release.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        shim.weft_nccl_list.argtypes = (ctypes.POINTER(CCommunicator), c_int)
        shim.weft_nccl_calls.argtypes = (ctypes.POINTER(CCall), c_int)
        shim.weft_nccl_on_call.argtypes = (ctypes.c_void_p, c_uint64, c_uint64)
        shim.weft_nccl_on_call.restype = None
    except AttributeError:
        return None
    return shim


def nccl_seen() -> bool:
    """Whether a communicator was made in this process."""
    shim = _nccl()
    return shim is not None and bool(shim.weft_nccl_seen())


def nccl_list() -> list[CCommunicator]:
    """Every live communicator, in the order of creation."""
    shim = _nccl()
    if shim is None:
        return []
    size = 64
    while True:
        room = (CCommunicator * size)()
        count = shim.weft_nccl_list(room, size)
        if count < size:
            return list(room[:count])
        size *= 4


def nccl_calls() -> list[CCall]:
    """The latest collective calls, oldest first."""
    shim = _nccl()
    if shim is None:
        return []
    room = (CCall * CALLS)()
    return list(room[: shim.weft_nccl_calls(room, CALLS)])


def nccl_prepare(ctas: int, timeout_s: float, keys: Collection[int] | None = None) -> str:
    """Empty, or why not. `keys`: of these communicators only."""
    if keys is None:
        return _asked("weft_nccl_prepare", ctas, timeout_s)
    return _asked("weft_nccl_prepare_keys", ctas, timeout_s, (c_uint64 * len(keys))(*keys), len(keys))


def nccl_route(ctas: int) -> str:
    """Empty, or why not. 0: the program's own communicators."""
    return _asked("weft_nccl_route", ctas)


def nccl_follow_policy() -> str:
    """Apply the rules of this process's policy to its next collective on; empty, or why not."""
    return _asked("weft_nccl_follow_policy")


def nccl_release() -> str:
    """Empty, or why not."""
    return _asked("weft_nccl_release")


def _asked(name: str, *arguments: Any) -> str:
    shim = _nccl()
    if shim is None:
        return NOT_THERE
    why = ctypes.create_string_buffer(WHY_BYTES)
    refused = getattr(shim, name)(*arguments, why, WHY_BYTES)
    return (why.value.decode(errors="replace") or "unknown") if refused else ""


def nccl_on_call(callback: Callable[[int, int], None] | None, key: int, every: int) -> None:
    """Have `callback(key, count)` run after collectives; None: no more."""
    if callback is None:
        if _callbacks:  # else there is nothing to take away, and no reason to touch the shim
            _nccl().weft_nccl_on_call(None, 0, 1)
        return
    shim = _nccl()
    if shim is None:
        raise UnavailableError(NOT_THERE)

    def guarded(found: int, count: int) -> None:
        global _callback_errors
        try:
            callback(found, count)
        except BaseException:
            _callback_errors += 1

    held = _CALLBACK(guarded)
    _callbacks.append(held)
    shim.weft_nccl_on_call(ctypes.cast(held, ctypes.c_void_p), key, every)


def nccl_callback_errors() -> int:
    """Exceptions that callbacks raised so far."""
    return _callback_errors
