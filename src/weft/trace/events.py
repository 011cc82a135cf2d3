"""Decodes pieces of the events array into columns, keeping only what the analysis needs.

Events become typed structs whose larger parts stay undecoded text (`msgspec.Raw`) until their category shows
that they matter. Nine in ten events of a profiler trace are never decoded further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from weft.errors import InputError
from weft.trace.digits import UNKNOWN, nanoseconds
from weft.trace.native import Scanned
from weft.trace.scan import DECODE_ERRORS, split_chunks
from weft.trace.schema import (
    BARE_VALUE,
    UNKNOWN_MESSAGE,
    Args,
    Batch,
    Event,
    HostArgs,
    Mark,
    cleaned,
    integer,
    message_from_shapes,
    message_of,
    text_field,
)

_I64 = npt.NDArray[np.int64]

KERNEL, MEMCPY, MEMSET = 0, 1, 2
_RUNTIME, _ANNOTATION, _OPERATOR, _SYNC, _MODULE = 3, 4, 5, 6, 7
_GPU_ROLES = (KERNEL, MEMCPY, MEMSET)

_STREAM = re.compile(rb'"?(?:stream )?(\d{1,9})"?')
_OTHER_STREAM = 1 << 30
_OTHER_PROCESS = 1 << 20

MAX_NS = 1 << 60
"""36 years: limit of durations, and of starts before a clock's zero, so that differences fit 64 bits."""

MAX_DAMAGED = 20_000
"""With more malformed events than this, and more than good ones, reading stops: the file is not a trace."""

# Categories as PyTorch 2.x, 1.11 to 1.13, and 1.8 to 1.10 write them. Events of other categories are dropped.
_ROLES: dict[str | None, int] = {
    "kernel": KERNEL,
    "Kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "Memcpy": MEMCPY,
    "memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "Memset": MEMSET,
    "memset": MEMSET,
    "cuda_runtime": _RUNTIME,
    "cuda_driver": _RUNTIME,
    "hip_runtime": _RUNTIME,
    "hip_driver": _RUNTIME,
    "runtime": _RUNTIME,
    "Runtime": _RUNTIME,
    "driver": _RUNTIME,
    "Driver": _RUNTIME,
    "user_annotation": _ANNOTATION,
    "UserAnnotation": _ANNOTATION,
    "Operator": _ANNOTATION,
    "operator": _ANNOTATION,
    "cpu_op": _OPERATOR,
    "cuda_sync": _SYNC,
    "python_function": _MODULE,
}

_LAUNCHES, _BLOCKS = 1, 2
_LAUNCH = re.compile(rb"launch|memcpy|memset|graph", re.IGNORECASE)
_BLOCKING = re.compile(rb"(?:Device|Stream|Event|Ctx)Synchronize", re.IGNORECASE)
_MARKING_OPERATOR = b"record_param_comms"
_MODULE_NAME = b'"nn.Module: '
_MARK = re.compile(rb'"(?:ProfilerStep#|record_param_comms|nccl:)')
_ROLES_WITHOUT_OPERATORS = {cat: role for cat, role in _ROLES.items() if role != _OPERATOR}


