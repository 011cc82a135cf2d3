"""Newer interfaces of the driver: handled, or counted as not handled."""

from __future__ import annotations

from weft.policy import Policy

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
CAPTURE = """
    stream = c_void_p(0x300)
    def capture(*kernels, begin=None):
        graph = c_void_p()
        assert (begin or (lambda: call("cuStreamBeginCapture_v2", stream, 0)))() == 0
        for k in kernels:
            launch(k, stream=0x300)
        assert call("cuStreamEndCapture", stream, ctypes.byref(graph)) == 0
        return graph
    def instantiate(graph):
        found = c_void_p()
        assert call("cuGraphInstantiateWithFlags", ctypes.byref(found), graph, c_uint64(0)) == 0
        return found
    run = lambda graph: call("cuGraphLaunch", graph, None)
    first, second = kernel("first"), kernel("second")
"""


def test_a_graph_that_is_captured_again_is_a_capture(program):
    done = program(
        CAPTURE
        + """
    graph = capture(first)
    again = lambda: call("cuStreamBeginRecaptureToGraph", stream, 0, graph, None, None)
    run(instantiate(capture(second, second, begin=again)))
    """
    )
    assert done.stats["captured"] == 3
    assert done.kernel("second")["launches"] == 2
    assert done.stats["unhandled"] == 0


def test_a_node_that_gets_another_kernel_is_counted_as_that(program):
    done = program(
        CAPTURE
        + """
    graph = capture(first, first)
    made = instantiate(graph)
    run(made)
    count, nodes = ctypes.c_size_t(2), (c_void_p * 2)()
    assert library().cuGraphGetNodes(graph, nodes, ctypes.byref(count)) == 0
    class Params(ctypes.Structure):
        _fields_ = (("f", c_void_p), ("sizes", c_uint * 7), ("params", c_void_p), ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p))
    other = Params(second, (c_uint * 7)(100, 1, 1, 128, 1, 1, 0))
    assert call("cuGraphExecKernelNodeSetParams_v2", made, c_void_p(nodes[1]), ctypes.byref(other)) == 0
    run(made)
    """
    )
    assert (done.kernel("first")["launches"], done.kernel("second")["launches"]) == (3, 1)


def test_bodies_that_run_as_often_as_the_gpu_decides_are_not_counted_and_said(program):
    done = program(
        CAPTURE
        + """
    graph = capture(first)
    library().fake_add_conditional(graph)
    made = instantiate(graph)
    run(made), run(made)
    """
    )
    assert done.kernel("first")["launches"] == 2
    assert done.stats["unhandled"] == 2
    assert "2 uses of an interface that weft does not account for" in done.stderr


def test_with_green_contexts_a_grid_that_may_be_resident_at_once_is_not_shaped(program):
    source = """
        green = c_void_p()
        k = kernel("barrier")
        def shaped(grid):
            launch(k, grid=grid)
            return records()[-1]["shared"] > 0
        seen = [shaped(132), shaped(16 * 132 + 1)]
        assert call("cuGreenCtxCreate", ctypes.byref(green), None, 0, 1) == 0
        show([*seen, shaped(132), shaped(16 * 132 + 1)])
    """
    assert program(source, Policy(residency=2)).results == [True, True, False, True]


def test_the_end_of_a_green_context_leaves_the_wait_kernels_of_others(program):
    source = f"""
        green, comm, gemm = c_void_p(), kernel("{NCCL}"), kernel("gemm")
        for _ in range(3):
            launch(comm, stream=0x200), launch(gemm, stream=0x100)
            assert call("cuGreenCtxCreate", ctypes.byref(green), None, 0, 1) == 0
            assert call("cuGreenCtxDestroy", green) == 0
        show(library().fake_module_loads())
    """
    done = program(source, Policy(head_start_us=5))
    assert (done.results, done.stats["head_starts"]) == (1, 3)


def test_nothing_is_put_in_front_of_a_dependent_launch(program):
    done = program(
        f"""
        comm, gemm = kernel("{NCCL}"), kernel("gemm")
        launch(comm, stream=0x200)
        launch_ex(gemm, stream=0x100, attributes=((6, 1),))
        dependent = [r["name"] for r in records()]
        launch_ex(gemm, stream=0x100)
        show([dependent, [r["name"] for r in records()][2:]])
        """,
        Policy(head_start_us=5),
    )
    assert done.results == [[NCCL, "gemm"], ["weft_head_start", "gemm"]]
    assert done.stats["unhandled"] == 1


def test_functions_that_cuda_changed_later_keep_all_their_parameters(program):
    """CUDA 13.1 added a mode to cuLaunchHostFunc; weft intercepts no version newer than the CUDA it knows."""
    done = program(
        """
        from weft.shim import tracer
        launch(kernel("gemm"), stream=0x10)
        shown = []
        for flags in (0, PER_THREAD):
            older, newer = (by_proc_address("cuLaunchHostFunc", version, flags) for version in (13000, 13010))
            for mode in (1, 0, 7):
                assert call(older, c_void_p(0x10), None, None) == 0
                assert call(newer, c_void_p(0x10), None, None, c_uint(mode)) == 0
                shown.append(library().fake_host_mode())
            assert tracer.start()  # the shim then makes calls of its own in between
            assert call(newer, c_void_p(0x10), None, None, c_uint(5)) == 0
            tracer.drop()
            shown += [library().fake_host_mode(), older != newer]
        names = ("cuStreamWaitEvent", "cuLaunchKernel")
        known, same, changed = ([by_proc_address(n, version) for n in names] for version in (13040, 14000, 15000))
        own = ctypes.cast(library().fake_newer_wait, c_void_p).value
        launch(kernel("other"), function=changed[1])
        show([*shown, same == known, changed == [own, known[1]]])
        """
    )
    assert done.results == [1, 0, 7, 5, True, 1, 0, 7, 5, True, True, True]
    assert done.kernel("other")["launches"] == 1
