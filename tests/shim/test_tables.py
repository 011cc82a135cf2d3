"""More of everything than a table holds, and states that never end: bounded, counted, never inverted."""

from __future__ import annotations

import pytest
from test_nccl_routes import build_nccl, fake_nccl, nccl_program  # noqa: F401 (fixtures)

from weft.policy import Policy, Rule

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
OVERLAP = Policy(residency=2, when="overlap")


def test_past_the_last_row_controls_still_hold(program):
    """One kernel with ever new shared-memory sizes, as from variable lengths; then unseen kernels."""
    done = program(
        f"""
        library().fake_logging(0)
        k = kernel("softmax")
        for i in range(9000):
            launch(k, shared=4 * i % 40000)
        library().fake_logging(1)
        launch(kernel("{NCCL}"))
        launch(kernel("gemm"))
        show([records()[0]["priority"], records()[1]["shared"] > 0])
        """,
        Policy(residency=2, priority="high", rules=(Rule("softmax", None),)),
    )
    # A kernel without a row keeps its priority; residency needs its name, which is in the row.
    assert done.results == [-5, False]
    assert done.stats["launches"] == 9002
    assert done.stats["unlisted"] > 0
    assert "more kernels than weft lists" in done.stderr


def test_many_policies_are_each_applied_and_leave_no_memory_behind(program):
    done = program("""
        import resource
        from weft.shim import binding, policy_image
        from weft import Policy
        k = kernel("gemm")
        library().fake_logging(0)
        def many(start, count):
            for i in range(start, start + count):
                policy_image.encode_policy.cache_clear()
                binding.set_policy(Policy(head_start_us=1 + i / 100))
                launch(k)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = many(0, 300)
        growth = many(300, 5000) - before
        library().fake_logging(1)
        binding.set_policy(Policy(residency=2, priority="high"))
        launch(k), launch(kernel("ncclX"))
        show([growth, records()[-2]["shared"] > 0, records()[-1]["priority"]])
    """)
    growth_kib, shaped, priority = done.results
    assert (shaped, priority) == (True, -5)
    assert growth_kib < 4096
    assert done.stats["policy_changes"] > 5000


def test_a_policy_that_is_half_written_is_waited_for_and_not_asked_for_again(program):
    """An interrupted writer leaves it like this; the launch after the next write has the new policy."""
    done = program(
        """
        import mmap
        from weft import Policy
        from weft.shim import binding
        k = kernel("gemm")
        def shaped():
            launch(k)
            return records()[-1]["shared"] > 0
        seen = [shaped()]
        path = binding.attach()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            control = binding._control_in(memory, path)
            control.sequence |= 1
            del control
        seen += [shaped() for _ in range(3)]
        binding.set_policy(Policy())
        show([*seen, shaped()])
        """,
        Policy(residency=2),
    )
    assert done.results == [True, True, True, True, False]


CONTROL = """
        import mmap, os
        from pathlib import Path
        from weft.shim import binding
        path = Path(os.environ["WEFT_JOB"]) / "control"
        file = path.open("r+b")
        memory = mmap.mmap(file.fileno(), 0)
        control = binding._control_in(memory, path)
"""


@pytest.mark.parametrize(
    ("spoil", "repair", "first"),
    [
        ("control.sequence |= 1", "control.sequence += 1", 0),
        ("control.checksum += 1", "control.checksum -= 1", 256),  # read again now and then
    ],
)
def test_a_program_that_starts_while_a_policy_is_written_has_none_until_it_is_whole(
    program, spoil, repair, first
):
    """Nor does the shim know which kernels communicate."""
    done = program(
        f"""
        {CONTROL}
        {spoil}
        k, n = kernel("gemm"), kernel("{NCCL}")
        for _ in range(3):
            assert launch(k) == launch(n) == 0
        {repair}
        for _ in range({first}):
            launch(k)
        before = len(records())
        assert launch(k) == launch(n) == 0
        show([(r["shared"] > 0, r["priority"]) for r in records()[:6] + records()[before:]])
        """,
        Policy(residency=2, priority="high"),
    )
    assert done.results == 6 * [[False, None]] + [[True, None], [False, -5]]
    assert done.kernel(NCCL)["kind"] == "comm"
    assert done.kernel(NCCL)["launches"] == 1
    assert done.stats["launches"] == 8 + first


def test_a_child_reads_what_was_not_whole_in_its_parent(program):
    done = program(
        f"""
        {CONTROL}
        k = kernel("gemm")
        launch(k)
        control.checksum += 1
        control.sequence += 2
        launch(k)
        control.checksum -= 1
        if child := os.fork():
            os._exit(os.waitpid(child, 0)[1] != 0)
        library().fake_forget()
        launch(k)
        show([r["shared"] > 0 for r in records()])
        """,
        Policy(residency=2),
    )
    assert done.results == [True]


