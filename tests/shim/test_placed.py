"""The exact head start on the fake driver: compute waits until the collective is placed, within a bound."""

from __future__ import annotations

import shutil

import pytest
from building import HERE, compile_c

from weft.policy import Policy

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
PLACED = Policy(head_start="placed")
WAIT = "weft_head_start_placed"
EVENT, PROGRAMMATIC = 12, 6


def timed(source: str) -> str:
    """A program on the simulated GPU's clock: `gemm` takes every SM, `comm` sixteen, a copy none."""
    return f"""
from tracer_driver import *
gemm, comm, copy_in = kernel("gemm"), kernel("{NCCL}"), kernel("copy_in")
cost("gemm", 1000, 132); cost("{NCCL}", 900, 16); cost("copy_in", 50_000, 0)
short = kernel("short"); cost("short", 300, 0)
{source}
show([[n, s, a, e] for n, s, a, e in truths()])
"""


def starts(done, name):
    return [start for n, _, start, _ in done.results if n == name]


def test_the_collective_goes_first_although_the_gemm_takes_every_sm(program):
    """The collective waits for a copy of 300 µs after each GEMM, when the next GEMM could start already."""
    steps = """
for _ in range(4):
    launch(gemm, grid=132, stream=0x10)
    wait(0x20, new_event(0x10))
    launch(short, stream=0x20)
    launch(comm, grid=16, stream=0x20)
"""
    plain = program(timed(steps), Policy())
    placed = program(timed(steps), PLACED)
    waited = [b - a for a, b in zip(starts(placed, "gemm")[1:], starts(placed, NCCL), strict=False)]
    assert all(gap <= 0 for gap in waited)  # each collective starts before the GEMM behind it
    first = [b - a for a, b in zip(starts(plain, "gemm")[1:], starts(plain, NCCL), strict=False)]
    assert any(gap > 0 for gap in first)  # without a head start a GEMM takes the SMs first
    assert placed.stats["placed_events"] == 4
    assert placed.stats["head_starts"] == 3
    assert not placed.stats["placed_timeouts"]
    assert "3 waits for 4 collectives to be placed" in placed.stderr


@pytest.mark.parametrize("bound_us", [0, 200])
def test_the_wait_is_bounded_whatever_the_collectives_stream_waits_for(program, bound_us):
    done = program(
        timed("""
launch(copy_in, stream=0x20)            # 50 ms on the collective's stream
launch(comm, grid=16, stream=0x20)
launch(gemm, grid=132, stream=0x10)
sync()
"""),
        Policy(head_start="placed", head_start_us=bound_us),
    )
    (gemm,), (comm,) = starts(done, "gemm"), starts(done, NCCL)
    assert comm > 50_000_000
    assert gemm < 20_000 + 1000 * (bound_us or 5000) + 1_000_000  # the host's calls take a little, too


def test_waits_in_vain_become_rare(program):
    """If each collective is behind a long copy, waits become rare: after each one, 1, 2, 4, … are skipped."""
    done = program(
        timed("""
for _ in range(63):
    launch(copy_in, stream=0x20)
    launch(comm, grid=16, stream=0x20)
    launch(gemm, grid=132, stream=0x10)
    sync(); library().fake_finish_all()
launch(comm, grid=16, stream=0x20)
"""),
        PLACED,
    )
    assert done.stats["placed_timeouts"] == 6  # at collectives 1, 3, 6, 11, 20 and 37
    assert not done.stats["placed_behind"]


def test_compute_does_not_wait_behind_a_backlog_of_collectives(program):
    """Compute waits for the first, in vain; each other one would take as long as all before it."""
    done = program(
        timed("""
launch(copy_in, stream=0x20)
for _ in range(20):
    launch(comm, grid=16, stream=0x20)
    launch(gemm, grid=100, stream=0x10)
launch(comm, grid=16, stream=0x20)
"""),
        PLACED,
    )
    gemms = starts(done, "gemm")
    assert gemms[19] - gemms[1] < 18 * 1_000_000 + 200_000  # one after the other
    assert done.stats["placed_timeouts"] == 1
    assert done.stats["placed_behind"] >= 17


