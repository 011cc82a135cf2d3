"""Paced collectives without a GPU: the kernel's PTX, the data it moves and when, and the NCCL API on top."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time

import numpy as np
import pytest
from ptx_interpreter import Memory, run_kernel

from weft.comm import nccl, paced, paced_kernel, paced_launch, paced_mail, paced_plan
from weft.comm.node import load_node
from weft.comm.paced_copies import UrgentCopies
from weft.errors import UnavailableError, UsageError, WeftError
from weft.gpu.driver import Attribute, Driver

THREADS = 32
BF16 = np.uint16


def call(operation: str, send: int, recv: int, size: int, **more) -> paced_plan.RankCall:
    known = {"type_name": "float32", "reduction": 0, "peer": 0, "rank": 0, "ranks": 4, "stream": 7, "comm": 1}
    return paced_plan.RankCall(operation, send, recv, size, **{**known, **more})


def arguments(planned, ctas=3, read=0, write=0, move_ns=0, wait_ns=0, scratch=0, mail=None):
    return paced_plan.kernel_arguments(
        planned,
        ctas=ctas,
        threads=THREADS,
        read_bytes=read,
        write_bytes=write,
        move_ns=move_ns,
        wait_ns=wait_ns,
        scratch=scratch,
        mail=mail,
    )


def run(planned, memory, ctas=3, extra=0, clock=lambda cta, reading: 1 << 40, **more):
    scratch = memory.add(np.zeros(paced_plan.scratch_bytes(ctas, THREADS), np.uint8))
    given = arguments(planned, ctas, extra, extra, scratch=scratch, **more)
    text = paced_kernel.kernel_text("ncclDevKernel_Test", planned.operation, THREADS, 90)
    run_kernel(text, bytes(given), memory, ctas, THREADS, clock)
    return given


TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": BF16,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
}


def encoded(values: np.ndarray, type_name: str) -> np.ndarray:
    if type_name == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(BF16)
    return values.astype(TYPES[type_name])


@pytest.mark.parametrize(
    ("type_name", "misaligned"), [*((name, 0) for name in TYPES), ("float32", 8), ("bfloat16", 2)]
)
def test_a_sum_is_the_input_times_the_ranks(type_name, misaligned):
    count = 741
    values = np.arange(count) % 9 + 1.0
    given, wanted = (encoded(x, type_name) for x in (values, 4 * values))
    memory, out = Memory(), np.zeros_like(given)
    send, recv = memory.add(given, misaligned), memory.add(out)
    (planned,) = paced_plan.plan_calls([call("all_reduce", send, recv, given.nbytes, type_name=type_name)])
    assert planned.operation == paced_plan.SCALED_TYPES[type_name]
    run(planned, memory, extra=5 * given.nbytes)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("size", [1, 33, 5001])
def test_gathered_parts_fill_the_output_and_nothing_else(size):
    memory, given = Memory(), np.random.default_rng(size).integers(0, 255, size).astype(np.uint8)
    out = np.zeros(4 * size, np.uint8)
    calls = [call("all_gather", memory.add(given), memory.add(out), size, type_name="uint8")]
    (planned,) = paced_plan.plan_calls(calls)
    run(planned, memory, ctas=5)
    assert np.array_equal(out, np.tile(given, 4))
    assert planned.node_bytes == 4 * size  # nccl-tests' size


def test_parts_of_reduce_scatter_and_all_to_all_are_the_ranks_own():
    memory, given, out = Memory(), np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    send, recv = memory.add(given), memory.add(out)
    own = {"rank": 2, "ranks": 4}
    (planned,) = paced_plan.plan_calls([call("reduce_scatter", send, recv, 64, **own)])
    run(planned, memory)
    assert np.array_equal(out[:16], 4 * given[32:48])
    (planned,) = paced_plan.plan_calls([call("all_to_all", send, recv, 64, **own)])
    run(planned, memory)
    assert np.array_equal(out, np.tile(given[32:48], 4))


def test_sends_and_receives_of_a_group_are_one_kernel():
    memory, given, out = Memory(), np.arange(32, dtype=np.float32), np.full(33, 9, np.float32)
    send, recv = memory.add(given), memory.add(out)
    calls = []
    for peer in range(4):
        calls.append(call("send", send + 32 * peer, 0, 32, peer=peer))
        calls.append(call("recv", 0, recv + 32 * peer, 32, peer=peer))
    calls.append(call("recv", 0, recv + 128, 4, peer=3))
    (planned,) = paced_plan.plan_calls(calls)
    assert (planned.kind, len(planned.copies)) == ("all_to_all", 2)
    run(planned, memory)
    assert np.array_equal(out[:32], np.tile(given[:8], 4))
    assert out[32] == 0  # a ghost has nothing of that size to send
    (pair,) = paced_plan.plan_calls([call("send", send, 0, 80, peer=1), call("recv", 0, recv, 64, peer=1)])
    assert (pair.kind, pair.node_bytes) == ("send_recv", 80)


def test_more_pieces_than_a_launch_takes_become_several():
    copies = tuple(paced_plan.RankCopy(16 * i, 4096 + 32 * i, 16) for i in range(150))
    planned = paced_plan.PlannedKernel("all_to_all", 2400, "copy8", copies, call("recv", 0, 0, 0))
    parts = paced_plan.split_kernel(planned)
    assert [len(part.copies) for part, _ in parts] == [64, 64, 22]
    assert sum(share for _, share in parts) == pytest.approx(1)


@pytest.mark.parametrize("placed_ns", [0, 5_000])
def test_progress_is_linear_from_the_placement_of_each_cta(placed_ns):
    """The clock advances by 1 us per poll; each CTA ends `us` after its own first reading, and no earlier."""
    given = np.zeros(8 * THREADS * 256 // 4, np.float32)
    memory, last = Memory(), {}

    def clock(cta: int, reading: int) -> int:
        last[cta] = max(last.get(cta, 0), (1 << 40) + cta * placed_ns + 1000 * reading)
        return (1 << 40) + cta * placed_ns + 1000 * reading

    send = memory.add(given)
    (planned,) = paced_plan.plan_calls([call("all_reduce", send, send, given.nbytes)])
    made = run(planned, memory, ctas=2, clock=clock, move_ns=80_000, wait_ns=20_000)
    assert made.all_units == 8
    for cta in range(2):
        assert last[cta] - (1 << 40) - cta * placed_ns == pytest.approx(100_000, abs=2000)


def test_a_ghost_stage_answers_when_it_would():
    """Two messages 10 us apart to stages of 50 us: the first answer takes 3 stages, the second one more."""
    memory, box, now = Memory(), np.zeros(2 + paced_mail.MAIL_SLOTS, np.uint64), [1 << 40]
    address, stages = memory.add(box), paced_plan.GhostStages(50.0)
    tensor = memory.add(np.zeros(16, np.float32))

    def clock(cta: int, reading: int) -> int:
        now[0] += 500
        return now[0]

    def issue(*operations: str) -> float:
        calls = [call(name, tensor, tensor, 64, peer=1) for name in operations]
        (planned,) = paced_plan.plan_calls(calls)
        mail = stages.mail(planned, lambda comm, peer: address)
        given = arguments(planned, ctas=1, move_ns=2000, mail=mail)
        text = paced_kernel.kernel_text("ncclDevKernel_Test", planned.operation, THREADS, 90)
        run_kernel(text, bytes(given), memory, 1, 1, clock)
        return (now[0] - (1 << 40)) / 1000

    posted = [issue("send")]
    now[0] += 10_000
    posted.append(issue("send"))
    first, second = issue("recv"), issue("recv")
    assert first == pytest.approx(posted[0] + 150 + 2, abs=4)
    assert second == pytest.approx(first + 50, abs=4)
    assert issue("recv") == pytest.approx(second + 2, abs=4)  # there is no send to answer
    assert issue("send", "recv") < second + 20  # a send does not answer itself
    assert issue("send", "recv") > second + 150


def test_waits_are_bounded_by_cycles_if_the_timer_stands_still():
    memory = Memory()
    (planned,) = paced_plan.plan_calls([call("all_reduce", 0, 0, 0)])
    ticks = itertools.count(0, 10_000_000)
    # %clock64 and %globaltimer read the same clock here; most_cycles is far below the time move_ns asks for.
    given = arguments(planned, move_ns=1 << 62)
    given.most_cycles = 50_000_000
    text = paced_kernel.kernel_text("ncclDevKernel_Test", planned.operation, THREADS, 80)
    run_kernel(text, bytes(given), memory, 1, 1, lambda cta, reading: next(ticks))


def test_traffic_beyond_the_data_goes_to_scratch_memory():
    (planned,) = paced_plan.plan_calls([call("all_reduce", 1 << 20, 1 << 20, 1 << 20)])
    made = arguments(planned, ctas=4, read=3 << 20, write=2 << 20)
    assert made.data_units * made.unit_bytes == 1 << 20
    assert made.read_units == 2 * made.data_units
    assert made.write_units == made.data_units
    assert made.all_units == 3 * made.data_units
    assert made.unit_bytes == THREADS * 256


class CopyingDriver(Driver):
    """Does the driver's copies in the interpreter's memory, and logs its calls together with the delays."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.log = memory, []

    def attribute(self, device, attribute):
        return 9

    def call(self, name, *given):
        self.log.append(name)
        if name == "cuMemcpyDtoDAsync_v2":
            target, source, size, _ = (value.value for value in given)
            self.memory.at(target, size)[:] = self.memory.at(source, size)
        elif name == "cuMemsetD8Async":
            target, byte, size, _ = (value.value for value in given)
            self.memory.at(target, size)[:] = byte


