"""Collectives by copy engines (comm.engine dma) against a fake NCCL that launches a kernel where it does not copy."""

# ruff: noqa: F811 (fixtures)

from __future__ import annotations

import json

import pytest
from test_nccl_routes import build_nccl, fake_nccl, nccl_program  # noqa: F401 (fixtures)
from test_rules import ncclver  # noqa: F401 (fixtures)

from weft.policy import Policy
from weft.shim.engine import kernels_in_traces, traced_summary

DMA = Policy(engine="dma")
START = """
    nccl = Nccl().launching()
    policies = []
    def made(size=4, settings=None):
        comm = nccl.init(size=size, settings=settings)
        policies.append(nccl.lib.fake_policy(comm))
        return comm
"""
WINDOWS = (
    START
    + """
    comm = made()
    window = nccl.window(comm, 0x1000, 0x1000)
    plain = nccl.window(comm, 0x8000, 0x1000, flags=0)
    nccl.gather(comm, 0x1000, 0x1100)
    nccl.gather(comm, 0x100000, 0x1100)
    nccl.gather(comm, 0x1000, 0x100000)
    nccl.gather(comm, 0x8000, 0x8100)
    nccl.gather(comm, 0x1000, 0x1100, name="ncclAlltoAll")
    nccl.gather(comm, 0x1000, 0x1100, count=0)
    nccl.all_reduce(comm)
    nccl.call("ncclReduceScatter", comm)
    nccl.check(nccl.lib.ncclCommWindowDeregister(comm, c_void_p(window)))
    nccl.gather(comm, 0x1000, 0x1100)
    show(policies)
"""
)


def counted(stats):
    """The nonzero copy-engine counters."""
    return {
        name.removeprefix("engine_"): value
        for name, value in stats.items()
        if name.startswith("engine_") and value
    }


@pytest.mark.parametrize(("version", "unregistered_send"), [(22800, "no_window"), (23000, "copied")])
def test_what_lies_in_windows_is_copied_and_the_rest_is_counted_with_its_reason(
    nccl_program, ncclver, version, unregistered_send
):
    """From 2.29 on only the receive buffer must lie in a window."""
    stats = {}
    assert nccl_program(WINDOWS, policy=DMA, folder=ncclver(version), statistics=stats) == [2]
    expected = {"copied": 2, "no_window": 3, "other_kind": 2}
    expected[unregistered_send] += 1
    assert counted(stats) == expected
    copied = expected["copied"]
    report = stats["engine"]
    assert (report["asked"], report["copied"], report["unsure"]) == (True, copied, 0)
    assert report["kernels"] == stats["comm_launches"] == 8 - copied  # the empty call is not counted
    assert any("in no symmetric window" in line for line in report["why"])


def test_without_the_policy_nothing_is_asked_for_or_counted(nccl_program, ncclver):
    stats = {}
    assert nccl_program(WINDOWS, policy=Policy(), folder=ncclver(23000), statistics=stats) == [0]
    assert (counted(stats), stats["engine"]["asked"]) == ({}, False)


def test_what_the_program_configures_itself_stays(nccl_program, ncclver):
    source = (
        START
        + """
    class Wide(ctypes.Structure):
        _fields_ = (*Config._fields_, ("traffic", c_int), ("name", c_char_p), ("collnet", c_int),
                    ("policy", c_int), ("shrink", c_int), ("nvls", c_int), ("later", c_int * 6))
    def wide(policy):
        made = Wide(ctypes.sizeof(Wide), 0xCAFEBEEF, 23000)
        for name, kind in Wide._fields_[3:]:
            setattr(made, name, UNDEFINED) if kind is c_int else None
        made.later[:] = [UNDEFINED] * 6
        made.policy = policy
        return made
    for policy in (UNDEFINED, 0, 1, 2):
        made(settings=wide(policy))
    made(settings=config(most=8))
    comm = c_void_p()
    nccl.check(nccl.lib.ncclCommInitRank(byref(comm), 4, nccl.unique(), 0))
    policies.append(nccl.lib.fake_policy(comm))
    policies.append(nccl.lib.fake_policy(nccl.split(comm)))
    show([policies, nccl.lib.fake_ctas(nccl.init(settings=config(most=8)))])
    """
    )
    assert nccl_program(source, policy=DMA, folder=ncclver(23200)) == [[2, 0, 1, 2, 2, 2, 2], 8]


