"""NCCL's calls under the shim, against a fake NCCL: keys, counts, siblings, and never a changed program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import pytest
from building import HERE, compile_c

from weft.shim.inject import Job


class mentions:  # noqa: N801 (reads as a word)
    """Equal to any text that contains `word`."""

    def __init__(self, word):
        self.word = word

    def __eq__(self, text):
        return self.word in text

    __hash__ = None


def build_nccl(folder, *flags):
    folder.mkdir(parents=True, exist_ok=True)
    library = compile_c(
        folder / "libnccl.so.2",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnccl.so.2",
        *flags,
        str(HERE / "fake_nccl.c"),
        "-lpthread",
        "-ldl",
    )
    (folder / "libnccl.so").symlink_to(library.name)
    compile_c(
        folder / "libuser.so",
        "-shared",
        "-fPIC",
        str(HERE / "nccl_user.c"),
        f"-L{folder}",
        "-lnccl",
        f"-Wl,-rpath,{folder}",
    )
    return folder


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory):
    return build_nccl(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def nccl_program(environment, fake_nccl):
    """Runs Python source on the fake NCCL (see nccl_driver.py) under the shim; returns what it `show`s."""

    def run(source, env=None, folder=fake_nccl, job=True, statistics=None, policy=None):
        code = "from nccl_driver import *\n" + textwrap.dedent(source)
        path = f"{folder}:{environment['LD_LIBRARY_PATH']}"
        base = {**environment, "LD_LIBRARY_PATH": path, **(env or {})}
        with Job(policy) as started:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=started.environment(base) if job else base,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            if statistics is not None:
                statistics.update(started.collect())
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return lines[0] if len(lines) == 1 else lines

    return run


TWO_GHOSTS = """
    n = Nccl()
    unique = n.unique()
    ghosts = []
    n.group(lambda: ghosts.append(n.init(2, 0, unique, config(12))), lambda: ghosts.append(n.init(2, 1, unique, config(12))))
    def step():
        n.group(*(lambda c=c: n.all_reduce(c) for c in ghosts))
"""


def test_ghost_ranks_are_routed_between_limits_and_back(nccl_program):
    statistics = {}
    seen = nccl_program(
        TWO_GHOSTS
        + """
    step()
    routes.prepare(4, 60)
    routes.prepare(16, 60)
    for limit in (4, 16, None, 16):
        routes.route(limit)
        step()
    found = routes.communicators()
    assert [call.routed for call in routes.calls()] == [False, True, True, False, True]
    show([n.ctas(), [[c.key == found[0].key, c.rank, c.size, c.max_ctas, c.collectives, c.routed_to, c.prepared, c.why_not, c.bytes] for c in found]])
    """,
        statistics=statistics,
    )
    assert seen[0] == [12, 12, 4, 4, 16, 16, 12, 12, 16, 16]
    assert seen[1] == [[True, rank, 2, 12, 5, 16, [4, 16], None, {"all_reduce": 5120}] for rank in (0, 1)]
    assert statistics["routed"] == 6
    assert statistics["split_failures"] == 0


def test_a_library_that_is_linked_to_nccl_out_of_global_sight_is_routed(nccl_program):
    """Like torch: libnccl is not in the process's global scope, and dlsym is never called for it."""
    assert nccl_program("""
    u = user()
    comm = u.user_init(2, 0)
    assert u.user_all_reduce(comm, 2) == 0
    routes.prepare(4, 60)
    routes.route(4)
    assert u.user_all_reduce(comm, 1) == 0 and u.user_group(comm) == 0
    routes.route(None)
    assert u.user_all_reduce(comm, 1) == 0
    n = Nccl()
    show([n.ctas(), [c.collectives for c in routes.communicators()]])
    """) == [[64, 64, 4, 4, 64], [5]]


