"""Rules for collectives (comm.rules) against a fake NCCL: by each call's configuration and by the tuner plugin."""

# ruff: noqa: F811 (fixtures)

from __future__ import annotations

import subprocess
import sys

import pytest
from building import HERE, compile_c
from test_nccl_routes import build_nccl, fake_nccl, nccl_program  # noqa: F401 (fixtures)

from weft.policy import CommRule, Policy
from weft.shim.inject import Job

SMALL = CommRule(collective="all_reduce", max_bytes=4096, ctas=2, algorithm="tree", protocol="ll")
LARGE = CommRule(collective="all_reduce", min_bytes=4097, ctas=8, cluster=2, chunk=65536)
RULES = Policy(comm_rules=(SMALL, LARGE), max_ctas=16)
TREE, RING = 0, 1
LL, SIMPLE = 0, 2
CHUNK = 131072
CALLS = """
    nccl = Nccl()
    comm = nccl.init(size=4)
    nccl.all_reduce(comm, 256)
    nccl.all_reduce(comm, 1 << 20)
    nccl.call("ncclAllGather", comm, 1 << 20)
    show(nccl.plans())
"""


@pytest.fixture(scope="session")
def ncclver(tmp_path_factory):
    """The fake NCCL in any version, each built once."""
    built = {}

    def folder(version, *flags):
        key = (version, *flags)
        if key not in built:
            built[key] = build_nccl(tmp_path_factory.mktemp("nccl"), f"-DFAKE_VERSION={version}", *flags)
        return built[key]

    return folder


def test_from_2_31_on_each_call_has_its_configuration(nccl_program, ncclver):
    stats = {}
    small, large, other = nccl_program(CALLS, policy=RULES, folder=ncclver(23100), statistics=stats)
    assert (small["name"], small["least"], small["most"], small["algorithm"]) == (
        "ncclAllReduceConfig",
        2,
        2,
        "tree",
    )
    assert small["force"] == 0  # where the algorithm is impossible, NCCL chooses
    assert small["cluster"] is None
    assert (large["least"], large["most"], large["nvls"], large["cluster"]) == (8, 8, 8, 2)
    assert (large["algorithm"], large["force"]) == (None, 1)
    assert (other["name"], other["least"], other["most"]) == ("ncclAllGatherConfig", None, 16)
    assert (small["plan"][:2], large["plan"][3], other["plan"][3]) == ([RING, LL], 65536, CHUNK)
    assert (stats["per_call"], stats["tuned"], stats["config_refused"], stats["rules_unapplied"]) == (
        3,
        2,
        0,
        0,
    )
    (process,) = [found for found in stats["processes"] if found["nccl"]]
    assert process["nccl"]["path"] == "config"
    assert process["nccl"]["tuner"] == 6


@pytest.mark.parametrize(
    ("version", "tuner", "chunk"), [(22400, 4, CHUNK), (22800, 5, CHUNK), (23000, 6, 65536)]
)
def test_before_that_the_tuner_plugin_answers(nccl_program, ncclver, version, tuner, chunk):
    stats = {}
    small, large, other = nccl_program(CALLS, policy=RULES, folder=ncclver(version), statistics=stats)
    assert [found["name"] for found in (small, large, other)] == [
        "ncclAllReduce",
        "ncclAllReduce",
        "ncclAllGather",
    ]
    assert small["plan"][:3] == [TREE, LL, 2]
    assert large["plan"] == [RING, SIMPLE, 8, chunk]
    assert other["plan"][:3] == [RING, SIMPLE, 16]
    assert (stats["tuned"], stats["per_call"]) == (2, 0)
    assert stats["rules_unapplied"] == 1  # a cluster needs a configuration
    (process,) = [found for found in stats["processes"] if found["nccl"]]
    assert (process["nccl"]["path"], process["nccl"]["tuner"]) == ("tuner", tuner)


