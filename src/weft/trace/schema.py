"""The decoded parts of an event: typed structs, lenient decoding of odd types, and repair of bad text."""

from __future__ import annotations

import json
import re
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from weft.trace.scan import DECODE_ERRORS

_EMPTY = msgspec.Raw(b"")
_NO_ARGS = msgspec.Raw(b"{}")


class Event(msgspec.Struct, gc=False):
    """An event. Complete events (`"ph": "X"`) are those with a duration, so the phase is not decoded."""

    cat: str | None = None
    name: msgspec.Raw = _EMPTY
    ts: msgspec.Raw = _EMPTY
    dur: msgspec.Raw = _EMPTY
    pid: msgspec.Raw = _EMPTY
    tid: msgspec.Raw = _EMPTY
    args: msgspec.Raw = _NO_ARGS


class Args(msgspec.Struct, gc=False):
    """Arguments of a GPU event. -1 and "" stand for unknown."""

    device: int = -1
    stream: int = -1
    correlation: int = -1
    external: int = msgspec.field(default=-1, name="External id")
    registers: int = msgspec.field(default=-1, name="registers per thread")
    shared_bytes: int = msgspec.field(default=-1, name="shared memory")
    bytes: int = -1
    grid: tuple[int, ...] = (-1, 1, 1)
    block: tuple[int, ...] = (-1, 1, 1)
    collective: str = msgspec.field(default="", name="Collective name")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    group_size: int = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    members: str = msgspec.field(default="", name="Process Group Ranks")
    sequence: int = msgspec.field(default=-1, name="Seq")


class HostArgs(msgspec.Struct, gc=False):
    """Arguments of a CPU event. -1 and None stand for unknown."""

    correlation: int = -1
    external: int = msgspec.field(default=-1, name="External id")
    stream: int = -1
    waits_for: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    waits_for_stream: int = msgspec.field(default=-1, name="wait_on_stream")
    grid: tuple[int, ...] = (-1, 1, 1)
    block: tuple[int, ...] = (-1, 1, 1)
    shared_bytes: int = msgspec.field(default=-1, name="shared memory")
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")


class Message(NamedTuple):
    """A collective's metadata in the trace. Elements are counts; -1 and "" stand for unknown."""

    collective: str = ""
    in_elements: int = -1
    out_elements: int = -1
    dtype: str = ""
    group_size: int = -1
    group: str = ""
    members: str = ""


class Mark(NamedTuple):
    """A CPU annotation that the analysis needs: a step, or the call that issued a collective."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    external: int
    message: Message


UNKNOWN_MESSAGE = Message()


def message_of(a: Args) -> Message:
    if not a.collective and not a.group:
        return UNKNOWN_MESSAGE
    return Message(a.collective, a.in_elements, a.out_elements, a.dtype, a.group_size, a.group, a.members)


_T = TypeVar("_T", bound=msgspec.Struct)


class Batch(Generic[_T]):
    """Decodes many argument objects at once; if one has odd types, each alone and leniently."""

    def __init__(self, kind: type[_T]) -> None:
        self._kind = kind
        self._all = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
        fields = msgspec.structs.fields(kind)
        self._fields = {f.encode_name: (f.name, f.type) for f in fields}

    def decode(self, events: list[Event]) -> list[_T]:
        try:
            return self._all.decode(b"[" + b",".join([e.args for e in events]) + b"]")
        except DECODE_ERRORS:
            return [self._lenient(e.args) for e in events]

    def _lenient(self, raw: msgspec.Raw) -> _T:
        out = self._kind()
        try:
            value = msgspec.json.decode(raw)
        except DECODE_ERRORS:
            return out
        if isinstance(value, dict):
            for key, (name, kind) in self._fields.items():
                if key in value:
                    setattr(out, name, _coerced(value[key], kind, getattr(out, name)))
        return out


def _coerced(value: Any, kind: Any, default: Any) -> Any:
    """The value converted to the wanted type; the default if that is impossible."""
    if kind is int:
        return integer(value, default)
    if kind is str:
        return value if isinstance(value, str) else json.dumps(value)[:4096]
    if kind is Any:
        return value
    items = value if isinstance(value, list) else []
    return tuple(integer(item, -1) for item in items)


def integer(value: Any, default: int = -1) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 1 << 62 else default


def text_field(raw: bytes) -> str:
    """The string that a JSON text encodes; the text itself if it is not a JSON string."""
    readable = raw.decode("utf-8", "replace")
    try:
        value = msgspec.json.decode(readable)
    except DECODE_ERRORS:
        return readable
    return value if isinstance(value, str) else readable


def message_from_shapes(args: HostArgs) -> Message:
    """Sizes of a collective from the recorded shapes of its input, for older traces."""
    try:
        elements = 0
        for dims in args.dims:
            count = 1
            for dim in dims:
                count *= int(dim)
            elements += count if dims else 0
        dtype = str(args.types[0])
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        return Message()
    return Message(in_elements=elements, dtype=dtype) if 0 < elements < 1 << 62 else Message()


# Profilers write `inf` for a bandwidth over zero time. Matches only where a value stands, and is fast.
BARE_VALUE = re.compile(rb"(:\s*)[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)

_BARE = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")|[-+]?\b(?:nan|inf|infinity)\b', re.IGNORECASE | re.DOTALL)
_BAD_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


def cleaned(raw: bytes) -> bytes:
    """Repairs known errors of profilers: bare NaN and inf, bad UTF-8, control characters, stray escapes."""
    raw = raw.decode("utf-8", "replace").encode()
    raw = _CONTROL.sub(b" ", raw)
    raw = _BAD_ESCAPE.sub(lambda m: m.group() if m.group(1) else rb"\\", raw)
    return _BARE.sub(lambda m: m.group(1) or b"null", raw)
