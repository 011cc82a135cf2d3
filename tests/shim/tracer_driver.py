"""The tracer against the fake driver's simulated GPU, for programs that tests run under the shim."""

from __future__ import annotations

import ctypes
import json
from ctypes import c_char, c_int, c_int64, c_void_p

from driver import *  # noqa: F403
from driver import launch_ex, library, records

from weft.shim import spans, tracer  # noqa: F401 (for programs)

PROGRAMMATIC = 6


class Truth(ctypes.Structure):
    _fields_ = (
        ("name", c_char * 256),
        ("stream", c_void_p),
        ("start", c_int64),
        ("end", c_int64),
        ("ready", c_int64),
        ("programmatic", c_int),
        ("sms", c_int),
        ("priority", c_int),
    )


def cost(name, us, sms=1):
    library().fake_cost(name.encode(), c_int64(int(us * 1000)), sms)


def truths():
    """What the simulated GPU really did: name, stream, start and end in ns."""
    lib = library()
    lib.fake_truth.restype = ctypes.POINTER(Truth)
    found = (lib.fake_truth(i).contents for i in range(lib.fake_truths()))
    return [(t.name.decode(), t.stream, t.start, t.end) for t in found if not t.name.startswith(b"weft_")]


def sync():
    library().fake_sync()


def host(us):
    """Advance the host's clock by this many microseconds."""
    library().fake_host(c_int64(int(us * 1000)))


def one_clock():
    """Let the shim read the simulated clock."""
    ctypes.CDLL(None).weft_trace_set_clock(ctypes.cast(library().fake_clock, c_void_p))


def launched():
    """The program's kernels that reached the driver."""
    return [r for r in records() if not r["name"].startswith("weft_")]  # the tracer's own


def copy(function, a, b, size, stream):
    return getattr(library(), function)(c_void_p(a), c_void_p(b), ctypes.c_size_t(size), c_void_p(stream))


def dependent(handle, stream):
    """A programmatic dependent launch."""
    return launch_ex(handle, stream=stream, attributes=((PROGRAMMATIC, 1),))


def wait(stream, event):
    return library().cuStreamWaitEvent(c_void_p(stream), event, 0)


def new_event(stream=None):
    made = c_void_p()
    assert library().cuEventCreate(ctypes.byref(made), 2) == 0
    if stream is not None:
        assert library().cuEventRecord(made, c_void_p(stream)) == 0
    return made


def left():
    """What is alive in the driver: events and streams."""
    return [library().fake_live_events(), library().fake_live_streams()]


def seen(recording):
    """Spans as [name, stream, start, end, timing], times relative to the first start."""
    found = spans.spans_of(recording)
    base = min((s.start_ns for s in found), default=0)
    return [[s.name, s.raw.stream, s.start_ns - base, s.end_ns - base, s.timing] for s in found]


def tell(recording, **more):
    """Hands the spans, the truth and the counters to the test."""
    result = {
        "spans": seen(recording),
        "truth": truths(),
        "counters": recording.counters,
        "left": left(),
        "captured_events": library().fake_captured_events(),
        "broken": library().fake_broken_programmatic(),
        "dead_calls": library().fake_dead_calls(),
        **more,
    }
    print(json.dumps(result))


one_clock()
