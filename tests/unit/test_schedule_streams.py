"""The GPU runner without a GPU: a driver that runs each stream's queue as late as its events allow.

Work is queued when issued and executed later, one stream at a time, in any order that events and streams
permit, as on a GPU; a missing event shows as a wrong result.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading

import pytest

torch = pytest.importorskip("torch")

from weft.comm.dma import Copies, HostPeers  # noqa: E402
from weft.comm.paced_peers import PacedPeers  # noqa: E402
from weft.comm.symmetric import layout  # noqa: E402
from weft.errors import UnavailableError  # noqa: E402
from weft.ops import run_streams  # noqa: E402
from weft.ops.call import Call  # noqa: E402
from weft.ops.links import HostLink, NcclLink, SymmetricLink, symmetric_size  # noqa: E402
from weft.ops.operands import Operands  # noqa: E402
from weft.ops.paced_link import PacedLink  # noqa: E402
from weft.ops.program import Program  # noqa: E402
from weft.ops.program import perform as really_perform  # noqa: E402
from weft.ops.run_streams import StreamRunner  # noqa: E402
from weft.ops.schedule import OPERATIONS, Problem, build, split  # noqa: E402
from weft.policy import SCHEDULES  # noqa: E402

MAIN = 99


@pytest.fixture(autouse=True)
def one_thread():
    """The matmuls are tiny: threads would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Gpu:
    """Streams as queues. `settle` runs them in a random order that respects events and streams."""

    def __init__(self, seed: int):
        self.queues: dict[int, list] = {}
        self.records: dict[int, int] = {}  # event → times recorded so far, at issue
        self.reached: dict[int, int] = {}
        self.random = random.Random(seed)
        self.now = MAIN
        self.events = 0

    def put(self, stream, kind, what):
        self.queues.setdefault(stream, []).append((kind, what))

    def library(self):
        class Library:
            pass

        library = Library()

        def copy(target, source, size, stream):
            self.put(stream, "do", lambda: ctypes.memmove(target, source, size))
            return 0

        def copy_2d(described, stream):
            it = described._structure

            def do():
                for row in range(it.height):
                    ctypes.memmove(
                        it.dst_device + row * it.dst_pitch, it.src_device + row * it.src_pitch, it.width
                    )

            self.put(stream, "do", do)
            return 0

        def create(made, _):
            self.events += 1
            made._obj.value = self.events
            return 0

        def record(event, stream):
            self.records[event] = self.records.get(event, 0) + 1
            self.put(stream, "record", (event, self.records[event]))
            return 0

        def wait(stream, event, _):
            self.put(stream, "wait", (event, self.records.get(event, 0)))
            return 0

        library.cuMemcpyAsync, library.cuMemcpy2DAsync_v2 = copy, copy_2d
        library.cuEventCreate, library.cuEventRecord, library.cuStreamWaitEvent = create, record, wait
        return library

    def blocked(self, stream):
        kind, what = self.queues[stream][0]
        if kind == "wait":
            return self.reached.get(what[0], 0) < what[1]
        return kind == "until" and not what()

    def step(self) -> bool:
        """Run one piece of work from a stream that is not blocked; False if there is none."""
        streams = [s for s, queue in self.queues.items() if queue and not self.blocked(s)]
        if not streams:
            return False
        # A stream that has begun tends to continue, which makes long races more likely to show.
        stream = (
            self.favourite if getattr(self, "favourite", None) in streams else self.random.choice(streams)
        )
        self.favourite = stream if self.random.random() < 0.9 else None
        kind, what = self.queues[stream].pop(0)
        if kind == "do":
            what()
        elif kind == "record":
            self.reached[what[0]] = max(self.reached.get(what[0], 0), what[1])
        return True

    @property
    def idle(self):
        return not any(self.queues.values())


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, gpu, handle):
        self.gpu, self.cuda_stream = gpu, handle
        self.event = -handle

    def wait_stream(self, other):
        self.gpu.records[other.event] = self.gpu.records.get(other.event, 0) + 1
        self.gpu.put(other.cuda_stream, "record", (other.event, self.gpu.records[other.event]))
        self.gpu.put(self.cuda_stream, "wait", (other.event, self.gpu.records[other.event]))