class Delays:
    """Stands in for StreamDelays."""

    def __init__(self, log: list[str], *, works: bool = True) -> None:
        self.log, self.works, self.held = log, works, []

    def capturing(self, stream):
        return False

    def hold(self, stream, us, action):
        if not self.works:
            raise UnavailableError("no delays")
        self.log.append("begin")
        action()
        self.log.append("end")
        self.held.append((stream, us))


@pytest.mark.parametrize(
    ("operation", "in_place", "root"),
    [
        ("all_gather", False, 0),
        ("all_gather", True, 0),
        ("all_to_all", False, 0),
        ("gather", False, 1),
        ("scatter", False, 1),
        ("scatter", False, 0),
    ],
)
def test_copies_leave_what_the_kernel_leaves_each_time(operation, in_place, root):
    """comm.engine dma copies the same bytes as SMs would, at every repetition and with new data."""
    memory, size, source = Memory(), 96, np.random.default_rng(0)
    given, out = np.zeros(4 * size, np.uint8), np.zeros(4 * size, np.uint8)
    recv = memory.add(out)
    send = recv + size if in_place else memory.add(given)
    (planned,) = paced_plan.plan_calls([call(operation, send, recv, size, rank=1, peer=root)])
    driver = CopyingDriver(memory)
    launcher = paced_launch.PacedLauncher(driver)
    launcher._delays = delays = Delays(driver.log)
    node = load_node("dgx-h100")
    copied, part = node.copied("all_gather", 4 * size, 4), node.collective("all_gather", 4 * size, None, 4)
    ready = []
    for turn in range(3):
        given[:], out[:] = source.integers(0, 255, (2, 4 * size))
        before = out.copy()
        run(planned, memory)
        wanted = out.copy()
        out[:] = before
        if ready:
            ready[0].launch(5.0)
        else:
            ready = launcher.delay(planned, copied, part, 5.0)
        assert np.array_equal(out, wanted)
        assert not np.array_equal(out, before)
        assert delays.held[turn:] == [(7, copied.us + 5.0)]
        issued = driver.log[driver.log.index("begin") :]
        assert (issued[1], issued[-2:]) == ("cuEventRecord", ["cuStreamWaitEvent", "end"])
        assert "cuLaunchKernelEx" not in driver.log
        driver.log.clear()


