"""Reads XLA profiles (`*.xplane.pb`), as JAX and TensorFlow write them for GPUs and TPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.errors import InputError
from weft.trace.assemble import traces_from
from weft.trace.columns import Columns
from weft.trace.custom import IsComm, kernel_table
from weft.trace.events import KERNEL, MEMCPY, MEMSET
from weft.trace.protobuf import fields, signed
from weft.trace.record import Trace

MAX_BYTES = 1 << 31

_DEVICE = re.compile(r"/device:(GPU|TPU|CUSTOM)[^0-9]*(\d+)")
_DETAILS = re.compile(r"(\w+):([0-9,]+)")
# XLA's names of collectives, for lines that show operations instead of kernels.
_COLLECTIVE = re.compile(
    r"(?:ragged-)?(?:all-?reduce(?:-scatter)?|all-?gather|reduce-?scatter|all-?to-?all|collective-?permute|"
    r"collective-?broadcast|async-collective|send|recv)"
    r"(?:-start|-done)?(?:[.\d)]|$)"
)
_OPERATION_LINES = ("XLA Ops", "Async XLA Ops")
# An operation as HLO text, `%name = shape opcode(operands)`; layouts in the shape have capitals: `T(8,128)`.
_HLO = re.compile(r"%?([^\s=]+) = .*?(?<=\s)([a-z][a-z0-9-]*)\(", re.DOTALL)
_CONTAINERS = ("while", "conditional", "call")
"""Operations that only contain others, which have their own spans."""
_COPIES = ("copy-start", "copy-done")
"""DMA transfers, and the wait for them."""


@dataclass
class _Plane:
    name: str = ""
    lines: list[tuple[int, int]] = field(default_factory=list)
    events: dict[int, str] = field(default_factory=dict)
    stats: dict[int, str] = field(default_factory=dict)


def read(path: Path, is_comm_names: IsComm | None = None) -> list[Trace]:
    """Reads the devices of one profile. Raises InputError if it holds no usable trace."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES >> 30} GiB; profile fewer steps")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        planes = [
            _plane(data, *place) for number, place in fields(data) if number == 1 and isinstance(place, tuple)
        ]
        hosts = [_host(data, plane) for plane in planes if plane.name.startswith("/host:CPU")]
        out: list[Trace] = []
        for plane in planes:
            device = _DEVICE.search(plane.name)
            if device is None:
                continue
            columns = Columns()
            operations = _spans(data, plane, int(device[2]), columns)
            own_steps = bool(columns.marks)  # a device's own steps are more exact than the host's
            for host in hosts:
                for call in host.calls:
                    columns.call(*call)
                for step in () if own_steps else host.steps:
                    columns.mark(*step)
            if columns.gpu:
                known = is_comm_names or kernel_table
                choose = _or_collective(known) if operations else known
                title = plane.name.removeprefix("/device:")
                metadata = {"deviceProperties": [{"id": int(device[2]), "name": title}]}
                out += traces_from(path, columns.collector(), metadata, None, choose)
    except InputError as error:
        raise InputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    if not out:
        names = ", ".join(plane.name for plane in planes[:6]) or "none"
        raise InputError(
            f"{path}: an XLA profile without GPU or TPU activity (planes: {names}); "
            "profile on the accelerator"
        )
    return out


def _or_collective(known: IsComm) -> IsComm:
    def choose(names: list[str]) -> list[bool]:
        return [
            comm or any(_COLLECTIVE.match(part) for part in name.split(" ("))
            for comm, name in zip(known(names), names, strict=True)
        ]

    return choose


@lru_cache(maxsize=1 << 16)
def operation(name: str) -> tuple[str, str]:
    """The short name of an XLA operation, and its opcode: from its HLO text if there is one, else its name.

    The opcode is added to a name that does not show it: `psum.3 (all-reduce)`.
    """
    found = _HLO.match(name)
    if found is None:
        short = name.lstrip("%")
        return short, re.sub(r"[.\d]+$", "", short)
    short, opcode = found[1], found[2]
    return (short if short.startswith(opcode) else f"{short} ({opcode})"), opcode


def _text(data: bytes, place: Any) -> str:
    return data[place[0] : place[1]].decode("utf-8", "replace") if isinstance(place, tuple) else ""


def _plane(data: bytes, low: int, high: int) -> _Plane:
    plane = _Plane()
    for number, value in fields(data, low, high):
        if number == 2:
            plane.name = _text(data, value)
        elif number == 3 and isinstance(value, tuple):
            plane.lines.append(value)
        elif number in (4, 5) and isinstance(value, tuple):
            key, name = _named(data, *value)
            (plane.events if number == 4 else plane.stats)[key] = name
    return plane


def _named(data: bytes, low: int, high: int) -> tuple[int, str]:
    """An entry of a map from ids to metadata: the id, and the name in the metadata."""
    key, name, display = 0, "", ""
    for number, value in fields(data, low, high):
        if number == 1 and isinstance(value, int):
            key = value
        elif number == 2 and isinstance(value, tuple):
            for inner, content in fields(data, *value):
                if inner == 2:
                    name = _text(data, content)
                elif inner == 4:
                    display = _text(data, content)
    return key, name or display