def test_a_preloaded_nccl_comes_first_as_for_the_linker(nccl_program, tmp_path):
    preloaded = build_nccl(tmp_path / "preloaded", "-DFAKE_VERSION=23200")
    seen = nccl_program(
        f"""
    u = user()
    comm = u.user_init(2, 0)
    assert u.user_all_reduce(comm, 1) == 0
    first, second = Nccl("{preloaded}/libnccl.so.2"), user()
    show([first.lib.fake_version(), first.ctas()])
    """,
        env={"LD_PRELOAD": str(preloaded / "libnccl.so.2")},
    )
    assert seen == [23200, [64]]


def test_functions_that_nccl_lacks_are_not_there(nccl_program):
    """A program may look them up in the whole process, where the shim defines all of them."""
    assert nccl_program("""
    whole = ctypes.CDLL(None)
    before = hasattr(whole, "ncclAllReduce")
    n = Nccl()
    show([before, [hasattr(ctypes.CDLL(None), name) for name in ("ncclAllReduce", "ncclCommGrow")], hasattr(n.lib, "ncclCommGrow")])
    """) == [False, [True, False], False]


def test_dlerror_tells_of_the_programs_own_questions_only(nccl_program):
    assert nccl_program("""
    whole = ctypes.CDLL(None)
    whole.dlerror.restype = c_char_p
    whole.dlsym.restype = c_void_p
    whole.dlopen.restype = c_void_p
    def ask(handle, name):
        whole.dlerror()
        found = whole.dlsym(c_void_p(handle), name)
        return [bool(found), (whole.dlerror() or b"").decode()]
    handle = whole.dlopen(b"libnccl.so.2", 1)
    show([ask(handle, b"ncclAllReduce"), ask(handle, b"ncclCommGrow"), ask(None, b"ncclCommGrow"), ask(None, b"ncclAllReduce")])
    """) == [[True, ""], [False, mentions("ncclCommGrow")], [False, mentions("ncclCommGrow")], [True, ""]]