def on_gpus(monkeypatch, gpus):
    """Queue torch's matmuls and copies too, on the current stream of this thread's GPU."""
    here = threading.local()

    @contextlib.contextmanager
    def stream(chosen):
        before = chosen.gpu.now
        chosen.gpu.now = chosen.cuda_stream
        yield
        chosen.gpu.now = before

    def perform(slots, instruction):
        here.gpu.put(here.gpu.now, "do", lambda: really_perform(slots, instruction))

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(run_streams, "perform", perform)
    return here


def make_inputs(operation, ranks, m, n, k, rows):
    random_ = torch.Generator().manual_seed(3)

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=random_).float()

    if operation == "all_gather_matmul":
        xs = [integers(count, k) for count in rows]
    else:
        xs = [integers(m, k) for _ in range(ranks)]
    return xs, [integers(k, n) for _ in range(ranks)]


def reference(operation, xs, ws, rows):
    if operation == "all_gather_matmul":
        return [torch.cat(xs) @ w for w in ws]
    if operation == "matmul_reduce_scatter":
        return list(sum(x @ w for x, w in zip(xs, ws, strict=True)).split(rows))
    return [torch.cat([x.split(rows)[q] for x in xs]) @ w for q, w in enumerate(ws)]


def problem_of(operation, ranks, m, n, k, rank, rows, pieces):
    if operation == "all_to_all_matmul":
        return Problem(
            m=m, n=n, k=k, ranks=ranks, itemsize=4, pieces=pieces, sent=rows, rows=(rows[rank],) * ranks
        )
    return Problem(m=m, n=n, k=k, ranks=ranks, itemsize=4, pieces=pieces, rows=rows)


class Peers(HostPeers):
    """HostPeers without pinned memory, which needs a GPU."""

    def outbox(self, key, rows, cols, dtype):
        return self.sent.setdefault(key, torch.empty(rows, cols))


CASES = [(operation, name) for operation in OPERATIONS for name in SCHEDULES]


@pytest.mark.parametrize(("operation", "name"), CASES)
@pytest.mark.parametrize(("ranks", "m"), [(3, 23), (4, 32)])
def test_peers_in_host_memory(operation, name, ranks, m, monkeypatch):
    n, k = 5, 6
    for seed in range(3):
        gpu = Gpu(seed)
        here = on_gpus(monkeypatch, [gpu])
        here.gpu = gpu
        driver = Copies(gpu.library())
        rank = seed % ranks
        rows = split(m, ranks)
        schedule = build(operation, name, problem_of(operation, ranks, m, n, k, rank, rows, None), rank)
        xs, ws = make_inputs(operation, ranks, m, n, k, rows)
        held = xs
        if operation == "matmul_reduce_scatter":
            held = [(x @ w).split(rows)[rank].contiguous() for x, w in zip(xs, ws, strict=True)]
        monkeypatch.setattr("weft.comm.dma._pinned", lambda tensor: tensor)
        peers = Peers(held, rank)
        program = Program(schedule, Operands.of(Call(operation), (xs[rank],), (ws[rank],), ()))
        link = HostLink(schedule, peers, "dma", driver, [Stream(gpu, 1), Stream(gpu, 2)])
        runner = StreamRunner(schedule, program, link, driver, lambda: MAIN)
        outs = [torch.full(schedule.buffers["out"], float("nan")) for _ in range(2)]
        given = [xs[rank], xs[rank] + 1]
        for x, out in zip(given, outs, strict=True):  # issue one after the other, execute nothing in between
            runner.run((x, ws[rank], out))
        while gpu.step():
            pass
        assert gpu.idle
        first = reference(operation, xs, ws, rows)[rank]
        assert torch.equal(outs[0], first)
        moved = [x + (1 if q == rank else 0) for q, x in enumerate(xs)]
        second = reference(operation, moved, ws, rows)[rank]
        assert torch.equal(outs[1], second)
        if operation == "matmul_reduce_scatter":
            check_sent(schedule, peers, (moved[rank] @ ws[rank]).split(rows))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pieces", [None, 3])
