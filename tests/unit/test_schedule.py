"""Schedules: their results, the data they move, and that their parts fit together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import UsageError
from weft.ops.schedule import (
    OPERATIONS,
    Add,
    Copy,
    Matmul,
    Problem,
    Recv,
    Region,
    Send,
    build,
    runs,
    split,
)
from weft.policy import SCHEDULES


@st.composite
def cases(draw):
    operation = draw(st.sampled_from(OPERATIONS))
    name = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 6))
    m, n, k = draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    pieces = draw(st.none() | st.integers(1, 7))
    counts = st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks)
    problems = [Problem(m=m, n=n, k=k, ranks=ranks, pieces=pieces)] * ranks
    if draw(st.booleans()):
        if operation == "all_to_all_matmul":
            sent = draw(st.lists(counts.filter(sum), min_size=ranks, max_size=ranks))
            problems = [
                Problem(
                    m=sum(sent[rank]),
                    n=n,
                    k=k,
                    ranks=ranks,
                    pieces=pieces,
                    sent=tuple(sent[rank]),
                    rows=tuple(row[rank] for row in sent),
                )
                for rank in range(ranks)
            ]
        else:
            rows = tuple(draw(counts.filter(sum)))
            problems = [Problem(m=sum(rows), n=n, k=k, ranks=ranks, pieces=pieces, rows=rows)] * ranks
    return [build(operation, name, problem, rank) for rank, problem in enumerate(problems)]


def view(buffers, region: Region):
    return buffers[region.buffer][
        region.row : region.row + region.rows, region.col : region.col + region.cols
    ]


class Rank:
    """Runs a schedule in numpy, with each element's number of writes counted."""

    def __init__(self, schedule, x, w):
        self.schedule = schedule
        self.values = {name: np.full(shape, np.nan) for name, shape in schedule.buffers.items()}
        self.writes = {name: np.zeros(shape, int) for name, shape in schedule.buffers.items()}
        self.reads = {name: np.zeros(shape, int) for name, shape in schedule.buffers.items()}
        self.values["x"], self.values["w"] = x, w
        self.todo = list(schedule.steps)
        self.done: set[str] = set()

    def read(self, region):
        view(self.reads, region)[...] += 1
        return view(self.values, region)

    def write(self, region, value):
        view(self.writes, region)[...] += 1
        view(self.values, region)[...] = value

    def run(self, step, mail):
        rank = self.schedule.rank
        if isinstance(step, Send):
            mail[rank, step.peer, step.round] = self.read(step.source).copy()
        elif isinstance(step, Recv):
            self.write(step.target, mail.pop((step.peer, rank, step.round)))
        elif isinstance(step, Copy):
            for source, target in zip(step.sources, step.targets, strict=True):
                self.write(target, self.read(source))
        elif isinstance(step, Add):
            self.write(step.target, sum(self.read(source) for source in step.sources))
        else:
            for a, c in zip(step.a, step.c, strict=True):
                product = self.read(a) @ self.read(step.b)
                if step.accumulate:
                    view(self.values, c)[...] += product
                else:
                    self.write(c, product)


def simulate(schedules, xs, ws):
    """Run all ranks. Of the steps that may run, the last listed goes first, to expose missing edges."""
    ranks = [Rank(s, x, w) for s, x, w in zip(schedules, xs, ws, strict=True)]
    mail: dict[tuple[int, int, int], np.ndarray] = {}
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            ready = [
                step
                for step in rank.todo
                if rank.done.issuperset(step.after)
                and not (isinstance(step, Recv) and (step.peer, rank.schedule.rank, step.round) not in mail)
            ]
            if ready:
                rank.run(ready[-1], mail)
                rank.todo.remove(ready[-1])
                rank.done.add(ready[-1].id)
                progress = True
    assert not mail, "sent, never received"
    assert not any(rank.todo for rank in ranks), "never ready: a cycle, or a receive without its send"
    return ranks


def inputs(schedules, rng):
    xs = [rng.integers(-8, 8, s.buffers["x"]).astype(float) for s in schedules]
    ws = [rng.integers(-8, 8, s.buffers["w"]).astype(float) for s in schedules]
    return xs, ws


def reference(schedules, xs, ws):
    first = schedules[0]
    if first.operation == "all_gather_matmul":
        return [np.concatenate(xs) @ w for w in ws]
    if first.operation == "matmul_reduce_scatter":
        total = sum(x @ w for x, w in zip(xs, ws, strict=True))
        ends = np.cumsum([s.buffers["out"][0] for s in schedules])[:-1]
        return np.split(total, ends)
    sent = [s.problem.sent or split(s.problem.m, s.problem.ranks) for s in schedules]
    blocks = [np.split(x, np.cumsum(counts)[:-1]) for x, counts in zip(xs, sent, strict=True)]
    return [np.concatenate([block[r] for block in blocks]) @ ws[r] for r in range(len(schedules))]