def test_two_nccls_in_one_process_are_kept_apart(nccl_program, fake_nccl, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    compile_c(
        other / "libother_nccl.so",
        "-shared",
        "-fPIC",
        "-DFAKE_VERSION=22100",
        "-Wl,-soname,libother_nccl.so",
        str(HERE / "fake_nccl.c"),
        "-lpthread",
    )
    flags = (f"-L{other}", "-l:libother_nccl.so", f"-Wl,-rpath,{other}")
    compile_c(other / "libuser.so", "-shared", "-fPIC", str(HERE / "nccl_user.c"), *flags)
    seen = nccl_program(f"""
    one, two = Nccl(), Nccl("{other}/libother_nccl.so")
    a, b = one.init(settings=config(10)), two.init(settings=config(20))
    one.all_reduce(a)
    two.group(lambda: two.all_reduce(b))
    routes.prepare(4, 60)
    routes.route(4)
    one.all_reduce(a)
    two.group(lambda: two.all_reduce(b), lambda: two.all_reduce(b))
    show([one.ctas(), two.ctas(), len(one.log("ncclCommSplit")), len(two.log("ncclCommSplit"))])
    """)
    assert seen == [[10, 4], [20, 4, 4], 1, 1]

    # Libraries linked to one or the other come and go at the same address: the shim must resolve each anew.
    seen = nccl_program(f"""
    import _ctypes
    users = [("{fake_nccl}", Nccl()), ("{other}", Nccl("{other}/libother_nccl.so"))] * 2
    seen = []
    for folder, meant in users:
        user = ctypes.CDLL(folder + "/libuser.so")
        user.user_init.restype = c_void_p
        before = len(meant.log())
        comm = c_void_p(user.user_init(2, 0))
        assert user.user_all_reduce(comm, 1) == user.user_group(comm) == user.user_destroy(comm) == 0
        seen.append([ctypes.cast(user.user_init, c_void_p).value, len(meant.log()) - before])
        _ctypes.dlclose(user._handle)
    show([len({{address for address, _ in seen}}), [calls for _, calls in seen]])
    """)
    assert seen == [1, [4] * 4]


def test_a_library_that_calls_itself_meets_itself(nccl_program, tmp_path):
    """Although another NCCL is the first that the linker finds."""
    preloaded = build_nccl(tmp_path / "preloaded", "-DFAKE_VERSION=23200")
    seen = nccl_program(
        f"""
    other, own = Nccl("{preloaded}/libnccl.so.2"), Nccl(os.environ["OWN"])
    a = own.init(settings=config(10))
    own.check(own.lib.ncclBcast(None, c_size_t(8), 7, 0, a, None))
    show([len(other.log("ncclBroadcast")), len(own.log("ncclBroadcast")), own.lib.fake_version()])
    """,
        env={
            "LD_PRELOAD": str(preloaded / "libnccl.so.2"),
            "OWN": str(build_nccl(tmp_path / "own") / "libnccl.so.2"),
        },
    )
    assert seen == [0, 1, 22800]


def test_without_a_route_the_calls_are_the_programs_own(nccl_program):
    source = """
    n = Nccl()
    a = n.init(4, 1, settings=config(8, net=b"Socket"))
    b = n.split(a, 3, 0, config(5))
    n.group(lambda: n.all_reduce(a), lambda: n.send(b))
    n.lib.ncclBcast(None, c_size_t(8), 7, 0, a, None)
    n.all_reduce(b)
    n.check(n.lib.ncclCommFinalize(b))
    n.check(n.lib.ncclCommDestroy(b))
    n.check(n.lib.ncclCommAbort(a))
    order = {}
    show([[name, order.setdefault(comm, len(order)), ctas] for name, comm, ctas in n.log()])
    """
    plain = nccl_program(source, job=False)
    assert nccl_program(source) == plain
    assert len(plain) == 9


def test_nothing_changes_inside_a_group(nccl_program):
    assert nccl_program(
        TWO_GHOSTS
        + """
    step()
    routes.prepare(4, 60)
    inside = []
    def middle():
        routes.route(4)
        inside.append(refused(routes.prepare, 8, 1))
    n.group(lambda: n.all_reduce(ghosts[0]), middle, lambda: n.group(lambda: n.all_reduce(ghosts[1])))
    step()
    show([n.ctas()[2:], inside])
    """
    ) == [
        [12, 12, 4, 4],
        ["the collectives' CTAs cannot be changed in this run: this thread is inside an NCCL group"],
    ]


def test_what_a_sibling_cannot_do_stays_with_the_original(nccl_program):
    """Point-to-point calls, and reductions that the program defined for its own communicator."""
    assert nccl_program("""
    n = Nccl()
    a = n.init(settings=config(12))
    n.all_reduce(a)
    routes.prepare(4, 60)
    routes.route(4)
    n.all_reduce(a, op=5)
    n.send(a)
    n.all_reduce(a)
    n.lib.ncclBcast(None, c_size_t(8), 7, 0, a, None)
    show([[name, ctas] for name, _, ctas in n.log()[3:]] + [[c.point_to_point, c.collectives] for c in routes.communicators()])
    """) == [["ncclAllReduce", 12], ["ncclSend", 12], ["ncclAllReduce", 4], ["ncclBroadcast", 4], [1, 4]]


@pytest.mark.parametrize("ranks", [2, 18])
def test_mixed_groups_use_the_same_communicators_in_the_same_order_on_every_rank(nccl_program, ranks):
    """Although ranks issue their calls in different orders, and some issue only one kind."""
    seen = nccl_program(f"""
    n, ranks = Nccl(), []
    unique = n.unique()
    n.group(*(lambda r=r: ranks.append(n.init({ranks}, r, unique, config(12))) for r in range({ranks})))
    n.group(*(lambda c=c: n.all_reduce(c) for c in ranks))
    routes.prepare(4, 60)
    routes.route(4)
    def calls(*order):
        before = len(n.log())
        n.group(*order)
        return [[name, ctas] for name, _, ctas in n.log()[before:]]
    a, b = ranks[0], ranks[-1]
    show([
        calls(lambda: n.all_reduce(a), lambda: n.send(a)),
        calls(lambda: n.send(b), lambda: n.all_reduce(b)),
        calls(lambda: n.all_reduce(b)),
        calls(lambda: n.send(b)),
        [c.point_to_point for c in (routes.communicators()[0], routes.communicators()[-1])],
        calls(*(lambda c=c: (n.send(c), n.all_reduce(c)) for c in ranks)),
    ])
    """)
    both = [["ncclAllReduce", 4], ["ncclSend", 12]]
    assert seen[:5] == [both, both, both[:1], both[1:], [1, 2]]
    assert seen[5] == [both[0]] * ranks + [both[1]] * ranks


@pytest.mark.parametrize("end", ["ncclCommAbort", "ncclCommDestroy", "ncclCommFinalize"])
def test_sends_of_a_group_reach_a_communicator_before_it_ends_in_that_group(nccl_program, end):
    seen = nccl_program(f"""
    n = Nccl()
    a, b = n.init(settings=config(12)), n.init(settings=config(12))
    n.all_reduce(a), n.all_reduce(b)
    routes.prepare(4, 60)
    routes.route(4)
    before = len(n.log())
    n.group(
        lambda: n.send(a),
        lambda: n.send(b),
        lambda: n.check(n.lib.{end}(a)),
        lambda: n.all_reduce(b),
    )
    ours = {{a.value: "a", b.value: "b"}}
    show([[name, ours[comm]] for name, comm, _ in n.log()[before:] if comm in ours])
    """)
    assert seen == [["ncclSend", "a"], [end, "a"], ["ncclSend", "b"]]


def test_captured_collectives_stay_with_the_original(nccl_program):
    """A graph may outlive a sibling."""
    assert nccl_program("""
    import driver
    cuda = driver.library()
    driver.launch(driver.kernel("gemm"))
    n = Nccl()
    a = n.init(settings=config(12))
    n.all_reduce(a, stream=0x70)
    routes.prepare(4, 60)
    routes.route(4)
    heard = []
    routes.on_call(lambda key, count: heard.append(count))
    cuda.cuStreamBeginCapture_v2(c_void_p(0x70), 0)
    n.all_reduce(a, stream=0x70)
    why = refused(routes.prepare, 8, 1)
    quiet = not heard
    cuda.cuStreamEndCapture(c_void_p(0x70), byref(c_void_p()))
    n.all_reduce(a, stream=0x70)
    show([n.ctas(), why.endswith("a CUDA graph is being captured"), quiet, heard])
    """) == [[12, 12, 4], True, True, [3]]


@pytest.mark.parametrize("end", ["ncclCommDestroy", "ncclCommAbort"])
def test_siblings_end_with_their_communicator(nccl_program, end):
    seen = nccl_program(
        TWO_GHOSTS
        + f"""
    step()
    routes.prepare(4, 60)
    routes.prepare(16, 60)
    routes.route(4)
    step()
    for ghost in ghosts:
        n.check(n.lib.{end}(ghost))
    ended = n.log("{end}")
    show([len(ended), len({{comm for _, comm, _ in ended}}), sorted(ctas for _, _, ctas in ended), len(routes.communicators())])
    """
    )
    assert seen == [6, 6, [4, 4, 12, 12, 16, 16], 0]


def test_finalize_reaches_siblings_and_their_errors_reach_the_program(nccl_program):
    seen = nccl_program("""
    n = Nccl()
    a = n.init(settings=config(12))
    n.all_reduce(a)
    routes.prepare(4, 60)
    routes.route(4)
    n.all_reduce(a)
    sibling = c_void_p(n.log("ncclAllReduce")[-1][1])
    def state():
        error = c_int(-1)
        n.check(n.lib.ncclCommGetAsyncError(a, byref(error)))
        return error.value
    states = [state()]
    n.lib.fake_async(sibling, 6)
    states.append(state())
    n.check(n.lib.ncclCommFinalize(a))
    show([states, n.ctas("ncclCommFinalize")])
    """)
    assert seen == [[0, 6], [4, 12]]


def test_siblings_are_suspended_and_resumed_with_their_communicator(nccl_program):
    """Otherwise they would keep memory that the program wants back. While suspended, nothing is split."""
    seen = nccl_program("""
    n = Nccl()
    a = n.init(settings=config(12))
    n.all_reduce(a)
    routes.prepare(4, 60)
    routes.route(4)
    n.all_reduce(a)
    n.lib.fake_fail(b"ncclCommSuspend", 1, 5)
    results = [n.lib.ncclCommSuspend(a, 1)]
    n.all_reduce(a)
    results += [n.lib.ncclCommSuspend(a, 0), n.lib.ncclCommSuspend(a, 1)]
    why = refused(routes.prepare, 6, 10)
    results.append(n.lib.ncclCommResume(a))
    routes.prepare(6, 60)
    n.all_reduce(a)
    calls = [n.ctas("ncclCommSuspend"), n.ctas("ncclCommResume"), n.ctas("ncclAllReduce")]
    n.lib.ncclCommSuspend(a, 1)
    sibling = c_void_p(n.log("ncclCommSuspend")[-1][1])
    n.lib.ncclCommResume(sibling)  # by itself, so that NCCL refuses it with the others
    show([results, why, calls, n.lib.ncclCommResume(a)])
    """)
    results, why, calls, failed = seen
    assert results == [5, 0, 0, 0]
    assert "ncclCommSuspend" in why
    assert calls == [[12, 12, 4], [12, 4], [12, 4, 4, 4]]
    assert failed == 5


def test_a_failed_split_leaves_the_program_as_it_was(nccl_program):
    statistics = {}
    seen = nccl_program(
        TWO_GHOSTS
        + """
    step()
    n.lib.fake_fail(b"ncclCommSplit", 1, 5)
    why = refused(routes.prepare, 4, 10)
    not_prepared = refused(routes.route, 4)
    step()
    routes.prepare(4, 60)
    routes.route(4)
    step()
    show([why, not_prepared, n.ctas()])
    """,
        statistics=statistics,
    )
    assert seen[0].endswith("ncclCommSplit failed: invalid usage: as the test asked")
    assert seen[1] == "no communicator with 4 CTAs is prepared"
    assert seen[2] == [12, 12, 12, 12, 4, 4]
    assert statistics["split_failures"] == 1


def test_a_split_that_hangs_is_given_up_and_an_abort_frees_it(nccl_program):
    seen = nccl_program("""
    n = Nccl()
    a, b = n.init(settings=config(12)), n.init(settings=config(12))
    n.all_reduce(a)
    n.lib.fake_hang(1)
    whys = [refused(routes.prepare, 4, 0.2), refused(routes.prepare, 4, 0.2)]
    n.all_reduce(a)
    n.check(n.lib.ncclCommAbort(a))
    n.all_reduce(b)
    for _ in range(500):
        left = refused(routes.prepare, 4, 10)
        if not left:
            break
        time.sleep(0.01)
    routes.route(4)
    n.all_reduce(b)
    show([whys, left, n.ctas()])
    """)
    assert "did not finish by the deadline" in seen[0][0]
    assert "an earlier split" in seen[0][1]
    assert seen[1:] == [None, [12, 12, 12, 4]]


def test_communicators_that_work_in_the_background_are_waited_for(nccl_program):
    seen = nccl_program("""
    n = Nccl()
    a, error = n.settled(n.init(settings=config(12, blocking=0))), c_int(7)
    n.all_reduce(a)
    routes.prepare(4, 60)
    routes.route(4)
    n.all_reduce(a)
    n.lib.fake_async(c_void_p(n.log("ncclAllReduce")[-1][1]), 7)
    n.lib.ncclCommGetAsyncError(a, byref(error))
    show([n.ctas(), error.value in (0, 7), refused(routes.prepare, 6, 10)])
    """)
    assert seen == [[12, 4], True, None]


def test_a_sibling_has_the_rest_of_its_communicators_configuration(nccl_program):
    seen = nccl_program("""
    n = Nccl()
    a = n.init(settings=config(12, 8, net=b"Socket"))
    child = n.split(a, 0, 0)
    n.all_reduce(a)
    n.all_reduce(child)
    routes.prepare(4, 60)
    routes.route(4)
    n.all_reduce(a)
    n.all_reduce(child)
    show([n.lib.fake_net(c_void_p(comm)).decode() for _, comm, ctas in n.log("ncclAllReduce") if ctas == 4])
    """)
    assert seen == ["Socket", "Socket"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "n.check(n.lib.ncclCommRegister(a, None, c_size_t(8), byref(c_void_p())))",
            "memory is registered with it",
        ),
        (
            "n.check(n.lib.ncclCommWindowRegister(a, None, c_size_t(8), byref(c_void_p()), 1))",
            "memory is registered with it",
        ),
        ("a = n.init(settings=config(share=1)); n.all_reduce(a)", "its splits share its channels"),
        ("a = n.init(1, 0); n.all_reduce(a)", "it has one rank"),
    ],
)
def test_communicators_that_cannot_be_routed_say_why(nccl_program, source, why):
    seen = nccl_program(f"""
    n = Nccl()
    a = n.init()
    {source}
    if routes.communicators()[0].why_not:
        n.all_reduce(a)
    found = routes.communicators()
    show([found[-1].why_not, refused(routes.prepare, 4, 5), len(n.log("ncclCommSplit"))])
    """)
    assert why in seen[0]
    assert why in seen[1]
    assert seen[2] == 0