def test_of_collectives_in_a_row_the_first_is_waited_for(program):
    """Waiting for the last would take as long as the others."""
    done = program(
        timed("""
launch(short, stream=0x20)
for _ in range(3): launch(comm, grid=16, stream=0x20)
wave = kernel("wave"); cost("wave", 1000, 100)
launch(wave, grid=100, stream=0x10)
"""),
        PLACED,
    )
    (wave,), comm = starts(done, "wave"), starts(done, NCCL)
    assert comm[0] <= wave < comm[0] + 900_000
    assert not done.stats["placed_timeouts"]


def test_the_event_is_put_on_the_launch_and_a_wait_in_front_of_the_first_compute_launch(program):
    done = program(
        f"""
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        launch(gemm, stream=0x10)
        launch(nccl, stream=0x20); launch(nccl, stream=0x30)
        for _ in range(2): launch(gemm, stream=0x10)
        launch(gemm, stream=0x40)
        launch(gemm, stream=0x30)          # the latest collective's own stream needs no wait
        library().fake_finish_all()
        launch(gemm, stream=0x50)          # placed by now
        show([(r["name"], r["stream"], r["attributes"]) for r in records()])
        """,
        PLACED,
    )
    assert [tuple(r) for r in done.results] == [
        ("gemm", 0x10, 0),
        (NCCL, 0x20, 1),
        (NCCL, 0x30, 1),
        (WAIT, 0x10, 0),
        ("gemm", 0x10, 0),
        ("gemm", 0x10, 0),
        (WAIT, 0x40, 0),
        ("gemm", 0x40, 0),
        ("gemm", 0x30, 0),
        ("gemm", 0x50, 0),
    ]
    assert done.stats["placed_ready"] == 1
    assert done.stats["head_starts"] == 2


def test_events_have_no_timing_and_are_used_again(program):
    done = program(
        f"""
        nccl = kernel("{NCCL}")
        for _ in range(1000):
            launch(nccl, stream=0x20)
            library().fake_finish_all()
        show([library().fake_live_events(), library().fake_live_streams(), library().fake_timed_completions()])
        """,
        PLACED,
    )
    events, streams, refused = done.results
    assert events <= 256
    assert (streams, refused) == (1, 0)
    assert done.stats["placed_events"] == 1000


def test_collectives_without_end_do_not_fill_the_helper(program):
    done = program(
        f"""
        nccl = kernel("{NCCL}")
        for _ in range(1000): launch(nccl, stream=0x20)
        launch(kernel("gemm"), stream=0x10)
        show([r["name"] for r in records()][1000:])
        """,
        PLACED,
    )
    assert done.stats["placed_events"] == 256
    assert done.stats["placed_busy"] == 744
    assert done.results == ["gemm"]  # what cannot be told is not waited for


def test_a_lane_that_another_stream_had_lets_the_first_collective_be_waited_for(program):
    """With more streams than lanes: collectives that nothing met on the old stream are no concern of the new."""
    done = program(
        timed("""
for number in range(64):
    for _ in range(3): launch(comm, grid=16, stream=0x1000 + 16 * number)
    sync(); library().fake_finish_all()
copy("cuMemcpyHtoDAsync_v2", 0x20000, 0x100, 300_000, 0x20)
launch(comm, grid=16, stream=0x20)
launch(gemm, grid=132, stream=0x10)
"""),
        PLACED,
    )
    assert starts(done, NCCL)[-1] <= starts(done, "gemm")[0]
    assert done.stats["head_starts"] == 1


def test_a_helper_whose_write_was_refused_does_not_hold_up_later_collectives(program):
    """Its wait is already queued, for a collective that may be behind a copy of 50 ms."""
    done = program(
        timed("""
launch(copy_in, stream=0x20)
fail("cuStreamWriteValue32_v2", 1, 1)
launch(comm, grid=16, stream=0x20)
for number in range(63): launch(comm, grid=16, stream=0x1000 + 16 * number)
launch(short, stream=0x30)
launch(comm, grid=16, stream=0x30)     # the 65th stream: gets the idle lane
launch(gemm, grid=132, stream=0x10)
"""),
        PLACED,
    )
    assert not done.stats["placed_timeouts"]
    assert done.stats["placed_failures"] == 1


