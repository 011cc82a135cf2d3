"""The compiled scanner: text of the events array in, columns out. Holds all ctypes code of the readers.

A call takes text that begins between two events, keeps no state and releases the GIL, so several threads can
scan parts of one file. Scanning does not need numpy, which loads while the first parts are scanned.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _I64 = npt.NDArray[np.int64]

_log = logging.getLogger("weft.trace")

_LIBRARY = "libweft_scan.so"
FED, CLOSED, MALFORMED, NO_MEMORY = range(4)
_WIDTHS = (15, 7, 2, 5)
_LATER = 4


@dataclass(frozen=True, eq=False)
class Scanned:
    """Columns of one part of the events array; see `weft.trace.events.Collector`."""

    events: int
    odd_times: int
    gpu: _I64
    launches: _I64
    blocking: _I64
    waits: _I64
    names: list[bytes]
    threads: list[bytes]
    later: list[bytes]
    """Events left to the Python reader: those with many arguments and unusual ones."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled scanner; None if it is not built, and the Python reader does all the work."""
    try:
        found = ctypes.CDLL(str(Path(__file__).parent / _LIBRARY))
    except OSError as error:
        _log.debug("no compiled scanner, traces are read by Python alone: %s", error)
        return None
    found.weft_scan_new.restype = c_void_p
    found.weft_scan_free.argtypes = [c_void_p]
    found.weft_scan_free.restype = None
    found.weft_scan_feed.argtypes = [c_void_p, c_char_p, c_int64, c_int64]
    found.weft_scan_feed.restype = c_int64
    for name, kind in (("status", c_int32), ("events", c_int64), ("odd_times", c_int64)):
        function = getattr(found, f"weft_scan_{name}")
        function.argtypes, function.restype = [c_void_p], kind
    found.weft_scan_rows.argtypes = [c_void_p, c_int32, POINTER(POINTER(c_int64))]
    found.weft_scan_rows.restype = c_int64
    found.weft_scan_texts.argtypes = [c_void_p, c_int32, POINTER(c_void_p), POINTER(POINTER(c_int64))]
    found.weft_scan_texts.restype = c_int64
    return found


class ScannedPart:
    """What was found in one part of the events array, in memory of the compiled scanner."""

    def __init__(self, core: ctypes.CDLL, state: int, text: bytes, consumed: int) -> None:
        self._core, self._state = core, state
        self.consumed = consumed
        """Offset up to which the text was read; only whole events are consumed."""
        self.status: int = core.weft_scan_status(state)
        """FED: the text was read up to its last whole event. CLOSED: up to the array's end. MALFORMED."""
        later, count = _pointer(core, state, _LATER)
        self.later = [text[later[2 * i] : later[2 * i + 1]] for i in range(count)]

    def columns(self) -> Scanned:
        """The columns. Can be called only once: it frees the scanner's memory."""
        core, state = self._core, self._state
        gpu, launches, blocking, waits = (_rows(core, state, which) for which in range(_LATER))
        found = Scanned(
            events=core.weft_scan_events(state),
            odd_times=core.weft_scan_odd_times(state),
            gpu=gpu,
            launches=launches,
            blocking=blocking,
            waits=waits,
            names=_texts(core, state, 0),
            threads=_texts(core, state, 1),
            later=self.later,
        )
        self.close()
        return found

    def close(self) -> None:
        """Frees the memory."""
        state, self._state = self._state, 0
        self._core.weft_scan_free(state)

    def __del__(self) -> None:
        if self._state:
            self.close()


def scan(text: bytes, low: int, high: int) -> ScannedPart:
    """Scans text[low:high], which begins between two events."""
    core = library()
    assert core is not None
    state = core.weft_scan_new()
    if not state:
        raise MemoryError
    part = ScannedPart(core, state, text, core.weft_scan_feed(state, text, low, high))
    if part.status == NO_MEMORY:
        raise MemoryError
    return part


def _pointer(core: ctypes.CDLL, state: int, which: int) -> tuple[Any, int]:
    values = POINTER(c_int64)()
    return values, core.weft_scan_rows(state, which, ctypes.byref(values))


def _rows(core: ctypes.CDLL, state: int, which: int) -> _I64:
    import numpy as np

    values, count = _pointer(core, state, which)
    width = _WIDTHS[which]
    if not count:
        return np.empty((0, width), dtype=np.int64)
    held = (c_int64 * (count * width)).from_address(ctypes.addressof(values.contents))
    return np.frombuffer(memoryview(held), dtype=np.int64).reshape(count, width).copy()


def _texts(core: ctypes.CDLL, state: int, which: int) -> list[bytes]:
    start, offsets = c_void_p(), POINTER(c_int64)()
    count = core.weft_scan_texts(state, which, ctypes.byref(start), ctypes.byref(offsets))
    if not count or start.value is None:
        return []
    whole = ctypes.string_at(start.value, offsets[count])
    return [whole[offsets[i] : offsets[i + 1]] for i in range(count)]