@pytest.mark.parametrize("flags", [("-DFAKE_VERSION=21700",), ("-DFAKE_NO_SPLIT", "-DFAKE_VERSION=22800")])
def test_an_nccl_without_splits_is_refused(nccl_program, tmp_path, flags):
    seen = nccl_program(
        "n = Nccl(); a = n.init(); n.all_reduce(a); show([refused(routes.prepare, 4, 5), n.ctas()])",
        folder=build_nccl(tmp_path / "old", *flags),
    )
    assert "2.18 and newer can" in seen[0]
    assert seen[1] == [64]


@pytest.mark.parametrize(
    ("env", "why"),
    [({}, "larger than weft knows"), ({"NCCL_MIN_CTAS": "2", "WEFT_LIVE": "1"}, "NCCL_MIN_CTAS")],
)
def test_a_configuration_larger_than_known_reaches_nccl_whole_and_is_not_copied(nccl_program, env, why):
    """Later NCCLs add members at its end. The limit in the environment then stays where NCCL reads it."""
    seen = nccl_program(
        """
    class Later(ctypes.Structure):
        _fields_ = (("known", Config), ("more", c_char * 400))
    n = Nccl()
    later = Later(config(6, net=b"IB"))
    later.known.size = ctypes.sizeof(Later)
    a = n.init(settings=later)
    b = n.split(a)
    n.all_reduce(a)
    found = routes.communicators()
    show([n.lib.fake_net(a).decode(), n.ctas(), [c.max_ctas for c in found], [c.why_not for c in found]])
    """,
        env=env,
    )
    assert seen[:3] == ["IB", [6], [6, 6]]
    assert all(why in found for found in seen[3])


