"""Reads the wire format of protocol buffers: the fields of a message, without a schema."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import InputError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at an offset, and the offset after it."""
    result = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise InputError("the protocol buffer ends early or is damaged")


def fields(data: bytes, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int | tuple[int, int]]]:
    """Number and value of each field in [low, high): an integer, or the byte range of a nested value."""
    at, end = low, len(data) if high is None else high
    while at < end:
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = read_varint(data, at)
            yield number, value
        elif kind == _BYTES:
            length, at = read_varint(data, at)
            if at + length > end:
                raise InputError("the protocol buffer ends early or is damaged")
            yield number, (at, at + length)
            at += length
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            if at + size > end:
                raise InputError("the protocol buffer ends early or is damaged")
            yield number, int.from_bytes(data[at : at + size], "little")
            at += size
        else:
            raise InputError("the protocol buffer is damaged")


def signed(value: int) -> int:
    """Reinterprets an unsigned 64-bit number as signed."""
    return value - (1 << 64) if value >> 63 else value