def test_from_2_31_on_the_call_asks_where_the_communicator_does_not(nccl_program, ncclver):
    """As when a running job is changed. Never for buffers outside windows."""
    source = (
        START
        + """
    from weft.policy import Policy
    from weft.shim import apply
    comm = made()
    nccl.window(comm, 0x1000, 0x1000)
    nccl.gather(comm, 0x1000, 0x1100)
    for engine in ("dma", "sm"):
        apply.apply(Policy(engine=engine), Policy())
        nccl.gather(comm, 0x1000, 0x1100)
        nccl.gather(comm, 0x1000, 0x100000)
    show([found["policy"] for found in nccl.plans()])
    """
    )
    stats = {}
    found = nccl_program(source, policy=Policy(), folder=ncclver(23200), statistics=stats)
    assert found == [None, 2, None, None, None]
    assert counted(stats) == {"copied": 1, "no_window": 1}
    assert stats["comm_launches"] == 4


@pytest.mark.parametrize(
    ("version", "before", "expected"),
    [
        (22400, "", {"old_nccl": 1}),
        (23000, "nccl.lib.fake_without(1, 0, 0)", {"no_window": 1}),
        (23000, "nccl.lib.fake_without(0, 1, 0)", {"kernels": 1}),
        (23000, "nccl.lib.fake_without(0, 0, 1)", {"own_policy": 1, "refused": 1}),
        (23000, "size = 2", {"two_ranks": 1}),
        (23200, "size = 2", {"copied": 1}),
        (23000, "os.environ['LOCAL_WORLD_SIZE'] = '2'; nccl.lib.fake_without(0, 1, 0)", {"nodes": 1}),
        (23000, "nccl.lib.fake_fail(b'ncclCommWindowRegister', 1, 5)", {"no_window": 1}),
        (23000, "nccl.lib.fake_fail(b'ncclAllGather', 1, 5)", {}),
        (23000, "settings = config(blocking=0)", {"unsure": 1}),
    ],
)
def test_whatever_fails_is_counted_and_never_the_programs_error(
    nccl_program, ncclver, version, before, expected
):
    source = (
        START
        + f"""
    size, settings = 4, None
    {before}
    comm = made(size, settings)
    handle, state = c_void_p(), c_int(7)
    while state.value == 7:
        nccl.lib.ncclCommGetAsyncError(comm, byref(state))
    results = [nccl.lib.ncclCommWindowRegister(comm, c_void_p(0x1000), c_size_t(0x1000), byref(handle), 1)]
    gather = (c_void_p(0x1000), c_void_p(0x1100), c_size_t(64), FLOAT32, comm, None)
    results.append(nccl.lib.ncclAllGather(*gather))
    show(results)
    """
    )
    stats = {}
    results = nccl_program(source, policy=DMA, folder=ncclver(version), statistics=stats)
    failing = "fake_fail" in before
    assert sorted(results) == ([0, 5] if failing else [0, 0])
    assert counted(stats) == expected


def test_in_a_group_an_nccl_newer_than_known_is_not_asked_for_copies(nccl_program, ncclver):
    """After a refused configuration NCCL fails the whole group, so a plain retry would come too late."""
    source = (
        START
        + """
    nccl.lib.fake_without(0, 0, 1)
    nccl.group(made, made)
    made()
    show(policies)
    """
    )
    stats = {}
    assert nccl_program(source, policy=DMA, folder=ncclver(23300), statistics=stats) == [0, 0, 0]
    assert stats["engine_refused"] == 1  # outside the group, where the program's own call follows