def test_rows_in_another_order_are_copied_in_front_of_the_matmul_that_reads_them(name, pieces, monkeypatch):
    ranks, tokens, batch, n, k, rank = 4, 8, 3, 5, 6, 1
    rows = tuple(count * batch for count in split(tokens, ranks))
    schedule = build(
        OPERATIONS[1], name, Problem(m=24, n=n, k=k, ranks=ranks, itemsize=4, pieces=pieces, rows=rows), rank
    )
    gpu = Gpu(2)
    on_gpus(monkeypatch, [gpu]).gpu = gpu
    driver = Copies(gpu.library())
    xs, ws = make_inputs(OPERATIONS[1], ranks, 24, n, k, rows)
    held = [(x @ w).split(rows)[rank].contiguous() for x, w in zip(xs, ws, strict=True)]
    monkeypatch.setattr("weft.comm.dma._pinned", lambda tensor: tensor)
    given = xs[rank].view(tokens, batch, k).movedim(0, 1).contiguous().movedim(1, 0)  # batch first in memory
    operands = Operands.of(
        Call(OPERATIONS[1]), (xs[rank],), (ws[rank],), (), ((0, given.shape, given.stride()),)
    )
    program = Program(schedule, operands)
    link = HostLink(schedule, Peers(held, rank), "dma", driver, [Stream(gpu, 1), Stream(gpu, 2)])
    runner = StreamRunner(schedule, program, link, driver, lambda: MAIN)
    flat, out = torch.full((24, k), float("nan")), torch.full(schedule.buffers["out"], float("nan"))
    runner.run((flat, ws[rank], out, given))
    done = [sum(bool(torch.isfinite(row).all()) for row in flat)]
    while gpu.step():
        done.append(sum(bool(torch.isfinite(row).all()) for row in flat))
    assert torch.equal(flat, xs[rank])  # complete: a gradient uses it
    assert torch.equal(out, reference(OPERATIONS[1], xs, ws, rows)[rank])
    assert (len(set(done)) > 2) == (name not in ("serial", "uniform-fused-2d"))


