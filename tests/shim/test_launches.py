"""Every route to a launch is seen, counted once and passed on unchanged when no policy asks for more."""

from __future__ import annotations

import pytest

from weft.policy import Policy

SYMBOLS = ("cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz")


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_launch_found_by_dlsym_is_counted_and_unchanged(program, symbol):
    form = "launch_ex" if "Ex" in symbol else "launch"
    done = program(f"""
        k = kernel("gemm")
        for _ in range(3):
            assert {form}(k, grid=7, threads=64, shared=512, stream=0x50, function="{symbol}") == 0
        show()
    """)
    assert done.kernel("gemm")["launches"] == 3
    assert [(r["route"], r["grid"], r["shared"], r["stream"], r["attributes"]) for r in done.results] == [
        (symbol, 7, 512, 0x50, 0)
    ] * 3


@pytest.mark.parametrize("way", ["cuGetProcAddress", "cuGetProcAddress_v2"])
@pytest.mark.parametrize("flags", [0, 1, 2])
@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuLaunchKernelEx"])
def test_a_launch_found_by_get_proc_address_is_counted(program, way, flags, name):
    form = "launch_ex" if "Ex" in name else "launch"
    done = program(f"""
        address = by_proc_address("{name}", 12000, {flags}, "{way}")
        assert {form}(kernel("gemm"), function=address) == 0
        show()
    """)
    assert done.kernel("gemm")["launches"] == 1
    (record,) = done.results
    assert record["route"] == (f"{name}_ptsz" if flags == 2 else name)
    assert record["stream"] == (2 if flags == 2 else 1)


@pytest.mark.parametrize("version", [11030, 12000, 13000])
def test_get_proc_address_found_through_itself_still_substitutes(program, version):
    done = program(f"""
        ask = by_proc_address("cuGetProcAddress", {version})
        assert launch(kernel("gemm"), function=by_proc_address("cuLaunchKernel", {version}, way=ask)) == 0
    """)
    assert done.kernel("gemm")["launches"] == 1


def test_kernel_handles_are_named_and_shaped_like_functions(program):
    done = program(
        """
        assert launch(kernel("triton_mm", as_kernel=True)) == 0
        show()
        """,
        Policy(residency=3),
    )
    assert done.kernel("triton_mm") | {"shared_bytes": 0} == {
        "name": "triton_mm",
        "kind": "compute",
        "launches": 1,
        "shaped": 1,
        "beside": 0,
        "ctas": None,
        "blocks_per_sm": 3,
        "natural_blocks_per_sm": 16,
        "threads": 128,
        "shared_bytes": 0,
        "why_not": None,
    }


def test_an_unknown_function_is_the_drivers_to_refuse(program):
    done = program("""
        refused = [launch(None), launch_ex(None), call("cuLaunchKernelEx", None, kernel("k"), None, None)]
        show(refused)
    """)
    assert done.results == [400, 400, 1]
    assert done.stats["launches"] == 0


def test_a_kernel_without_a_name_runs_and_is_counted_as_unknown(program):
    done = program("""
        fail("cuFuncGetName", 2), fail("cuKernelGetName", 2)
        assert [launch(k := kernel("gemm")), launch(k)] == [0, 0]
        assert launch(k) == 0
        show()
    """)
    assert len(done.results) == 3
    assert done.stats["unknown"] == 2
    assert done.stats["launches"] == 3
    assert done.kernel("(kernels without a name)")["launches"] == 2
    assert done.kernel("gemm")["launches"] == 1


def test_a_failed_launch_is_reported_and_not_counted(program):
    done = program("""
        fail("cuLaunchKernel", 1, 719)
        show([launch(kernel("gemm")), library().fake_launches()])
    """)
    assert done.results == [719, 0]
    assert done.stats["launches"] == 0


def test_cooperative_launches_are_never_touched(program):
    done = program(
        """
        k, c = kernel("grid_sync"), kernel("ncclDevKernel_AllReduce")
        sizes = [c_uint(n) for n in (64, 1, 1, 128, 1, 1, 0)]
        assert call("cuLaunchCooperativeKernel", k, *sizes, None, None) == 0
        assert launch_ex(k, attributes=[(COOPERATIVE, 1)]) == 0
        assert launch_ex(c, attributes=[(COOPERATIVE, 1)]) == 0
        show()
        """,
        Policy(residency=1, priority="high"),
    )
    assert [(r["shared"], r["priority"], r["attributes"]) for r in done.results] == [
        (0, None, 0),
        (0, None, 1),
        (0, None, 1),
    ]
    assert done.stats["cooperative"] == 3
    assert done.stats["launches"] == 3
    assert done.stats["shaped"] == 0


def test_handles_that_are_used_again_get_their_new_name(program):
    done = program("""
        k = kernel("first")
        assert launch(k) == 0
        call("cuModuleUnload", None)
        library().fake_rename(k, b"second")
        assert launch(k) == 0
        assert launch(k) == 0
    """)
    assert done.kernel("first")["launches"] == 1
    assert done.kernel("second")["launches"] == 2


def test_more_kernels_than_rows_still_run(program):
    done = program(
        """
        k = kernel("gemm")
        for n in range(8300):
            assert launch(k, shared=n) == 0
        assert launch(kernel("ncclDevKernel_AllReduce")) == 0
        show([library().fake_launches(), records()[-1]["priority"]])
        """,
        Policy(priority="high"),
    )
    assert done.results == [8301, -5]
    assert done.stats["launches"] == 8301
    assert done.stats["unlisted"] == 8301 - (8192 - 3)
    assert done.kernel("(other collectives)")["launches"] == 1
    assert "more kernels than weft lists" in done.stderr
