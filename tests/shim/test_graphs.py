"""Captured launches follow the policy and are counted when the graph runs."""

from __future__ import annotations

import pytest

from weft.policy import Policy

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"

CAPTURE = f"""
gemm, nccl = kernel("gemm", as_kernel=True), kernel("{NCCL}")
graph, executable = c_void_p(), c_void_p()
def capture():
    assert call("cuStreamBeginCapture_v2", c_void_p(0x10), 0) == 0
    library().fake_join_capture(c_void_p(0x10), c_void_p(0x20))
    assert launch(gemm, stream=0x10) == 0
    assert launch(nccl, stream=0x20) == 0
    assert launch(gemm, stream=0x10) == 0
    library().fake_leave_capture(c_void_p(0x20))
    assert call("cuStreamEndCapture", c_void_p(0x10), ctypes.byref(graph)) == 0
capture()
"""


def test_kernels_in_a_graph_count_when_it_runs(program):
    done = program(f"""
{CAPTURE}
assert call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, c_uint64(0)) == 0
for _ in range(5):
    assert call("cuGraphLaunch", executable, c_void_p(0x10)) == 0
assert call("cuGraphExecDestroy", executable) == 0
""")
    assert done.kernel("gemm")["launches"] == 10
    assert done.kernel(NCCL)["launches"] == 5
    assert done.stats["captured"] == 3
    assert done.stats["graph_launches"] == 5


def test_a_graph_that_cannot_be_read_is_counted_as_not_handled(program):
    """Each call of the driver fails once while the graph's nodes are read: no kernel is missed silently."""
    done = program(f"""
from weft.shim import stats
{CAPTURE}
counted = []
for number in range(1, 40):
    library().fake_fail_at(ctypes.c_long(number))
    made = call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, c_uint64(0))
    library().fake_fail_at(ctypes.c_long(0))
    if made == 0:
        before = stats.snapshot()
        assert call("cuGraphLaunch", executable, c_void_p(0x10)) == 0
        after = stats.snapshot()
        counted.append([after[name] - before[name] for name in ("launches", "unhandled")])
        assert call("cuGraphExecDestroy", executable) == 0
show(counted)
""")
    assert [0, 1] in done.results  # the nodes could not be listed
    assert all(launches == 3 or unhandled for launches, unhandled in done.results)


def test_the_policy_is_captured_with_the_kernels(program):
    done = program(
        f"""
{CAPTURE}
assert call("cuGraphInstantiateWithParams", ctypes.byref(executable), graph, None) == 0
assert call("cuGraphLaunch_ptsz", executable, None) == 0
show([records(), library().fake_unsafe_calls()])
""",
        Policy(residency=2, when="overlap", priority="high", head_start_us=5),
    )
    records, unsafe_calls = done.results
    assert [(r["name"], r["shared"] > 0, r["priority"]) for r in records] == [
        ("gemm", False, None),  # before the collective
        (NCCL, False, -5),
        ("weft_head_start", False, None),
        ("gemm", True, None),
    ]
    assert all(r["captured"] for r in records)
    assert unsafe_calls == 0
    launches = {k["name"]: (k["launches"], k["shaped"]) for k in done.stats["kernels"]}
    assert launches == {"gemm": (2, 1), NCCL: (1, 0), "weft_head_start": (1, 0)}


@pytest.mark.parametrize("version", [11040, 12000])
def test_graphs_found_by_get_proc_address_are_counted(program, version):
    arguments = "graph, c_uint64(0)" if version >= 12000 else "graph, None, None, c_uint64(0)"
    done = program(f"""
{CAPTURE}
assert call(by_proc_address("cuGraphInstantiate", {version}), ctypes.byref(executable), {arguments}) == 0
assert call(by_proc_address("cuGraphLaunch", {version}), executable, None) == 0
""")
    assert done.stats["launches"] == 3


def test_an_updated_graph_and_a_graph_within_a_graph_are_read_again(program):
    done = program(f"""
{CAPTURE}
inner = c_void_p(graph.value)
capture()
library().fake_add_child(graph, inner)
assert call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, c_uint64(0)) == 0
assert call("cuGraphLaunch", executable, None) == 0
assert call(by_proc_address("cuGraphExecUpdate", 12000), executable, inner, None) == 0
assert call("cuGraphLaunch", executable, None) == 0
""")
    assert done.stats["launches"] == 6 + 3


