"""Controls the shim's tracer, which records CUDA events around launches without a profiler.

    tracer.start()            # at the end of a step
    …                         # some steps; tracer.mark() at the end of each
    recording = tracer.stop() # None if nothing could be recorded

Runs inside users' programs, so it uses only the standard library. `weft.shim.spans` turns a recording into
spans.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_char, c_double, c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import InputError
from weft.shim import binding

_log = logging.getLogger("weft.tracer")

_MAGIC, TRACE_VERSION = b"wefttrc", 3
DEVICES, COUNTERS_ROOM = 16, 16
KERNEL_SPAN, MEMCPY_SPAN, MEMSET_SPAN, GRAPH = range(4)
CHAINED, OPEN, LATE, FAILED, UNTIMED, COMM_SPAN, PDL_SPLIT = (1 << bit for bit in range(7))
STALLED = 1 << 8  # bit 7 is unused
_COUNTERS = (
    "events",
    "event_failures",
    "dropped",
    "placed_failures",
    "captured",
    "contexts_gone",
    "unfinished",
    "left_behind",
    "pdl_splits",
    "stalls",
    "skipped_fronts",
    "stamps",
    "stamp_failures",
    "probes",
)
READ_TIMEOUT_S = 20.0


class CSpan(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("host_ns", "host_end_ns", "host_front_ns", "host_placed_ns")),
        *((name, c_int64) for name in ("before_ns", "after_ns", "placed_ns", "again_ns")),
        *((name, c_uint64) for name in ("stream", "bytes", "comm_key", "count", "comm_sequence")),
        *((name, c_uint32) for name in ("kind", "row", "lane", "step", "thread", "flags")),
        ("device", c_int32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        *((name, c_uint32) for name in ("shared", "static_shared", "registers", "blocks_per_sm")),
        *((name, c_uint32) for name in ("copy", "graph", "graph_kernels")),
        *((name, c_int32) for name in ("operation", "dtype", "comm_rank", "comm_size", "calls", "unused")),
    )


class CDevice(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "ordinal",
                "sms",
                "major",
                "minor",
                "threads_per_sm",
                "registers_per_sm",
                "shared_per_sm",
                "shared_optin",
            )
        ),
        ("name", c_char * 96),
    )


class CHeader(ctypes.Structure):
    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("span_size", c_uint32),
        *((name, c_uint64) for name in ("spans", "marks", "graph_rows", "begin_ns", "end_ns")),
        ("calibrated_ns", c_int64 * 4),
        ("realtime_offset_ns", c_int64),
        *((name, c_int32) for name in ("rank", "world", "pid", "by_steps")),
        ("devices", c_uint32),
        ("unused", c_uint32),
        ("counters", c_uint64 * COUNTERS_ROOM),
        ("device", CDevice * DEVICES),
        ("process_file", c_char * 256),
    )


@dataclass(frozen=True)
class Recording:
    """The raw recording of one process, as the shim returns it."""

    header: Any
    spans: Any
    """An array of CSpan in launch order."""
    marks: tuple[int, ...]
    """Host times at which steps ended after the trace began."""
    graph_rows: tuple[int, ...]
    symbols: tuple[str, ...]
    """The driver's names of the kernels, indexed by row."""

    @property
    def counters(self) -> dict[str, int]:
        return dict(zip(_COUNTERS, self.header.counters, strict=False))


@cache
def _shim() -> Any:
    """The shim's functions; None if the shim is not loaded in this process."""
    if binding.attach() is None:
        return None
    shim = ctypes.CDLL(None)
    try:
        shim.weft_trace_read.argtypes = (ctypes.POINTER(CHeader), ctypes.c_void_p, c_uint64, c_double)
        shim.weft_trace_finish.argtypes = (c_double,)
        for name in ("weft_trace_read", "weft_trace_read_marks", "weft_trace_read_graph_rows"):
            getattr(shim, name).restype = c_int64
        for name in ("weft_trace_read_marks", "weft_trace_read_graph_rows"):
            getattr(shim, name).argtypes = (ctypes.c_void_p, c_uint64)
    except AttributeError:
        return None
    return shim


def tracer_available() -> bool:
    """Whether this process can be traced, which requires that `weft run` started it."""
    return _shim() is not None