@pytest.mark.parametrize(("operation", "name"), CASES)
@pytest.mark.parametrize(("engine", "node"), [("dma", "dgx-h100"), ("dma", "mi300x"), ("sm", "dgx-h100")])
def test_peers_of_a_node_take_its_time_and_results_are_those_of_host_peers(
    operation, name, engine, node, monkeypatch
):
    ranks, m, n, k = 4, 32, 5, 6
    gpu, rank, rows = Gpu(7), 1, split(32, 4)
    on_gpus(monkeypatch, [gpu]).gpu = gpu
    driver, spent = Copies(gpu.library()), {1: [], 2: []}
    schedule = build(operation, name, problem_of(operation, ranks, m, n, k, rank, rows, None), rank)
    xs, ws = make_inputs(operation, ranks, m, n, k, rows)
    held = xs
    if operation == "matmul_reduce_scatter":
        held = [(x @ w).split(rows)[rank].contiguous() for x, w in zip(xs, ws, strict=True)]

    def delay(stream, ns):
        gpu.put(stream, "do", lambda: spent[stream].append(ns))
        return 0

    def kernel(peers, nbytes, count, stream):
        us = peers.node.collective("all_to_all" if count > 1 else "send_recv", nbytes).us
        return lambda: delay(stream, round(1e3 * us))

    monkeypatch.setattr(PacedPeers, "kernel", kernel)
    peers = PacedPeers(held, node, rank)
    program = Program(schedule, Operands.of(Call(operation), (xs[rank],), (ws[rank],), ()))
    link = PacedLink(schedule, peers, engine, driver, [Stream(gpu, 1), Stream(gpu, 2)], delay)
    runner = StreamRunner(schedule, program, link, driver, lambda: MAIN)
    given = [xs[rank], xs[rank] + 1]
    outs = [torch.full(schedule.buffers["out"], float("nan")) for _ in given]
    for x, out in zip(given, outs, strict=True):
        runner.run((x, ws[rank], out))
    while gpu.step():
        pass
    assert gpu.idle
    for turn, out in enumerate(outs):
        moved = [x + (turn if q == rank else 0) for q, x in enumerate(xs)]
        assert torch.equal(out, reference(operation, moved, ws, rows)[rank])
    if engine == "dma":
        received = sum(step.bytes for step in schedule.recvs.values())
        one_link = 3 if node == "mi300x" and name == "shard" else 1  # one peer at a time uses one of 3 links
        each = len(spent[1])
        assert sum(spent[1]) == pytest.approx(2 * one_link * 1e3 * peers.copy_us(received), abs=each)
        assert bool(spent[2]) == (operation == "matmul_reduce_scatter")
    else:
        rounds = {step.round for step in (*schedule.sends.values(), *schedule.recvs.values())}
        assert len(spent[1]) == 2 * len(rounds)


def check_sent(schedule, peers, products):
    """The peers' pinned memory holds this rank's results for them."""
    for peer, product in enumerate(products):
        boxes = [
            peers.sent[schedule.name, schedule.problem, send.id]
            for (to, _), send in sorted(schedule.sends.items())
            if to == peer
        ]
        if boxes:
            whole = torch.cat(boxes, dim=1 if schedule.name == "uniform-fused-2d" else 0)
            assert torch.equal(whole, product)


class Work:
    def wait(self):
        pass


