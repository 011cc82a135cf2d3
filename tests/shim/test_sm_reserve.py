"""SMs that GEMMs leave free while a collective is in flight, on a fake cuBLAS."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import HERE, compile_c

from weft.policy import Policy

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
RESERVE = Policy(sm_reserve=16)


def build(folder: Path, fake_driver: Path, *flags: str) -> Path:
    shared = ("-shared", "-fPIC", f"-L{fake_driver}", "-lcuda")
    name = "-Wl,-soname,libcublas.so.12"
    library = compile_c(folder / "libcublas.so.12", str(HERE / "fake_cublas.c"), *flags, name, *shared)
    (folder / "libcublas.so").symlink_to(library.name)
    compile_c(folder / "libblas_user.so", str(HERE / "blas_user.c"), *shared, f"-L{folder}", "-lcublas")
    return folder


@pytest.fixture(scope="module")
def fake_cublas(fake_driver, tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("cublas"), fake_driver)


START = f"""
user, blas = ctypes.CDLL("libblas_user.so"), ctypes.CDLL("libcublas.so.12")
user.user_handle.restype = c_void_p
gemm = lambda stream=0x10: user.user_gemm(c_void_p(stream))
targets = lambda: [blas.fake_gemm_target(i) for i in range(blas.fake_gemms())]
handle_target = lambda: blas.fake_handle_target(c_void_p(user.user_handle(c_void_p(0x10))))
comm = kernel("{NCCL}")
"""


@pytest.fixture
def reserved(program, fake_cublas, environment):
    """Runs a program that is linked to the fake cuBLAS."""

    def run(source, policy=RESERVE, folder=fake_cublas, **env):
        path = f"{folder}:{environment['LD_LIBRARY_PATH']}"
        return program(START + source, policy, env={"LD_LIBRARY_PATH": path, **env})

    return run


def test_gemms_leave_sms_free_only_while_a_collective_is_in_flight(reserved):
    done = reserved("""
assert gemm() == 0
launch(comm, grid=8, stream=0x20)
assert gemm() == 0 and user.user_sgemm(c_void_p(0x10)) == 0
assert gemm(0x20) == 0                 # behind the collective, not concurrent with it
finish(0x20)
assert gemm() == 0
show([targets(), handle_target()])
""")
    assert done.results == [[0, 116, 116, 0, 0], 0]
    assert done.stats["sm_reserved"] == 2
    assert "2 GEMMs left 16 SMs free" in done.stderr


def test_many_places_that_call_cublas_cost_as_little_as_one(reserved):
    done = reserved("""
import time
def seconds(places):
    start = time.thread_time()
    assert user.user_places(c_void_p(0x10), places) == 0
    return time.thread_time() - start
show([min(taken) for taken in zip(*([seconds(places) for places in (1, 32)] for _ in range(30)))])
""")
    one, many = done.results

    assert many < 1.5 * one


@pytest.mark.parametrize("choose", [0, 1])
def test_cublaslt_chooses_and_runs_for_the_same_sms(reserved, choose):
    done = reserved(f"""
lt = lambda: user.user_lt(c_void_p(0x10), {choose})
assert lt() == 0
launch(comm, grid=8, stream=0x20)
assert lt() == 0
finish(0x20)
assert lt() == 0
show(targets())
""")
    assert done.results == [0, 116, 0]
    assert done.stats["sm_reserved"] == 1


def test_an_algorithm_chosen_earlier_runs_for_the_sms_it_was_chosen_for(reserved):
    done = reserved("""
launch(comm, grid=8, stream=0x20)
assert user.user_lt(c_void_p(0x10), 2) == 0
show(targets())
""")
    assert done.results == [0]
    assert done.stats["sm_reserved"] == 0


def test_a_number_that_the_program_set_stays(reserved):
    done = reserved("""
