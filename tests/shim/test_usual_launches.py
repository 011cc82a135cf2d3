"""Repeated launches take the shim's shortest path: what may disturb them there."""

from __future__ import annotations

import pytest

from weft.policy import Policy

STEP = """
    kernels = [kernel(f"gemm_{i}") for i in range(3)]

    def step():
        return [launch(kernels[0]), launch_ex(kernels[1]), launch(kernels[2], function="cuLaunchKernel_ptsz")]

    for _ in range(10):
        assert step() == [0, 0, 0]
"""


def launches(done) -> list[int]:
    return [done.kernel(f"gemm_{i}")["launches"] for i in range(3)]


def test_repeated_launches_reach_the_driver_as_they_are(program):
    done = program(STEP + "    show()")
    assert [r["route"] for r in done.results] == 10 * [
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchKernel_ptsz",
    ]
    assert launches(done) == [10, 10, 10]
    assert done.stats["launches"] == 30


def test_a_repeated_launch_that_fails_is_reported_and_not_counted(program):
    done = program(
        STEP
        + """
    fail("cuLaunchKernel", 1, 719)
    assert step() == [719, 0, 0]
    assert step() == [0, 0, 0]
    """
    )
    assert launches(done) == [11, 12, 12]


@pytest.mark.parametrize("policy", [Policy(), Policy(residency=2, priority="high")])
def test_what_only_the_driver_may_refuse_reaches_it_as_it_is(program, policy):
    """A launch of no function is refused whatever its attributes point to."""
    done = program(
        STEP
        + """
    def with_attributes(handle, at):
        config = Config((1, 1, 1), (128, 1, 1), 0, None, at, 1)
        return call("cuLaunchKernelEx", ctypes.byref(config), handle, None, None)
    show([with_attributes(None, 0x10), with_attributes(None, None), with_attributes(kernels[1], None)])
    assert step() == [0, 0, 0]
    """,
        policy,
    )
    assert done.results == [400, 400, 1]
    assert launches(done) == [11, 11, 11]


def test_a_repeated_handle_with_another_shape_is_counted_in_another_row(program):
    done = program(
        STEP
        + """
    for _ in range(3):
        assert launch(kernels[0]) == launch_ex(kernels[1], threads=256) == launch(kernels[2], shared=1024) == 0
    """
    )
    rows = {(k["name"], k["threads"], k["shared_bytes"]): k["launches"] for k in done.stats["kernels"]}
    assert rows == {
        ("gemm_0", 128, 0): 13,
        ("gemm_1", 128, 0): 10,
        ("gemm_1", 256, 0): 3,
        ("gemm_2", 128, 0): 10,
        ("gemm_2", 128, 1024): 3,
    }


def test_a_repeated_collective_is_not_only_counted(program):
    """The shim also notes what the latest launch asked for."""
    done = program(
        STEP
        + """
    collective = kernel("ncclDevKernel_AllReduce")
    for ctas in [16] * 10 + [24]:
        assert step() == [0, 0, 0]
        assert launch(collective, grid=ctas) == 0
    """
    )
    assert done.kernel("ncclDevKernel_AllReduce")["launches"] == 11
    assert done.kernel("ncclDevKernel_AllReduce")["ctas"] == 24


def test_repeated_kernels_without_a_row_are_told_each_time(program):
    done = program(
        """
        library().fake_logging(0)
        k = kernel("softmax")
        for i in range(8200):
            launch(k, shared=4 * i)
        late = [kernel(f"late_{i}") for i in range(3)]
        for _ in range(100):
            assert [launch(one) for one in late] == [0, 0, 0]
        """
    )
    assert done.stats["launches"] == 8500
    assert done.stats["unlisted"] == 8200 - 8189 + 300


def test_a_cooperative_launch_among_repeated_ones_is_counted_as_such(program):
    done = program(
        STEP
        + """
    for _ in range(3):
        assert launch(kernels[0]) == launch_ex(kernels[1], attributes=[(COOPERATIVE, 1)]) == 0
        assert launch(kernels[2]) == 0
    """
    )
    assert done.stats["cooperative"] == 3
    assert launches(done) == [13, 13, 13]


def test_repeated_handles_that_are_used_again_get_their_new_name(program):
    done = program(
        STEP
        + """
    call("cuModuleUnload", None)
    library().fake_rename(kernels[1], b"second")
    for _ in range(4):
        assert step() == [0, 0, 0]
    """
    )
    assert launches(done) == [14, 10, 14]
    assert done.kernel("second")["launches"] == 4


def test_repeated_launches_are_captured(program):
    done = program(
        STEP
        + """
    graph = c_void_p()
    assert call("cuStreamBeginCapture_v2", c_void_p(0x10), 2) == 0
    for _ in range(4):
        assert [launch(k, stream=0x10) for k in kernels] == [0, 0, 0]
    assert call("cuStreamEndCapture", c_void_p(0x10), ctypes.byref(graph)) == 0
    assert step() == [0, 0, 0]
    """
    )
    assert done.stats["captured"] == 12
    assert launches(done) == [11, 11, 11]


def test_repeated_launches_in_a_child_are_its_own(program):
    done = program(
        STEP
        + """
    import os
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(5):
        assert step() == [0, 0, 0]
    if not child:
        os._exit(0)
    """
    )
    assert len(done.stats["processes"]) == 2
    assert launches(done) == [20, 20, 20]


@pytest.mark.parametrize("policy", [Policy(residency=2), Policy(head_start_us=5), Policy(priority="high")])
def test_repeated_launches_follow_a_policy_from_its_first_step_to_its_last(program, policy):
    """The process changes its own policy, as live tuning does."""
    done = program(
        STEP
        + f"""
    from weft.policy import Policy
    from weft.shim import binding
    own = binding.attach()
    collective = kernel("ncclDevKernel_AllReduce")

    def shaped():
        before = len(records())
        assert launch(collective, stream=0x40) == 0
        assert step() == [0, 0, 0]
        return [(r["shared"] > 0, r["priority"] is not None, r["name"]) for r in records()[before:]]

    def told(policy):
        binding.write_policy(own, policy)
        return shaped()

    plain = [told(Policy()) for _ in range(4)][-1]
    under = [told(Policy.from_dict({policy.to_dict()!r})) for _ in range(4)]
    assert all(one != plain and one == under[0] for one in under), under
    assert all(told(Policy()) == plain for _ in range(4))
    """
    )
    assert launches(done) == [22, 22, 22]