def test_a_simulated_group_leaves_the_chunks_of_other_calls_unchanged(nccl_program, ncclver):
    """Its own thread does not remember it; other threads plan as usual while it lasts."""
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        def simulate():
            nccl.check(nccl.lib.ncclGroupStart())
            nccl.check(nccl.lib.ncclGroupSimulateEnd(None))
        nccl.lib.fake_hold_simulation(1)
        other = threading.Thread(target=simulate)
        other.start()
        while not nccl.lib.fake_simulations():
            time.sleep(0.001)
        nccl.all_reduce(comm, 1 << 20)
        nccl.lib.fake_hold_simulation(0)
        other.join()
        simulate()
        nccl.all_reduce(comm, 1 << 20)
        show(nccl.plans())
    """
    plans = nccl_program(source, policy=RULES, folder=ncclver(23000))
    assert [found["plan"][3] for found in plans] == [65536, 65536]


def test_bytes_are_counted_as_the_plugin_counts_them(nccl_program, ncclver):
    """An all-gather of 1024 bytes from each of 4 ranks counts as 4096; a broadcast of 1024 counts as 1024."""
    at_4096 = CommRule(min_bytes=4096, max_bytes=4096, ctas=3)
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        for name in ("ncclAllGather", "ncclReduceScatter", "ncclBroadcast", "ncclBcast", "ncclReduce"):
            nccl.call(name, comm, 256)
        show(nccl.plans())
    """
    for version in (23000, 23200):
        plans = nccl_program(source, policy=Policy(comm_rules=(at_4096,)), folder=ncclver(version))
        by_plan = [found["plan"][2] == 3 for found in plans]
        by_config = [found["most"] == 3 for found in plans]
        assert (by_config if version >= 23100 else by_plan) == [True, True, False, False, False]


def test_every_collective_has_a_configured_form(nccl_program, ncclver):
    names = (
        "ncclAllReduce",
        "ncclBroadcast",
        "ncclBcast",
        "ncclReduce",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclAlltoAll",
        "ncclGather",
        "ncclScatter",
    )
    source = f"""
        nccl = Nccl()
        comm = nccl.init(size=4)
        for name in {names}:
            nccl.call(name, comm)
        nccl.group(lambda: nccl.call("ncclAlltoAll", comm), lambda: nccl.send(comm), lambda: nccl.all_reduce(comm))
        show([nccl.plans(), [call[0] for call in nccl.log()][-3:]])
    """
    stats = {}
    plans, mixed = nccl_program(
        source, policy=Policy(comm_rules=(CommRule(ctas=5),)), folder=ncclver(23200), statistics=stats
    )
    assert [found["most"] for found in plans] == [5] * (len(names) + 2)
    wanted = [f"{'ncclBroadcast' if name == 'ncclBcast' else name}Config" for name in names]
    assert [found["name"] for found in plans][: len(names)] == wanted
    assert mixed == ["ncclAlltoAllConfig", "ncclSend", "ncclAllReduceConfig"]  # in the program's order
    assert stats["rules_unapplied"] == 0


def test_what_the_program_configures_itself_wins(nccl_program, ncclver):
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        own = call_config(most=3, cluster=1, algorithm=b"nvls", tag=9)
        nccl.all_reduce_config(comm, own, 1 << 20)
        nccl.all_reduce_config(comm, call_config(tag=9), 1 << 20)
        nccl.all_reduce_config(comm, call_config(size=72), 1 << 20)
        nccl.all_reduce_config(comm, None, 1 << 20)
        show([nccl.plans(), [own.most, own.least == UNDEFINED, own.cluster]])
    """
    (mine, free, newer, none), untouched = nccl_program(source, policy=RULES, folder=ncclver(23200))
    assert (mine["least"], mine["most"], mine["cluster"]) == (None, 3, 1)
    assert (mine["algorithm"], mine["force"]) == ("nvls", 1)
    for found in (free, newer, none):
        assert (found["most"], found["cluster"], found["force"]) == (8, 2, 1)
    assert untouched == [3, True, 1]  # the program's own memory


def test_a_group_has_one_cluster_size(nccl_program, ncclver):
    rules = Policy(
        comm_rules=(
            CommRule(max_bytes=4096, cluster=4),
            CommRule(max_bytes=65536, cluster=1),
            CommRule(max_bytes=1 << 20, ctas=4),
        )
    )
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        first, second, third = (lambda: nccl.all_reduce(comm, 256)), (lambda: nccl.all_reduce(comm, 4096)), (lambda: nccl.all_reduce(comm, 1 << 18))
        nccl.group(first, second, third)
        nccl.group(third, first)
        nccl.group(lambda: nccl.all_reduce_config(comm, call_config(cluster=2)), first)
        second()
        show([found["cluster"] for found in nccl.plans()])
    """
    assert nccl_program(source, policy=rules, folder=ncclver(23200)) == [4, 4, 4, None, None, 2, 2, 1]