def watch_tracer() -> None:
    """Before a trace, note which kernels are followed by programmatic dependent launches.

    The trace must not record an event between two such kernels. Costs a few nanoseconds per launch until the
    trace begins or `unwatch` is called.
    """
    if tracer_available() and not recording():
        _shim().weft_trace_watch()


def unwatch() -> None:
    """Stop what `watch_tracer` started."""
    if tracer_available() and not recording():
        _shim().weft_trace_end()


def start() -> bool:
    """Start recording; False if the tracer is unavailable or already in use."""
    return tracer_available() and _shim().weft_trace_begin() == 0


def mark() -> None:
    """Mark the end of a step."""
    if tracer_available():
        _shim().weft_trace_mark()


def pause() -> None:
    """Stop recording without waiting for the GPU; the caller must then call `stop`, `finish` or `drop`."""
    if tracer_available():
        _shim().weft_trace_pause()


def recording() -> bool:
    """Whether a trace is being recorded."""
    return tracer_available() and _shim().weft_trace_state() == 1


def stop(timeout_s: float = READ_TIMEOUT_S) -> Recording | None:
    """End the trace, wait for the GPU to finish the recorded work, read the trace and free all events."""
    if not tracer_available() or _shim().weft_trace_state() != 1:
        return None
    shim = _shim()
    shim.weft_trace_end()
    try:
        return _read(shim, timeout_s)
    finally:
        shim.weft_trace_free()


def drop() -> None:
    """End the trace and discard it."""
    if tracer_available():
        _shim().weft_trace_end()
        _shim().weft_trace_free()


def finish(timeout_s: float = READ_TIMEOUT_S) -> bool:
    """End the trace and write it to the job's folder, where `weft run` turns it into a trace file."""
    return tracer_available() and _shim().weft_trace_finish(timeout_s) == 0


def steps_come() -> None:
    """For `weft run --trace`: steps are still being searched for, so the trace must not use seconds yet."""
    function = getattr(ctypes.CDLL(None), "weft_trace_steps_come", None)
    if function is not None:
        function()


def steps_known() -> bool:
    """Tell the tracer that a step was found; False if the trace already uses seconds."""
    return tracer_available() and _shim().weft_trace_steps_known() == 0


def _read(shim: Any, timeout_s: float) -> Recording | None:
    header = CHeader()
    count = shim.weft_trace_read(None, None, 0, timeout_s)
    if count < 0:
        return None
    spans = (CSpan * count)()
    shim.weft_trace_read(ctypes.byref(header), ctypes.addressof(spans), count, timeout_s)
    marks = (c_uint64 * header.marks)()
    shim.weft_trace_read_marks(ctypes.addressof(marks), header.marks)
    rows = (c_uint32 * header.graph_rows)()
    shim.weft_trace_read_graph_rows(ctypes.addressof(rows), header.graph_rows)
    path = binding.attach()
    symbols = _symbols(path) if path else ()
    _log.debug("traced %d operations: %s", count, dict(zip(_COUNTERS, header.counters, strict=False)))
    return Recording(header, spans, tuple(marks), tuple(rows), symbols)


def _symbols(path: Path) -> tuple[str, ...]:
    return tuple(row.name.decode(errors="replace") for row, _ in binding.read_process(path).rows())


def read_file(path: Path) -> Recording:
    """Read a recording that a process left in the job's folder. Raises InputError or OSError."""
    from weft.files import open_regular  # imported here to keep it out of the traced program

    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read()
    size = ctypes.sizeof(CHeader)
    if len(data) < size or not data.startswith(_MAGIC):
        raise InputError(f"{path} is not a trace of this weft")
    header = CHeader.from_buffer_copy(data)
    if header.version != TRACE_VERSION or header.span_size != ctypes.sizeof(CSpan):
        raise InputError(f"{path} was written by another version of weft")
    kinds: list[Any] = [CSpan * header.spans, c_uint64 * header.marks, c_uint32 * header.graph_rows]
    if len(data) < size + sum(ctypes.sizeof(kind) for kind in kinds):
        raise InputError(f"{path} is incomplete")
    parts = []
    for kind in kinds:
        parts.append(kind.from_buffer_copy(data, size))
        size += ctypes.sizeof(kind)
    symbols = _symbols(path.parent / header.process_file.decode())
    return Recording(header, parts[0], tuple(parts[1]), tuple(parts[2]), symbols)