@pytest.mark.parametrize("streams", [16, 40, 64, 100])
def test_many_streams_of_collectives_never_turn_in_flight_around(program, streams):
    done = program(
        f"""
        n, g = kernel("{NCCL}"), kernel("gemm")
        all_of_them = [0x1000 + 0x10 * i for i in range({streams})]
        def shaped():
            launch(g, stream=0x90000)
            return records()[-1]["shared"] > 0
        for s in all_of_them:
            launch(n, stream=s)
        seen = [shaped()]
        for s in all_of_them[1:]:
            finish(s)
        seen.append(shaped())
        finish(all_of_them[0])
        seen += [shaped() for _ in range(3)]
        for s in all_of_them:  # one after the other, as streams that are made and destroyed
            launch(n, stream=s + 0x100000)
            finish(s + 0x100000)
        seen.append(shaped())
        a, b = 0x500000, 0x500100
        launch(n, stream=a), launch(n, stream=b), finish(b)
        seen.append(shaped())
        finish(a)
        show([*seen, shaped()])
        """,
        OVERLAP,
    )
    assert done.results == [True, True, False, False, False, False, True, False]
    assert (done.stats["tracking_failures"] > 0) == (streams > 64)


def test_a_capture_whose_stream_is_destroyed_does_not_stay_open(nccl_program):  # noqa: F811
    assert nccl_program("""
    import driver
    n = Nccl()
    a = n.init(settings=config(12))
    n.all_reduce(a)
    cuda = driver.library()
    seen = []
    for end in (cuda.cuStreamDestroy_v2, cuda.fake_leave_capture):
        cuda.cuStreamBeginCapture_v2(c_void_p(0x100), 0)
        seen.append("captured" in (refused(routes.prepare, 24, 2) or ""))
        end(c_void_p(0x100))
    show([*seen, refused(routes.prepare, 24, 2)])
    """) == [True, True, None]


def test_more_streams_capture_than_are_listed(program):
    done = program("""
        graph = c_void_p()
        k = kernel("gemm")
        for i in range(80):
            assert call("cuStreamBeginCapture_v2", c_void_p(0x1000 + 16 * i), 0) == 0
        for i in range(80):
            launch(k, stream=0x1000 + 16 * i)
            assert call("cuStreamEndCapture", c_void_p(0x1000 + 16 * i), ctypes.byref(graph)) == 0
        launch(k)
    """)
    assert done.stats["captured"] == 80
    assert done.stats["launches"] == 1


def test_communicators_that_come_and_go_leave_no_memory_behind(nccl_program):  # noqa: F811
    seen = nccl_program("""
    import resource
    n = Nccl()
    n.lib.fake_logging(0)
    def many(count):
        for _ in range(count):
            comm = n.init(settings=config(12, net=b"Socket"))
            n.all_reduce(comm)
            n.check(n.lib.ncclCommDestroy(comm))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = many(1000)
    own = n.lib.fake_comm_bytes()
    growth = (many(10_000) - before) * 1024 - 10_000 * own
    last = n.init(settings=config(12))
    n.all_reduce(last)
    n.lib.fake_logging(1)
    routes.prepare(4, 60)
    routes.route(4)
    n.all_reduce(last)
    show([growth, len(routes.communicators()), n.ctas()])
    """)
    growth, count, ctas = seen
    assert growth < 2 << 20
    assert (count, ctas) == (1, [4])


def test_a_group_may_make_any_number_of_communicators(nccl_program):  # noqa: F811
    assert nccl_program("""
    n, made = Nccl(), []
    unique = n.unique()
    n.group(*(lambda r=r: made.append(n.init(200, r, unique, config(12))) for r in range(200)))
    n.group(*(lambda c=c: n.all_reduce(c) for c in made))
    routes.prepare(4, 60)
    routes.route(4)
    n.group(*(lambda c=c: n.all_reduce(c) for c in made))
    show([len(routes.communicators()), n.ctas().count(4), n.ctas().count(12)])
    """) == [200, 200, 200]


def test_more_libraries_than_are_listed_are_passed_through(nccl_program, tmp_path):  # noqa: F811
    folders = [build_nccl(tmp_path / f"nccl{i}") for i in range(6)]
    for i, folder in enumerate(folders):
        (folder / "libnccl.so.2").rename(folder / f"libnccl{i}.so")
    seen = nccl_program(f"""
    found = []
    for path in {[str(folder / f"libnccl{i}.so") for i, folder in enumerate(folders)]}:
        n = Nccl(path)
        comm = n.init(settings=config(12))
        n.all_reduce(comm)
        found.append(n.ctas())
    show([found, len(routes.communicators())])
    """)
    assert seen == [[[12]] * 6, 4]


def test_patterns_that_match_badly_take_no_longer_than_a_launch_may(program):
    done = program(
        """
        import time
        library().fake_logging(0)
        def first(name):
            k, start = kernel(name), time.thread_time()
            launch(k)
            return time.thread_time() - start
        first("warm")
        show([first("a" * 250), first("b" * 250)])
        """,
        Policy(rules=tuple(Rule("*a" * 40 + f"*{i}c", 2) for i in range(64))),
    )
    worst, plain = done.results
    assert worst < 50 * plain + 0.05