FOLLOW = """
    from weft.policy import CommRule, Policy
    from weft.shim import apply
    start = Policy(comm_rules=(CommRule(ctas=12),))
    def use(*rules, **controls):
        apply.apply(Policy(comm_rules=rules, **controls), start)
"""


@pytest.mark.parametrize("version", [23000, 23200])
def test_rules_change_between_calls_and_never_inside_a_group(nccl_program, ncclver, version):
    source = (
        FOLLOW
        + """
    nccl = Nccl()
    comm = nccl.init(size=4)
    one = lambda: nccl.all_reduce(comm, 1 << 20)
    one()
    use(CommRule(ctas=4))
    one()
    def inside():
        binding_refused.append(refused(use, CommRule(ctas=6)))
    binding_refused = []
    nccl.group(one, inside, one)
    use(CommRule(ctas=6))
    one()
    apply.apply(start, start)
    one()
    show([nccl.plans(), binding_refused])
    """
    )
    plans, refusals = nccl_program(
        source, policy=Policy(comm_rules=(CommRule(ctas=12),)), folder=ncclver(version)
    )
    seen = [found["most"] if version >= 23100 else found["plan"][2] for found in plans]
    assert seen == [12, 4, 4, 4, 6, 12]
    assert "inside an NCCL group" in refusals[0]


@pytest.mark.parametrize("version", [23000, 23200])
def test_fewer_ctas_need_no_sibling_and_more_do(nccl_program, ncclver, version):
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4, settings=config(most=12))
        one = lambda: nccl.all_reduce(comm, 1 << 20)
        one()
        routes.prepare(4, 60), routes.route(4), one()
        splits = len(nccl.log("ncclCommSplit"))
        limited = routes.communicators()[0].routed_to
        routes.prepare(16, 60), routes.route(16), one()
        routes.route(None), one()
        show([nccl.plans(), nccl.ctas("ncclAllReduce", "ncclAllReduceConfig"), splits, limited, len(nccl.log("ncclCommSplit"))])
    """
    folder = ncclver(version)
    plans, of_comm, splits, limited, splits_after = nccl_program(
        source, env={"NCCL_TUNER_PLUGIN": "STATIC_PLUGIN"}, folder=folder
    )
    assert (splits, limited, splits_after) == (0, 4, 1)
    assert of_comm == [12, 12, 16, 12]
    if version >= 23100:
        assert [found["most"] for found in plans] == [None, 4, None, None]
    else:
        assert [found["plan"][2] for found in plans] == [12, 4, 16, 12]


def test_a_small_collective_keeps_nccls_own_few_channels_under_a_limit(nccl_program, ncclver):
    """NCCL takes a plugin's number even above its own choice, so the limit must only lower it."""
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        for count in (16, 1 << 15, 1 << 20):
            nccl.all_reduce(comm, count)
        show([found["plan"][2] for found in nccl.plans()])
    """
    policy = Policy(comm_rules=(CommRule(collective="reduce", ctas=1),), max_ctas=16)
    assert nccl_program(source, policy=policy, folder=ncclver(23000)) == [1, 4, 16]


# --- faults: the program's own call is made, once, and it is counted ------------------------------------------------


def test_a_refused_configuration_leads_to_the_plain_call_once(nccl_program, ncclver):
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        nccl.lib.fake_refuse(1)
        reduce = lambda: nccl.all_reduce(comm, 256)
        nccl.group(reduce, reduce)  # NCCL checks a configuration before the call becomes the group's
        reduce()
        show([[found["name"] for found in nccl.plans()], routes.communicators()[0].path])
    """
    stats = {}
    names, path = nccl_program(source, policy=RULES, folder=ncclver(23200), statistics=stats)
    assert names == ["ncclAllReduce"] * 3
    assert stats["config_refused"] == 1  # and no second configuration is tried
    assert path == "tuner"


