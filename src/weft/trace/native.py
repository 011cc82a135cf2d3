"""The compiled scanner: text of the events array in, columns out. All ctypes of the trace readers.

A call works on text that begins between two events, keeps no state and releases the interpreter lock, so
several threads can work on parts of one file.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger("weft.trace")

LIBRARY = "libweft_scan.so"
FED, CLOSED, MALFORMED, NO_MEMORY = range(4)
_WIDTHS = (15, 7, 2, 5, 2)

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Scanned:
    """What was found in one part of the events array; see `weft.trace.events.Collector` for the columns."""

    consumed: int
    """Bytes that were read: whole events only."""
    status: int
    """FED: to the end or to an event that the text ends in. CLOSED: to the end of the array. MALFORMED."""
    events: int
    odd_times: int
    gpu: I64
    launches: I64
    blocking: I64
    waits: I64
    names: list[bytes]
    threads: list[bytes]
    later: list[bytes]
    """Events that need the Python reader: rich ones and odd ones."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled scanner; None where it is not built, and the Python reader does all the work."""
    try:
        found = ctypes.CDLL(str(Path(__file__).parent / LIBRARY))
    except OSError as error:
        log.debug("no compiled scanner, traces are read by Python alone: %s", error)
        return None
    found.weft_scan_new.restype = c_void_p
    found.weft_scan_free.argtypes = [c_void_p]
    found.weft_scan_free.restype = None
    found.weft_scan_feed.argtypes = [c_void_p, c_char_p, c_int64]
    found.weft_scan_feed.restype = c_int64
    for name, kind in (("status", c_int32), ("events", c_int64), ("odd_times", c_int64)):
        function = getattr(found, f"weft_scan_{name}")
        function.argtypes, function.restype = [c_void_p], kind
    found.weft_scan_rows.argtypes = [c_void_p, c_int32, POINTER(POINTER(c_int64))]
    found.weft_scan_rows.restype = c_int64
    found.weft_scan_texts.argtypes = [c_void_p, c_int32, POINTER(c_void_p), POINTER(POINTER(c_int64))]
    found.weft_scan_texts.restype = c_int64
    return found


def scan(text: bytes, length: int) -> Scanned:
    """Scans the first `length` bytes of a text that begins between two events."""
    core = library()
    assert core is not None
    state = core.weft_scan_new()
    if not state:
        raise MemoryError
    try:
        consumed = core.weft_scan_feed(state, text, length)
        status = core.weft_scan_status(state)
        if status == NO_MEMORY:
            raise MemoryError
        gpu, launches, blocking, waits, later = (_rows(core, state, which) for which in range(5))
        return Scanned(
            consumed=consumed,
            status=status,
            events=core.weft_scan_events(state),
            odd_times=core.weft_scan_odd_times(state),
            gpu=gpu,
            launches=launches,
            blocking=blocking,
            waits=waits,
            names=_texts(core, state, 0),
            threads=_texts(core, state, 1),
            later=[text[low:high] for low, high in later.tolist()],
        )
    finally:
        core.weft_scan_free(state)


def _rows(core: ctypes.CDLL, state: int, which: int) -> I64:
    values = POINTER(c_int64)()
    count = core.weft_scan_rows(state, which, ctypes.byref(values))
    width = _WIDTHS[which]
    if not count:
        return np.empty((0, width), dtype=np.int64)
    return np.ctypeslib.as_array(values, (count, width)).copy()


def _texts(core: ctypes.CDLL, state: int, which: int) -> list[bytes]:
    start, offsets = c_void_p(), POINTER(c_int64)()
    count = core.weft_scan_texts(state, which, ctypes.byref(start), ctypes.byref(offsets))
    if not count or start.value is None:
        return []
    whole = ctypes.string_at(start.value, offsets[count])
    return [whole[offsets[i] : offsets[i + 1]] for i in range(count)]
