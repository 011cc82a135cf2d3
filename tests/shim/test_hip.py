"""The same policy over HIP's launch calls, against a fake libamdhip64. Not run on AMD hardware."""

from __future__ import annotations

import sys
import textwrap

import pytest
from building import HERE, compile_c

from weft.policy import Policy, Rule

ROUTES = (
    "hipLaunchKernel",
    "hipLaunchKernel_spt",
    "hipExtLaunchKernel",
    "hipLaunchKernelExC",
    "hipModuleLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipDrvLaunchKernelEx",
)

DRIVER = """
import ctypes, json
from ctypes import c_char, c_size_t, c_uint, c_uint64, c_void_p

hip = ctypes.CDLL("libamdhip64.so")
hip.fake_kernel.restype = c_void_p

class Dim3(ctypes.Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]

class Record(ctypes.Structure):
    _fields_ = [("route", c_char * 32), ("name", c_char * 64), ("shared", c_uint64), ("stream", c_void_p)]

class Config(ctypes.Structure):
    _fields_ = [("grid", Dim3), ("block", Dim3), ("shared", c_size_t), ("stream", c_void_p), ("a", c_void_p), ("n", c_uint)]

class DriverConfig(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p), ("a", c_void_p), ("n", c_uint)]

hip.fake_launch.restype = ctypes.POINTER(Record)

def kernel(name, vgprs=64, lds=0):
    return c_void_p(hip.fake_kernel(name.encode(), vgprs, lds))

def launch(f, route="hipLaunchKernel", grid=100000, threads=256, shared=0, stream=0x10, attributes=0):
    g, b, s, none = Dim3(grid, 1, 1), Dim3(threads, 1, 1), c_void_p(stream), None
    sizes = [c_uint(n) for n in (grid, 1, 1, threads, 1, 1)]
    if route == "hipLaunchKernelExC":
        return hip.hipLaunchKernelExC(ctypes.byref(Config(g, b, shared, stream, None, attributes)), f, none)
    if route == "hipDrvLaunchKernelEx":
        c = DriverConfig((grid, 1, 1), (threads, 1, 1), shared, stream, None, attributes)
        return hip.hipDrvLaunchKernelEx(ctypes.byref(c), f, none, none)
    if route == "hipModuleLaunchKernel":
        return hip.hipModuleLaunchKernel(f, *sizes, c_uint(shared), s, none, none)
    if route == "hipExtModuleLaunchKernel":
        sizes[0] = c_uint(grid * threads)
        return hip.hipExtModuleLaunchKernel(f, *sizes, c_size_t(shared), s, none, none, none, none, 0)
    if route == "hipExtLaunchKernel":
        return hip.hipExtLaunchKernel(f, g, b, none, c_size_t(shared), s, none, none, 0)
    return getattr(hip, route)(f, g, b, none, c_size_t(shared), s)

def show():
    seen = [hip.fake_launch(i).contents for i in range(hip.fake_launches())]
    print(json.dumps([{"route": r.route.decode(), "name": r.name.decode(), "shared": r.shared} for r in seen]))
"""


@pytest.fixture(scope="session")
def fake_hip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hip")
    compile_c(
        folder / "libamdhip64.so",
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic,-soname,libamdhip64.so",
        str(HERE / "fake_hip.c"),
    )
    return folder


@pytest.fixture
def program(weft_run, fake_hip):
    def run(source: str, policy: Policy | None = None):
        code = DRIVER + textwrap.dedent(source)
        outcome = weft_run([sys.executable, "-c", code], policy, {"LD_LIBRARY_PATH": str(fake_hip)})
        assert outcome.code == 0, outcome.stderr
        return outcome

    return run


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_counted_and_shaped(program, route):
    done = program(f'assert launch(kernel("gemm"), "{route}") == 0; show()', Policy(residency=2))
    (record,) = done.results
    assert record["route"] == route
    assert record["shared"] == 65536 // 3 // 512 * 512 + 1  # one byte more than lets three workgroups fit
    kernel = done.kernel("gemm")
    assert (
        kernel["launches"],
        kernel["shaped"],
        kernel["blocks_per_sm"],
        kernel["natural_blocks_per_sm"],
    ) == (1, 1, 2, 8)


def test_a_function_found_by_get_proc_address_is_counted(program):
    done = program("""
        pointer = c_void_p()
        assert hip.hipGetProcAddress(b"hipModuleLaunchKernel", ctypes.byref(pointer), 60000000, c_uint64(0), None) == 0
        sizes = [c_uint(n) for n in (64, 1, 1, 256, 1, 1, 0)]
        assert ctypes.CFUNCTYPE(ctypes.c_int)(pointer.value)(kernel("gemm"), *sizes, None, None, None) == 0
    """)
    assert done.kernel("gemm")["launches"] == 1


