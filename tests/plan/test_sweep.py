"""Sweeps: which splits are tried, which are refused, and the Pareto front of step time and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import UsageError
from weft.plan import TrainingJob, predict
from weft.plan.config import AUTO
from weft.plan.memory import MARGIN
from weft.plan.sweep import SweepRow, front, room, spread, sweep, total_memory, ways

JOB = TrainingJob(model="llama3-8b", gpu="h100", gpus=32, global_batch=64)
SAMPLE = predict(TrainingJob(model="llama3-8b", gpu="h100", gpus=8, tp=8))


def fake(step_s: float, memory: float):
    return replace(SAMPLE, step_s=step_s, memory_bytes={"all": memory})


def test_ways_keep_the_job_and_multiply_up():
    found, impossible = ways(JOB)
    assert len(found) > 100
    assert impossible > 0
    assert len(set(found)) == len(found)
    for way in found:
        assert (way.model, way.gpus, way.global_batch) == (JOB.model, 32, 64)
        assert way.tp * way.pp * way.cp * way.dp == 32


def test_what_was_asked_for_stays():
    found, _ = ways(JOB.but(tp=4, recompute="full"), fixed={"tp", "recompute", "gpu"})
    assert {(way.tp, way.recompute) for way in found} == {(4, "full")}
    assert len({way.pp for way in found}) > 1


def test_what_follows_from_the_split_is_held_where_it_was_given():
    found, _ = ways(JOB.but(tp=2, pp=2, schedule="gpipe"), fixed={"schedule", "dp"})
    assert {(way.schedule, way.dp) for way in found} == {("gpipe", 8)}
    assert {way.tp * way.pp * way.cp for way in found} == {4}


def test_ways_where_the_compression_cannot_apply_are_left_out():
    found, _ = ways(JOB.but(sharding="zero3", compression="zero++"), fixed={"compression"})
    assert {(way.sharding, way.pp) for way in found} == {("zero3", 1)}
    found, _ = ways(JOB.but(compression="int8"))
    assert all(way.dp * way.cp > 1 for way in found)


@examples(50)
@given(st.integers(1, 300), st.integers(1, 100))
def test_a_limit_spreads_evenly(count, most):
    chosen = spread(list(range(count)), most)
    assert len(chosen) == min(count, most)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0


@examples(100)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 100)), min_size=1, max_size=30))
def test_the_front_is_what_nothing_beats(points):
    rows = front([SweepRow(JOB, fake(step, memory)) for step, memory in points])
    assert [row.prediction.step_s for row in rows] == sorted(step for step, _ in points)
    for row in rows:
        step, memory = row.prediction.step_s, total_memory(row.prediction)
        beaten = any(s <= step and m <= memory and (s, m) != (step, memory) for s, m in points)
        if row.best:
            assert not beaten
        else:
            assert any(s <= step and m <= memory for s, m in points)


def test_a_sweep_tries_each_way_with_and_without_controls():
    seen = []

    def run(job):
        seen.append(job)
        return fake(1.0 / job.tp + (0.0 if job.policy == AUTO else 0.1), 1.0)

    told = []
    found = sweep(JOB, limit=40, run=run, progress=lambda at, total: told.append((at, total)))
    assert len(found.rows) == 40
    # All splits are screened without controls; the fastest and those on the front are tried with them.
    assert sum(job.policy is None for job in seen) == min(200, len(ways(JOB)[0]))
    assert sum(job.policy == AUTO for job in seen) == 20
    assert found.rows[0].job.policy == AUTO
    assert found.rows[0].job.tp == max(job.tp for job in seen)
    assert found.left_out > 0
    assert told[-1][0] == told[-1][1]


def test_a_job_that_cannot_run_unsplit_is_swept():
    """405B on 1,024 GPUs with 512 sequences: no replica for each GPU, and no memory without a split."""
    options = {"model": "llama3-405b", "gpu": "h100", "gpus": 1024, "global_batch": 512}
    with pytest.raises(UsageError):
        TrainingJob(**options)
    found = sweep(options, fixed={"global_batch"}, limit=20, fits=room())
    assert found.rows[0].prediction.step_s > 0
    assert {row.job.global_batch for row in found.rows} == {512}
    assert all(total_memory(row.prediction) <= MARGIN * row.job.gpu.memory_bytes for row in found.rows)


def test_experts_context_schedules_and_uneven_stages_are_tried():
    options = {"model": "deepseek-v3", "gpu": "h100", "gpus": 512, "global_batch": 2048, "seq_len": 16384}
    found, _ = ways(options, {"global_batch", "micro_batch", "recompute", "sharding"})
    assert {way.ep for way in found} >= {8, 64}
    assert {way.cp for way in found} >= {1, 4}
    assert {way.schedule for way in found} >= {"1f1b", "interleaved", "zero-bubble", "dualpipe"}
    assert any(61 % (way.pp * way.interleave) for way in found)
    assert len(set(found)) == len(found)


def test_a_policy_that_was_asked_for_is_the_only_one():
    found = sweep(JOB, fixed={"policy"}, limit=5, run=lambda job: fake(1.0, 1.0))
    assert {row.job.policy for row in found.rows} == {JOB.policy}
    assert len(found.rows) == 5


def test_what_does_not_fit_is_counted_not_run():
    def run(job):
        assert job.tp > 1
        return fake(1.0, 1.0)

    found = sweep(JOB, limit=10, run=run, fits=lambda job: "too large" if job.tp == 1 else "")
    assert "do not fit into memory, such as too large" in found.refused[0]


def test_a_sweep_without_a_way_says_why():
    with pytest.raises(UsageError, match="nothing that can run.*too large"):
        sweep(JOB, run=lambda job: fake(1.0, 1.0), fits=lambda job: "too large")
    with pytest.raises(UsageError, match="nothing that can run"):
        sweep(JOB.but(model="llama3-405b"), fixed={"tp", "pp"}, fits=room())


def test_real_rows_fit_and_are_ordered():
    found = sweep(JOB, limit=12, fits=room())
    steps = [row.prediction.step_s for row in found.rows]
    assert steps == sorted(steps)
    assert all(total_memory(row.prediction) <= JOB.gpu.memory_bytes for row in found.rows)
    assert found.rows[0].best
    pairs = {}
    for row in found.rows:
        pairs.setdefault(row.label, {})[row.job.policy] = row.prediction.step_s
    for both in pairs.values():
        if len(both) == 2:
            assert both[AUTO] <= both[None] * 1.0001
