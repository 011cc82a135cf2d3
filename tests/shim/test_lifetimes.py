"""Objects that end early or appear late for weft: contexts, modules, libraries, forked children, splits."""

from __future__ import annotations

import subprocess
import sys

import pytest
from building import HERE, compile_c
from test_nccl_routes import fake_nccl, nccl_program  # noqa: F401 (fixtures)

from weft.policy import Policy
from weft.shim.inject import Job

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
OVERLAP = Policy(residency=2, when="overlap", head_start_us=5, priority="high")


@pytest.mark.parametrize(
    "end", ["cuDevicePrimaryCtxReset_v2", "cuCtxDestroy_v2", "cuDevicePrimaryCtxRelease_v2"]
)
def test_what_is_in_flight_dies_with_its_context_and_comes_back(program, end):
    done = program(
        f"""
        n, g = kernel("{NCCL}"), kernel("gemm")
        def shaped():
            assert launch(g, stream=0x100) == 0
            return records()[-1]["shared"] > 0
        seen = []
        for _ in range(3):
            assert launch(n, stream=0x200) == 0
            seen.append(shaped())  # in flight
            assert call("{end}", 0) == 0
            if "Release" in "{end}":
                finish(0x200)
            seen.append(shaped())  # nothing is, any more
        show(seen)
        """,
        OVERLAP,
    )
    assert done.results == [True, False] * 3
    assert done.stats["tracking_failures"] == done.stats["head_start_failures"] == 0
    assert done.stats["head_starts"] == 3


def test_a_collective_of_another_context_stays_in_flight(program):
    done = program(
        f"""
        n, g = kernel("{NCCL}"), kernel("gemm")
        def shaped():
            assert launch(g, stream=0x100) == 0
            return records()[-1]["shared"] > 0
        launch(n, stream=0x200)
        finish(0x200)
        call("cuCtxDestroy_v2", 0)
        launch(n, stream=0x300)
        seen = [shaped()]
        finish(0x300)
        show([*seen, shaped()])
        """,
        OVERLAP,
    )
    assert done.results == [True, False]


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuGetProcAddress_v2", "cuModuleUnload"])
def test_a_driver_that_is_closed_and_loaded_again_is_found(environment, fake_driver, tmp_path, name):
    program = compile_c(tmp_path / "reload", str(HERE / "reload.c"), "-ldl")
    renamed = tmp_path / "libcuda-550.so"
    renamed.write_bytes((fake_driver / "libcuda.so.1").read_bytes())
    for library in ("libcuda.so.1", str(renamed)):
        with Job(Policy(residency=2)) as job:
            command = [program, name, library]
            assert subprocess.run(command, env=job.environment(environment), check=False).returncode == 0
            assert job.collect()["shaped"] == 1