def test_disabled_nodes_and_changed_child_graphs_are_counted_as_they_run(program):
    done = program(f"""
{CAPTURE}
inner, node, count = c_void_p(graph.value), (c_void_p * 8)(), c_uint64(8)
capture()
library().fake_add_child(graph, inner)
assert call("cuGraphGetNodes", graph, node, ctypes.byref(count)) == 0
assert call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, c_uint64(0)) == 0
def run():
    assert call("cuGraphLaunch", executable, None) == 0
for on in (0, 0, 1, 1):
    assert call("cuGraphNodeSetEnabled", executable, c_void_p(node[0]), on) == 0
    run()
other = c_void_p()
assert call("cuStreamBeginCapture_v2", c_void_p(0x10), 0) == 0
for _ in range(3):
    launch(nccl, stream=0x10)
assert call("cuStreamEndCapture", c_void_p(0x10), ctypes.byref(other)) == 0
assert call("cuGraphExecChildGraphNodeSetParams", executable, c_void_p(node[3]), other) == 0
run()
""")
    assert done.kernel("gemm")["launches"] == 3 + 3 + 4 + 4 + 2
    assert done.kernel(NCCL)["launches"] == 4 * 2 + 4
    assert done.stats["unhandled"] == 0


def test_a_handle_that_came_back_as_another_kernel_is_not_taken_for_a_shaped_one(program):
    done = program(
        """
        k, graph, executable = kernel("gemm"), c_void_p(), c_void_p()
        launch(k)
        shaped = records()[-1]["shared"]
        call("cuModuleUnload", c_void_p(0x2000))
        library().fake_rename(k, b"other")
        call("cuStreamBeginCapture_v2", c_void_p(0x10), 0)
        assert launch(k, shared=shaped, stream=0x10) == 0
        call("cuStreamEndCapture", c_void_p(0x10), ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, c_uint64(0))
        call("cuGraphLaunch", executable, None)
        """,
        Policy(residency=5),
    )
    assert {k["name"]: (k["launches"], k["shaped"]) for k in done.stats["kernels"]} == {
        "gemm": (1, 1),
        "other": (1, 0),
    }


def test_captures_for_graphics_are_seen(program):
    done = program(f"""
gemm, nccl = kernel("gemm"), kernel("{NCCL}")
launch(nccl, stream=0x10)
assert call("cuStreamBeginCaptureToCig", c_void_p(0x20), None) == 0
launch(gemm, stream=0x20)
assert call("cuStreamEndCaptureToCig", c_void_p(0x20)) == 0
launch(gemm, stream=0x20)
""")
    assert (done.stats["captured"], done.kernel("gemm")["launches"]) == (1, 1)


def test_counting_goes_on_after_a_capture_that_failed(program):
    done = program("""
        assert call("cuStreamEndCapture", c_void_p(0x10), None) == 401
        assert launch(kernel("gemm"), stream=0x10) == 0
    """)
    assert done.kernel("gemm")["launches"] == 1


def test_a_node_over_the_programs_own_limit_is_refused_under_residency_too(program):
    """weft raises the shared-memory limit for its own launches; for a graph node the program's holds."""
    source = """
        k, graph, node, stream = kernel("gemm"), c_void_p(), c_void_p(), c_void_p(0x300)
        class Params(ctypes.Structure):
            _fields_ = (("f", c_void_p), ("sizes", c_uint * 7), ("params", c_void_p), ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p))
        class AnyParams(ctypes.Structure):
            _fields_ = (("type", c_int), ("reserved", c_int * 3), ("kernel", Params), ("rest", c_char * 168))
        def params(shared):
            return Params(k, (c_uint * 7)(100, 1, 1, 128, 1, 1, shared))
        def add(shared):
            return call("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, None, c_uint64(0), ctypes.byref(params(shared)))
        def add_any(shared):
            some = AnyParams(0, (c_int * 3)(), params(shared))
            return call("cuGraphAddNode_v2", ctypes.byref(node), graph, None, None, c_uint64(0), ctypes.byref(some))
        def change(shared):
            return call("cuGraphKernelNodeSetParams_v2", node, ctypes.byref(params(shared)))
        launch(k)
        raised = library().fake_max_dynamic(k)
        call("cuStreamBeginCapture_v2", stream, 0), call("cuStreamEndCapture", stream, ctypes.byref(graph))
        seen = [do(shared) for do in (add, add_any, change) for shared in (48 << 10, 60 << 10)]
        show([seen, raised > 60 << 10, library().fake_max_dynamic(k) == raised])
    """
    assert program(source, Policy(residency=1)).results == [[0, 1] * 3, True, True]
