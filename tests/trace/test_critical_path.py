"""The critical path: its parts, and that only exposed time on it counts as recoverable."""

from __future__ import annotations

import random

import numpy as np
import pytest
from trace_building import GEMM, TraceBuilder
from truth import Machine

import weft
from weft.trace import critical

US = 1_000


def path_of(tmp_path, machine):
    rank = weft.analyze(machine.trace.write(tmp_path / "rank0.json")).ranks[0]
    path = rank.path
    total = path.compute_ns + path.comm_ns + path.memory_ns + path.host_ns + path.gap_ns
    assert total == rank.figures.span_ns
    assert path.recoverable_ns <= rank.figures.exposed_ns
    return rank, path


@pytest.mark.parametrize("seed", range(5))
def test_collectives_that_compute_waits_for_are_on_it(tmp_path, seed):
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    gpu.launch(1_000 * US)
    for _ in range(40):
        end, _ = gpu.launch(draw.randrange(80, 400) * US, comm=True, stream=20)
        gpu.launch(draw.randrange(30, 60) * US, after=end)
    rank, path = path_of(tmp_path, gpu)
    assert path.recoverable_ns > 0.9 * rank.figures.exposed_ns
    assert path.host_ns < 10 * US


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_cpu_is_on_it_and_hiding_communication_gains_nothing(tmp_path, seed):
    """Kernels wait for their launches; collectives end long before the next one."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(40):
        gpu.launch(50 * US)
        gpu.launch(draw.randrange(100, 200) * US, comm=True, stream=20)
        gpu.work(900 * US)
    rank, path = path_of(tmp_path, gpu)
    assert path.host_ns > 0.9 * rank.figures.span_ns
    needed = sum(ns for reason, ns in path.reasons().items() if reason not in ("launched_late", "queue_full"))
    assert needed < 0.05 * rank.figures.exposed_ns  # the last collective ends the run


def test_exposed_communication_off_the_path_costs_nothing(tmp_path):
    """A copy from the host takes longer than each collective, and compute waits for the copy."""
    gpu = Machine(TraceBuilder())
    gpu.launch(3_000 * US)
    for _ in range(30):
        end, _ = gpu.launch(100 * US)
        gpu.launch(100 * US, comm=True, stream=20, after=end)
        gpu.launch(400 * US, copy=True)
    rank, path = path_of(tmp_path, gpu)
    assert rank.figures.exposed_ns > 2_500 * US
    assert path.recoverable_ns < 0.05 * rank.figures.exposed_ns
    assert path.memory_ns > 0.5 * (rank.figures.span_ns - 3_000 * US)


def test_the_cpu_that_waits_for_the_gpu_leads_back_to_it(tmp_path):
    gpu = Machine(TraceBuilder())
    for _ in range(20):
        gpu.launch(500 * US)
        gpu.synchronize()
        gpu.work(100 * US)
    rank, path = path_of(tmp_path, gpu)
    assert path.compute_ns == rank.figures.compute_ns
    assert path.host_ns == pytest.approx(19 * 106 * US, rel=0.1)


def test_an_empty_and_a_single_span(tmp_path):
    built = TraceBuilder()
    built.gpu(GEMM, 0, 1_000)
    rank = weft.analyze(built.write(tmp_path / "rank0.json")).ranks[0]
    assert (rank.path.compute_ns, rank.path.gap_ns) == (1_000, 0)


@pytest.mark.parametrize("seed", range(200))
def test_a_chain_by_doubling_is_the_chain_step_by_step(seed):
    draw = random.Random(seed)
    count = draw.choice([1, 2, 3, 10, 50])
    following = [draw.choice([count, draw.randrange(count), max(at - 1, 0)]) for at in range(count)] + [count]
    at, expected = draw.randrange(count), []
    first = at
    while at != count and at not in expected:
        expected.append(at)
        at = following[at]
    assert critical._chain(first, np.array(following)).tolist() == expected