@pytest.mark.parametrize("fresh", [(), ("new",)])
def test_modules_that_come_and_go_leave_no_memory_behind(environment, fake_driver, tmp_path, fresh):
    program = compile_c(tmp_path / "churn", str(HERE / "churn.c"), f"-L{fake_driver}", "-lcuda")
    steps, kernels = 400, 300
    command = [program, str(steps), str(kernels), *fresh]
    plain = int(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    with Job(Policy(priority="high")) as job:
        under = subprocess.run(command, env=job.environment(environment), check=True, capture_output=True)
        assert job.collect()["launches"] == steps * kernels
    # Ever new handles fill a bounded table; repeated ones must not grow it at all.
    assert int(under.stdout) - plain < (20_000 if fresh else 500)


@pytest.mark.parametrize("first", ["", "weft.restart()", "launch(kernel('before'))"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_made_in_any_way_have_policy_and_counters(weft_run, tmp_path, method, first):
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing, weft
from driver import kernel, launch, records
def child(queue):
    launch(kernel("gemm"))
    queue.put(records()[-1]["shared"] > 0)
if __name__ == "__main__":
    {first or "pass"}
    context = multiprocessing.get_context("{method}")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=40))
    process.join()
""")
    done = weft_run([sys.executable, str(script)], Policy(residency=2))
    assert (done.code, done.stdout) == (0, "True\n"), done.stderr
    assert done.kernel("gemm")["launches"] == 1


def test_a_storm_of_forks_is_counted(program):
    done = program(
        """
        import os
        launch(k := kernel("gemm"))
        def children():
            return [p for p in (fork() for _ in range(8))]
        def fork():
            pid = os.fork()
            if pid == 0:
                for _ in range(50):
                    launch(k)
                os._exit(0 if records()[-1]["shared"] else 1)
            return pid
        stop = threading.Event()
        def keep_launching():
            while not stop.is_set():
                launch(k)
        thread = threading.Thread(target=keep_launching)
        thread.start()
        codes = [os.waitpid(pid, 0)[1] for _ in range(5) for pid in children()]
        stop.set()
        thread.join()
        show(codes)
        """,
        Policy(residency=2),
    )
    assert done.results == [0] * 40
    children = [process["launches"] for process in done.stats["processes"]]
    assert sorted(children)[:40] == [50] * 40


LATE = """
    n = Nccl()
    a = n.settled(n.init(settings=config(12, blocking=0)))
    n.all_reduce(a)
    n.lib.fake_late(1)  # until it is 0
"""


def test_a_split_that_ends_after_the_deadline_writes_into_nobodys_memory(nccl_program):  # noqa: F811
    seen = nccl_program(
        LATE
        + """
    whys = [refused(routes.prepare, 24, 0.1), routes.communicators()[0].why_not, refused(routes.prepare, 24, 0.1)]
    threading.Timer(0.3, n.lib.fake_late, (0,)).start()
    n.all_reduce(a)  # waits for the split: NCCL would refuse it
    routes.prepare(24, 60)
    routes.route(24)
    n.all_reduce(a)
    late = [comm for name, comm, ctas in n.log("ncclCommAbort") if ctas == 24]
    show([whys, n.ctas(), len(late)])
    """,
    )
    assert "did not finish by the deadline" in seen[0][0]
    assert "an earlier split" in seen[0][1]
    assert "an earlier split" in seen[0][2]
    assert seen[1:] == [[12, 12, 24], 1]


def test_a_communicator_that_ends_before_its_late_split_is_let_go(nccl_program):  # noqa: F811
    assert (
        nccl_program(
            LATE
            + """
    b = n.init(settings=config(12))
    n.all_reduce(b)
    refused(routes.prepare, 24, 0.1)
    n.check(n.lib.ncclCommAbort(a))
    n.lib.fake_late(0)
    while not n.lib.fake_late_ended():
        time.sleep(0.01)
    routes.prepare(24, 60)
    routes.route(24)
    n.all_reduce(b)
    show(n.ctas()[-1])
    """,
        )
        == 24
    )


def test_children_of_a_split_in_the_background_are_counted_as_not_handled(nccl_program):  # noqa: F811
    statistics = {}
    seen = nccl_program(
        LATE
        + """
    made = c_void_p()
    n.check(n.lib.ncclCommSplit(a, 0, 0, byref(made), None), (7,))
    n.lib.fake_late(0)
    n.settled(a)
    n.all_reduce(made)
    show([bool(made.value), len(routes.communicators())])
    """,
        statistics=statistics,
    )
    assert seen == [True, 1]
    assert statistics["unhandled"] == 1


def test_a_release_that_leaves_the_context_alive_costs_no_launch_and_no_trace(program):
    """Some libraries retain and release the primary context for every operation."""
    done = program("""
        from tracer_driver import *
        k, lib = kernel("gemm"), library()
        lib.fake_calls_so_far.restype = ctypes.c_long
        def calls():
            before = lib.fake_calls_so_far()
            launch(k, stream=0x10)
            return lib.fake_calls_so_far() - before
        lib.fake_fail_at(ctypes.c_long(1 << 40))  # counts the driver's calls
        launch(k, stream=0x10)
        known = calls()
        assert call("cuDevicePrimaryCtxRelease_v2", 0) == 0
        counted = [known, calls()]
        before = left()
        assert tracer.start()
        launch(k, stream=0x10)
        assert call("cuDevicePrimaryCtxRelease_v2", 0) == 0
        launch(k, stream=0x10)
        recording = tracer.stop()
        show([*counted, len(recording.spans), recording.counters["contexts_gone"], left() == before])
    """)
    assert done.results == [1, 1, 2, 0, True]