def test_an_error_that_is_the_programs_own_is_reported_and_changes_nothing(nccl_program, ncclver):
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        for code, times in ((4, 2), (3, 1)):
            nccl.lib.fake_fail(b"ncclAllReduceConfig", 1, code)
            nccl.lib.fake_fail(b"ncclAllReduce", times - 1, code)
            show(nccl.lib.ncclAllReduce(None, None, c_size_t(64), FLOAT32, 0, comm, None))
        nccl.all_reduce(comm, 256)
        show([[found["name"] for found in nccl.plans()], routes.communicators()[0].path])
    """
    argument, internal, (names, path) = nccl_program(source, policy=RULES, folder=ncclver(23200))
    assert (argument, internal, path) == (4, 3, "config")
    assert names[-1] == "ncclAllReduceConfig"
    assert (
        names.count("ncclAllReduce") == 1
    )  # no retry after an internal error: the call may have been enqueued


def test_an_nccl_newer_than_known_is_left_to_itself(nccl_program, ncclver):
    """It asks only a v7 plugin, and refuses a configuration of our size."""
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        nccl.lib.fake_refuse(1)
        for _ in range(3):
            nccl.all_reduce(comm, 256)
        show([[found["name"] for found in nccl.plans()], routes.communicators()[0].path, len(nccl.plans())])
    """
    stats = {}
    names, path, _ = nccl_program(
        source, policy=RULES, folder=ncclver(23900, "-DFAKE_TUNER=7"), statistics=stats
    )
    assert names == ["ncclAllReduce"] * 3
    assert path == "refused"
    assert (stats["config_refused"], stats["rules_unapplied"], stats["tuned"]) == (1, 3, 0)