def test_copies_of_two_threads_wait_for_their_own_streams():
    """The driver is called without Python's lock, and both threads use the same two events."""
    issued: list[int] = []

    class SlowDriver(CopyingDriver):
        def call(self, name, *given):
            if name in ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync_v2"):
                issued.append(threading.get_ident())
                time.sleep(1e-4)

    memory = Memory()
    urgent = UrgentCopies(SlowDriver(memory))
    (planned,) = paced_plan.plan_calls([call("all_gather", 4096, 1 << 20, 96, rank=0)])
    issue = urgent.ready(planned)
    issue()
    each = len(issued)
    threads = [threading.Thread(target=lambda: [issue() for _ in range(20)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(issued) == 41 * each
    assert all(len(set(issued[at : at + each])) == 1 for at in range(0, len(issued), each))


def test_without_delays_the_kernel_runs_in_place_of_copies(monkeypatch):
    launcher, launched = paced_launch.PacedLauncher(FakeDriver()), []
    launcher._delays = Delays([], works=False)
    monkeypatch.setattr(launcher, "launch", lambda *given: launched.append(given))
    node = load_node("dgx-h100")
    copied, part = node.copied("all_gather", 4096, 4), node.collective("all_gather", 4096, None, 4)
    (planned,) = paced_plan.plan_calls([call("all_gather", 4096, 1 << 20, 1024)])
    launcher.delay(planned, copied, part, 2.0)
    assert launched == [(planned, part, 2.0)]


# --- the NCCL API ------------------------------------------------------------------------------------------


class Again:
    leads = True

    def __init__(self, recorder, planned, part) -> None:
        self.recorder, self.planned, self.part = recorder, planned, part

    def launch(self, late_us):
        self.recorder.repeated += 1
        self.recorder.launched.append((self.planned, self.part, late_us))


class Recorder:
    """Stands in for the GPU: records the kernels that would be launched."""

    def __init__(self) -> None:
        self.launched, self.copied, self.delayed, self.repeated = [], [], [], 0

    def current_device(self) -> int:
        return 3

    def mailbox(self, comm, peer):
        return 1 << 30

    def launch(self, planned, part, late_us, mail):
        self.mail = mail
        self.launched.append((planned, part, late_us))
        return [Again(self, planned, part)]

    def copy(self, planned):
        self.copied.append(planned)

    def delay(self, planned, copied, part, late_us):
        self.delayed.append((planned, copied, late_us))
        return [Again(self, planned, copied)]


class Tensor:
    dtype = "torch.float32"

    def __init__(self, count: int, address: int) -> None:
        self.count, self.address = count, address

    def numel(self) -> int:
        return self.count

    def data_ptr(self) -> int:
        return self.address


class Stream:
    cuda_stream = 77


def ranks_of(recorder, size=8, ctas=None, late=None, own=0):
    library = paced.load_paced(load_node("dgx-h100"), late or paced.Lateness(), launcher=recorder)
    return nccl.NcclRanks(library, size, ctas, own=own)


def test_calls_of_one_rank_take_the_time_and_ctas_of_the_node():
    recorder, node = Recorder(), load_node("dgx-h100")
    ranks = ranks_of(recorder)
    none, tensor = [None] * 7, Tensor(16 << 20, 4096)
    ranks.all_reduce([tensor, *none], [tensor, *none], [Stream()] * 8)
    ranks.all_gather([Tensor(1 << 20, 4096), *none], [Tensor(8 << 20, 1 << 30), *none], [Stream()] * 8)
    (reduced, part, _), (gathered, other, _) = recorder.launched
    assert part == node.collective("all_reduce", 64 << 20, None, 8)
    assert other == node.collective("all_gather", 32 << 20, None, 8)
    assert (reduced.operation, reduced.call.stream) == ("sum_f32", 77)
    assert gathered.copies == (paced_plan.RankCopy(4096, 1 << 30, 4 << 20, 8),)
    ranks_of(recorder, ctas=4).all_reduce([tensor, *none], [tensor, *none], [Stream()] * 8)
    assert recorder.launched[-1][1].ctas <= 4
    assert recorder.launched[-1][1].us > part.us
    eighth = Tensor(1 << 20, 4096)
    eighth.dtype = "torch.float8_e4m3fn"
    ranks.all_gather([eighth, *none], [Tensor(8 << 20, 1 << 30), *none], [Stream()] * 8)
    assert recorder.launched[-1][1] == node.collective("all_gather", 8 << 20, None, 8)
    alone = ranks_of(recorder, size=1)
    alone.all_reduce([tensor], [Tensor(16 << 20, 8192)], [Stream()])
    assert len(recorder.copied) == 1
    alone.close()


def test_groups_of_several_nodes_take_the_time_of_their_places():
    """A group with one rank on each node uses the network, and so do the communicators that the shim splits."""
    recorder, node = Recorder(), load_node("dgx-h100-2")
    library = paced.load_paced(node, paced.Lateness(), launcher=recorder)
    assert [node.stride(ranks) for ranks in (range(16), range(8), (0, 2), (0, 8), (0, 4, 8, 12))] == [
        1,
        1,
        1,
        8,
        4,
    ]
    pair, tensor = nccl.NcclRanks(library, 2, own=0), Tensor(16 << 20, 4096)

    def reduced(handle) -> float:
        library.call("ncclAllReduce", 4096, 8192, 16 << 20, 7, 0, handle, 77)
        return recorder.launched[-1][1].us

    inside = reduced(pair.communicator(0))
    library.call("weft_paced_spread", pair.communicator(0), node.stride((0, 8)))
    outside, split = reduced(pair.communicator(0)), ctypes.c_void_p()
    library.call("ncclCommSplit", pair.communicator(0), 0, 0, ctypes.byref(split), None)
    assert outside == reduced(split) == node.collective("all_reduce", 64 << 20, ranks=2, stride=8).us
    assert outside > 4 * inside
    assert node.copies("all_gather", 2)
    assert not node.copies("all_gather", 2, stride=8)
    world = nccl.NcclRanks(library, 16, own=0)
    for peer in (1, 8):
        world.exchange([(0, tensor, peer, None)], [Stream()] * 16)
    near, far = (part.us for _, part, _ in recorder.launched[-2:])
    assert near == node.collective("send_recv", 64 << 20, ranks=8).us < far / 4


def test_an_all_to_all_of_thousands_of_ranks_is_one_group():
    recorder, size = Recorder(), 4096
    ranks = ranks_of(recorder, size=size)
    part = Tensor(256, 4096)
    moves = [(0, part, 0, part)]
    for peer in range(1, size):
        moves += [(0, part, peer, None), (peer, None, 0, part)]
    ranks.exchange(moves, [Stream()] * size)
    ((planned, _, _),) = recorder.launched
    assert (planned.kind, planned.node_bytes) == ("all_to_all", 1024 * size)


def test_limits_of_the_environment_and_of_a_call_hold(monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", "6")
    recorder = Recorder()
    ranks = ranks_of(recorder)
    tensor = Tensor(16 << 20, 4096)
    ranks.all_reduce([tensor], [tensor], [Stream()])
    assert recorder.launched[-1][1].ctas == 6

    class CallConfig(ctypes.Structure):
        _fields_ = (
            ("size", ctypes.c_size_t),
            ("magic", ctypes.c_uint),
            ("version", ctypes.c_uint),
            ("ext", ctypes.c_void_p),
            ("numbers", ctypes.c_int * 4),
            ("algorithm", ctypes.c_char_p),
            ("force", ctypes.c_int),
            ("policy", ctypes.c_int),
            ("tag", ctypes.c_uint64),
        )

    undefined = -(2**31)
    numbers = (ctypes.c_int * 4)(undefined, 2, undefined, 1)
    config = CallConfig(ctypes.sizeof(CallConfig), 0xCAFEBEEF, 23100, None, numbers, b"ring")
    library = ctypes.CDLL(str(paced.PACED_LIBRARY))
    comm = ranks._comms[0]
    send = ctypes.c_void_p(4096)
    assert (
        library.ncclAllReduceConfig(
            send, send, ctypes.c_size_t(1 << 20), 7, 0, comm, None, ctypes.byref(config)
        )
        == 0
    )
    planned, part, _ = recorder.launched[-1]
    assert (part.ctas, part.algorithm, planned.call.cluster) == (2, "ring", 1)
    config.algorithm = b"collnetchain"  # not on this node: keep NCCL's choice
    arguments = send, send, ctypes.c_size_t(1 << 20), 7, 0, comm, None, ctypes.byref(config)
    assert library.ncclAllReduceConfig(*arguments) == 0
    config.magic = 1
    assert library.ncclAllReduceConfig(*arguments) == 4


def test_copy_engines_take_their_time_and_no_cta_inside_one_domain():
    recorder, node = Recorder(), load_node("dgx-h100")
    server = paced.PacedServer(node, recorder, paced.Lateness())
    asked = {"ranks": 8, "copies": True}
    server.serve([call("all_gather", 4096, 1 << 30, 64 << 20, **asked)])
    server.serve([call("all_to_all", 4096, 1 << 30, 64 << 20, **asked)])
    for planned, copied, _ in recorder.delayed:
        assert copied == node.copied(planned.kind, 512 << 20, 8)
        assert copied.ctas == 0
    assert (len(recorder.delayed), recorder.launched) == (2, [])
    server.serve([call("gather", 4096, 1 << 30, 64, **asked)])  # the profile has no copies for it
    wide = paced.PacedServer(load_node("dgx-h100-2"), recorder, paced.Lateness())
    wide.serve([call("all_gather", 4096, 1 << 30, 64, ranks=16, copies=True)])
    assert (len(recorder.delayed), len(recorder.launched)) == (2, 2)


def test_messages_to_a_stage_are_numbered_even_if_they_are_equal():
    recorder = Recorder()
    library = paced.load_paced(load_node("dgx-h100"), paced.Lateness(), 100.0, launcher=recorder)
    ranks, tensor, seen = nccl.NcclRanks(library, 4, own=0), Tensor(16, 4096), []
    for way in ("recv", "send", "send", "recv", "recv", "recv"):
        ranks.exchange([(0, tensor, 1, None) if way == "send" else (1, None, 0, tensor)], [Stream()] * 4)
        seen.append((recorder.mail.post, recorder.mail.answer) if recorder.mail else None)
    assert seen == [None, (1, 0), (2, 0), (0, 1), (0, 2), None]
    assert recorder.repeated == 0


def test_an_error_of_the_launch_is_an_nccl_error_with_its_text():
    class Broken(Recorder):
        def launch(self, planned, part, late_us, mail):
            raise UsageError("no such thing")

    tensor = Tensor(16, 4096)
    with pytest.raises(WeftError, match="no such thing"):
        ranks_of(Broken()).all_reduce([tensor], [tensor], [Stream()])


def test_stragglers_are_drawn_from_the_distribution():
    recorder = Recorder()
    ranks, tensor = ranks_of(recorder, late=paced.Lateness.parse("50,10")), Tensor(16, 4096)
    for _ in range(400):
        ranks.all_reduce([tensor], [tensor], [Stream()])
    assert recorder.repeated == 399  # planned once
    late = [delay for _, _, delay in recorder.launched]
    assert np.mean(late) == pytest.approx(50, abs=3)
    assert np.std(late) == pytest.approx(10, rel=0.2)
    with pytest.raises(UsageError, match="use US or US,SIGMA"):
        paced.Lateness.parse("soon")


class FakeDriver(Driver):
    """Records modules and launches."""

    ATTRIBUTES = {  # noqa: RUF012
        Attribute.COMPUTE_CAPABILITY_MAJOR: 9,
        Attribute.COMPUTE_CAPABILITY_MINOR: 0,
        Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
    }

    def __init__(self) -> None:
        self.modules, self.launches, self.names = [], [], {}

    def load(self, ptx):
        self.modules.append(ptx)
        return len(self.modules)

    def function(self, module, name):
        self.names[module] = name
        return module

    def attribute(self, device, attribute):
        return self.ATTRIBUTES[attribute]

    def call(self, name, *given):
        if name == "cuLaunchKernelEx":
            config, function, pointers, _ = given
            config = config._obj
            cluster = config.attributes[0].value[0] if config.attribute_count else 1
            size = ctypes.sizeof(paced_kernel.KernelArguments)
            self.launches.append(
                {
                    "grid": tuple(config.grid),
                    "block": tuple(config.block),
                    "shared_bytes": config.shared_bytes,
                    "stream": config.stream,
                    "cluster": cluster,
                    "name": self.names[function],
                    "work": ctypes.string_at(pointers[0], size),
                }
            )
        elif name == "cuMemAlloc_v2":
            given[0]._obj.value = 1 << 33


def test_a_launch_has_the_shape_of_the_nodes_kernel():
    driver = FakeDriver()
    launcher = paced_launch.PacedLauncher(driver)
    part = load_node("dgx-h100").collective("all_reduce", 64 << 20, None, 8)
    (planned,) = paced_plan.plan_calls([call("all_reduce", 4096, 4096, 64 << 20, ranks=8)])
    launcher.launch(planned, part, late_us=3.0)
    launcher.launch(planned, part)
    (first, second), (module,) = driver.launches, driver.modules
    assert first["grid"] == (part.ctas, 1, 1)
    assert first["block"] == (part.threads, 1, 1)
    assert first["shared_bytes"] == part.shared_bytes
    assert first["cluster"] == (part.cluster if part.ctas % part.cluster == 0 else 1)
    assert first["name"] == "ncclDevKernel_AllReduce_Sum_f32_PACED"
    made = paced_kernel.KernelArguments.from_buffer_copy(first["work"])
    assert (made.wait_ns, made.move_ns) == (3000, round(1000 * part.us))
    assert paced_kernel.KernelArguments.from_buffer_copy(second["work"]).wait_ns == 0
    assert f".maxntid {part.threads}, 1, 1" in module
    assert ".target sm_90" in module
    for size in (2, 8):  # kernels of one name for elements of other sizes
        (gathered,) = paced_plan.plan_calls([call("all_gather", 4096, 8192, size, type_name="float16")])
        launcher.launch(gathered, part)
    assert [
        kind in text for kind, text in zip(("b16 %h", "b64 %value"), driver.modules[1:], strict=True)
    ] == [
        True,
        True,
    ]
