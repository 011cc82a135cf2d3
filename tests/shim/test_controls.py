"""Each control does what the policy says, and nothing else."""

from __future__ import annotations

import pytest

from weft.policy import Policy, Rule

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


# --- residency ------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 17))
def test_residency_is_exactly_what_was_asked_wherever_it_can_be(program, n):
    done = program('assert launch(kernel("gemm")) == 0; show()', Policy(residency=n))
    kernel = done.kernel("gemm")
    assert kernel["blocks_per_sm"] == n
    assert kernel["natural_blocks_per_sm"] == 16
    assert kernel["shaped"] == (1 if n < 16 else 0)
    needed = 233472 // (n + 1) // 128 * 128 - 1024 + 1 if n < 16 else 0
    assert done.results[0]["shared"] == needed


def test_more_than_48_kib_is_allowed_to_the_kernel_first(program):
    done = program(
        """
        k = kernel("gemm")
        before = library().fake_max_dynamic(k)
        assert launch(k) == 0
        show([before, library().fake_max_dynamic(k)])
        """,
        Policy(residency=1),
    )
    before, after = done.results
    assert before == 48 * 1024
    assert after == done.kernel("gemm")["shared_bytes"] > 48 * 1024


def test_a_kernel_that_fits_no_more_often_is_left_alone(program):
    done = program(
        'assert launch(kernel("nvjet", registers=168), threads=384) == 0; show()', Policy(residency=3)
    )
    assert done.results[0]["shared"] == 0
    assert "at or below the requested residency" in done.kernel("nvjet")["why_not"]
    assert "nothing was shaped: already at or below the requested residency" in done.stderr


def test_rules_decide_by_name_before_the_default_and_can_exclude(program):
    done = program(
        """
        for name in ("triton_gemm_a", "vectorized_layer_norm_kernel", "elementwise"):
            assert launch(kernel(name)) == 0
        """,
        Policy(residency=4, rules=(Rule("*GEMM*", 2), Rule("*layer_norm*", None))),
    )
    shaped = {k["name"]: (k["shaped"], k["blocks_per_sm"]) for k in done.stats["kernels"]}
    assert shaped == {"triton_gemm_a": (1, 2), "vectorized_layer_norm_kernel": (0, 16), "elementwise": (1, 4)}


def test_collectives_are_never_shaped(program):
    done = program(
        f'assert launch(kernel("{NCCL}")) == 0; show()', Policy(residency=1, rules=(Rule("*", 1),))
    )
    assert done.results[0]["shared"] == 0
    assert done.stats["comm_launches"] == 1


def test_a_grid_that_is_resident_at_once_is_shaped_only_by_a_rule_that_names_it(program):
    source = """
        k = kernel("barrier_kernel")
        for grid in (132, 2 * 132, 16 * 132, 16 * 132 + 1):
            assert launch(k, grid=grid) == 0
        show([r["shared"] > 0 for r in records()])
    """
    # One block per SM stays resident at residency 1; up to 16 per SM would not; beyond that nothing did before.
    assert program(source, Policy(residency=1)).results == [True, False, False, True]
    assert program(source, Policy(rules=(Rule("barrier*", 1),))).results == [True, True, True, True]


def test_a_refused_shaped_launch_is_made_again_as_it_was_and_counted(program):
    done = program(
        """
        k = kernel("gemm")
        fail("cuLaunchKernel", 2)
        assert launch(k) == 0
        show()
        """,
        Policy(residency=2),
    )
    assert [r["shared"] for r in done.results] == [0]
    assert done.stats["shape_failures"] == 1
    assert done.kernel("gemm")["why_not"] == "the driver refused the shaped launch"


def test_a_kernel_that_is_refused_again_and_again_is_left_alone(program):
    done = program(
        """
        k = kernel("gemm")
        for _ in range(3):
            fail("cuLaunchKernel", 2)
            assert launch(k) == 0
        assert launch(k) == 0
        show()
        """,
        Policy(residency=2),
    )
    assert [r["shared"] for r in done.results] == [0, 0, 0, 0]
    assert done.stats["shape_failures"] == 3


def test_a_limit_lowered_by_the_program_is_raised_again(program):
    done = program(
        """
        k = kernel("gemm")
        assert launch(k) == 0
        call("cuFuncSetAttribute", k, 8, 1024)
        assert launch(k) == 0
        show()
        """,
        Policy(residency=1),
    )
    assert all(r["shared"] > 48 * 1024 for r in done.results)
    assert done.stats["shape_failures"] == 0


@pytest.mark.parametrize("api", ["cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuFuncSetAttribute"])
def test_without_an_answer_about_occupancy_the_launch_is_the_original(program, api):
    done = program(f'fail("{api}", 99); assert launch(kernel("gemm")) == 0; show()', Policy(residency=2))
    assert [r["shared"] for r in done.results] == [0]
    assert done.stats["shape_failures"] == 1


# --- only while a collective is in flight ------------------------------------------------------------


def test_when_overlap_shapes_only_between_a_collectives_launch_and_its_end(program):
    done = program(
        f"""
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        seen = []
        def shaped(stream=0x10):
            assert launch(gemm, stream=stream) == 0
            return records()[-1]["shared"] > 0
        seen.append(shaped())                    # nothing in flight
        assert launch(nccl, stream=0x20) == 0
        seen.append(shaped())
        seen.append(shaped(stream=0x20))         # behind the collective on its own stream, so it does not overlap
        finish(0x20)
        seen.append(shaped())
        assert launch(nccl, stream=0x20) == 0 and launch(nccl, stream=0x30) == 0
        finish(0x20)
        seen.append(shaped())
        finish(0x30)
        seen.append(shaped())
        show(seen)
        """,
        Policy(residency=2, when="overlap"),
    )
    assert done.results == [False, True, False, False, True, False]
    assert done.kernel("gemm")["shaped"] == 2


