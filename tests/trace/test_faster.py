"""A run with faster collectives: spans move as far as streams, inputs, launches and other ranks let them."""

from __future__ import annotations

import numpy as np
import pytest
from trace_building import GEMM, TraceBuilder, write_text
from trace_programs import comm, compute, run, wait

import weft
from weft.trace import faster
from weft.trace.assemble import PROFILER_SLOWS_HOST
from weft.trace.faster import with_faster_collectives

US = 1_000


def sped_up(path, trace, ratio, entered=None):
    (rank,) = weft.analyze(trace.write(path / "rank0.json")).ranks
    entered = np.full(len(rank.found.span), -(1 << 62)) if entered is None else entered
    return rank, with_faster_collectives(rank.trace, rank.found, entered, ratio)


def exposed_run(steps=10, *, launch_early=True):
    """Steps of 100 µs of compute, a 200 µs collective that needs it, and compute that needs that."""
    trace = TraceBuilder()
    for i in range(steps):
        at = i * 302 * US
        issued = i * 10 * US - 5_000 * US if launch_early else at - 4 * US
        trace.gpu(GEMM, at, at + 100 * US, launch=issued)
        trace.collective(at + 101 * US, at + 301 * US, launch=issued + 1 * US)
    return trace


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
def test_exposed_collectives_save_what_they_get_shorter(tmp_path, ratio):
    _, found = sped_up(tmp_path, exposed_run(), ratio)
    assert found.saved_ns == pytest.approx(10 * 200 * US * (1 - 1 / ratio), abs=10)
    assert found.overlap_ns == 0


def test_a_late_cpu_leaves_nothing_to_save(tmp_path):
    """Each step is launched after the previous one ends, and could not start earlier."""
    _, found = sped_up(tmp_path, exposed_run(launch_early=False), 2.0)
    assert found.saved_ns == 100 * US  # the last collective alone


def test_hidden_collectives_save_nothing(tmp_path):
    trace = TraceBuilder()
    for i in range(10):
        at, issued = i * 500 * US, i * 10 * US - 5_000 * US
        trace.gpu(GEMM, at, at + 499 * US, launch=issued)
        trace.collective(at + 50 * US, at + 250 * US, launch=issued + 1 * US)
    rank, found = sped_up(tmp_path, trace, 2.0)
    assert found.saved_ns == 0
    assert found.overlap_ns == rank.figures.overlap_ns // 2


def test_queued_collectives_move_up_into_what_hides_them(tmp_path):
    """Four collectives of 300 µs behind 400 µs of compute: at twice the speed they end 600 µs earlier."""
    trace = TraceBuilder()
    for i in range(4):
        trace.gpu(GEMM, i * 100 * US, (i + 1) * 100 * US, launch=-1_000 * US + 2 * i * US)
        trace.collective((100 + 300 * i) * US, (400 + 300 * i) * US, launch=-1_000 * US + (2 * i + 1) * US)
    trace.gpu(GEMM, 1_301 * US, 1_401 * US, launch=-500 * US)  # the optimizer
    rank, found = sped_up(tmp_path, trace, 2.0)
    assert rank.figures.exposed_ns == 900 * US
    assert found.saved_ns == 600 * US


def test_waiting_for_another_rank_gets_no_shorter(tmp_path):
    step = [compute(100 * US), comm(200 * US), wait()]
    slow = [compute(500 * US), comm(200 * US), wait()]
    for trace in run([step * 10, slow * 10], [0, 0]):
        trace.write(tmp_path / f"rank{trace.rank}.json")
    first, last = weft.analyze(tmp_path).ranks
    for rank in (first, last):
        found = with_faster_collectives(rank.trace, rank.found, rank.matched.last_entered_ns, 2.0)
        assert found.saved_ns == pytest.approx(10 * 100 * US, rel=0.05)


def test_the_beginning_of_a_long_trace_stands_for_the_whole(tmp_path, monkeypatch):
    _, whole = sped_up(tmp_path, exposed_run(steps=100), 2.0)
    monkeypatch.setattr(faster, "_MOST_SPANS", 50)
    _, part = sped_up(tmp_path, exposed_run(steps=100), 2.0)
    assert part.saved_ns == pytest.approx(whole.saved_ns, rel=0.02)


def test_the_profiler_slows_the_cpu_of_a_trace_by_torch_but_not_of_one_by_weft(tmp_path):
    """Launches come at 60% of the GPU's pace while traced: with faster collectives they are soon too late."""
    trace = TraceBuilder()
    for i in range(20):
        at = i * 300 * US
        trace.gpu(GEMM, at, at + 99 * US, launch=i * 180 * US - 10 * US)
        trace.collective(at + 100 * US, at + 300 * US, launch=i * 180 * US - 9 * US)
    rank, found = sped_up(tmp_path, trace, 4.0)
    assert rank.trace.host_slowed == PROFILER_SLOWS_HOST
    assert found.saved_ns == pytest.approx(20 * 150 * US, rel=0.01)
    own = trace.text().replace('"schemaVersion": 1', '"schemaVersion": 1, "weft": {}', 1)
    (rank,) = weft.analyze(write_text(tmp_path / "own.json", own)).ranks
    assert rank.trace.host_slowed == 1.0
    entered = np.full(len(rank.found.span), -(1 << 62))
    found = with_faster_collectives(rank.trace, rank.found, entered, 4.0)
    paced = 19 * 180 * US + 100 * US + 50 * US
    assert found.saved_ns == pytest.approx(20 * 300 * US - paced, rel=0.01)