def test_a_program_configuration_that_is_unknown_stays_as_it_is(nccl_program, ncclver):
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        for strange in (call_config(magic=1), call_config(force=7)):
            show(nccl.lib.ncclAllReduceConfig(None, None, c_size_t(64), FLOAT32, 0, comm, None, byref(strange)))
        show(len(nccl.plans()))
    """
    stats = {}
    results = nccl_program(source, policy=RULES, folder=ncclver(23200), statistics=stats)
    assert results == [4, 4, 0]  # NCCL's own answers to the program, which it gave once
    assert stats["rules_unapplied"] == 2


def test_a_revoked_communicator_is_refused_with_and_without_siblings(nccl_program, ncclver):
    source = """
        nccl = Nccl()
        early, late = nccl.init(settings=config(12)), nccl.init(settings=config(12))
        for comm in (early, late):
            nccl.all_reduce(comm)
        reduce = lambda comm: nccl.lib.ncclAllReduce(None, None, c_size_t(4), FLOAT32, 0, comm, None)
        nccl.check(nccl.lib.ncclCommRevoke(late, 0))
        routes.prepare(24, 60)  # of the one that is not revoked
        routes.route(24)
        shown = [reduce(early), reduce(late), nccl.lib.ncclCommRevoke(late, 0)]
        nccl.check(nccl.lib.ncclCommRevoke(early, 0))
        show([*shown, reduce(early), nccl.ctas()])
    """
    shown = nccl_program(source, folder=ncclver(23000), env={"NCCL_TUNER_PLUGIN": "none"})
    assert shown == [0, 4, 4, 4, [12, 12, 24, 12, 12]]  # as NCCL answers on the communicator itself


@pytest.mark.parametrize(
    "call", ["ncclCommRevoke(comm, 0)", "ncclCommShrink(*shrinking, 1)", "ncclCommAbort(comm)"]
)
def test_ending_work_on_a_communicator_ends_what_hangs_on_its_siblings(nccl_program, ncclver, call):
    """A collective hangs on each sibling; no wait for the GPU may begin before all are aborted."""
    source = f"""
        nccl = Nccl()
        comm, made = nccl.init(settings=config(12)), c_void_p()
        shrinking = comm, byref(c_int(1)), 1, byref(made), None
        nccl.all_reduce(comm)
        for ctas in (24, 16):
            routes.prepare(ctas, 60)
            routes.route(ctas)
            nccl.all_reduce(comm)
        for _, used, _ in nccl.log("ncclAllReduce"):
            nccl.lib.fake_stick(c_void_p(used))
        result = nccl.lib.{call}
        show([result, nccl.lib.fake_endless_waits(), len(routes.communicators())])
    """
    shown = nccl_program(source, folder=ncclver(23000), env={"NCCL_TUNER_PLUGIN": "none"})
    assert shown == [0, 0, 1 + ("Shrink" in call) - ("Abort" in call)]


def test_rules_for_some_sizes_of_all_to_all_are_counted_where_nothing_can_apply_them(nccl_program, ncclver):
    source = """
        nccl = Nccl()
        comm = nccl.init(size=4)
        nccl.group(lambda: nccl.call("ncclAlltoAll", comm), lambda: nccl.send(comm))
        show(os.environ.get("NCCL_MAX_P2P_NCHANNELS"))
    """
    sized, whole = CommRule(collective="all_to_all", max_bytes=4096, ctas=4), CommRule(ctas=4)
    for rule, version, unapplied in ((sized, 23000, 1), (sized, 23200, 0), (whole, 23000, 0)):
        stats = {}
        folder = ncclver(version)
        limit = nccl_program(source, policy=Policy(comm_rules=(rule,)), folder=folder, statistics=stats)
        assert stats["rules_unapplied"] == unapplied
        assert limit == ("4" if rule is whole else None)


def test_an_nccl_without_either_way_is_called_plainly_and_counted(nccl_program, ncclver):
    stats = {}
    plans = nccl_program(CALLS, policy=RULES, folder=ncclver(22200), statistics=stats)
    assert [found["name"] for found in plans] == ["ncclAllReduce", "ncclAllReduce", "ncclAllGather"]
    assert (stats["rules_unapplied"], stats["per_call"], stats["tuned"]) == (2, 0, 0)
    (process,) = [found for found in stats["processes"] if found["nccl"]]
    assert process["nccl"]["path"] == "none"
    assert "2.31 and newer" in process["nccl"]["why"]


def test_without_the_plugin_in_force_rules_are_refused_with_the_reason(nccl_program, ncclver):
    source = (
        FOLLOW
        + """
    nccl = Nccl()
    comm = nccl.init(size=4)
    nccl.all_reduce(comm, 1 << 20)
    why = refused(use, CommRule(ctas=4))
    nccl.all_reduce(comm, 1 << 20)
    show([why, [found["plan"][2] for found in nccl.plans()]])
    """
    )
    why, channels = nccl_program(source, folder=ncclver(22800))
    assert "NCCL_TUNER_PLUGIN" in why
    assert channels == [32, 32]


@pytest.mark.parametrize(
    ("version", "plugin", "rule", "reason"),
    [
        (23200, "", 'protocol="ll"', "a protocol needs weft's tuner plugin"),
        (23200, "", "chunk=65536", "a chunk needs version 6"),
        (22800, "STATIC_PLUGIN", "chunk=65536", "a chunk needs version 6"),
        (23000, "STATIC_PLUGIN", "cluster=2", "cluster and cta_policy need the configuration of a call"),
        (23200, "", 'ctas=4, algorithm="ring", cluster=2', None),
        (23200, "STATIC_PLUGIN", 'protocol="ll", chunk=65536', None),
        (22800, "STATIC_PLUGIN", 'protocol="ll", algorithm="tree"', None),
    ],
)
def test_a_rule_of_which_a_part_would_be_lost_is_refused(
    nccl_program, ncclver, version, plugin, rule, reason
):
    source = (
        FOLLOW
        + f"""
    nccl = Nccl()
    comm = nccl.init(size=4)
    start = Policy()
    show(refused(use, CommRule({rule})))
    """
    )
    env = {"NCCL_TUNER_PLUGIN": plugin} if plugin else {}
    said = nccl_program(source, env=env, folder=ncclver(version))
    assert said is None if reason is None else reason in said


def test_a_communicator_that_works_in_the_background_is_waited_for(nccl_program, ncclver):
    source = (
        FOLLOW
        + """
    nccl = Nccl()
    comm = nccl.init(size=4, settings=config(blocking=0))
    start = Policy()
    use(CommRule(ctas=4))
    nccl.all_reduce(comm, 1 << 20)
    show([found["most"] for found in nccl.plans()])
    """
    )
    assert nccl_program(source, folder=ncclver(23200)) == [4]


@pytest.mark.parametrize("version", [23000, 23200])
def test_a_communicator_aborted_inside_a_group(nccl_program, ncclver, version):
    source = """
        nccl = Nccl()
        first, second = nccl.init(size=4), nccl.init(size=4)
        nccl.group(
            lambda: nccl.all_reduce(first, 1 << 20),
            lambda: nccl.check(nccl.lib.ncclCommAbort(first)),
            lambda: show(nccl.lib.ncclAllReduce(None, None, c_size_t(64), FLOAT32, 0, first, None)),
            lambda: nccl.all_reduce(second, 1 << 20),
        )
        nccl.all_reduce(second, 1 << 20)
        show(len(nccl.plans()))
    """
    native = nccl_program(source, folder=ncclver(version), job=False)
    assert (
        nccl_program(source, policy=RULES, folder=ncclver(version)) == native == [0, 4]
    )  # it ends with the group


@pytest.mark.parametrize("version", [23000, 23200])
def test_captured_calls_have_the_rules_of_the_job_and_no_trials(nccl_program, ncclver, version):
    source = (
        FOLLOW
        + """
    import driver
    driver.call("cuInit", 0)
    nccl = Nccl()
    comm = nccl.init(size=4)
    use(CommRule(ctas=4))
    nccl.all_reduce(comm, 1 << 20)
    stream = c_void_p(0x300)
    assert driver.call("cuStreamBeginCapture_v2", stream, 0) == 0
    nccl.all_reduce(comm, 1 << 20, stream=0x300)
    assert driver.call("cuStreamEndCapture", stream, byref(c_void_p())) == 0
    nccl.all_reduce(comm, 1 << 20)
    show(nccl.plans())
    """
    )
    plans = nccl_program(source, policy=Policy(comm_rules=(CommRule(ctas=12),)), folder=ncclver(version))
    assert [found["most"] if version >= 23100 else found["plan"][2] for found in plans] == [4, 12, 4]


# --- the user's own tuner plugin ------------------------------------------------------------------------------------

REDUCE_ONLY = Policy(comm_rules=(CommRule(collective="reduce", ctas=3, algorithm="ring", protocol="simple"),))
ASKED = """
    nccl = Nccl()
    comm = nccl.init(size=4)
    nccl.all_reduce(comm, 1 << 20)
    nccl.call("ncclReduce", comm, 1 << 20)
    nccl.check(nccl.lib.ncclCommDestroy(comm))
    show([found["plan"] for found in nccl.plans()])