def test_before_any_collective_there_is_nothing_to_prepare(nccl_program):
    seen = nccl_program("""
    before = [routes.available(), refused(routes.prepare, 4, 1)]
    n = Nccl()
    n.init()
    show([*before, routes.available(), refused(routes.prepare, 4, 1)])
    """)
    assert (seen[0], seen[2]) == (False, True)
    assert "no NCCL communicator" in seen[1]
    assert "no communicator has carried a collective yet" in seen[3]


def test_outside_weft_run_the_fix_is_told(nccl_program):
    assert nccl_program(
        "show([routes.available(), routes.communicators(), refused(routes.route, 4)])", job=False
    ) == [
        False,
        [],
        "this process was not started by weft: start it with `weft run -- python …`",
    ]


# --- limits in the environment ---------------------------------------------------------------------------------


LIMITS = """
    n = Nccl()
    a = n.init(settings=config({given}))
    b = c_void_p()
    n.check(n.lib.ncclCommInitRank(byref(b), 2, n.unique(), 0))
    child = n.split(a)
    explicit = n.split(a, 0, 0, config(30))
    for comm in (a, b, child, explicit):
        n.all_reduce(comm)
    show([n.ctas(), [c.max_ctas for c in routes.communicators()], environ("NCCL_MAX_CTAS"), refused(routes.prepare, 4, 5)])
"""