def test_an_event_of_the_program_is_used_and_stays_the_only_one(program):
    done = program(
        f"""
        from tracer_driver import new_event
        event = new_event().value
        launch_ex(kernel("{NCCL}"), stream=0x20, attributes=(({EVENT}, event & 0xffffffff, event >> 32),))
        launch(kernel("gemm"), stream=0x10)
        show([[r["name"], r["attributes"]] for r in records()])
        """,
        PLACED,
    )
    assert done.results == [[NCCL, 1], [WAIT, 0], ["gemm", 0]]
    assert done.stats["placed_events"] == 1


def test_nothing_is_put_between_a_dependent_launch_and_its_predecessor(program):
    done = program(
        f"""
        from tracer_driver import dependent
        gemm = kernel("gemm")
        launch(gemm, stream=0x10)
        launch(kernel("{NCCL}"), stream=0x20)
        dependent(gemm, 0x10)
        launch(gemm, stream=0x10)
        show([[r["name"] for r in records()], library().fake_broken_programmatic()])
        """,
        PLACED,
    )
    assert done.results == [["gemm", NCCL, "gemm", WAIT, "gemm"], 0]


def test_a_launch_with_the_dependency_switched_off_gets_its_head_start(program):
    """Libraries set the attribute on every launch, with the value 0 where PDL is off."""
    done = program(
        f"""
        gemm = kernel("gemm")
        launch(kernel("{NCCL}"), stream=0x20)
        launch_ex(gemm, stream=0x10, attributes=(({PROGRAMMATIC}, 0),))
        show([r["name"] for r in records()])
        """,
        PLACED,
    )
    assert done.results == [NCCL, WAIT, "gemm"]
    assert done.stats["unhandled"] == 0


def test_a_capture_has_neither_event_nor_wait(program):
    done = program(
        f"""
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        library().cuStreamBeginCapture_v2(c_void_p(0x10), 0)
        library().fake_join_capture(c_void_p(0x10), c_void_p(0x20))
        launch(nccl, stream=0x20)
        launch(gemm, stream=0x10)
        graph = c_void_p()
        library().fake_leave_capture(c_void_p(0x20))
        assert library().cuStreamEndCapture(c_void_p(0x10), ctypes.byref(graph)) == 0
        launch(nccl, stream=0x20)
        library().cuStreamBeginCapture_v2(c_void_p(0x30), 0)
        launch(gemm, stream=0x30)          # behind a collective outside of the capture
        assert library().cuStreamEndCapture(c_void_p(0x30), ctypes.byref(graph)) == 0
        show([[[r["name"], r["attributes"]] for r in records()], library().fake_unsafe_calls()])
        """,
        PLACED,
    )
    assert done.results == [[[NCCL, 0], ["gemm", 0], [NCCL, 1], ["gemm", 0]], 0]
    assert done.stats["placed_captured"] == 3


@pytest.mark.parametrize("api", ["launch completion event", "cuStreamWaitEvent", "cuStreamWriteValue32_v2"])
def test_what_the_driver_refuses_is_counted_and_the_program_goes_on(program, api):
    done = program(
        f"""
        fail("{api}", 99, 1)
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        for _ in range(8):
            assert launch(nccl, stream=0x20) == 0
            assert launch(gemm, stream=0x10) == 0
        show([r["name"] for r in records()])
        """,
        PLACED,
    )
    assert done.results == [NCCL, "gemm"] * 8
    assert done.stats["placed_failures"] == 8
    assert not done.stats["head_starts"]