"""


@pytest.fixture(scope="session")
def user_tuner(tmp_path_factory):
    def build(version, name="libnccl-tuner.so"):
        folder = tmp_path_factory.mktemp("tuner")
        compile_c(folder / name, "-shared", "-fPIC", f"-DVERSION={version}", str(HERE / "user_tuner.c"))
        return folder

    return build


@pytest.mark.parametrize(
    ("version", "nccl", "chunk"),
    [(2, 22400, CHUNK), (3, 22400, CHUNK), (4, 23000, CHUNK), (5, 22800, CHUNK), (6, 23000, 4096)],
)
def test_the_users_plugin_answers_where_no_rule_does(nccl_program, ncclver, user_tuner, version, nccl, chunk):
    """Found as libnccl-tuner.so where nothing else names a plugin."""
    stats, folder = {}, user_tuner(version)
    path = {"LD_LIBRARY_PATH": f"{ncclver(nccl)}:{folder}"}
    plans = nccl_program(ASKED, env=path, folder=ncclver(nccl), policy=REDUCE_ONLY, statistics=stats)
    assert plans == [[TREE, LL, 5, chunk], [RING, SIMPLE, 3, chunk]]
    (process,) = [found for found in stats["processes"] if found["nccl"]]
    assert process["nccl"]["user_tuner"] == version
    assert stats["tuner_failures"] == 0


def test_a_plugin_that_this_nccl_would_not_know_is_not_asked(nccl_program, ncclver, user_tuner):
    path = {"LD_LIBRARY_PATH": f"{ncclver(22800)}:{user_tuner(6)}"}
    plans = nccl_program(ASKED, env=path, folder=ncclver(22800), policy=REDUCE_ONLY)
    assert plans == [[RING, SIMPLE, 32, CHUNK], [RING, SIMPLE, 3, CHUNK]]


@pytest.mark.parametrize("given", ["path", "short name", "none", "net plugin", "file", "static"])
def test_the_users_plugin_is_found_where_nccl_would_find_it(nccl_program, ncclver, user_tuner, given):
    names = {"short name": "libnccl-tuner-mine.so", "net plugin": "libnccl-net.so"}
    names |= dict.fromkeys(("path", "file", "static"), "mine.so")
    folder = user_tuner(6, names.get(given, "libnccl-tuner.so"))
    value = {"path": str(folder / "mine.so"), "short name": "mine", "none": "none", "static": "STATIC_PLUGIN"}
    env = {"LD_LIBRARY_PATH": f"{ncclver(23000)}:{folder}"}
    if given in value:
        env["NCCL_TUNER_PLUGIN"] = value[given]
    if given == "file":  # like /etc/nccl.conf
        env["NCCL_CONF_FILE"] = str(folder / "conf")
        (folder / "conf").write_text(f"# NCCL_TUNER_PLUGIN=other\nNCCL_TUNER_PLUGIN={folder / 'mine.so'}\n")
    loaded = 'ctypes.CDLL("libnccl-net.so")' if given == "net plugin" else ""  # NCCL loads it first
    loaded = 'ctypes.CDLL("mine.so", ctypes.RTLD_GLOBAL)' if given == "static" else loaded
    plans = nccl_program("\n    " + loaded + ASKED, env=env, folder=ncclver(23000), policy=REDUCE_ONLY)
    assert plans[0] == ([RING, SIMPLE, 32, CHUNK] if given == "none" else [TREE, LL, 5, 4096])
    assert plans[1][:3] == [RING, SIMPLE, 3]


@pytest.mark.parametrize("fails", ["init", "question", "chunk", "end"])
def test_an_error_of_the_users_plugin_is_counted_and_fails_nothing(nccl_program, ncclver, user_tuner, fails):
    stats = {}
    env = {"LD_LIBRARY_PATH": f"{ncclver(23000)}:{user_tuner(6)}", "USER_TUNER_FAILS": fails}
    plans = nccl_program(ASKED, env=env, folder=ncclver(23000), policy=REDUCE_ONLY, statistics=stats)
    users = {"init": [RING, SIMPLE, 32, CHUNK], "question": [RING, SIMPLE, 32, 4096]}
    assert plans[0] == users.get(fails, [TREE, LL, 5, CHUNK if fails == "chunk" else 4096])
    assert plans[1][:3] == [RING, SIMPLE, 3]
    assert stats["tuner_failures"] == {"init": 1, "question": 2, "chunk": 2, "end": 1}[fails]


# --- in Python ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [23000, 23200])
def test_overlap_follows_rules_and_gives_them_back(nccl_program, ncclver, version):
    source = """
    import weft
    from weft.policy import CommRule
    nccl = Nccl()
    comm = nccl.init(size=4)
    one = lambda: nccl.all_reduce(comm, 1 << 20)
    with weft.overlap(weft.Policy(comm_rules=(CommRule(ctas=4),))):
        one()
        with weft.overlap(weft.Policy(comm_rules=(CommRule(ctas=6),), priority="high")):
            one()
        one()
    one()
    show(nccl.plans())
    """
    plans = nccl_program(source, policy=Policy(comm_rules=(CommRule(ctas=12),)), folder=ncclver(version))
    assert [found["most"] if version >= 23100 else found["plan"][2] for found in plans] == [4, 6, 4, 12]


def test_a_rank_that_cannot_follow_keeps_all_from_it(nccl_program, ncclver):
    source = """
    import warnings
    import weft
    from weft.policy import CommRule
    from weft.shim import apply
    class Disagreeing:
        def gather(self, value):
            return [value, "of another rank"]
    nccl = Nccl()
    comm = nccl.init(size=4)
    apply.Ranks = Disagreeing
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with weft.overlap(weft.Policy(comm_rules=(CommRule(ctas=4),))):
            nccl.all_reduce(comm, 1 << 20)
    show([[found["name"] for found in nccl.plans()], [str(one.message) for one in caught]])
    """
    names, (said,) = nccl_program(source, folder=ncclver(23200))
    assert names == ["ncclAllReduce"]
    assert "comm.rules are not applied (of another rank)" in said


# --- many threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [22800, 23200])
def test_threads_under_rules_and_a_limit_that_keeps_changing(
    sanitized, ncclver, environment, tmp_path, version
):
    folder = ncclver(version)
    program = sanitized(tmp_path / "hammer", str(HERE / "nccl_hammer.c"), f"-L{folder}", "-lnccl")
    cluster = 2 if version >= 23100 else None
    rules = Policy(comm_rules=(CommRule(collective="all_reduce", cluster=cluster, protocol="ll"),))
    with Job(rules) as job:
        env = {**job.environment(environment), "ASAN_OPTIONS": "verify_asan_link_order=0"}
        env["LD_LIBRARY_PATH"] = f"{folder}:{env['LD_LIBRARY_PATH']}"
        del env["LD_PRELOAD"]
        done = subprocess.run(
            [program, "4", "400"], env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.stderr == ""
        assert done.returncode == 0
        counted = job.collect()
    assert counted["split_failures"] == counted["config_refused"] == counted["rules_unapplied"] == 0
    assert counted["per_call"] > 0 or version < 23100


def test_the_last_line_of_weft_run_says_what_became_of_the_rules(weft_run, environment, ncclver):
    code = """
