"""Chakra execution traces, the format that ASTRA-sim and other network simulators read.

A trace is a stream of protobuf messages, each preceded by its length as a varint: one GlobalMetadata, then
Nodes. The field numbers come from `schema/protobuf/et_def.proto` of mlcommons/chakra, schema version 0.0.4.
This module encodes only the fields that weft writes, so it needs no protobuf library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

CHAKRA_VERSION = "0.0.4"

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
"""Values of Chakra's NodeType."""
COLLECTIVE_TYPES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
"""Values of Chakra's CollectiveCommType."""

INT32 = frozenset({"comm_src", "comm_dst", "comm_tag", "comm_priority"})
"""Attributes written as 32-bit integers: Chakra's first feeder reads these only from `int32_val`; later ones
also accept `int64_val`."""
_VARINT, _LENGTH = 0, 2
_SMALL = tuple(bytes([value]) for value in range(128))
Value = bool | int | str


@dataclass(frozen=True)
class ChakraNode:
    """One operation of one rank."""

    id: int
    name: str
    type: int
    after: tuple[int, ...] = ()
    """Identifiers of the nodes that must end first."""
    duration_us: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)


def varint(value: int) -> bytes:
    """Seven bits per byte, lowest first; negative numbers as 64-bit two's complement."""
    if 0 <= value < 128:
        return _SMALL[value]
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(tag: int, value: int) -> bytes:
    return varint(tag << 3 | _VARINT) + varint(value) if value else b""


def _bytes(tag: int, value: bytes) -> bytes:
    return varint(tag << 3 | _LENGTH) + varint(len(value)) + value


def _text(tag: int, value: str) -> bytes:
    return _bytes(tag, value.encode("utf-8", "replace")) if value else b""


@lru_cache(maxsize=1 << 16, typed=True)
def _attribute(name: str, value: Value) -> bytes:
    """AttributeProto: bool_val 27, int32_val 7, int64_val 9, string_val 29. These are members of a oneof, so
    zero is written too.
    """
    if isinstance(value, bool):
        payload = varint(27 << 3 | _VARINT) + varint(int(value))
    elif isinstance(value, int) and name in INT32:
        payload = varint(7 << 3 | _VARINT) + varint(value)
    elif isinstance(value, int):
        payload = varint(9 << 3 | _VARINT) + varint(value)
    else:
        payload = _bytes(29, value.encode("utf-8", "replace"))
    return _text(1, name) + payload


def encode_node(node: ChakraNode) -> bytes:
    """One Node message."""
    parts = [_number(1, node.id), _text(2, node.name), _number(3, node.type)]
    if node.after:
        parts.append(_bytes(5, b"".join(map(varint, node.after))))
    parts.append(_number(7, node.duration_us))
    parts += [_bytes(10, _attribute(name, value)) for name, value in node.attributes.items()]
    return b"".join(parts)


def encode(nodes: Iterable[ChakraNode], version: str = CHAKRA_VERSION) -> bytes:
    """A whole trace."""
    return b"".join(_framed(message) for message in _messages(nodes, version))


def _messages(nodes: Iterable[ChakraNode], version: str) -> Iterator[bytes]:
    yield _text(1, version)
    for node in nodes:
        yield encode_node(node)


def _framed(message: bytes) -> bytes:
    return varint(len(message)) + message
