"""Traces across what a program does to its streams, captures and groups meanwhile."""

from __future__ import annotations

import pytest
from building import HERE, compile_c

OPEN = """
from tracer_driver import *
gemm, first, second = kernel("gemm"), kernel("split_k"), kernel("reduce")
def pair(stream):
    launch(first, stream=stream)
    dependent(second, stream=stream)
tracer.watch_tracer(); pair(0x10); tracer.unwatch(); sync()
def begin(stream):
    assert call("cuStreamBeginCapture_v2", c_void_p(stream), 0) == 0
def end(stream):
    assert call("cuStreamEndCapture", c_void_p(stream), ctypes.byref(c_void_p())) == 0
"""


def test_a_capture_is_not_disturbed(program):
    """A capture in global mode is lost if any thread queries an event or a stream."""
    done = program(
        OPEN
        + """
assert tracer.start()
launch(gemm, stream=0x10), launch(gemm, stream=0x10)
begin(0x300)
for i in range(3):
    launch(gemm, stream=0x10)
    launch(first, stream=0x10)
    launch(kernel("ncclDevKernel_AllReduce"), stream=0x20)
    launch(gemm, stream=0x300)
end(0x300)
begin(0x10)  # its latest kernel has no event behind it yet, and the trace ends now
recording = tracer.stop()
end(0x10)
tell(recording, unsafe=library().fake_unsafe_calls())
"""
    )
    assert (done.results["captured_events"], done.results["unsafe"]) == (0, 0)
    assert len(done.results["spans"]) == 10  # all but the one whose end would have been captured


def test_a_destroyed_stream_is_not_touched_and_its_handle_may_be_another_stream(program):
    done = program(
        OPEN
        + """
assert tracer.start()
for k in (gemm, gemm, first):  # the last has no event behind it yet
    library().fake_stream_again(c_void_p(0x10))
    launch(k, stream=0x10)
    assert call("cuStreamDestroy_v2", c_void_p(0x10)) == 0
recording = tracer.stop()
tell(recording, lanes=[span.lane for span in recording.spans])
"""
    )
    assert done.results["dead_calls"] == 0
    assert done.results["lanes"] == [0, 1, 2]
    assert [span[0] for span in done.results["spans"]] == ["gemm", "gemm", "split_k"]


@pytest.fixture
def collectives(program, environment, tmp_path):
    """Runs a program against an NCCL that launches kernels; returns [calls, bytes] of the collectives that it traced."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
    compile_c(tmp_path / "libnccl.so.2", *flags, str(HERE / "launching_nccl.c"))
    path = f"{tmp_path}:{environment['LD_LIBRARY_PATH']}"
    head = """
from tracer_driver import *
from ctypes import c_size_t
n = ctypes.CDLL("libnccl.so.2")
class Id(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)
n.fake_launch_with(library().cuLaunchKernel, kernel("ncclDevKernel_AllReduce"))
comm, unique = c_void_p(), Id()
n.ncclGetUniqueId(ctypes.byref(unique))
assert n.ncclCommInitRank(ctypes.byref(comm), 4, unique, 2) == 0
def reduce(count):
    assert n.ncclAllReduce(None, None, c_size_t(count), 7, 0, comm, c_void_p(0x20)) == 0
def group(*counts):
    n.ncclGroupStart()
    for count in counts:
        reduce(count)
    n.ncclGroupEnd()
"""
    tail = "\nshow([[s.calls, s.bytes] for s in tracer.stop().spans])\n"

    def run(source):
        return program(head + source + tail, env={"LD_LIBRARY_PATH": path}).results

    return run


def test_a_kernel_has_all_calls_of_its_group_and_none_of_an_earlier_trace(collectives):
    shown = collectives("""
reduce(1)
assert tracer.start()
n.ncclGroupStart()
reduce(1000), reduce(1000)
tracer.drop()  # inside the group
n.ncclGroupEnd()
assert tracer.start()
reduce(10)
group(*[10] * 200)
""")
    assert shown == [[1, 40], [200, 8000]]
