"""Fused operations on simulated nodes: lower bounds, losses that add up, uneven shapes."""

from __future__ import annotations

import random

import pytest

from weft.errors import UsageError
from weft.ops.case import FUSED_ENGINES, ROW_BYTES, Case, gemm, library_collective_s
from weft.ops.explore import explore, operation_of
from weft.ops.schedule import OPERATIONS
from weft.ops.simulate import exhaustive, simulate
from weft.policy import SCHEDULES
from weft.sim.fabric import TOPOLOGIES
from weft.timeline import Kind

MESH = {"ranks": 8, "gpu": "mi300x", "topology": "mesh"}


def drawn(seed: int) -> Case:
    draw = random.Random(f"simulate {seed}")
    ranks = draw.randint(2, 9)
    topology = draw.choice(TOPOLOGIES)
    return Case(
        operation=OPERATIONS[seed % 3],
        m=draw.randint(1, 9000),
        n=draw.randint(1, 3000),
        k=draw.randint(1, 3000),
        ranks=min(ranks, 6) if topology == "pcie" else ranks,
        gpu=draw.choice(("h100", "mi300x", "a40", "b200")),
        dtype=draw.choice(("bf16", "fp32")),
        topology=topology,
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_is_faster_than_its_gemm_or_its_links(seed):
    case = drawn(seed)
    whole = gemm(case, case.m, case.n, case.k)
    shard = case.m // case.ranks * (case.n if case.operation == "matmul_reduce_scatter" else case.k)
    fastest = max(case.fabric.capacity) * case.fabric.in_links
    least = shard * (case.ranks - 1) * (4 if case.dtype == "fp32" else 2) / fastest
    for result in exhaustive(case):
        # Split into pieces that use other tiles, a GEMM can be slightly faster.
        assert result.seconds >= 0.9 * whole.compute_s * (case.m // case.ranks * case.ranks) / case.m
        assert result.seconds >= least


@pytest.mark.parametrize("seed", range(12))
def test_losses_add_up_to_the_time_and_the_timeline_shows_it(seed):
    case = drawn(seed)
    for result in exhaustive(case):
        losses = result.losses
        total = (
            losses.product_s
            + losses.decomposition_s
            + losses.contention_s
            + losses.staging_s
            + losses.exposed_s
        )
        assert total == pytest.approx(result.seconds, rel=1e-6)
        assert losses.contention_s >= -1e-9
        line = result.timeline
        mine = [t for t in result.tasks if t.rank == 0]
        assert len(line) == len(mine)
        last = max(result.flowed.end_s[i] for i, t in enumerate(result.tasks) if t.rank == 0)
        assert line.end_ns.max() == pytest.approx(last * 1e9, abs=1)
        copies = (line.kind == Kind.COMM).sum()
        assert copies == sum(t.moves for t in mine)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_byte_of_a_peer_arrives_once(operation):
    case = Case(operation=operation, m=4096, n=1024, k=2048, **MESH)
    for name in SCHEDULES:
        moved = simulate(case, name, "dma").timeline.resources["bytes"]
        extra = ROW_BYTES * 4096 * 7 if name == "uniform-fused-2d" else 0  # copies in two dimensions
        assert moved.sum() == pytest.approx(case.shard_bytes * 7 + extra, rel=1e-6)


def test_serial_is_the_sum_and_a_good_schedule_hides_most_of_it():
    case = Case(operation="all_gather_matmul", m=327680, n=3584, k=4096, **MESH)
    whole, moved = gemm(case, case.m, case.n, case.k).seconds, library_collective_s(case)
    found = explore(case)
    assert found.serial.seconds == pytest.approx(whole + moved, rel=0.01)
    assert found.best.seconds < 1.2 * found.ideal_s
    assert found.best.losses.exposed_s < 0.2 * found.serial.losses.exposed_s


def test_on_a_mesh_whole_shards_leave_all_links_but_one_idle():
    case = Case(operation="all_gather_matmul", m=131072, n=2048, k=16384, **MESH)
    found = explore(case)
    shard, finer = found.fastest("shard"), found.fastest("hetero-fused-1d")
    assert (shard.losses.links_used, finer.losses.links_used) == (1, 7)
    assert shard.seconds > found.serial.seconds > 1.5 * finer.seconds
    assert "7 of 7 links busy where shard has 1" in found.to_dict()["reason"]


def test_on_a_switch_whole_shards_are_enough():
    case = Case(operation="matmul_reduce_scatter", m=8192, n=8192, k=4096, ranks=8, gpu="h100")
    found = explore(case)
    assert found.best.name == "shard"
    assert found.best.losses.links_used == found.best.losses.links == 1


def test_copies_on_sms_slow_the_gemm_more_than_copies_by_dma():
    case = Case(operation="all_gather_matmul", m=32768, n=2048, k=8192, ranks=8, gpu="h100", dtype="fp16")
    by = {engine: simulate(case, "shard", engine) for engine in FUSED_ENGINES}
    assert by["sm"].losses.contention_s > 1.5 * by["dma"].losses.contention_s
    # pytorch PR 172714, eight H100: 2.96 ms serial; by shards, 2.02 ms on SMs and 1.77 ms on copy engines.
    serial = simulate(case, "serial", "sm").ms
    assert serial == pytest.approx(2.96, rel=0.15)
    assert by["sm"].ms == pytest.approx(2.02, rel=0.15)
    assert by["dma"].ms == pytest.approx(1.77, rel=0.15)


def test_a_tiny_gemm_is_not_worth_splitting():
    found = explore(Case(operation="all_gather_matmul", m=64, n=64, k=64, ranks=8, gpu="h100"))
    assert found.best.name == found.picked.schedule == "serial"
    assert found.to_dict()["reason"].startswith("serial wins")


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (5, 4096, 4096), (4096, 1, 4096), (4096, 4096, 3)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_smallest_shapes_run(operation, shape):
    m, n, k = shape
    for result in exhaustive(Case(operation=operation, m=m, n=n, k=k, ranks=8, gpu="h100")):
        assert 0 < result.seconds < 0.1


def test_the_simulation_is_deterministic():
    case = drawn(3)
    assert [r.seconds for r in exhaustive(case)] == [r.seconds for r in exhaustive(case)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"operation": "all_reduce"}, "operation 'all_reduce' is not known"),
        ({"m": 0}, "M = 0 is not valid"),
        ({"k": 1 << 40}, "K = 1099511627776 is not valid"),
        ({"m": 1 << 24, "n": 1 << 24}, "fits on no GPU"),
        ({"ranks": 1}, "ranks 1 is not valid"),
        ({"dtype": "int3"}, "dtype 'int3' is not known"),
        ({"topology": "star"}, "topology 'star' is not known"),
        ({"gpu": "h900"}, "no GPU preset"),
    ],
)
def test_invalid_input_is_named(changes, said):
    with pytest.raises(UsageError, match=said):
        Case(**{"operation": "all_gather_matmul", "m": 64, "n": 64, "k": 64, "ranks": 8, **changes})


def test_unknown_engines_and_collectives_are_rejected():
    case = Case(operation="all_gather_matmul", m=64, n=64, k=64, ranks=8)
    with pytest.raises(UsageError, match="engine 'pigeon' is not known"):
        simulate(case, "shard", "pigeon")
    with pytest.raises(UsageError, match="'all_reduce' cannot be fused"):
        operation_of("all_reduce")
    assert operation_of("reduce-scatter") == "matmul_reduce_scatter"