@pytest.mark.parametrize("api", ["cuStreamWriteValue32_v2", "cuMemHostRegister_v2"])
def test_a_collective_that_cannot_be_tracked_is_never_in_flight(program, api):
    done = program(
        f"""
        fail("{api}", 9)
        assert launch(kernel("{NCCL}"), stream=0x20) == 0
        assert launch(kernel("gemm"), stream=0x10) == 0
        show()
        """,
        Policy(residency=2, when="overlap"),
    )
    assert [r["shared"] for r in done.results] == [0, 0]
    assert done.stats["tracking_failures"] == 1


# --- priority ------------------------------------------------------------


@pytest.mark.parametrize("form", ["launch", "launch_ex"])
def test_priority_is_put_on_collectives_and_on_nothing_else(program, form):
    done = program(f'{form}(kernel("{NCCL}")); {form}(kernel("gemm")); show()', Policy(priority="high"))
    assert [(r["name"], r["priority"]) for r in done.results] == [(NCCL, -5), ("gemm", None)]
    assert done.stats["prioritised"] == 1


def test_attributes_of_the_program_are_kept_and_its_own_priority_stands(program):
    done = program(
        f"""
        k = kernel("{NCCL}")
        launch_ex(k, attributes=[(4, 1), (9, 2)])
        launch_ex(k, attributes=[(PRIORITY, -1)])
        launch_ex(k, attributes=[(4, 1)] * 32)
        show()
        """,
        Policy(priority="high"),
    )
    assert [(r["attributes"], r["priority"]) for r in done.results] == [(3, -5), (1, -1), (32, None)]


def test_a_refused_priority_falls_back_to_the_programs_launch(program):
    done = program(
        f'fail("cuLaunchKernelEx", 1); assert launch(kernel("{NCCL}")) == 0; show()', Policy(priority="high")
    )
    assert [(r["route"], r["priority"]) for r in done.results] == [("cuLaunchKernel", None)]
    assert done.stats["priority_failures"] == 1


def test_a_gpu_without_priorities_is_left_alone(program):
    done = program(
        f'fail("cuCtxGetStreamPriorityRange", 9); assert launch(kernel("{NCCL}")) == 0; show()',
        Policy(priority="high"),
    )
    assert [r["priority"] for r in done.results] == [None]


# --- head start ------------------------------------------------------------


def test_the_first_compute_launch_after_a_collective_waits_once_on_each_stream(program):
    done = program(
        f"""
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        for _ in range(2): launch(gemm, stream=0x10)
        launch(nccl, stream=0x20); launch(nccl, stream=0x30)
        for _ in range(2): launch(gemm, stream=0x10)
        launch(gemm, stream=0x40)
        launch(gemm, stream=0x30)          # the collective's own stream needs no wait
        launch(nccl, stream=0x20)
        launch(gemm, stream=0x10)
        show([(r["name"][:4], r["stream"]) for r in records()])
        """,
        Policy(head_start_us=5),
    )
    wait = "weft"
    assert [tuple(r) for r in done.results] == [
        ("gemm", 0x10),
        ("gemm", 0x10),
        ("nccl", 0x20),
        ("nccl", 0x30),
        (wait, 0x10),
        ("gemm", 0x10),
        ("gemm", 0x10),
        (wait, 0x40),
        ("gemm", 0x40),
        ("gemm", 0x30),
        ("nccl", 0x20),
        (wait, 0x10),
        ("gemm", 0x10),
    ]
    assert done.stats["head_starts"] == 3
    assert done.kernel("weft_head_start")["kind"] == "weft"
    assert "3 head starts of 5 µs" in done.stderr


def test_a_head_start_that_cannot_be_given_costs_nothing_but_a_count(program):
    done = program(
        f"""
        fail("cuModuleLoadData", 9)
        launch(kernel("{NCCL}"), stream=0x20)
        assert launch(kernel("gemm"), stream=0x10) == 0
        show()
        """,
        Policy(head_start_us=5),
    )
    assert [r["name"] for r in done.results] == [NCCL, "gemm"]
    assert done.stats["head_start_failures"] == 1


def test_no_policy_changes_nothing(program):
    done = program(f'launch(kernel("{NCCL}"), stream=2); launch(kernel("gemm"), stream=1); show()')
    assert [(r["name"], r["shared"], r["attributes"]) for r in done.results] == [(NCCL, 0, 0), ("gemm", 0, 0)]
    assert "no control was requested" in done.stderr


# --- which kernels overlap with collectives -------------------------------------------------------------------


TRACKED = f"""
    from weft.shim import binding
    from weft.shim.stats import snapshot
    compute, other = kernel("gemm"), kernel("norm")
    comm = kernel("{NCCL}")
    binding.set_policy(None, track=True)
    launch(compute)
    launch(comm, grid=24, stream=0x70)
    launch(compute)
    launch(compute)
    launch(other, stream=0x70)
    finish(0x70)
    launch(compute)
    binding.set_policy(None)
    launch(comm, grid=6, stream=0x70)
    launch(compute)
    show([[k["name"], k["beside"], k["launches"], k["shaped"], k["ctas"]] for k in snapshot()["kernels"]])
"""


def test_launches_that_overlap_with_a_collective_are_counted_without_shaping_any(program):
    done = program(TRACKED)
    assert sorted(done.results) == [["gemm", 2, 5, 0, None], [NCCL, 0, 2, 0, 6], ["norm", 0, 1, 0, None]]


def test_tracking_keeps_the_jobs_policy(program):
    done = program(TRACKED, Policy(residency=2))
    assert sorted(done.results)[0] == ["gemm", 2, 5, 5, None]