def test_a_driver_before_cuda_12_3_is_not_asked(program, tmp_path):
    compile_c(
        tmp_path / "libcuda.so.1",
        *("-shared", "-fPIC", "-DFAKE_OLD", "-Wl,-Bsymbolic,-soname,libcuda.so.1"),
        *(str(HERE / "fake_cuda.c"), str(HERE / "fake_cuda_events.c"), "-lpthread"),
    )
    source = f"""
    lib = library()
    made = lambda name: (lib.cuModuleGetFunction(ctypes.byref(f := c_void_p()), None, name.encode()), f)[1]
    gemm, nccl = made("gemm"), made("{NCCL}")
    launch(nccl, stream=0x20); launch(gemm, stream=0x10)
    show([[r["name"], r["attributes"]] for r in records()])
    """
    done = program(source, PLACED, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.results == [[NCCL, 0], ["gemm", 0]]
    assert done.stats["placed_failures"] == 1
    assert "no launch-completion event" in done.stderr


def test_a_new_context_has_its_own_events_and_helpers(program):
    done = program(
        f"""
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        for _ in range(2):
            launch(nccl, stream=0x20); launch(gemm, stream=0x10)
            assert library().cuDevicePrimaryCtxReset_v2(0) == 0
            library().fake_context_alive()
        show([[r["name"] for r in records()], library().fake_dead_calls()])
        """,
        PLACED,
    )
    assert done.results == [[NCCL, WAIT, "gemm"] * 2, 0]


def test_a_forked_child_starts_anew(program):
    done = program(
        f"""
        import os
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        launch(nccl, stream=0x20)
        pid = os.fork()
        library().fake_forget()
        launch(gemm, stream=0x10)
        found = [r["name"] for r in records()]
        library().fake_forget()
        launch(nccl, stream=0x20); launch(gemm, stream=0x10)
        found += [r["name"] for r in records()]
        if pid == 0:
            os._exit(0 if found == ["gemm", "{NCCL}", "{WAIT}", "gemm"] else 3)
        show([os.waitpid(pid, 0)[1], found])
        """,
        PLACED,
    )
    assert done.results == [0, [WAIT, "gemm", NCCL, WAIT, "gemm"]]


def test_with_priority_and_event_the_launch_is_made_once(program):
    done = program(
        f'launch(kernel("{NCCL}"), stream=2); launch(kernel("gemm"), stream=1); show()',
        Policy(priority="high", head_start="placed"),
    )
    nccl, wait, gemm = done.results
    assert (nccl["attributes"], nccl["priority"]) == (2, -5)
    assert [wait["name"], gemm["name"]] == [WAIT, "gemm"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler")
def test_many_threads_each_with_a_stream_of_collectives(program):
    done = program(
        f"""
        gemm, nccl = kernel("gemm"), kernel("{NCCL}")
        library().fake_logging(0)
        def work(i):
            for _ in range(300):
                assert launch(nccl, stream=0x1000 + 16 * i) == 0
                assert launch(gemm, stream=0x9000 + 16 * i) == 0
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        show([])
        """,
        PLACED,
    )
    assert done.stats["comm_launches"] == 8 * 300
    counted = sum(done.stats[name] for name in ("placed_events", "placed_busy", "placed_failures"))
    assert counted == 8 * 300


def test_a_trace_has_the_programs_kernels_and_the_collectives_true_starts(program):
    """The tracer uses the event that the launch already carries."""
    done = program(
        f"""
from tracer_driver import *
gemm, comm = kernel("gemm"), kernel("{NCCL}")
cost("gemm", 1000, sms=132)
cost("{NCCL}", 300, sms=8)
assert tracer.start()
for i in range(4):
    launch(gemm, stream=0x10)
    wait(0x20, new_event(0x10))
    launch(comm, grid=8, stream=0x20)
sync()
tell(tracer.stop(), events=[r["attributes"] for r in records() if r["name"] == "{NCCL}"])
""",
        PLACED,
    )
    spans, truth = done.results["spans"], done.results["truth"]
    assert [s[:2] for s in spans] == [list(t[:2]) for t in truth]
    base = truth[0][3] - spans[0][3]
    assert all(abs(s[2] + base - t[2]) < 8000 for s, t in zip(spans, truth, strict=True) if s[0] == NCCL)
    assert done.results["events"] == [1] * 4