@examples(250)
@given(cases())
def test_every_output_is_produced_once_and_every_copy_is_used(schedules):
    xs, ws = inputs(schedules, np.random.default_rng(0))
    expected = reference(schedules, xs, ws)
    for rank, want in zip(simulate(schedules, xs, ws), expected, strict=True):
        assert np.array_equal(rank.values["out"], want)
        for name in rank.values:
            if name not in ("x", "w"):
                assert (rank.writes[name] == 1).all(), f"{name} is not written exactly once"
            if name not in ("x", "w", "out"):
                assert (rank.reads[name] > 0).all(), f"something in {name} is moved or computed for nothing"


@examples(250)
@given(cases())
def test_the_parts_fit_together(schedules):
    for schedule in schedules:
        seen: set[str] = set()
        for step in schedule.steps:
            assert step.id not in seen
            assert seen.issuperset(step.after)
            seen.add(step.id)
            if isinstance(step, Matmul):
                assert len(runs(step.a, step.c)) <= 2
                assert [part.rows for part in step.a] == [part.rows for part in step.c]
                assert all(part.cols == step.b.rows for part in step.a)
                assert all(part.cols == step.b.cols for part in step.c)
                m, n, k = step.shape
                assert step.flops == 2 * m * n * k
        for (peer, round_), send in schedule.sends.items():
            recv = schedules[peer].recvs[schedule.rank, round_]
            assert (send.source.rows, send.source.cols) == (recv.target.rows, recv.target.cols)
            assert send.bytes == recv.bytes == schedule.problem.itemsize * send.source.size
        rows_in_all = sum(len({(s.peer, s.round) for s in other.sends.values()}) for other in schedules)
        assert rows_in_all == sum(len(other.recvs) for other in schedules)


@examples(150)
@given(cases())
def test_nothing_is_moved_or_multiplied_twice(schedules):
    for schedule in schedules:
        problem, rank = schedule.problem, schedule.rank
        if schedule.operation == "matmul_reduce_scatter":
            rows, width = schedule.buffers["out"][0] * (problem.ranks - 1), problem.n
            products = problem.m
        else:
            products, width = schedule.buffers["out"][0], problem.k
            own = schedule.problem.rows[rank] if problem.rows else None
            if own is None:
                own = split(problem.m, problem.ranks)[rank]
            rows = products - own
        assert schedule.received_bytes == rows * width * problem.itemsize
        assert schedule.flops == 2 * products * problem.n * problem.k


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_each_name_means(operation):
    problem = Problem(m=64 * 8, n=24, k=16, ranks=8)
    made = {name: build(operation, name, problem, 3) for name in SCHEDULES}
    assert [made[name].rounds for name in SCHEDULES] == [1, 7, 8, 8, 8, 8]
    assert [made[name].peers_at_once(0) for name in SCHEDULES] == [7, 1, 7, 7, 7, 7]
    assert [len(made[name].matmuls) for name in SCHEDULES] == [1, 8, 8, 9, 57, 8]
    assert made["hetero-fused-1d"].local_bytes == made["hetero-unfused-1d"].local_bytes == 0
    own = next(step for step in made["hetero-fused-1d"].matmuls if step.id == "matmul.own")
    first = operation != "matmul_reduce_scatter"
    assert made["hetero-fused-1d"].matmuls[0 if first else -1] is own
    assert own.shape == (64, 24, 16)


def test_more_pieces_make_smaller_rounds():
    fine = build("all_gather_matmul", "hetero-fused-1d", Problem(m=256, n=8, k=8, ranks=4, pieces=16), 0)
    assert fine.rounds == 16
    assert fine.matmuls[-1].shape == (12, 8, 8)


def test_a_product_of_equal_pieces_needs_no_permutation():
    even = build("all_gather_matmul", "hetero-fused-1d", Problem(m=256, n=8, k=8, ranks=4), 1)
    assert not any(isinstance(step, Copy) for step in even.steps)
    uneven = build(
        "all_gather_matmul", "hetero-fused-1d", Problem(m=51, n=8, k=8, ranks=4, rows=(20, 3, 9, 19)), 1
    )
    assert any(step.id.startswith("permute") for step in uneven.steps)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gather", "serial", Problem(m=1, n=1, k=1, ranks=1), 0), "operation 'gather' is not known"),
        (("all_gather_matmul", "best", Problem(m=1, n=1, k=1, ranks=1), 0), "schedule 'best' is not known"),
        (("all_gather_matmul", "serial", Problem(m=1, n=1, k=1, ranks=1), 1), "rank 1 is not one of 1"),
        (
            ("all_gather_matmul", "serial", Problem(m=5, n=1, k=1, ranks=2, rows=(2, 2)), 0),
            "add up to 4, not to m = 5",
        ),
        (
            ("all_to_all_matmul", "serial", Problem(m=5, n=1, k=1, ranks=2, sent=(2, 2)), 0),
            "add up to 4, not to m = 5",
        ),
        (
            ("all_to_all_matmul", "serial", Problem(m=4, n=1, k=1, ranks=2, sent=(2, 2), rows=(1, 1)), 0),
            "sends itself 2 rows and expects 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        build(*arguments)


@pytest.mark.parametrize(
    "bad", [{"m": 0}, {"n": -1}, {"k": 1.5}, {"ranks": True}, {"pieces": 0}, {"rows": (1,)}]
)
def test_impossible_sizes_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        Problem(**({"m": 4, "n": 4, "k": 4, "ranks": 2} | bad))
