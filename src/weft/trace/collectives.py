"""The kind of each communication span, the bytes it moves, and its bytes on the bus.

Bytes and factors are defined as in nccl-tests (its doc/PERFORMANCE.md), so that figures can be compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.timeline import Kind, Ns
from weft.trace.record import Trace
from weft.trace.schema import Message

# First match wins, on the collective's own name, then on the kernel's. Case, "_", "-" and " " are ignored.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("peer_copy", r"memcpy"),
        ("reduce_scatter", r"reducescatter"),
        ("all_gather", r"allgather"),
        ("all_to_all", r"alltoall|a2a"),
        ("all_reduce", r"allreduce|crossdevicereduce|multimemreduce"),
        ("broadcast", r"broadcast"),
        ("reduce", r"reduce"),
        ("dispatch", r"dispatch"),
        ("combine", r"combine"),
        ("send_recv", r"sendrecv|send|recv"),
        ("barrier", r"barrier"),
        ("gather", r"gather"),
        ("scatter", r"scatter"),
    )
)

_ELEMENT_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "complexfloat": 8, "long int": 8,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2,
    "char": 1, "byte": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip


_MAX_BYTES = 1 << 44
"""16 TiB, more than any call moves. Larger sizes are ignored, so that sums of sizes fit 64 bits."""


@dataclass(frozen=True, eq=False)
class Collectives:
    """The communication spans of one trace, in order of start. All columns have the same length."""

    span: npt.NDArray[np.intp]
    """Index into the timeline."""
    kind: tuple[str, ...]
    """Kind of each distinct (kernel name, message) pair; indexed by `label`."""
    group: tuple[str, ...]
    label: npt.NDArray[np.int64]
    """Index into `kind` and `group`."""
    bytes: Ns
    """Bytes as nccl-tests counts them; -1 if the trace does not say."""
    bus_bytes: npt.NDArray[np.float64]
    """Bytes times the bus factor; NaN if the bytes or the size of the group are unknown."""


def collectives(trace: Trace) -> Collectives:
    """Classifies the communication spans of a trace."""
    timeline = trace.timeline
    span = np.flatnonzero(timeline.kind == Kind.COMM)
    pairs = np.stack((timeline.name[span].astype(np.int64), trace.message[span]), axis=1)
    distinct, label = np.unique(pairs, axis=0, return_inverse=True)
    label = label.reshape(-1)
    kinds, groups, sizes, factors = [], [], [], []
    for name, message in distinct.tolist():
        what = trace.messages[message]
        kind = kind_of(timeline.names[name], what.collective)
        ranks = what.group_size if what.group_size > 0 else (trace.world_size or 0) if trace.one_group else 0
        kinds.append(kind)
        groups.append(what.group)
        sizes.append(message_bytes(kind, what, ranks))
        factors.append(bus_factor(kind, ranks))
    moved = np.array(sizes, dtype=np.int64)[label] if len(span) else np.empty(0, dtype=np.int64)
    copied = timeline.resources["bytes"][span]
    moved = np.where(moved < 0, np.where(copied < _MAX_BYTES, copied, -1), moved)
    factor = np.array(factors, dtype=np.float64)[label] if len(span) else np.empty(0)
    bus = np.where(moved >= 0, moved * factor, np.nan)
    return Collectives(span, tuple(kinds), tuple(groups), label, moved, bus)


def kind_of(kernel: str, collective: str = "") -> str:
    """The kind of collective, from its own name or its kernel's; `other` if neither is recognized."""
    for name in (collective, kernel):
        plain = re.sub(r"[-_ ]", "", name.lower())
        for kind, pattern in _KINDS:
            if name and pattern.search(plain):
                return kind
    return "other"


def element_bytes(dtype: str) -> int:
    """Bytes per element of a dtype, named as in PyTorch, C++ or Python; -1 if unknown."""
    plain = dtype.lower().replace("c10::", "").replace("torch.", "").strip()
    if plain.startswith("float8"):
        return 1
    return _ELEMENT_BYTES.get(plain, -1)


def message_bytes(kind: str, message: Message, ranks: int) -> int:
    """Bytes of one call: the output of all-gather, the input of reduce-scatter, the buffer of the others.

    -1 if the trace does not say.
    """
    each = element_bytes(message.dtype)
    elements = max(message.in_elements, message.out_elements)
    if each < 0 or elements < 0:
        return -1
    if kind == "all_gather" and message.out_elements < 0:
        # Only the input was recorded; the output holds one such input per rank.
        elements *= ranks if ranks > 0 else -1
    return elements * each if 0 <= elements * each < _MAX_BYTES else -1


def bus_factor(kind: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as in nccl-tests. NaN if the factor is unknown."""
    if kind in ("broadcast", "reduce", "send_recv", "peer_copy"):
        return 1.0
    if ranks < 1:
        return float("nan")
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return float("nan")