@dataclass
class _Line:
    name: str = ""
    identity: int = 0
    timestamp_ns: int = 0
    events: list[tuple[int, int]] = field(default_factory=list)


def _line(data: bytes, low: int, high: int) -> _Line:
    line = _Line()
    for number, value in fields(data, low, high):
        if number in (2, 11) and isinstance(value, tuple):
            line.name = _text(data, value) or line.name
        elif number == 1 and isinstance(value, int):
            line.identity = signed(value)
        elif number == 3 and isinstance(value, int):
            line.timestamp_ns = signed(value)
        elif number == 4 and isinstance(value, tuple):
            line.events.append(value)
    return line


def _event(
    data: bytes, plane: _Plane, line: _Line, place: tuple[int, int]
) -> tuple[str, int, int, dict[str, Any]]:
    """Name, start and end in nanoseconds, and statistics of one event."""
    name, offset, length = "", 0, 0
    stats: dict[str, Any] = {}
    for number, value in fields(data, *place):
        if number == 1 and isinstance(value, int):
            name = plane.events.get(value, "")
        elif number == 2 and isinstance(value, int):
            offset = signed(value)
        elif number == 3 and isinstance(value, int):
            length = signed(value)
        elif number == 4 and isinstance(value, tuple):
            key: str = ""
            content: int | str | None = None
            for inner, part in fields(data, *value):
                if inner == 1 and isinstance(part, int):
                    key = plane.stats.get(part, "")
                elif inner in (3, 4) and isinstance(part, int):
                    content = signed(part)
                elif inner == 5:
                    content = _text(data, part)
                elif inner == 7 and isinstance(part, int):
                    content = plane.stats.get(part, "")
            stats[key] = content
    start_ps = line.timestamp_ns * 1000 + offset
    return name, start_ps // 1000, (start_ps + length) // 1000, stats


@dataclass
class _Host:
    calls: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    """CPU calls that launched work on a GPU or waited for it: name, start, end, correlation and thread."""
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    """Steps that the program marked (`jax.profiler.StepTraceAnnotation`): name, start and end."""


def _host(data: bytes, plane: _Plane) -> _Host:
    host = _Host()
    for place in plane.lines:
        line = _line(data, *place)
        for event in line.events:
            name, start, end, stats = _event(data, plane, line, event)
            correlation, step = stats.get("correlation_id"), stats.get("step_num")
            if isinstance(correlation, int):
                said = name if "ynchronize" in name else f"launch {name}"
                host.calls.append((said, start, end, correlation, line.identity))
            elif isinstance(step, int) and end > start:
                host.steps.append((f"ProfilerStep#{step}", start, end))
    return host


def _spans(data: bytes, plane: _Plane, device: int, columns: Columns) -> bool:
    """Adds the spans of a device. Returns whether they are XLA operations, not kernels on streams."""
    lines = [_line(data, *place) for place in plane.lines]
    streams = [line for line in lines if line.name.startswith("Stream")]
    operations = not streams
    for line in lines:
        if line.name == "Steps":
            for place in line.events:
                name, start, end, _ = _event(data, plane, line, place)
                if name.isdecimal() and end > start:
                    columns.mark(f"ProfilerStep#{name}", start, end)
    for line in streams or [line for line in lines if line.name in _OPERATION_LINES]:
        for place in line.events:
            name, start, end, stats = _event(data, plane, line, place)
            opcode = ""
            if operations:
                name, opcode = operation(name)
                if opcode in _CONTAINERS:
                    continue
            kind = (
                MEMCPY
                if name.lower().startswith("memcpy") or opcode in _COPIES
                else MEMSET
                if name.lower().startswith("memset")
                else KERNEL
            )
            known: dict[str, Any] = {"stream": line.identity, "correlation": stats.get("correlation_id")}
            details = dict(
                _DETAILS.findall(str(stats.get("kernel_details") or stats.get("memcpy_details") or ""))
            )
            _resources(details, known)
            columns.span(kind, name or "kernel", start, end, device, **known)
    return operations


def _resources(details: dict[str, str], known: dict[str, Any]) -> None:
    def total_of(text: str) -> int | None:
        total = 1
        for part in text.split(","):
            total *= int(part) if part.isdecimal() and len(part) < 12 else 0
        return total or None

    if "grid" in details and "block" in details:
        known["blocks"], known["threads"] = total_of(details["grid"]), total_of(details["block"])
    if details.get("regs", "").isdecimal():
        known["registers"] = int(details["regs"][:12])
        shared = [details.get(key, "0") for key in ("static_shared", "dynamic_shared")]
        known["shared_bytes"] = sum(int(text[:12]) for text in shared if text.isdecimal())
    if details.get("size", "").isdecimal():
        known["bytes"] = int(details["size"][:18])