gemm()
user.user_target(100)
launch(comm, grid=8, stream=0x20)
assert gemm() == 0
show([targets(), handle_target()])
""")
    assert done.results == [[0, 100], 100]
    assert done.stats["sm_reserve_own"] == 1
    assert "1 unchanged, since the program set its own SM count" in done.stderr


def test_reproducible_results_are_not_touched(reserved):
    source = "launch(comm, grid=8, stream=0x20); gemm(); user.user_lt(c_void_p(0x10), 1); show(targets())"
    done = reserved(source, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert done.results == [0, 0]
    assert done.stats["sm_reserve_determinism"] >= 2
    assert "CUBLAS_WORKSPACE_CONFIG" in done.stderr


@pytest.mark.parametrize("refuse", ["1, 0", "0, 1"])
def test_what_cublas_refuses_is_called_as_the_program_did(reserved, refuse):
    done = reserved(f"""
blas.fake_refuse({refuse})
launch(comm, grid=8, stream=0x20)
assert gemm() == 0
show([targets(), handle_target(), len(records())])
""")
    assert done.results == [[0], 0, 2]
    assert done.stats["sm_reserve_failures"] == 1


def test_a_cublas_without_such_a_number(reserved, fake_driver, tmp_path):
    folder = build(tmp_path, fake_driver, "-DFAKE_OLD")
    source = """
launch(comm, grid=8, stream=0x20)
assert gemm() == 0 and user.user_lt(c_void_p(0x10), 1) == 0
show(targets())
"""
    done = reserved(source, folder=folder)
    assert done.results == [0, 0]
    assert done.stats["sm_reserve_failures"] >= 2


def test_more_sms_than_there_are_cannot_be_kept_free(reserved):
    done = reserved("launch(comm, grid=8, stream=0x20); gemm(); show(targets())", Policy(sm_reserve=132))
    assert done.results == [0]
    assert done.stats["sm_reserve_failures"] == 1


def test_gemms_that_weft_cannot_reach_are_said_to_be_unchanged(reserved):
    """cuBLAS found by dlsym, as in CuPy and JAX."""
    done = reserved("""
h = c_void_p()
blas.cublasCreate_v2(ctypes.byref(h)); blas.cublasSetStream_v2(h, c_void_p(0x10))
launch(comm, grid=8, stream=0x20)
numbers = [1, 0, 2, 3, 4, c_void_p(5), c_void_p(6), 7, 8, c_void_p(9), 10, 11, c_void_p(12), c_void_p(13), 14, 15, 16, 17]
assert blas.cublasGemmEx(h, *numbers) == 0
show(targets())
""")
    assert done.results == [0]
    assert (done.stats["sm_reserved"], done.stats["sm_reserve_others"]) == (0, 1)
    assert "not applied to 1 launches" in done.stderr


def test_a_lookup_in_the_whole_process_finds_what_a_loaded_cublas_has(program, fake_cublas, environment):
    done = program(
        """
whole = ctypes.CDLL(None)
names = ("cublasGemmEx", "cublasLtMatmul", "cublasSgemm_v2_64")
found = lambda: [hasattr(ctypes.CDLL(None), name) for name in names]
before = found()
blas = ctypes.CDLL("libcublas.so.12")
h = c_void_p()
blas.cublasCreate_v2(ctypes.byref(h)); blas.cublasSetStream_v2(h, c_void_p(0x10))
numbers = [1, 0, 2, 3, 4, c_void_p(5), c_void_p(6), 7, 8, c_void_p(9), 10, 11, c_void_p(12), c_void_p(13), 14, 15, 16, 17]
show([before, found(), ctypes.CDLL(None).cublasGemmEx(h, *numbers), blas.fake_gemms()])
""",
        env={"LD_LIBRARY_PATH": f"{fake_cublas}:{environment['LD_LIBRARY_PATH']}"},
    )
    assert done.results == [[False] * 3, [True, True, False], 0, 1]  # the fake has no *_64


def test_without_the_policy_and_without_weft_nothing_changes(reserved):
    done = reserved("launch(comm, grid=8, stream=0x20); gemm(); show(targets())", Policy())
    assert done.results == [0]
    assert not done.stats["sm_reserved"]
    assert not done.stats["sm_reserve_others"]
