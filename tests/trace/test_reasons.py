"""Runs whose reason for exposure is known by construction, with durations drawn at random: at least 95% of the
exposed time gets that reason."""

from __future__ import annotations

import random

import pytest
from trace_building import TraceBuilder
from truth import Machine

import weft
from weft.trace.attribute import REASONS

US = 1_000
SEEDS = range(6)


def shares(analysis):
    exposed = sum(rank.figures.exposed_ns for rank in analysis.ranks)
    assert exposed > 0
    totals = [rank.attribution.reasons() for rank in analysis.ranks]
    assert sum(sum(t.values()) for t in totals) == exposed
    return {reason: sum(t[reason] for t in totals) / exposed for reason in REASONS}


def analyzed(tmp_path, *machines):
    for machine in machines:
        machine.trace.write(tmp_path / f"rank{machine.trace.rank}.json")
    return weft.analyze(tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("host_us", [0, 300])
def test_communication_on_the_compute_stream(tmp_path, seed, host_us):
    """Tensor-parallel inference: all-reduce on the compute stream, with a fast and with a slow CPU."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(40):
        gpu.work(draw.randrange(host_us * US + 1))
        gpu.launch(draw.randrange(20, 200) * US)
        gpu.work(draw.randrange(host_us * US + 1))
        gpu.launch(draw.randrange(10, 80) * US, comm=True)
    found = shares(analyzed(tmp_path, gpu))
    assert found["same_stream"] >= 0.95
    assert found["launched_late"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_small_kernels_on_a_communication_stream_do_not_make_it_a_compute_stream(tmp_path, seed):
    """FSDP2 copies in and out on the stream of its collectives; the layers run elsewhere and wait."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    gpu.launch(200 * US)
    for _ in range(30):
        gpu.launch(2 * US, stream=20)
        end, _ = gpu.launch(draw.randrange(200, 300) * US, comm=True, stream=20)
        gpu.launch(draw.randrange(100, 150) * US, after=end)
    found = shares(analyzed(tmp_path, gpu))
    assert found["same_stream"] == 0
    assert found["needed_by_compute"] >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recorded", [False, True])
def test_compute_that_waits_for_the_collective(tmp_path, seed, recorded):
    """All-gathers without inputs, each layer waits for its own, and the CPU runs ahead."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder(), recorded=recorded)
    gpu.launch(1_000 * US)
    for _ in range(40):
        end, _ = gpu.launch(draw.randrange(80, 400) * US, comm=True, stream=20)
        gpu.launch(draw.randrange(30, 100) * US, after=end)
    assert shares(analyzed(tmp_path, gpu))["needed_by_compute"] >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cpu_that_waits_for_the_collective(tmp_path, seed):
    """`work.wait()` with blocking waits, or a loss read after the all-reduce: the CPU needs the result."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(30):
        end, _ = gpu.launch(draw.randrange(100, 300) * US)
        gpu.launch(draw.randrange(200, 500) * US, comm=True, stream=20, after=end)
        gpu.synchronize()
    found = shares(analyzed(tmp_path, gpu))
    assert found["needed_by_compute"] + found["waits_for_input"] >= 0.95
    assert found["launched_late"] <= 0.05


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_collective_that_waits_for_the_compute_that_makes_its_input(tmp_path, seed, recorded):
    """Compute afterwards waits for a copy from the host, not for the collective."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder(), recorded=recorded)
    gpu.launch(3_000 * US)
    for _ in range(30):
        end, identity = gpu.launch(draw.randrange(100, 300) * US)
        length = draw.randrange(50, 200) * US
        gpu.launch(length, comm=True, stream=20, after=end, producer=identity)
        gpu.launch(length + 50 * US, copy=True)
    assert shares(analyzed(tmp_path, gpu))["waits_for_input"] >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_collective_of_the_run_waits_for_its_input(tmp_path, seed):
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(5):
        end, _ = gpu.launch(draw.randrange(500, 900) * US)
    gpu.launch(draw.randrange(500, 900) * US, comm=True, stream=20, after=end)
    assert shares(analyzed(tmp_path, gpu))["waits_for_input"] >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("depth", [16, 256])
def test_a_queue_that_is_full(tmp_path, seed, depth):
    """The data of the collective is ready early, but the CPU is stuck behind a full queue of kernels."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder(), depth=depth, recorded=True)
    waits = 0
    for _ in range(6):
        early, identity = gpu.launch(10 * US, after=waits)
        for _ in range(3 * depth):
            gpu.launch(draw.randrange(8, 14) * US)
        waits, _ = gpu.launch(depth * 25 * US, comm=True, stream=20, after=early, producer=identity)
    found = shares(analyzed(tmp_path, gpu))
    hidden_by_rest = depth * 11 / (depth * 25)  # the share that the queued kernels still hide
    assert hidden_by_rest < 0.5
    assert found["queue_full"] >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_cpu_with_long_calls_is_not_a_full_queue(tmp_path, seed):
    """The first launch of a kernel may take a millisecond to load it, while the GPU has nothing left to do."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(30):
        end, _ = gpu.launch(draw.randrange(50, 80) * US)
        gpu.launch(draw.randrange(300, 400) * US, comm=True, stream=20, after=end)
        gpu.work(draw.randrange(700, 1500) * US)
    found = shares(analyzed(tmp_path, gpu))
    assert found["launched_late"] >= 0.9  # the last collective is a tail
    assert found["queue_full"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_late_host(tmp_path, seed):
    """The CPU issues the next compute long after the collective could have been hidden behind it."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(40):
        end, _ = gpu.launch(draw.randrange(50, 150) * US)
        gpu.launch(draw.randrange(150, 300) * US, comm=True, stream=20, after=end)
        gpu.work(draw.randrange(500, 900) * US)
    gpu.launch(100 * US)
    assert shares(analyzed(tmp_path, gpu))["launched_late"] >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_bubble(tmp_path, seed, stages):
    """Every stage receives, computes, sends. A receive starts at once and ends when the sender has sent."""
    draw = random.Random(seed)
    transfer = 20 * US
    machines = [Machine(TraceBuilder(rank=rank, world_size=stages)) for rank in range(stages)]
    message = {"Collective name": "recv", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20,
               "Process Group Ranks": ""}  # fmt: skip
    sent: list[int] = [0] * 12
    expected = [0, 0]
    for rank, gpu in enumerate(machines):
        for batch in range(12):
            ready = 0
            if rank:
                before = max(gpu.now + 4_000, gpu.free.get(20, 0))
                ready, _ = gpu.launch(transfer, comm=True, stream=20, until=sent[batch], **message)
                expected[0] += ready - before - transfer
                expected[1] += transfer
            end, _ = gpu.launch(draw.randrange(400, 600) * US * (stages - rank), after=ready)
            gpu.synchronize()
            if rank < stages - 1:
                sent[batch], _ = gpu.launch(transfer, comm=True, stream=21, after=end, **message)
                gpu.synchronize()
    found = shares(analyzed(tmp_path, *machines))
    assert found["pipeline_bubble"] >= 0.95 * expected[0] / (expected[0] + 2 * expected[1])
    assert found["pipeline_bubble"] > 0.8


@pytest.mark.parametrize("seed", SEEDS)
def test_communication_that_outlasts_compute(tmp_path, seed):
    """Collectives queue behind each other after the last kernel."""
    draw = random.Random(seed)
    gpu = Machine(TraceBuilder())
    for _ in range(20):
        end, _ = gpu.launch(draw.randrange(20, 40) * US)
        gpu.launch(draw.randrange(200, 300) * US, comm=True, stream=20, after=end)
    assert shares(analyzed(tmp_path, gpu))["nothing_to_hide_behind"] >= 0.95
