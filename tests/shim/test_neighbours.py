"""Neighbours of weft: other tools in the process, other drivers, the program's own threads and limits."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from building import HERE, compile_c
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)

from weft.policy import Policy
from weft.shim.inject import Job, tuning_environment


@pytest.fixture(scope="module")
def linked(fake_driver, tmp_path_factory):
    program = tmp_path_factory.mktemp("linked") / "hammer"
    return compile_c(program, str(HERE / "hammer.c"), f"-L{fake_driver}", "-lcuda", "-lpthread")


def interposer(folder, *flags):
    return compile_c(folder / "libother.so", "-shared", "-fPIC", *flags, str(HERE / "interposer.c"), "-ldl")


def test_another_tool_is_called_as_often_as_without_weft(linked, environment, tmp_path):
    env = {**environment, "LD_PRELOAD": str(interposer(tmp_path))}
    plain = subprocess.run([linked, "2", "1000"], env=env, capture_output=True, text=True, check=True)
    with Job(Policy(priority="high")) as job:
        under = subprocess.run(
            [linked, "2", "1000"], env=job.environment(env), capture_output=True, text=True, check=True
        )
        assert job.collect()["launches"] == 2000
    assert plain.stderr == "the other tool saw 1000 launches and 0 all-reduces\n"
    # Collectives with a priority go by cuLaunchKernelEx, which this tool does not intercept.
    assert under.stderr == "the other tool saw 750 launches and 0 all-reduces\n"
    with Job() as job:
        under = subprocess.run(
            [linked, "2", "1000"], env=job.environment(env), capture_output=True, text=True, check=True
        )
    assert under.stderr == plain.stderr


def test_another_tool_that_intercepts_dlsym_is_called(environment, tmp_path):
    env = {**environment, "LD_PRELOAD": str(interposer(tmp_path, "-DDLSYM"))}
    source = "from driver import *\nk = kernel('gemm')\nfor _ in range(10): assert launch(k) == 0\n"
    command = [sys.executable, "-c", source]
    plain = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    with Job(Policy(residency=2)) as job:
        under = subprocess.run(command, env=job.environment(env), capture_output=True, text=True, check=True)
        assert job.collect()["shaped"] == 10
    assert under.stderr == plain.stderr == "the other tool saw 10 launches and 0 all-reduces\n"


def test_another_tool_in_front_of_nccl_is_called(environment, fake_nccl, tmp_path):  # noqa: F811
    program = compile_c(
        tmp_path / "calls", str(HERE / "nccl_hammer.c"), f"-L{fake_nccl}", "-lnccl", "-ldl", "-rdynamic"
    )
    env = {
        **environment,
        "LD_LIBRARY_PATH": f"{fake_nccl}:{environment['LD_LIBRARY_PATH']}",
        "LD_PRELOAD": str(interposer(tmp_path)),
    }
    with Job() as job:
        done = subprocess.run(
            [program, "1", "100", "time"],
            env=job.environment(env),
            capture_output=True,
            text=True,
            check=True,
        )
    assert "901 all-reduces" in done.stderr


# --- drivers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory):
    """A driver like CUDA 11.8 to 12.2, without a call for a function's name."""
    folder = tmp_path_factory.mktemp("old")
    compile_c(
        folder / "libcuda.so.1",
        "-shared",
        "-fPIC",
        "-DFAKE_OLD",
        "-Wl,-Bsymbolic,-soname,libcuda.so.1",
        str(HERE / "fake_cuda.c"),
        str(HERE / "fake_cuda_events.c"),
        "-lpthread",
    )
    return folder


@pytest.mark.parametrize("way", ["cuModuleGetFunction", "cuLibraryGetKernel"])
def test_an_old_drivers_kernels_have_the_names_that_the_program_asked_for(
    program, old_driver, environment, way
):
    done = program(
        f"""
        def load(name):
            found = c_void_p()
            assert call("{way}", ctypes.byref(found), None, name.encode()) == 0
            return found
        gemm, comm = load("gemm"), load("ncclDevKernel_AllReduce")
        assert [launch(gemm), launch(comm)] == [0, 0]
        show()
        """,
        Policy(residency=2, priority="high"),
        env={"LD_LIBRARY_PATH": f"{old_driver}:{environment['LD_LIBRARY_PATH']}"},
    )
    gemm, comm = done.results
    assert gemm["shared"] > 0
    assert comm["priority"] == -5
    assert done.stats["unknown"] == 0


def test_kernels_that_cannot_be_named_are_counted_and_said(program, old_driver, environment):
    done = program(
        "k = kernel('gemm')\nfor _ in range(1000): assert launch(k) == 0\nshow(records()[-1]['shared'])",
        Policy(residency=2),
        env={"LD_LIBRARY_PATH": f"{old_driver}:{environment['LD_LIBRARY_PATH']}"},
    )
    assert done.results == 0
    assert (done.stats["launches"], done.stats["unknown"]) == (1000, 1000)
    assert "1,000 launches of kernels that this driver does not name" in done.stderr


# --- the program's own limits -------------------------------------------------------------------------------------


