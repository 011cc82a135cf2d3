"""The shim's functions for NCCL in this process. Mirrors csrc/nccl.h."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection
from ctypes import c_char, c_double, c_int, c_int32, c_uint32, c_uint64
from functools import cache
from typing import Any

from weft.errors import UnavailableError
from weft.shim.binding import attach
from weft.shim.layout import NCCL_OPERATIONS

_log = logging.getLogger("weft.shim")

LIMITS = 16
CALLS = 4096
WHY_BYTES = 256
NOT_THERE = "this process was not started by weft: start it with `weft run -- python …`"
NO_COMMUNICATOR = "the program has made no NCCL communicator yet"


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
_callbacks: list[Any] = []  # never emptied: a thread may still be running a callback that was removed


@cache
def _nccl() -> Any:
    """The shim's functions for NCCL; None if the shim is not loaded in this process."""
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
        pointer = ctypes.POINTER(ctypes.c_void_p)
        text = (ctypes.c_char_p, ctypes.c_size_t)
        shim.weft_nccl_arena.argtypes = (c_uint64, ctypes.c_size_t, pointer, pointer, *text)
        shim.weft_nccl_arena_register.argtypes = (ctypes.c_void_p, *text)
        shim.weft_nccl_arena_close.argtypes = (ctypes.c_void_p,)
        shim.weft_nccl_arena_close.restype = None
    except AttributeError:
        return None
    return shim


def nccl_seen() -> bool:
    """Whether this process has created a communicator."""
    shim = _nccl()
    return shim is not None and bool(shim.weft_nccl_seen())


def nccl_list() -> list[CCommunicator]:
    """Every live communicator, in creation order."""
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
    """Make siblings with at most `ctas` CTAs. Returns "" or why not.

    `keys` selects the communicators; None means all.
    """
    if _nccl() is not None and not nccl_seen():
        return NO_COMMUNICATOR
    if keys is None:
        return _asked("weft_nccl_prepare", ctas, timeout_s)
    return _asked("weft_nccl_prepare_keys", ctas, timeout_s, (c_uint64 * len(keys))(*keys), len(keys))


def nccl_route(ctas: int) -> str:
    """Use the siblings with this limit; 0: the program's own communicators. Returns "" or why not."""
    return _asked("weft_nccl_route", ctas)


def nccl_follow_policy() -> str:
    """Apply the rules of this process's policy from its next collective on. Returns "" or why not."""
    return _asked("weft_nccl_follow_policy")


def nccl_release() -> str:
    """Destroy the siblings that are not in use. Returns "" or why not."""
    return _asked("weft_nccl_release")


def _asked(name: str, *arguments: Any) -> str:
    shim = _nccl()
    if shim is None:
        return NOT_THERE
    why = ctypes.create_string_buffer(WHY_BYTES)
    refused = getattr(shim, name)(*arguments, why, WHY_BYTES)
    return (why.value.decode(errors="replace") or "unknown") if refused else ""


def nccl_on_call(callback: Callable[[int, int], None] | None, key: int, every: int) -> None:
    """Make the shim call `callback(key, count)` after collectives; None removes the callback."""
    if callback is None:
        if _callbacks:  # otherwise there is nothing to remove and no reason to load the shim
            _nccl().weft_nccl_on_call(None, 0, 1)
        return
    shim = _nccl()
    if shim is None:
        raise UnavailableError(NOT_THERE)

    def guarded(found: int, count: int) -> None:
        try:
            callback(found, count)
        except BaseException:
            _log.debug("the callback after a collective failed", exc_info=True)

    held = _CALLBACK(guarded)
    _callbacks.append(held)
    shim.weft_nccl_on_call(ctypes.cast(held, ctypes.c_void_p), key, every)


class NcclArena:
    """GPU memory allocated by NCCL, to be registered as a symmetric window of a communicator."""

    def __init__(self, key: int, size: int) -> None:
        """Allocate `size` bytes for the communicator `key`. Raises UnavailableError if that fails."""
        made, memory = ctypes.c_void_p(), ctypes.c_void_p()
        why = _asked("weft_nccl_arena", key, size, ctypes.byref(made), ctypes.byref(memory))
        if why:
            raise UnavailableError(why)
        self._made, self.address, self.size = made, memory.value or 0, size

    def register(self) -> None:
        """Register the memory as a window, on all ranks together. Raises UnavailableError with the reason."""
        why = _asked("weft_nccl_arena_register", self._made)
        if why:
            raise UnavailableError(why)

    def close(self) -> None:
        """Deregister the window and free the memory; nothing may still be using them."""
        if self._made:
            _nccl().weft_nccl_arena_close(self._made)
            self._made = ctypes.c_void_p()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as an array of bytes, for `torch.as_tensor`."""
        return {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}