def test_groups_captures_and_communicators_that_end(nccl_program, ncclver):
    source = (
        START
        + """
    import driver
    driver.call("cuInit", 0)
    comm, other = made(), made()
    handle = c_void_p()
    register = lambda: nccl.check(
        nccl.lib.ncclCommWindowRegister(comm, c_void_p(0x1000), c_size_t(0x1000), byref(handle), 1))
    nccl.group(register)
    copied = lambda: nccl.gather(comm, 0x1000, 0x1100)
    nccl.group(copied, copied)
    nccl.group(copied, lambda: nccl.all_reduce(comm))
    nccl.group(copied, lambda: nccl.send(comm))
    nccl.gather(other, 0x1000, 0x1100)
    stream = c_void_p(0x300)
    assert driver.call("cuStreamBeginCapture_v2", stream, 0) == 0
    nccl.gather(comm, 0x1000, 0x1100, stream=0x300)
    assert driver.call("cuStreamEndCapture", stream, byref(c_void_p())) == 0
    nccl.check(nccl.lib.ncclCommAbort(comm))
    again = made()
    nccl.gather(again, 0x1000, 0x1100)
    show(policies)
    """
    )
    stats = {}
    assert nccl_program(source, policy=DMA, folder=ncclver(23000), statistics=stats) == [2, 2, 2]
    # A group with a kernel of its own cannot be told apart; a send launches nothing in this fake.
    assert counted(stats) == {"copied": 4, "unsure": 1, "other_kind": 1, "no_window": 2}


def test_rccl_has_no_copies_and_is_counted_so(nccl_program, ncclver, tmp_path):
    folder = tmp_path / "rccl"
    folder.mkdir()
    (folder / "librccl.so.1").write_bytes((ncclver(23000) / "libnccl.so.2").read_bytes())
    source = (
        START.replace("Nccl()", "Nccl('librccl.so.1')")
        + """
    comm = made()
    nccl.window(comm, 0x1000, 0x1000)
    nccl.gather(comm, 0x1000, 0x1100)
    show(policies)
    """
    )
    stats = {}
    assert nccl_program(source, policy=DMA, folder=folder, statistics=stats) == [0]
    assert counted(stats) == {"old_nccl": 1}


def test_memory_of_wefts_own_in_a_window(nccl_program, ncclver):
    """As for FSDP2's buffers. A failure gives its reason and leaves nothing behind."""
    source = (
        START
        + """
    from weft.shim.nccl_binding import NcclArena
    comm = made()
    key = int(routes.communicators()[-1].key, 16)
    arena = NcclArena(key, 4096)
    arena.register()
    nccl.gather(comm, arena.address, arena.address)
    arena.close()
    nccl.gather(comm, arena.address, arena.address)
    told = [refused(NcclArena, key + 1, 4096)]
    nccl.lib.fake_fail(b"ncclCommMemAlloc", 1, 3)
    told.append(refused(NcclArena, key, 4096))
    nccl.lib.fake_fail(b"ncclCommWindowRegister", 1, 3)
    arena = NcclArena(key, 4096)
    told.append(refused(arena.register))
    nccl.lib.fake_without(1, 0, 0)
    told.append(refused(arena.register))
    nccl.check(nccl.lib.ncclCommAbort(comm))
    told.append(refused(arena.register))
    arena.close()
    arena.close()
    show([told, len(nccl.log("ncclCommMemAlloc")), len(nccl.log("ncclCommMemFree"))])
    """
    )
    stats = {}
    told, allocated, freed = nccl_program(source, policy=DMA, folder=ncclver(23000), statistics=stats)
    assert counted(stats) == {"copied": 1, "no_window": 1}
    words = ("no such communicator", "could not allocate", "refused", "no symmetric windows", "has ended")
    assert [word in (text or "") for word, text in zip(words, told, strict=True)] == [True] * 5
    assert (allocated, freed) == (3, 2)  # one of them failed


def test_the_trace_says_whether_kernels_ran(tmp_path):
    events = [
        {"cat": "kernel", "name": "gemm", "args": {}},
        {
            "cat": "kernel",
            "name": "ncclDevKernel_ReduceScatter(x)",
            "args": {"Collective name": "reduce_scatter"},
        },
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "args": {}},
    ]
    path = tmp_path / "weft.rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert "no SM kernel" in traced_summary(kernels_in_traces([path]))
    events.append(
        {"cat": "kernel", "name": "ncclDevKernel_AllGather(x)", "args": {"Collective name": "all_gather"}}
    )
    path.write_text(json.dumps({"traceEvents": events}))
    assert kernels_in_traces([path, path]) == {"ncclDevKernel_AllGather(x)": 2}
    assert "2 of ncclDevKernel_AllGather)" in traced_summary(kernels_in_traces([path, path]))
