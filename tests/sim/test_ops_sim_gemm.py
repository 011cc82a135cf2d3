"""GEMM cost: against the block-level simulator, and the cost of splitting."""

from __future__ import annotations

import pytest

from weft.execute.sim import SimExecutor
from weft.gpu.presets import GPU_PRESETS
from weft.ops.characterize import cut_s
from weft.policy import Policy
from weft.sim.gemm import gemms, machine
from weft.workload import Compute, Workload

LARGE = [(8192, 8192, 8192), (4096, 2048, 8192), (16384, 4096, 4096), (2048, 16384, 32768)]


@pytest.mark.parametrize("gpu", ["h200", "mi300x", "a100"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_gemms_agree_with_the_block_simulation(gpu, shape):
    """The closed form may choose a smaller tile than the block simulation, so it is never much slower."""
    work = Workload(compute=Compute(kind="gemm", shape=shape), iterations=1)
    blocks_ms = SimExecutor(gpu).measure(work, Policy(), "compute").ms
    ms = 1e3 * gemms(gpu).cost(*shape).seconds
    assert 0.85 * blocks_ms <= ms <= 1.05 * blocks_ms


@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_fewer_sms_cost_as_much_as_in_the_block_simulation(gpu):
    shape, of = (8192, 8192, 8192), machine(gpu)
    work = Workload(compute=Compute(kind="gemm", shape=shape), iterations=1)
    taken = int(of.figures.comm_ctas)
    blocks = [
        SimExecutor(gpu).measure(work, Policy(sm_reserve=n), "overlap" if n else "compute")
        for n in (0, taken)
    ]
    comm_free = SimExecutor(gpu).timeline(work, Policy(sm_reserve=taken))
    slower = (comm_free.end_ns - comm_free.start_ns)[comm_free.kind == 0][0] / 1e6 / blocks[0].ms
    cost = [gemms(gpu).cost(*shape, sms=sms).seconds for sms in (0, of.spec.sms - taken)]
    assert cost[1] / cost[0] == pytest.approx(slower, rel=0.03)


@pytest.mark.parametrize("gpu", sorted(GPU_PRESETS))
def test_every_preset_has_costs(gpu):
    dtype = "fp16" if gpu.startswith("v100") else "bf16"  # Volta has no bf16
    cost = gemms(gpu).cost(4096, 4096, 4096, dtype)
    peak = machine(gpu).spec.flops(dtype)
    assert 0.3 < 2 * 4096**3 / cost.seconds / peak < 1


@pytest.mark.parametrize("gpu", ["h200", "mi300x", "a100", "b200"])
def test_splitting_costs_time_and_finer_splits_cost_more(gpu):
    costs, (m, n, k) = gemms(gpu), (8192, 8192, 8192)
    whole = costs.cost(m, n, k).seconds
    along_m = [ways * costs.cost(m // ways, n, k).seconds / whole for ways in (8, 64)]
    along_k = [ways * costs.cost(m, n, k // ways, accumulate=True).seconds / whole for ways in (8, 64)]
    assert 1 <= along_m[0] < 1.3
    assert 1 <= along_k[0] < 1.8
    assert along_m[1] > 1.1 * along_m[0]
    assert along_k[1] > 1.5 * along_k[0]


@pytest.mark.parametrize(
    ("axis", "ways", "loss"), [("M", 8, -0.9), ("M", 64, 63.7), ("K", 8, 25.1), ("K", 64, 408.9)]
)
def test_splitting_8192_cubed_costs_about_as_much_as_measured_on_an_h200(axis, ways, loss):
    """benchmarks/results/ops/h200_characterize.json, bf16."""
    shape, costs = (8192, 8192, 8192), gemms("h200")
    taken = cut_s(costs, shape, "bf16", axis, ways) / costs.cost(*shape).seconds
    assert taken == pytest.approx(1 + loss / 100, rel=0.16)


def test_a_thin_gemm_is_memory_bound():
    costs = gemms("h200")
    cost = costs.cost(16, 8192, 8192)
    floor = 8192 * 8192 * 2 / (machine("h200").figures.memory_tb_s * 1e12)
    assert floor <= cost.seconds < 1.3 * floor
    assert cost.compute_s < cost.seconds


def test_tiles_do_not_span_separate_parts():
    costs = gemms("h200")
    joined, apart = costs.cost(1024, 4096, 4096), costs.cost(1024, 4096, 4096, parts=64)
    assert apart.seconds > 1.5 * joined.seconds
    assert costs.cost(1024, 4096, 4096, parts=4).seconds == pytest.approx(joined.seconds)


def test_an_empty_gemm_is_free_and_larger_gemms_cost_more():
    costs = gemms("h100")
    assert costs.cost(0, 64, 64).seconds == 0
    times = [costs.cost(m, 4096, 4096).seconds for m in (128, 1024, 8192, 65536)]
    assert times == sorted(times)
    assert costs.cost(4096, 4096, 4096, "fp32").seconds > 4 * costs.cost(4096, 4096, 4096).seconds
