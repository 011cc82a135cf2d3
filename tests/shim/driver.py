"""The fake driver from Python, for programs that tests run under the shim."""

from __future__ import annotations

import ctypes
import json
import threading  # noqa: F401 (for programs)
from ctypes import c_char, c_int, c_uint, c_uint64, c_void_p

PER_THREAD = 2
PRIORITY, COOPERATIVE = 8, 2

_library = None


class Record(ctypes.Structure):
    _fields_ = (
        ("route", c_char * 40),
        ("name", c_char * 256),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("priority", c_int),
        ("has_priority", c_int),
        ("cooperative", c_int),
        ("attributes", c_int),
        ("captured", c_int),
        ("cluster", c_uint * 3),
    )


class Attribute(ctypes.Structure):
    _fields_ = (
        ("id", c_uint),
        ("pad", c_char * 4),
        ("value", c_int),
        ("more", c_int * 2),
        ("rest", c_char * 52),
    )


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    )


def library():
    global _library
    if _library is None:
        _library = ctypes.CDLL("libcuda.so.1")
        _library.fake_kernel.restype = c_void_p
        _library.fake_launch.restype = ctypes.POINTER(Record)
    return _library


def kernel(name, registers=32, static_shared=0, as_kernel=False):
    """A new kernel's handle: a CUfunction, or a CUkernel."""
    return c_void_p(library().fake_kernel(name.encode(), registers, static_shared, as_kernel))


def by_proc_address(name, version=12000, flags=0, way="cuGetProcAddress_v2"):
    """A driver function, found as the CUDA runtime does."""
    newer = way.endswith("_v2") if isinstance(way, str) else version >= 12000
    pointer, status = c_void_p(), c_int(-1 if newer else 0)
    arguments = [name.encode(), ctypes.byref(pointer), version, c_uint64(flags)]
    result = call(way, *arguments, *([ctypes.byref(status)] if newer else []))
    assert (result, status.value) == (0, 0), (name, result, status.value)
    return pointer.value


def call(function, *arguments):
    """Calls a function by its symbol or its address; returns the driver's result."""
    if isinstance(function, str):
        return getattr(library(), function)(*arguments)
    return ctypes.CFUNCTYPE(c_int)(function)(*arguments)


def launch(handle, grid=100_000, threads=128, shared=0, stream=None, function="cuLaunchKernel"):
    sizes = [c_uint(n) for n in (grid, 1, 1, threads, 1, 1, shared)]
    return call(function, handle, *sizes, c_void_p(stream), None, None)


def attribute(number, value, *more):
    return Attribute(id=number, value=value, more=(*more, *(0 for _ in range(2 - len(more)))))


def launch_ex(
    handle, grid=100_000, threads=128, shared=0, stream=None, attributes=(), function="cuLaunchKernelEx"
):
    array = (Attribute * max(1, len(attributes)))(*(attribute(*one) for one in attributes))
    config = Config((grid, 1, 1), (threads, 1, 1), shared, stream, ctypes.addressof(array), len(attributes))
    return call(function, ctypes.byref(config), handle, None, None)


def records():
    """Every launch that reached the driver."""
    lib = library()
    found = (lib.fake_launch(i).contents for i in range(lib.fake_launches()))
    return [
        {
            "route": r.route.decode(),
            "name": r.name.decode(),
            "grid": r.grid[0],
            "shared": r.shared,
            "stream": r.stream,
            "priority": r.priority if r.has_priority else None,
            "attributes": r.attributes,
            "captured": r.captured,
            "threads": r.block[0] * r.block[1] * r.block[2],
            "cluster": list(r.cluster),
        }
        for r in found
    ]


def fail(api, times=1, code=1):
    """Makes the next `times` calls of a driver function fail."""
    library().fake_fail(api.encode(), times, code)


def finish(stream):
    library().fake_finish(c_void_p(stream))


def show(value=None):
    """Prints a result, by default every launch, for the test."""
    print(json.dumps(records() if value is None else value))