class Interned:
    """Maps repeated values to small consecutive numbers."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.index.setdefault(value, len(self.index))

    def all(self, values: Iterable[Any]) -> list[int]:
        """Numbers of many values, most of which are already known."""
        get = self.index.get
        return [self(value) if (found := get(value)) is None else found for value in values]

    def values(self) -> list[Any]:
        return list(self.index)


class Collector:
    """Builds columns from the pieces of one trace."""

    def __init__(self) -> None:
        self.events = 0
        self.damaged = 0
        self.odd_times = 0
        self.names = Interned()
        self.messages = Interned()
        self.threads = Interned()
        self.pids = Interned()
        self.marks: list[Mark] = []
        self.modules: list[tuple[str, int, int, int]] = []
        """Calls of modules: name, start and end in nanoseconds, thread."""
        self.messages(UNKNOWN_MESSAGE)
        self._gpu: list[_I64] = []
        self._launches: list[_I64] = []
        self._blocking: list[_I64] = []
        self._waits: list[_I64] = []
        self._shapes: dict[tuple[int, ...], int] = {}
        self._decoder = msgspec.json.Decoder(list[Event])
        self._args = Batch(Args)
        self._host_args = Batch(HostArgs)
        self._call_roles: dict[bytes, int] = {}

    # Feeding ------------------------------------------------------------------------------------

    def take(self, buffer: bytearray, low: int, high: int) -> bool:
        """Takes the JSON array of events at [low, high). False if it cannot be decoded."""
        try:
            events = self._decoder.decode(memoryview(buffer)[low:high])
        except DECODE_ERRORS:
            mended, count = BARE_VALUE.subn(rb"\1null", bytes(buffer[low:high]))
            return count > 0 and self.take(bytearray(mended), 0, len(mended))
        # Searching for the word once is cheaper than checking every operator's name.
        marked = buffer.find(_MARKING_OPERATOR, low, high) >= 0
        self._keep(events, _ROLES if marked else _ROLES_WITHOUT_OPERATORS)
        return True

    def salvage(self, buffer: bytearray, low: int, high: int) -> bool:
        """Takes those of the damaged events that can be decoded; counts the others."""
        repaired = cleaned(bytes(buffer[low:high]))
        if self.take(bytearray(repaired), 0, len(repaired)):
            return True
        good = []
        for piece in split_chunks(repaired[1:-1]):
            try:
                good.append(msgspec.json.decode(piece, type=Event))
            except DECODE_ERRORS:
                self.damaged += 1
        self._keep(good, _ROLES)
        if self.damaged > MAX_DAMAGED and self.damaged > self.events:
            raise InputError(f"{self.damaged} malformed events and {self.events} good ones")
        return False

    def absorb(self, found: Scanned) -> None:
        """Takes what the compiled scanner found, and decodes the events it left to Python."""
        self.events += found.events - len(found.later)
        self.odd_times += found.odd_times
        if len(found.gpu):
            found.gpu[:, 2] = np.array(self.names.all(found.names), dtype=np.int64)[found.gpu[:, 2]]
            self._gpu.append(found.gpu)
        if len(found.launches):
            threads = np.array(self.threads.all(found.threads), dtype=np.int64)
            found.launches[:, 3] = threads[found.launches[:, 3]]
            self._launches.append(found.launches)
        if len(found.blocking):
            self._blocking.append(found.blocking)
        if len(found.waits):
            self._waits.append(found.waits)
        if found.later:
            text = bytearray(b"[" + b",".join(found.later) + b"]")
            if not self.take(text, 0, len(text)):
                self.salvage(text, 0, len(text))

    def _keep(self, events: list[Event], roles: dict[str | None, int]) -> None:
        self.events += len(events)
        kept: list[list[Event]] = [[] for _ in range(_MODULE + 1)]
        for event in [e for e in events if e.cat in roles]:
            kept[roles[event.cat]].append(event)
        gpu = [e for role in _GPU_ROLES for e in kept[role]]
        if gpu:
            self._keep_gpu(gpu, [role for role in _GPU_ROLES for _ in kept[role]])
        if kept[_RUNTIME]:
            self._keep_runtime(kept[_RUNTIME])
        marks = [e for e in kept[_ANNOTATION] + kept[_OPERATOR] if _MARK.match(bytes(e.name))]
        if marks:
            self._keep_marks(marks)
        if kept[_SYNC]:
            self._keep_syncs(kept[_SYNC])
        modules = [e for e in kept[_MODULE] if bytes(e.name).startswith(_MODULE_NAME)]
        if modules:
            self._keep_modules(modules)

    def _keep_gpu(self, events: list[Event], kinds: list[int]) -> None:
        args = self._args.decode(events)
        start, end = self._times(events)
        names = self.names.all([bytes(e.name) for e in events])
        devices = _array([a.device for a in args])
        if devices.min() < 0:
            devices = np.where(devices < 0, [self._process(bytes(e.pid)) for e in events], devices)
        rows = [
            (
                a.stream if a.stream >= 0 else self._stream(bytes(e.tid)),
                *(a.correlation, a.external, a.registers, a.shared_bytes, a.bytes, a.sequence),
            )
            for e, a in zip(events, args, strict=True)
        ]
        blocks, threads = self._sizes([a.grid for a in args]), self._sizes([a.block for a in args])
        messages = [self.messages(message_of(a)) if a.group or a.collective else 0 for a in args]
        columns = np.column_stack(
            (start, end, names, kinds, devices, _array(rows, 7), blocks, threads, messages)
        )
        self._gpu.append(self._with_times(columns))

    def _keep_runtime(self, events: list[Event]) -> None:
        known = self._call_roles
        roles = [
            self._call_role(name) if (role := known.get(name)) is None else role
            for name in [bytes(e.name) for e in events]
        ]
        launches = [e for e, role in zip(events, roles, strict=True) if role == _LAUNCHES]
        if launches:
            args = self._host_args.decode(launches)
            start, end = self._times(launches)
            threads = self.threads.all([bytes(e.tid) for e in launches])
            columns = (
                *(start, end, _array([a.correlation for a in args]), threads),
                *(self._sizes([a.grid for a in args]), self._sizes([a.block for a in args])),
                _array([a.shared_bytes for a in args]),
            )
            self._launches.append(self._with_times(np.column_stack(columns)))
        blocking = [e for e, role in zip(events, roles, strict=True) if role == _BLOCKS]
        if blocking:
            self._blocking.append(self._with_times(np.column_stack(self._times(blocking))))

    def _sizes(self, shapes: list[tuple[int, ...]]) -> list[int]:
        """Product x*y*z of each shape; -1 if it is not three positive numbers."""
        known = self._shapes
        return [self._size(shape) if (size := known.get(shape)) is None else size for shape in shapes]

    def _size(self, shape: tuple[int, ...]) -> int:
        usable = len(shape) == 3 and min(shape) > 0 and (total := shape[0] * shape[1] * shape[2]) < 1 << 62
        size = self._shapes[shape] = total if usable else -1
        return size

    def _process(self, pid: bytes) -> int:
        """Profilers write a GPU's number as the process of its spans; other ids get unique numbers."""
        return int(pid) if pid.isdigit() and len(pid) < 4 else _OTHER_PROCESS + self.pids(pid)

    def _stream(self, tid: bytes) -> int:
        """The stream of a span that has no stream argument: some profilers write `stream 7` as its thread."""
        number = _STREAM.fullmatch(tid)
        return int(number[1]) if number else _OTHER_STREAM + self.threads(tid) if tid else -1

    def _call_role(self, name: bytes) -> int:
        role = _LAUNCHES if _LAUNCH.search(name) else _BLOCKS if _BLOCKING.search(name) else 0
        self._call_roles[name] = role
        return role

    def _keep_marks(self, events: list[Event]) -> None:
        args = self._args.decode(events)
        host = self._host_args.decode(events)
        start, end = self._times(events)
        for i, event in enumerate(events):
            if start[i] == UNKNOWN or end[i] == UNKNOWN:
                continue
            message = message_of(args[i])
            if message is UNKNOWN_MESSAGE:
                message = message_from_shapes(host[i])
            self.marks.append(
                Mark(
                    text_field(bytes(event.name)),
                    int(start[i]),
                    int(end[i]),
                    self.threads(bytes(event.tid)),
                    host[i].external,
                    message,
                )
            )

    def _keep_modules(self, events: list[Event]) -> None:
        start, end = self._times(events)
        for i, event in enumerate(events):
            if start[i] != UNKNOWN and end[i] != UNKNOWN:
                name = text_field(bytes(event.name)).removeprefix("nn.Module: ")
                self.modules.append((name, int(start[i]), int(end[i]), self.threads(bytes(event.tid))))

    def _keep_syncs(self, events: list[Event]) -> None:
        args = self._host_args.decode(events)
        start, _ = self._times(events)
        rows = [(a.stream, a.waits_for, a.waits_for_stream) for a in args]
        self._waits.append(self._with_times(np.column_stack((start, start, _array(rows, 3)))))

    def _times(self, events: list[Event]) -> tuple[_I64, _I64]:
        start = nanoseconds([e.ts for e in events])
        duration = nanoseconds([e.dur for e in events])
        usable = (start > -MAX_NS) & (duration >= 0) & (duration < MAX_NS)
        end = np.where(usable, start + np.where(usable, duration, 0), UNKNOWN)
        return start, end

    def _with_times(self, columns: _I64) -> _I64:
        """Keeps the rows with usable times and durations; counts the others."""
        good: npt.NDArray[np.bool_] = (columns[:, 0] != UNKNOWN) & (columns[:, 1] != UNKNOWN)
        if good.all():
            return columns
        self.odd_times += int((~good).sum())
        kept: _I64 = columns[good]
        return kept

    # Results ------------------------------------------------------------------------------------

    def gpu(self) -> _I64:
        """One row per GPU event: see GPU_COLUMNS."""
        return _stacked(self._gpu, len(GPU_COLUMNS))

    def launches(self) -> _I64:
        """One row per launching call: start, end, correlation, thread, blocks, threads a block, shared bytes.

        The last three come from HIP launches, because HIP's kernel events lack them; otherwise -1.
        """
        return _stacked(self._launches, 7)

    def blocking(self) -> _I64:
        """One row per call in which the CPU waits for the GPU: start, end."""
        return _stacked(self._blocking, 2)

    def waits(self) -> _I64:
        """One row per event wait: time, time, stream that waits, correlation and stream of the record."""
        return _stacked(self._waits, 5)


GPU_COLUMNS = (
    "start",
    "end",
    "name",
    "kind",
    "device",
    "stream",
    "correlation",
    "external",
    "registers",
    "shared_bytes",
    "bytes",
    "sequence",
    "blocks",
    "threads",
    "message",
)


def _stacked(parts: list[_I64], width: int) -> _I64:
    """Joins the parts and frees them."""
    if not parts:
        return np.empty((0, width), dtype=np.int64)
    joined = np.concatenate(parts)
    parts.clear()
    return joined


def _array(values: list[Any], width: int = 0) -> _I64:
    try:
        array = np.array(values, dtype=np.int64)
    except OverflowError:
        clean = [tuple(map(integer, v)) if width else integer(v) for v in values]
        array = np.array(clean, dtype=np.int64)
    return array.reshape(len(values), width) if width else array