from nccl_driver import *
import driver
nccl = Nccl()
comm = nccl.init(size=4)
nccl.all_reduce(comm, 256)
nccl.all_reduce(comm, 1 << 20)
driver.launch(driver.kernel("gemm"))
"""
    for version, words in (
        (23200, "rules: 2 calls configured, 2 answers to NCCL's tuner"),
        (22200, "2 not applied (NCCL 2.22.0 takes no configuration with a call"),
    ):
        env = {"LD_LIBRARY_PATH": f"{ncclver(version)}:{environment['LD_LIBRARY_PATH']}"}
        done = weft_run([sys.executable, "-c", code], RULES, env=env)
        assert done.code == 0, done.stderr
        assert words in done.stderr


def test_live_tuning_has_the_plugin_and_keeps_what_the_user_had():
    with Job(tune=True) as job:
        asked = job.environment({"NCCL_TUNER_PLUGIN": "mine"})
        assert (asked["NCCL_TUNER_PLUGIN"], asked["WEFT_NCCL_TUNER_PLUGIN"]) == ("STATIC_PLUGIN", "mine")
        again = job.environment(asked)  # one `weft run` inside another
        assert (again["NCCL_TUNER_PLUGIN"], again["WEFT_NCCL_TUNER_PLUGIN"]) == ("STATIC_PLUGIN", "mine")
        own = job.environment(job.environment({"NCCL_TUNER_PLUGIN": "STATIC_PLUGIN"}))
        assert own["WEFT_NCCL_TUNER_PLUGIN"] == "STATIC_PLUGIN"
        assert job.environment(job.environment({}))["WEFT_NCCL_TUNER_PLUGIN"] == ""
        assert "NCCL_TUNER_PLUGIN" not in job.environment({"NCCL_CTA_POLICY": "EFFICIENCY"})
    with Job() as job:
        assert "NCCL_TUNER_PLUGIN" not in job.environment({})