@pytest.mark.parametrize(
    ("given", "variables", "in_file"),
    [("", "12", ""), ("40", "12", ""), ("40", "12", "9"), ("40", None, "12")],
)
def test_limits_of_the_environment_hold_and_can_be_changed_in_a_live_job(
    nccl_program, tmp_path, given, variables, in_file
):
    """Including limits in nccl.conf, which the environment outranks."""
    env = {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")} | (
        {"NCCL_MAX_CTAS": variables} if variables else {}
    )
    (tmp_path / "nccl.conf").write_text(f"NCCL_MAX_CTAS={in_file}\n" if in_file else "")
    fixed = nccl_program(LIMITS.format(given=given), env=env)
    live = nccl_program(LIMITS.format(given=given), env={**env, "WEFT_LIVE": "1"})
    assert fixed[:3] == live[:3] == [[12] * 4, [12] * 4, "12"]
    assert "WEFT_LIVE=1" in fixed[3]
    assert live[3] is None


def test_a_live_job_routes_under_limits_of_the_environment(nccl_program):
    assert nccl_program(
        TWO_GHOSTS
        + "    step(); routes.prepare(4, 60); routes.prepare(16, 60); routes.route(16); step(); show(n.ctas())",
        env={"NCCL_MAX_CTAS": "8", "NCCL_MIN_CTAS": "8", "WEFT_LIVE": "1"},
    ) == [8, 8, 16, 16]


