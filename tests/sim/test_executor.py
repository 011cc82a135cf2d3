"""Workloads on simulated GPUs: the modes, the controls, the profiles and the errors."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from weft.comm.node import load_node
from weft.errors import InputError, UsageError
from weft.execute.devices import open_executor
from weft.execute.sim import SimExecutor
from weft.policy import CommRule, Policy, Rule
from weft.sim.core import DeadlockError, NeverFitsError
from weft.sim.profile import SimFigures, load_profile, names, profile
from weft.timeline import Kind
from weft.workload import COMPUTE_SHAPES, DTYPE_BYTES, Compute, Workload, named, specify

SMALL = named("cb-ar").but(shape=(2048, 2048, 2048), bytes=64 << 20, ranks=2, iterations=3)
GPUS = ("a40", "a100", "h100", "h200", "mi250x", "mi300x")


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_runs_every_mode(name):
    executor = open_executor(f"sim:{name}")
    compute, comm, sequential, overlap = (
        executor.measure(SMALL, Policy(), mode).ms for mode in ("compute", "comm", "sequential", "overlap")
    )
    assert max(compute, comm) < overlap <= sequential * 1.001
    assert sequential == pytest.approx(compute + comm, rel=0.05)
    assert executor.device == f"sim:{name}"
    assert executor.simulated
    assert executor.info()["simulated"]


@pytest.mark.parametrize("device", ["a40-paper", "mi250x-paper", "h200-ghost"])
def test_a_sequential_pipeline_takes_as_long_as_all_of_its_iterations(device):
    executor = SimExecutor(device)
    workload = SMALL.but(iterations=7, compute_streams=3)
    every = executor.timeline(workload, Policy(), "sequential").end_ns.max() / 1e6
    assert executor.measure(workload, Policy(), "sequential").ms == pytest.approx(every, rel=1e-3)


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_of_a_profile_has_a_source(name):
    assert all(profile(name).sources.get(f.name) for f in fields(SimFigures) if f.name != "priority")


def test_all_gpus_have_a_profile():
    assert set(GPUS) <= set(names())


@pytest.mark.parametrize("kind", [k for k in COMPUTE_SHAPES if k != "callable"])
def test_every_kind_of_compute_has_a_model(kind):
    shape = {"attention": (2, 8, 512, 64), "conv": (8, 64, 28, 28, 64, 3)}.get(
        kind, (1024,) * len(COMPUTE_SHAPES[kind])
    )
    workload = Workload(compute=Compute(kind=kind, shape=shape), bytes=1 << 24, iterations=2)
    assert SimExecutor("h100").measure(workload, Policy(), "compute").ms > 0


@pytest.mark.parametrize("workload", [SMALL, SMALL.but(collective="all_to_all"), SMALL.but(grid=(8, 8))])
@pytest.mark.parametrize("device", ["h200", "h200-ghost", "mi250x"])
def test_a_policy_without_controls_is_plain_overlap(device, workload):
    executor = SimExecutor(device)
    plain = executor.measure(workload, Policy()).ms
    assert executor.measure(workload, Policy(when="overlap")).ms == plain
    assert executor.measure(workload, Policy(rules=(Rule("another", 1),))).ms == plain
    assert executor.measure(workload, Policy(max_ctas=executor.ctas)).ms == plain


@pytest.mark.parametrize("mode", ["compute", "comm", "sequential"])
def test_time_never_falls_when_the_work_grows(mode):
    executor = SimExecutor("h200-ghost")
    sizes = [SMALL.but(shape=(n, 2048, 2048), bytes=n << 15) for n in range(512, 4097, 256)]
    times = [executor.measure(size, Policy(), mode).ms for size in sizes]
    assert times == sorted(times)


def test_controls_apply_in_overlap_only():
    executor = SimExecutor("h200-ghost")
    policy = Policy(priority="high", head_start_us=50, rules=(Rule("weft_gemm", 1),))
    for mode in ("compute", "sequential"):
        assert executor.measure(SMALL, policy, mode).ms == executor.measure(SMALL, Policy(), mode).ms
    assert executor.measure(SMALL, policy).ms != executor.measure(SMALL, Policy()).ms


def test_a_rule_gives_collectives_of_its_kind_and_size_their_ctas():
    executor = SimExecutor("h200-ghost")
    size = SMALL.whole_bytes
    ruled = Policy(max_ctas=16, comm_rules=(CommRule(collective=SMALL.collective, max_bytes=size, ctas=4),))
    larger = Policy(
        max_ctas=16, comm_rules=(CommRule(collective=SMALL.collective, min_bytes=size + 1, ctas=4),)
    )
    ms = [executor.measure(SMALL, policy).ms for policy in (ruled, larger)]
    assert ms == [executor.measure(SMALL, Policy(max_ctas=ctas)).ms for ctas in (4, 16)]
    with pytest.raises(UsageError, match="simulator has CTAs only"):
        executor.measure(SMALL, Policy(comm_rules=(CommRule(protocol="ll"),)))


def test_the_timeline_shows_fewer_blocks_per_sm():
    executor = SimExecutor("h200")
    three = executor.launches(SMALL, Policy(rules=(Rule("WEFT_*", 3),)))[0]
    assert 228 * 1024 // three.footprint.shared_bytes == 3


def test_ghost_ranks_have_their_blocks_on_the_same_gpu():
    node, ghost = (SimExecutor(name).timeline(SMALL, Policy()) for name in ("h200", "h200-ghost"))
    assert (node.kind == Kind.COMM).sum() == 3
    assert (ghost.kind == Kind.COMM).sum() == 6
    assert {int(s) for s in ghost.stream} == {0, 100, 101}


def test_a_measurement_repeats_and_has_a_timeline():
    executor, policy = SimExecutor("h100"), Policy(priority="high")
    assert executor.simulated
    assert executor.measure(SMALL, policy).ms == SimExecutor("h100").measure(SMALL, policy).ms
    assert 0 < executor.timeline(SMALL, policy).figures().overlap_pct <= 100


def test_copy_engines_use_no_sm_and_cannot_reduce():
    executor = SimExecutor("h100")
    gather = SMALL.but(collective="all_gather")
    dma = Policy(engine="dma")
    assert executor.measure(gather, dma).ms <= executor.measure(gather, Policy()).ms
    with pytest.raises(UsageError, match="copy engines cannot reduce"):
        executor.measure(SMALL, dma)


def test_a_deadlock_is_reported_instead_of_hanging():
    with pytest.raises(DeadlockError, match="would hang .* set comm.max_ctas to 8 or less") as found:
        SimExecutor("h200-ghost").measure(SMALL.but(ranks=8), Policy(max_ctas=32))
    assert found.value.exit_code == 2


def test_a_kernel_that_fits_no_sm_is_explained():
    big = SMALL.but(tile=(128, 128, 64), stages=4, warps=8)
    with pytest.raises(NeverFitsError, match="128 KiB of shared memory fits on no SM of NVIDIA A40") as found:
        SimExecutor("a40").measure(big, Policy())
    assert found.value.exit_code == 2


def test_unknown_gpus_and_callables_are_rejected_by_name():
    with pytest.raises(UsageError, match="no GPU preset named 'h900'"):
        SimExecutor("h900")
    with pytest.raises(UsageError, match="no simulator profile for NVIDIA B200"):
        SimExecutor("b200")
    workload = Workload(compute=Compute(kind="callable", target="a:b"))
    with pytest.raises(UsageError, match="cannot be simulated"):
        SimExecutor("h100").measure(workload, Policy())


def test_a_profile_file_reads_back_as_written(tmp_path):
    path = tmp_path / "mine.json"
    changed = profile("h200").with_figures(latency_ns=555.0)
    changed.save(path)
    assert load_profile(path).figures == changed.figures
    assert SimExecutor(str(path)).profile.figures.latency_ns == 555.0
    path.write_text(json.dumps({"version": 1, "name": "x", "gpu": "h200", "figures": {}}))
    with pytest.raises(InputError, match="incomplete"):
        load_profile(path)
    with pytest.raises(InputError, match="cannot read profile"):
        load_profile(tmp_path / "none.json")


def test_the_exact_head_start_helps_where_the_collective_is_longer_than_the_gemm():
    """The timed head start ends before the collective's stream is ready, so the GEMM takes the SMs first."""
    work = Workload(compute=Compute(kind="gemm", shape=(8192, 8192, 8192)), ranks=2, iterations=6)
    gpu = SimExecutor("h200-ghost")
    for size, sooner in ((150 << 20, False), (300 << 20, True)):
        sized = work.but(bytes=size)
        timed = gpu.measure(sized, Policy(max_ctas=8, head_start_us=5)).ms
        placed = gpu.measure(sized, Policy(max_ctas=8, head_start="placed")).ms
        assert placed <= timed * 1.001
        assert (placed < 0.95 * timed) is sooner


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ctas", [None, 4])
def test_collectives_of_a_node_profile_take_its_time_and_ctas(kind, ctas):
    node = load_node("dgx-h200")
    executor = SimExecutor("h200", node=node)
    workload = specify("", gemm="4096x4096x4096", collective=kind, size="64MiB", ranks=8, iterations=1)
    larger_bytes = workload.elements * DTYPE_BYTES[workload.compute.dtype]
    part = node.collective(kind, larger_bytes, ctas, 8)
    policy = Policy(max_ctas=ctas)
    assert executor.measure(workload, policy, "comm").ms == pytest.approx(part.us * 1e-3, rel=0.02)
    (launch,) = executor.launches(workload, policy, "comm")
    assert launch.blocks == part.ctas
    assert executor.device == "sim:h200 in dgx-h200"
    if kind != "all_reduce":
        copied = executor.measure(workload, Policy(engine="dma"), "comm").ms
        assert copied == pytest.approx(node.copied(kind, larger_bytes, 8).us * 1e-3, rel=0.02)


def test_a_node_has_one_gpu_for_each_rank():
    with pytest.raises(UsageError, match="use sim:h200 with --node"):
        SimExecutor("h200-ghost", node=load_node("dgx-h200"))