class Shared:
    """Stands in for symmetric memory: one buffer per rank, with counters as signals."""

    def __init__(self, ranks, size):
        self.memory = [torch.zeros(size // 4 + 64) for _ in range(ranks)]
        self.signals: dict[tuple[int, int, int], int] = {}
        self.arrived: dict[tuple[int, int], int] = {}

    def of(self, rank, gpu):
        shared = self

        class Buffer:
            def __init__(self):
                self.turns = {}

            def matrix(self, peer, offset, rows, cols, dtype):
                return shared.memory[peer][offset // 4 : offset // 4 + rows * cols].view(rows, cols)

            def barrier(self, which):
                turn = self.turns.setdefault(which, 0)
                self.turns[which] += 1

                def come():
                    shared.arrived[which, turn] = shared.arrived.get((which, turn), 0) + 1

                gpu.put(gpu.now, "do", come)
                ranks = len(shared.memory)
                gpu.put(gpu.now, "until", lambda: shared.arrived.get((which, turn), 0) == ranks)

            def signal(self, peer, message):
                key = (rank, peer, message)
                gpu.put(gpu.now, "until", lambda: not shared.signals.get(key))
                gpu.put(gpu.now, "do", lambda: shared.signals.__setitem__(key, 1))

            def wait_signal(self, peer, message):
                key = (peer, rank, message)
                gpu.put(gpu.now, "until", lambda: shared.signals.get(key))
                gpu.put(gpu.now, "do", lambda: shared.signals.__setitem__(key, 0))

        return Buffer()


def all_ranks(monkeypatch, operation, name, ranks, m, make_link, seeds, pieces=None):
    """Two calls on every rank of simulated GPUs, whose queues are then run against each other."""
    n, k = 5, 6
    rows = split(m, ranks)
    xs, ws = make_inputs(operation, ranks, m, n, k, rows)
    for seed in range(seeds):
        gpus = [Gpu(seed * 31 + rank) for rank in range(ranks)]
        here = on_gpus(monkeypatch, gpus)
        schedules = {
            rank: build(operation, name, problem_of(operation, ranks, m, n, k, rank, rows, pieces), rank)
            for rank in range(ranks)
        }
        make = make_link(schedules)
        outs, kept = [], []
        for rank, gpu in enumerate(gpus):
            here.gpu = gpu
            driver = Copies(gpu.library())
            link, memory = make(rank, gpu, driver)
            program = Program(
                schedules[rank], Operands.of(Call(operation), (xs[rank],), (ws[rank],), ()), memory
            )
            runner = StreamRunner(schedules[rank], program, link, driver, lambda: MAIN)
            kept.append(runner)  # keep it alive: its scratch is referenced by address only
            for turn in range(2):
                out = torch.full(schedules[rank].buffers["out"], float("nan"))
                x = xs[rank] + turn
                outs.append((rank, turn, out))
                kept.append(x)
                runner.run((x, ws[rank], out))
        order = random.Random(seed)
        while sum(gpu.step() for gpu in gpus for _ in range(order.randint(1, 9))):
            pass
        assert all(gpu.idle for gpu in gpus), "a stream waits for what never comes"
        for rank, turn, out in outs:
            want = reference(operation, [x + turn for x in xs], ws, rows)[rank]
            assert torch.equal(out, want), f"rank {rank}, call {turn}, seed {seed}"


@pytest.mark.parametrize(("operation", "name"), CASES)
@pytest.mark.parametrize(("ranks", "m"), [(3, 18)])
def test_peers_in_symmetric_memory(operation, name, ranks, m, monkeypatch):
    def make_link(schedules):
        shared = Shared(ranks, symmetric_size(schedules, 4))

        def make(rank, gpu, driver):
            lanes = [Stream(gpu, 1), Stream(gpu, 2)]
            buffer = shared.of(rank, gpu)
            link = SymmetricLink(schedules[rank], schedules, buffer, torch.float32, driver, lanes)
            for index in range(len(shared.memory)):
                assert layout([(1, 1)], 4)[1] <= shared.memory[index].numel() * 4
            return link, link.buffers()

        return make

    copied = torch.Tensor.copy_

    def copy_(self, other, *more):
        gpu = current.get("gpu")
        if gpu is None:
            return copied(self, other, *more)
        gpu.put(gpu.now, "do", lambda: copied(self, other, *more))
        return self

    current: dict[str, Gpu] = {}
    begin = SymmetricLink.begin

    def staged(self, program):
        made = begin(self, program)
        inner = made.call

        def call(slots):
            current["gpu"] = self._streams[0].gpu
            inner(slots)
            current.clear()

        made.call = call
        return made

    monkeypatch.setattr(SymmetricLink, "begin", staged)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    all_ranks(monkeypatch, operation, name, ranks, m, make_link, seeds=3)


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_peers_by_rounds_of_sends_and_receives(operation, name, monkeypatch):
    """As with NCCL: one exchange per round, complete when all its parts are."""

    def make_link(schedules):
        ranks = len(schedules)
        mail: dict = {}

        def make(rank, gpu, driver):
            class Group:
                turn = 0

                def allreduce(self, tensors):
                    return Work()

                def alltoall(self, arriving, leaving):
                    turn, self.turn = self.turn, self.turn + 1

                    def post():
                        for peer, tensor in enumerate(leaving):
                            if tensor.numel():
                                mail.setdefault((rank, peer), []).append(tensor.clone())

                    def there():
                        return all(mail.get((peer, rank)) for peer, t in enumerate(arriving) if t.numel())

                    def take():
                        for peer, tensor in enumerate(arriving):
                            if tensor.numel():
                                tensor.copy_(mail[peer, rank].pop(0))

                    gpu.put(gpu.now, "do", post)
                    gpu.put(gpu.now, "until", there)
                    gpu.put(gpu.now, "do", take)
                    assert turn >= 0
                    assert len(arriving) == len(leaving) == ranks

                    return Work()

            return NcclLink(schedules[rank], Group(), Stream(gpu, 1)), None

        return make

    # The views of x are made contiguous when the call is issued: x itself must not change in between.
    all_ranks(monkeypatch, operation, name, 3, 20, make_link, seeds=2)


def test_what_is_not_available_is_said_once(monkeypatch):
    """Without symmetric memory NCCL is used; without NCCL the error says what to do."""
    from weft.ops import choose, engines
    from weft.ops.teams import TeamAgreement

    gpu = Gpu(0)
    monkeypatch.setattr(engines, "copies", lambda: Copies(gpu.library()))
    monkeypatch.setattr(engines, "_lanes", lambda device: [Stream(gpu, 1), Stream(gpu, 2)])

    class ProcessGroupNCCL:
        pass

    class ProcessGroupGloo:
        pass

    class Group:
        group_name = "nobody"
        backend = ProcessGroupNCCL()

        def _get_backend(self, device):
            return self.backend

        def allreduce(self, tensors):
            return Work()

    class Team:
        rank, size, timeout_s, group = 0, 3, 1.0, Group()

        def all_can(self, facts, reason):
            return reason

    schedule = build("all_gather_matmul", "shard", Problem(m=9, n=4, k=4, ranks=3, rows=(3, 3, 3)), 0)
    facts = [{"operation": "all_gather_matmul"}] * 3
    operands = Operands.of(Call("all_gather_matmul"), (torch.ones(3, 4),), (torch.ones(4, 4),), ())
    given = (operands, Team())
    choose._SAID.clear()
    with pytest.warns(RuntimeWarning, match="engine dma is not available .*NCCL moves the bytes") as said:
        made = [engines.stream_runner(schedule, "dma", TeamAgreement(facts), *given) for _ in range(3)]
    assert all(isinstance(runner._link, NcclLink) for runner in made)
    assert len(said) == 1
    Group.backend = ProcessGroupGloo()
    with pytest.raises(UnavailableError, match="use a group with backend 'nccl'"):
        engines.stream_runner(schedule, "dma", TeamAgreement(facts), *given)
    choose._SAID.clear()


def test_calls_of_one_kind_share_their_symmetric_memory(monkeypatch):
    """Making it takes all ranks, and a rank may prepare a call alone. Given blocks go by NCCL: sizes may change."""
    from weft.ops import choose, engines
    from weft.ops.teams import TeamAgreement

    gpu, made = Gpu(0), []
    monkeypatch.setattr(engines, "copies", lambda: Copies(gpu.library()))

    class Memory:
        def __init__(self, size, *_):
            made.append(size)

    monkeypatch.setattr(engines, "SymmetricBuffer", Memory)

    class Team:
        rank, size, timeout_s, group = 0, 3, 1.0, None

        def all_can(self, facts, reason):
            return reason

    def link(operation, agreement, n):
        schedule = build(operation, "shard", Problem(m=9, n=n, k=4, ranks=3, rows=(3, 3, 3)), 0)
        lanes = [Stream(gpu, 1), Stream(gpu, 2)]
        given = (torch.float32, torch.device("cpu"), Team(), lanes)
        return engines._symmetric(schedule, agreement, *given)

    agreement = TeamAgreement([{"operation": "all_gather_matmul"}] * 3)
    first, second = (link("all_gather_matmul", agreement, n) for n in (4, 5))
    assert len(made) == 1
    assert first._memory is second._memory
    choose._SAID.clear()
    with pytest.warns(RuntimeWarning, match="input_splits may change on one rank alone; NCCL moves"):
        assert link("all_to_all_matmul", TeamAgreement([{"blocks": "given"}] * 3), 4) is None
    assert len(made) == 1
    choose._SAID.clear()