def test_what_the_program_sets_while_limits_are_hidden_stays(nccl_program):
    """Another thread may set a limit while a communicator is made; a callback from NCCL stands in for it."""
    assert nccl_program(
        """
    n, seen = Nccl(), []
    def change():
        seen.append(environ("NCCL_MAX_CTAS"))
        ctypes.CDLL(None).setenv(b"NCCL_MAX_CTAS", b"20", 1)
    back = ctypes.CFUNCTYPE(None)(change)
    n.lib.fake_while_making(back)
    n.init()
    show([*seen, environ("NCCL_MAX_CTAS")])
    """,
        env={"NCCL_MAX_CTAS": "8", "WEFT_LIVE": "1"},
    ) == [None, "20"]


# --- keys, clocks, callbacks -----------------------------------------------------------------------------------


def test_keys_are_equal_on_all_ranks_and_different_otherwise(nccl_program):
    """Two processes share a unique id, as ranks do; the colour of a split distinguishes the children."""
    source = """
    n = Nccl()
    world = n.init(2, {rank}, UniqueId(b"shared by the test"))
    other = n.init(2, {rank}, UniqueId(b"another"))
    same = n.split(world, 7, {rank})
    apart = n.split(world, {rank}, 0)
    for comm in (world, world, same):
        n.all_reduce(comm)
    show([[c.key, c.collectives] for c in routes.communicators()])
    """
    zero, one = (nccl_program(source.format(rank=rank)) for rank in (0, 1))
    assert zero[:3] == one[:3]
    assert zero[3] != one[3]
    assert len({key for key, _ in zero}) == 4
    assert [count for _, count in zero] == [2, 0, 1, 0]
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key, _ in zero)


