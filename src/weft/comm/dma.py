"""Copies by the GPU's copy engines, issued through the CUDA driver: no kernel, about 1 µs per call.

`HostPeers` lets one GPU act as one rank of many: the peers' data is in pinned host memory, so reading it is a
real transfer by a copy engine.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from weft.errors import UnavailableError, UsageError

_LIBRARY = "libcuda.so.1"
_NO_TIMING = 2
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver tells host from device by the address

CopyEntry: TypeAlias = tuple[Callable[..., int], tuple[Any, ...]]
"""A prepared driver call; it returns 0 on success."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = [
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of equal length in memory; `width` and `pitch` are in bytes."""

    address: int
    rows: int
    width: int
    pitch: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Block:
        """The block of a matrix. Raises UsageError unless its rows are contiguous."""
        if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
            raise UsageError("a copy by the copy engine needs a matrix with contiguous rows")
        item = tensor.element_size()
        return cls(tensor.data_ptr(), tensor.shape[0], tensor.shape[1] * item, tensor.stride(0) * item)


class Copies:
    """The driver's functions for copies and events."""

    def __init__(self, library: Any) -> None:
        handle, address, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        self._library = library
        self._free: list[int] = []
        self.copy = self._function("cuMemcpyAsync", address, address, size, handle)
        self.copy_2d = self._function("cuMemcpy2DAsync_v2", handle, handle)
        self.record = self._function("cuEventRecord", handle, handle)
        self.wait = self._function("cuStreamWaitEvent", handle, handle, ctypes.c_uint)
        self._create = self._function("cuEventCreate", handle, ctypes.c_uint)

    def _function(self, name: str, *types: Any) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self._library, name)
        function.argtypes, function.restype = types, ctypes.c_int  # type: ignore[attr-defined]
        return function

    def event(self) -> int:
        """Take an event from the pool, or create one; return it with `give_back`."""
        if self._free:
            return self._free.pop()
        made = ctypes.c_void_p()
        check_result(self._create(ctypes.byref(made), _NO_TIMING), "cuEventCreate")
        return made.value or 0

    def give_back(self, events: Sequence[int]) -> None:
        """Return events to the pool. Work that already waits for one of them is not affected by its reuse."""
        self._free += events

    def entry(self, target: Block, source: Block, stream: int) -> CopyEntry:
        """The prepared call that copies a block on a stream."""
        if (target.rows, target.width) != (source.rows, source.width):
            raise UsageError(f"cannot copy {source} to {target}: they differ in size")
        tight = target.pitch == target.width == source.pitch or target.rows == 1
        if tight:
            return self.copy, (target.address, source.address, target.rows * target.width, stream)
        described = _Copy2D(
            src_type=_UNIFIED,
            src_device=source.address,
            src_pitch=source.pitch,
            dst_type=_UNIFIED,
            dst_device=target.address,
            dst_pitch=target.pitch,
            width=target.width,
            height=target.rows,
        )
        return self.copy_2d, (_Kept(described), stream)


class _Kept:
    """Keeps a structure alive as long as the prepared call that passes its address."""

    def __init__(self, structure: ctypes.Structure) -> None:
        self._structure = structure
        self._as_parameter_ = ctypes.c_void_p(ctypes.addressof(structure))


def check_result(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed: CUDA error {code}")


@cache
def copies() -> Copies:
    """The copy functions of this process's driver. Raises UnavailableError without a driver."""
    try:
        return Copies(ctypes.CDLL(_LIBRARY))
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"no copies by the copy engine: {error}; use engine='sm'") from None


_NUMBERS = itertools.count()
_NAMED: WeakValueDictionary[str, HostPeers] = WeakValueDictionary()


def host_peers(name: str) -> HostPeers | None:
    """The group with this name; None if it no longer exists."""
    return _NAMED.get(name)


class HostPeers:
    """A group in which this process is one rank, and each other rank is only data in pinned host memory.

    `held` contains the matrix that each rank would send from: its x, or for a reduce-scatter its partial
    results for this rank's rows. The entry of this rank is not used. Data that this rank sends is also
    written to pinned memory. Transfers therefore cross the GPU's bus; the peers compute nothing.
    """

    silent = True  # there are no other processes to agree with

    def __init__(self, held: Sequence[torch.Tensor | None], rank: int = 0) -> None:
        if not 0 <= rank < len(held):
            raise UsageError(f"rank {rank} is not one of {len(held)}")
        if any(tensor is None for peer, tensor in enumerate(held) if peer != rank):
            raise UsageError("every peer needs its data")
        self._rank, self._size = rank, len(held)
        self.group_name = f"weft.host.{next(_NUMBERS)}"
        _NAMED[self.group_name] = self
        self.held = [
            None if peer == rank or tensor is None else self._keep(tensor) for peer, tensor in enumerate(held)
        ]
        self.sent: dict[Any, torch.Tensor] = {}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return _pinned(tensor)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def outbox(self, key: Any, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory that receives the data for a peer; allocated once per `key`."""
        if key not in self.sent:
            self.sent[key] = torch.empty(rows, cols, dtype=dtype, pin_memory=True)
        return self.sent[key]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.is_pinned() and tensor.is_contiguous():
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return made.copy_(tensor.detach())