def test_launches_of_graphs_are_counted_as_not_accounted_for(program):
    done = program("""
        launch(kernel("gemm"))
        calls = hip.hipGraphLaunch, hip.hipGraphLaunch_spt
        assert [call(c_void_p(exec), None) for call in calls for exec in (8, None)] == [0, 1, 0, 1]
    """)
    assert (done.stats["graph_launches"], done.stats["unhandled"], done.kernel("gemm")["launches"]) == (
        2,
        2,
        1,
    )


@pytest.mark.parametrize("n", range(1, 9))
def test_residency_is_exact(program, n):
    done = program('assert launch(kernel("gemm", lds=1024)) == 0; show()', Policy(residency=n))
    assert done.kernel("gemm")["blocks_per_sm"] == n
    assert done.kernel("gemm")["shaped"] == (1 if n < 8 else 0)


def test_collectives_rules_and_single_waves_are_left_alone(program):
    done = program(
        """
        assert launch(kernel("ncclDevKernel_Generic_4")) == 0
        assert launch(kernel("layer_norm")) == 0
        assert launch(kernel("one_wave"), grid=8 * 104) == 0
        show()
        """,
        Policy(residency=2, rules=(Rule("*norm*", None),)),
    )
    assert [r["shared"] for r in done.results] == [0, 0, 0]
    assert done.stats["comm_launches"] == 1


def test_when_overlap_follows_the_collectives(program):
    done = program(
        """
        gemm, rccl = kernel("gemm"), kernel("ncclDevKernel_Generic_4")
        launch(gemm); launch(rccl, stream=0x20); launch(gemm); hip.fake_finish(); launch(gemm); show()
        """,
        Policy(residency=2, when="overlap"),
    )
    assert [r["shared"] > 0 for r in done.results] == [False, False, True, False]


def test_captures_stay_whole_and_default_streams_have_the_names_that_every_rocm_knows(program):
    done = program(
        """
        gemm, rccl = kernel("gemm"), kernel("ncclDevKernel_Generic_4")
        hip.fake_write_stream.restype = c_void_p
        hip.fake_capture(c_void_p(0x20))
        launch(rccl, stream=0x20), launch(gemm, stream=0x10), launch(rccl, stream=None)
        launch(rccl, stream=0x30), launch(gemm, stream=0x20), launch(gemm, stream=0x10)
        assert hip.fake_capture_lost() == 0
        hip.fake_capture(None), hip.fake_finish()
        for route, stream in (("hipLaunchKernel", None), ("hipLaunchKernel_spt", 2)):
            launch(rccl, route, stream=None)
            assert hip.fake_write_stream(0) == stream
            launch(gemm, stream=None), launch(gemm, "hipLaunchKernel_spt", stream=None)
            hip.fake_finish()
        show()
        """,
        Policy(residency=2, when="overlap"),
    )
    captured, default = [False, False, True], [False, True, True, False]
    assert [r["shared"] > 0 for r in done.results if r["name"] == "gemm"] == captured + default
    assert done.stats["tracking_failures"] == 0


def test_launches_that_overlap_with_a_collective_are_counted_without_shaping_any(program):
    done = program("""
        from weft.shim import binding
        gemm, rccl = kernel("gemm"), kernel("ncclDevKernel_Generic_4")
        binding.set_policy(None, track=True)
        launch(gemm); launch(rccl, stream=0x20, grid=24); launch(gemm); hip.fake_finish(); launch(gemm); show()
    """)
    assert [r["shared"] for r in done.results] == [0] * 4
    assert (done.kernel("gemm")["beside"], done.kernel("ncclDevKernel_Generic_4")["ctas"]) == (1, 24)


def test_a_refused_launch_is_made_again_as_it_was(program):
    done = program('hip.fake_fail(1); assert launch(kernel("gemm")) == 0; show()', Policy(residency=2))
    assert [r["shared"] for r in done.results] == [0]
    assert done.stats["shape_failures"] == 1


@pytest.mark.parametrize("route", ["hipLaunchKernelExC", "hipDrvLaunchKernelEx"])
def test_launches_with_attributes_may_be_cooperative_and_are_not_touched(program, route):
    done = program(
        f'assert launch(kernel("gemm"), "{route}", attributes=1) == 0; show()', Policy(residency=1)
    )
    assert [r["shared"] for r in done.results] == [0]


@pytest.mark.parametrize(
    ("policy", "counter"),
    [
        (Policy(head_start_us=5), "head_start_failures"),
        (Policy(head_start="placed"), "placed_failures"),
        (Policy(sm_reserve=8), "sm_reserve_others"),
    ],
)
def test_controls_that_hip_lacks_are_counted_as_not_applied(program, policy, counter):
    done = program(
        'launch(kernel("ncclDevKernel_Generic_4"), stream=0x20); launch(kernel("gemm")); show()', policy
    )
    assert [r["name"] for r in done.results] == ["ncclDevKernel_Generic_4", "gemm"]
    assert done.stats[counter] == 1
    assert "not applied" in done.stderr or "1 head start failures" in done.stderr