def test_a_limit_that_the_program_sets_is_never_overwritten_by_a_stale_one(
    environment, fake_driver, tmp_path
):
    program = compile_c(
        tmp_path / "race", str(HERE / "attr_race.c"), f"-L{fake_driver}", "-lcuda", "-lpthread"
    )
    with Job(Policy(residency=2)) as job:
        env = {**job.environment(environment), "FAKE_SLOW": "1"}
        done = subprocess.run([program], env=env, capture_output=True, text=True, check=True, timeout=120)
        assert job.collect()["shaped"] > 0
    assert done.stdout == "0\n"


def test_a_limit_stays_what_the_program_or_the_shaped_launch_needs(program):
    done = program(
        """
        k = kernel("gemm")
        limit = lambda: library().fake_max_dynamic(k)
        seen = []
        assert launch(k, shared=60_000) == 1  # the program has not allowed it: the driver refuses it
        launch(k)
        needed = records()[-1]["shared"]
        seen.append(limit() - needed)
        assert call("cuFuncSetAttribute", k, 8, 120_000) == 0
        seen.append(limit())
        launch(k, threads=256)
        seen.append(limit())
        assert call("cuFuncSetAttribute", k, 8, 50_000) == 0
        seen.append(limit() - needed)
        assert call("cuFuncSetAttribute", k, 8, 10**6) != 0
        launch(k, shared=50_000)
        show([needed, seen, [r["shared"] > 0 for r in records()]])
        """,
        Policy(residency=2),
    )
    needed, seen, shaped = done.results
    assert seen == [0, 120_000, 120_000, 0]
    assert needed > 50_000
    assert all(shaped)


@pytest.mark.parametrize("as_kernel", [False, True])
def test_a_limit_that_is_set_before_every_launch_costs_one_question(program, as_kernel):
    done = program(
        f"""
        k = kernel("conv", as_kernel={as_kernel})
        assert call("cuFuncSetAttribute", k, 8, 60_000) == 0
        library().fake_fail_at(c_int(1_000_000))
        for _ in range(50):
            assert call("cuFuncSetAttribute", k, 8, 60_000) == 0
        show(library().fake_calls_so_far())
        """,
        Policy(),
    )
    assert done.results <= 2 * 50  # the call itself, and cuCtxGetCurrent


LIMIT = """
from ctypes import byref, c_size_t
lib = library()

def limit(k):
    value = c_int(-1)
    as_kernel = lib.cuFuncGetAttribute(byref(value), 8, k) != 0
    assert not as_kernel or lib.cuKernelGetAttribute(byref(value), 8, k, 0) == 0
    return value.value

def fits(k, bytes, function="cuOccupancyMaxActiveBlocksPerMultiprocessor", *flags):
    return getattr(lib, function)(byref(c_int()), k, 128, c_size_t(bytes), *flags)
"""


@pytest.mark.parametrize("as_kernel", [False, True])
def test_the_program_meets_its_own_limit_where_residency_raised_it(program, environment, as_kernel):
    """Natively and under a policy the same calls succeed, the same are refused, with the same values."""
    source = f"""
        k, seen = kernel("gemm", as_kernel={as_kernel}), []
        set_limit = lambda bytes: lib.cuFuncSetAttribute(k, 8, bytes)
        sizes = [c_uint(n) for n in (100, 1, 1, 128, 1, 1, 60_000)]
        over = lambda: [launch(k, shared=60_000), launch_ex(k, shared=60_000), launch(k, shared=60_000, threads=64),
                        call("cuLaunchCooperativeKernel", k, *sizes, None, None)]
        def look():
            again = fits(k, 60_000, "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 0)
            seen.append([limit(k), over(), fits(k, 60_000), again, launch(k), over(), launch(k, 5000)])
        for _ in range(2):
            look()
        for bytes in (100_000, 59_999, 60_000, 1000, 10**6):  # what was allowed is forbidden again
            seen.append(set_limit(bytes))
            look()
        lib.cuModuleUnload(None)  # the handles may be others' from here on
        look()
        begun = lib.cuStreamBeginCapture_v2(c_void_p(0x10), 2)
        seen.append([begun, launch(k, shared=60_000, stream=0x10), launch(k, stream=0x10)])
        show([seen, lib.fake_max_dynamic(k)])
    """
    source = LIMIT + textwrap.dedent(source)
    command = [sys.executable, "-c", "from driver import *\n" + source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    native, shaped = json.loads(done.stdout), program(source, Policy(residency=2))
    assert shaped.results[0] == native[0]
    assert shaped.results[1] > native[1] == 1000
    assert shaped.stats["shaped"] > 0
    assert [shaped.stats[name] for name in ("unknown", "unlisted", "shape_failures")] == [0, 0, 0]


@pytest.mark.parametrize("path", ["", ":/x", "/x:", "a::b", "/x"])
def test_pythonpath_is_kept_as_it_is(path):
    found = tuning_environment(Policy(), {"PYTHONPATH": path})["PYTHONPATH"]
    kept, _, ours = found.rpartition(":")
    assert kept == path
    assert ours.endswith("autoload")
