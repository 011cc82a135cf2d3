"""The one-GPU lab on a virtual clock: order, dependencies, controls and errors, without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from lab_fakes import FakeGpu, FakeRanksFactory, FakeShim  # noqa: E402

from weft.errors import UnavailableError, UsageError  # noqa: E402
from weft.execute.base import MemoryFullError, References, WrongResultError  # noqa: E402
from weft.execute.cuda import CudaExecutor  # noqa: E402
from weft.execute.devices import open_executor  # noqa: E402
from weft.policy import CommRule, Policy, Rule  # noqa: E402
from weft.workload import Compute, Workload  # noqa: E402

N = 5


def make(gpu=None, ranks=None, shim=None, compute_ms=2.0, **options):
    gpu = gpu or FakeGpu()
    call = lambda: gpu.current.run(compute_ms)  # noqa: E731
    workload = Workload(compute=Compute(kind="callable", call=call), bytes=1000, ranks=2, iterations=N)
    return gpu, CudaExecutor(gpu=gpu, ranks=ranks or FakeRanksFactory(3.0), shim=shim, **options), workload


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_times_follow_from_the_dependencies(collective):
    _, executor, workload = make(shim=FakeShim())
    workload = workload.but(collective=collective)
    times = {
        mode: executor.measure(workload, Policy(), mode).ms
        for mode in ("overlap", "sequential", "compute", "comm")
    }
    assert times["compute"] == pytest.approx(2.0 * N)
    assert times["comm"] == pytest.approx(3.0 * N)
    assert times["sequential"] == pytest.approx(5.0 * N)
    assert times["overlap"] == pytest.approx(2.0 + 3.0 * N)  # the ideal: pipeline fill plus the longer side


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_one_rank_of_a_node_has_one_stream_and_its_own_data(collective):
    ranks = FakeRanksFactory(3.0, node=True)
    _, executor, workload = make(ranks=ranks, shim=FakeShim(), baseline_ctas=None, node="dgx-h100")
    workload = workload.but(collective=collective, ranks=8)
    assert executor.device.endswith("as dgx-h100")
    assert executor.measure(workload, Policy(), "comm").ms == pytest.approx(3.0 * N)
    assert ranks.made == [(8, None)]
    assert len(executor._streams["default"]) == 1
    ranks.broken = True
    with pytest.raises(WrongResultError):
        executor.measure(workload, Policy(), "comm")


def test_copy_engines_of_a_node_have_a_communicator_and_windows_of_their_own():
    ranks, shim = FakeRanksFactory(3.0, node=True), FakeShim()
    _, executor, workload = make(ranks=ranks, shim=shim, baseline_ctas=None, node="dgx-h100")
    gathers = workload.but(collective="all_gather", ranks=8)
    for engine in ("sm", "dma", "dma"):
        executor.measure(gathers, Policy(engine=engine))
    assert ranks.made == [(8, None), (8, None)]
    assert ranks.windows == [executor._held[1].recv[0].data_ptr()]
    ranks.broken = True
    with pytest.raises(WrongResultError):
        executor.measure(gathers, Policy(engine="dma"))
    ranks.broken = False
    with pytest.raises(UsageError, match="comm.engine dma"):
        executor.measure(workload.but(collective="all_reduce", ranks=8), Policy(engine="dma"))
    _, alone, _ = make(ranks=ranks, baseline_ctas=None, node="dgx-h100")
    with pytest.raises(UnavailableError, match="comm.engine dma needs the launch shim"):
        alone.measure(gathers, Policy(engine="dma"))


def test_a_node_needs_a_gpu_or_a_simulated_one():
    with pytest.raises(UsageError, match="one process on one GPU"):
        open_executor("cpu", node="dgx-h100")


def test_references_give_the_ideal_that_overlap_reaches():
    _, executor, workload = make(shim=FakeShim())
    alone = (executor.measure(workload, Policy(), mode).ms for mode in ("sequential", "compute", "comm"))
    found = References(*alone, workload.iterations)
    assert found.ideal_ms == pytest.approx(3.0 * N + 2.0)
    assert found.sequential_ms == pytest.approx(5 * N)
    ms = executor.measure(workload, Policy()).ms
    assert found.fraction_of_ideal(ms) == pytest.approx(1.0)
    assert 50 < executor.timeline(workload, Policy()).figures().overlap_pct < 90


def test_several_compute_streams_run_at_once():
    _, executor, workload = make(shim=FakeShim())
    workload = workload.but(compute_streams=N)
    assert executor.measure(workload, Policy(), "compute").ms == pytest.approx(2.0)
    assert executor.measure(workload, Policy(), "overlap").ms == pytest.approx(2.0 + 3.0 * N)
    assert executor.measure(workload, Policy(), "sequential").ms == pytest.approx(5.0 * N)


def test_priority_uses_other_streams_and_ctas_other_communicators():
    ranks = FakeRanksFactory()
    _, executor, workload = make(ranks=ranks, shim=FakeShim(), baseline_ctas=12)
    executor.measure(workload, Policy(priority="high"))
    executor.measure(workload, Policy(max_ctas=4))
    executor.measure(workload, Policy(max_ctas=4, priority="high"))
    assert ranks.made == [(2, 12), (2, 4)]
    assert [stream.high for stream in executor._streams["high"]] == [True, True]
    assert [stream.high for stream in executor._streams["default"]] == [False, False]


def test_the_shim_gets_the_policy_only_in_overlap_and_only_when_it_changes():
    shim = FakeShim()
    _, executor, workload = make(shim=shim)
    policy = Policy(residency=3, head_start_us=5)
    for mode in ("overlap", "overlap", "sequential", "comm", "overlap"):
        executor.measure(workload, policy, mode)
    assert shim.policies == [policy, Policy(), policy]


def test_without_the_shim_a_head_start_is_a_sleep_and_residency_is_rejected():
    gpu, executor, workload = make(shim=False)
    executor._shim = None
    plain = executor.measure(workload, Policy()).ms
    ms = executor.measure(workload, Policy(head_start_us=500)).ms
    assert gpu.sleeps.count(0.5) >= N - 1
    assert ms >= plain
    with pytest.raises(UnavailableError, match="weft run"):
        executor.measure(workload, Policy(rules=(Rule("weft_gemm", 3),)))


def test_visible_skew_doubles_the_spin():
    gpu, executor, workload = make(shim=FakeShim())
    gpu.launches_too_slow = True
    sample = executor.measure(workload, Policy())
    assert sample.facts["launches_hidden"] is False
    assert gpu.sleeps[-1] > gpu.sleeps[0] * 8
    assert gpu.flushes >= 6


def test_wrong_result_names_rank_and_element():
    _, executor, workload = make(ranks=FakeRanksFactory(broken=True), shim=FakeShim())
    with pytest.raises(WrongResultError, match=r"rank 1 .* at element 0"):
        executor.measure(workload, Policy())
    executor.measure(workload, Policy(), "compute")  # no collective, nothing to check


def test_a_collective_that_never_ran_is_detected():
    class Lazy(FakeRanksFactory):
        def __call__(self, size, ctas):
            class Nothing:
                def all_reduce(self, *_):
                    pass

            return Nothing()

    _, executor, workload = make(ranks=Lazy(), shim=FakeShim())
    with pytest.raises(WrongResultError, match="nan"):
        executor.measure(workload, Policy())


@pytest.mark.parametrize(
    ("collective", "ranks", "ctas", "fits"),
    [
        ("all_reduce", 2, 66, True),
        ("all_reduce", 2, 67, False),
        ("all_reduce", 4, 64, False),
        ("all_to_all", 4, 32, True),
        ("all_to_all", 4, 33, False),
    ],
)
def test_collectives_that_can_never_be_resident_are_rejected(collective, ranks, ctas, fits):
    _, executor, workload = make(shim=FakeShim())
    workload = workload.but(collective=collective, ranks=ranks)
    if fits:
        executor.measure(workload, Policy(max_ctas=ctas))
    else:
        with pytest.raises(UsageError, match=r"would hang: set comm\.max_ctas"):
            executor.measure(workload, Policy(max_ctas=ctas))


@pytest.mark.parametrize("policy", [Policy(engine="dma"), Policy(schedule="shard")])
def test_controls_that_the_pipeline_lacks_are_rejected_by_name(policy):
    _, executor, workload = make(shim=FakeShim())
    with pytest.raises(UsageError, match="is not applied"):
        executor.measure(workload, policy)


def test_rules_for_collectives_are_followed_while_their_policy_is_measured():
    shim, ranks = FakeShim(), FakeRanksFactory(3.0)
    _, executor, workload = make(shim=shim, ranks=ranks, baseline_ctas=8)
    more, fewer = (CommRule(ctas=16, min_bytes=512),), (CommRule(ctas=4, protocol="ll"),)
    for policy in (Policy(), Policy(comm_rules=more), Policy(comm_rules=more), Policy(comm_rules=fewer)):
        executor.measure(workload, policy)
    executor.measure(workload, Policy(comm_rules=fewer), "sequential")  # a reference has no controls
    assert shim.followed == [more, fewer, ()]
    assert ranks.made == [(2, 8), (2, 16)]  # a call can only lower a communicator's CTAs
    assert {policy.max_ctas for policy in shim.policies if policy.comm_rules} == {8}  # for the rest
    with pytest.raises(UsageError, match="would hang"):
        executor.measure(workload.but(ranks=4), Policy(comm_rules=(CommRule(ctas=64),)))


def test_rules_that_cannot_be_applied_are_refused_with_the_reason():
    class Refusing(FakeShim):
        def follow_rules(self) -> None:
            super().follow_rules()
            if self.followed[-1]:
                raise UnavailableError("comm.rules cannot be applied: too old")

    shim = Refusing()
    _, executor, workload = make(shim=shim)
    ruled = Policy(comm_rules=(CommRule(ctas=4),))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="too old"):
            executor.measure(workload, ruled)
    executor.measure(workload, Policy())
    assert shim.followed == [ruled.comm_rules, ruled.comm_rules, ()]


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (Policy(head_start="placed"), "placed head start"),
        (Policy(sm_reserve=4), "sm_reserve"),
        (Policy(comm_rules=(CommRule(ctas=4),)), r"comm\.rules"),
    ],
)
def test_controls_that_only_the_shim_applies_need_it(policy, word):
    _, executor, workload = make()
    with pytest.raises(UnavailableError, match=f"{word} needs the launch shim"):
        executor.measure(workload, policy)


def test_out_of_memory_is_one_line_and_the_next_workload_runs(monkeypatch):
    _, executor, workload = make(shim=FakeShim())
    from weft.execute import cuda

    def full(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "build_compute", full)
        with pytest.raises(MemoryFullError, match="does not fit into 141 GB"):
            executor.measure(workload, Policy())
    assert executor.measure(workload, Policy()).ms > 0
