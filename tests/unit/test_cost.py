"""One cost model: the closed forms against measurements, and every predictor against the closed forms.

docs/models.md states the bounds that are checked here.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pytest

from weft.execute.sim import SimExecutor
from weft.gpu.collectives import collective_s as plan_collective_s
from weft.gpu.collectives import group
from weft.gpu.cost import (
    NODE_LINKS,
    NodeLinks,
    gemm_cost,
    link_bytes_per_s,
    node_collective_s,
    switch_reduces,
)
from weft.gpu.network import network
from weft.gpu.specs import spec
from weft.ops.case import Case
from weft.ops.case import library_collective_s as ops_collective_s
from weft.plan.compute import gemm_s
from weft.plan.figures import shipped
from weft.plan.models import Gemm
from weft.policy import Policy
from weft.sim.gemm import gemm_rates, gemms, machine
from weft.workload import Compute, Workload

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "sim"))

from lab_rows import cases, halves  # noqa: E402

LARGE = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (1024, 8192, 8192),
    (16384, 1024, 4096),
    (16384, 4096, 4096),
    (8192, 28672, 8192),
    (2048, 8192, 1024),
)
NVLINK_PROFILES = ("a100", "h100", "h200")
MIB = 1 << 20


def node_s(kind, size, ranks, gpu):
    """The closed form at the planner's rate."""
    of = spec(gpu)
    return node_collective_s(kind, size, ranks, link_bytes_per_s(of), in_switch=switch_reduces(of))


def simulated_s(workload, mode, gpu):
    return SimExecutor(gpu).measure(workload, Policy(), mode).ms * 1e-3


def gemm_workload(shape):
    return Workload(compute=Compute(kind="gemm", shape=shape), bytes=1024, ranks=2, iterations=1)


def test_the_closed_form_of_a_gemm_is_near_measured_library_gemms():
    """H200, cuBLAS alone; the half of the lab's rows that no figure was fitted to."""
    _, held_out = halves(cases())
    errors = []
    for case in held_out:
        compute = case.workload.compute
        if case.mode == "compute" and compute.kind == "gemm":
            measured_s = case.ms * 1e-3 / case.workload.iterations / compute.repeat
            errors.append(abs(gemms("h200").cost(*compute.shape, compute.dtype).seconds / measured_s - 1))
    assert len(errors) >= 5
    assert median(errors) <= 0.06
    assert max(errors) <= 0.12


def test_the_closed_form_of_a_collective_is_near_published_runs_of_one_node():
    with (ROOT / "tests" / "data" / "published_collectives.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["nodes"] == "1"]
    for predict in (node_s, node_simulated_s):
        errors = [
            abs(
                predict(row["collective"], int(row["bytes"]), int(row["ranks"]), row["gpu"])
                / (float(row["time_us"]) * 1e-6)
                - 1
            )
            for row in rows
        ]
        assert len(errors) > 40
        assert fmean(errors) <= 0.13
        assert max(errors) <= 0.35


def node_simulated_s(kind, size, ranks, gpu):
    compute = Compute(kind="gemm", shape=(128, 128, 128))
    workload = Workload(compute=compute, collective=kind, bytes=size, ranks=ranks, iterations=1)
    return simulated_s(workload, "comm", gpu)


def test_planner_and_cost_model_use_the_same_figures_inside_a_node():
    links = shipped().links
    assert {f.name: getattr(links, f.name) for f in fields(NodeLinks)} == {
        f.name: getattr(NODE_LINKS, f.name) for f in fields(NodeLinks)
    }


@pytest.mark.parametrize("gpu", [*NVLINK_PROFILES, "mi300x", "a40"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_the_block_simulation_of_a_gemm_agrees_with_the_closed_form(gpu, shape):
    """Shapes whose tiles fill the GPU; smaller ones differ, because only the closed form picks the tile."""
    simulated = simulated_s(gemm_workload(shape), "compute", gpu)
    assert simulated == pytest.approx(gemms(gpu).cost(*shape).seconds, rel=0.12)


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_the_planner_takes_the_same_time_at_the_efficiency_of_training(gpu, shape):
    """Once the fitted efficiency of training is divided out, shapes cost the same."""
    figures, of = shipped(), spec(gpu)
    sustained = gemm_s(Gemm("any", *shape, 1), of, "bf16", figures, 1.0)
    slower = machine(gpu).figures.library_efficiency / figures.gemm_share(of, "bf16")
    assert sustained == pytest.approx(slower * gemms(gpu).cost(*shape).seconds, rel=0.15)
    # The planner uses the H100's share for unmeasured GPUs; an MI300X's clock falls further.
    assert (0.75 if gpu == "mi300x" else 0.95) <= slower <= 1.2


@pytest.mark.parametrize("gpu", [*NVLINK_PROFILES, "b200"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mib", [1, 8, 64, 512])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_every_predictor_gives_a_node_collective_the_same_time(gpu, ranks, mib, kind):
    size, ndr = mib * MIB, network("ndr400")
    expected = node_s(kind, size, ranks, gpu)
    planned = plan_collective_s(kind, size, group(ranks, 1, ndr), spec(gpu), ndr, shipped().links)
    assert planned == pytest.approx(expected, rel=1e-9)
    if gpu in NVLINK_PROFILES:
        assert node_simulated_s(kind, size, ranks, gpu) == pytest.approx(expected, rel=0.08)
    operation = {
        "all_gather": "all_gather_matmul",
        "reduce_scatter": "matmul_reduce_scatter",
        "all_to_all": "all_to_all_matmul",
    }.get(kind)
    if operation:
        case = Case(operation=operation, m=size // 2 // 8192, n=8192, k=8192, ranks=ranks, gpu=gpu)
        assert ops_collective_s(case) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_more_bytes_and_slower_links_never_take_less_time(kind):
    sizes = [1 << power for power in range(8, 34)]
    times = [node_collective_s(kind, size, 8, 300e9) for size in sizes]
    assert all(later > earlier for earlier, later in pairwise(times))
    assert node_collective_s(kind, MIB, 8, 300e9) < node_collective_s(kind, MIB, 8, 100e9)
    assert node_collective_s(kind, MIB, 1, 300e9) == node_collective_s(kind, 0, 8, 300e9) == 0.0


@pytest.mark.parametrize("gpu", ["a40", "a100", "h100", "mi300x"])
def test_a_gemm_takes_no_less_time_than_its_arithmetic_and_its_memory_traffic(gpu):
    of = machine(gpu)
    rates = gemm_rates(of)
    for shape in ((1, 1, 1), (128, 8192, 8192), (8192, 64, 8192), *LARGE):
        m, n, k = shape
        cost = gemm_cost(of.spec, rates, shape)
        assert cost.seconds >= 2.0 * m * n * k / (of.spec.flops("bf16") * rates.efficiency) * (1 - 1e-9)
        assert cost.seconds >= cost.memory_bytes / rates.memory_bytes_per_s
        assert cost.memory_bytes >= 2 * (m * k + k * n + m * n)
        assert gemm_cost(of.spec, rates, shape, sms=of.spec.sms // 2).seconds >= cost.seconds * (1 - 1e-9)
    assert gemm_cost(of.spec, rates, (0, 4, 4)).seconds == 0.0