def test_calls_are_remembered_in_order(nccl_program):
    seen = nccl_program("""
    n = Nccl()
    a = n.init()
    before = time.monotonic_ns()
    for i in range(5000):
        n.all_reduce(a, count=i)
    found = routes.calls()
    show([
        [c.number for c in found] == list(range(5000 - 4096, 5000)),
        all(c.bytes == 4 * c.number and c.operation == "all_reduce" and not c.routed for c in found),
        all(before <= x.host_ns <= y.host_ns for x, y in zip(found, found[1:])),
        {c.key for c in found} == {routes.communicators()[0].key},
    ])
    """)
    assert seen == [True] * 4


def test_a_callback_runs_between_collectives_and_may_change_the_route(nccl_program):
    seen = nccl_program(
        TWO_GHOSTS
        + """
    step()
    routes.prepare(4, 60)
    heard = []
    def change(key, count):
        heard.append([count, key == routes.communicators()[0].key, threading.get_ident() == threading.main_thread().ident])
        routes.route(4 if len(heard) % 2 else None)
    routes.on_call(change, every=2)
    for _ in range(5):
        step()
    failures = []
    import logging
    log = logging.getLogger("weft.shim")
    log.setLevel(logging.DEBUG)
    log.addFilter(lambda record: failures.append(record.exc_info[0].__name__))
    routes.on_call(lambda key, count: 1 / 0)
    step()
    routes.on_call(None)
    step()
    show([heard, n.ctas()[::2], failures])
    """
    )
    assert seen == [
        [[count, True, True] for count in (2, 4, 6)],
        [12, 12, 4, 4, 12, 12, 4, 4],
        ["ZeroDivisionError"],
    ]


def test_release_keeps_what_is_in_use(nccl_program):
    seen = nccl_program(
        TWO_GHOSTS
        + """
    step()
    for limit in range(1, 16):
        routes.prepare(limit, 60)
    full = refused(routes.prepare, 32, 10)
    routes.route(9)
    routes.release()
    step()
    left = [list(c.prepared) for c in routes.communicators()]
    routes.route(None)
    routes.release()
    step()
    routes.prepare(32, 60)
    show([full, n.ctas(), left, len(n.log("ncclCommDestroy"))])
    """
    )
    assert "too many limits" in seen[0]
    assert seen[1:] == [[12, 12, 9, 9, 12, 12], [[9], [9]], 30]


# --- threads ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nccl_hammer(fake_nccl, tmp_path_factory):
    program = tmp_path_factory.mktemp("nccl_hammer") / "hammer"
    return compile_c(
        program, str(HERE / "nccl_hammer.c"), f"-L{fake_nccl}", "-lnccl", "-ldl", "-lpthread", "-rdynamic"
    )


def test_many_threads_under_a_route_that_keeps_changing(nccl_hammer, fake_nccl, environment):
    env = {**environment, "LD_LIBRARY_PATH": f"{fake_nccl}:{environment['LD_LIBRARY_PATH']}"}
    with Job() as job:
        subprocess.run([nccl_hammer, "6", "3000"], env=job.environment(env), check=True, timeout=60)
        assert job.collect()["routed"] > 0


def test_sanitizers_find_nothing(sanitized, fake_nccl, environment, tmp_path):
    program = sanitized(tmp_path / "hammer", str(HERE / "nccl_hammer.c"), f"-L{fake_nccl}", "-lnccl")
    with Job() as job:
        env = {**job.environment(environment), "ASAN_OPTIONS": "verify_asan_link_order=0"}
        env["LD_LIBRARY_PATH"] = f"{fake_nccl}:{env['LD_LIBRARY_PATH']}"
        del env["LD_PRELOAD"]
        done = subprocess.run(
            [program, "4", "400"], env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.stderr == ""
        assert done.returncode == 0
        assert job.collect()["routed"] > 0
