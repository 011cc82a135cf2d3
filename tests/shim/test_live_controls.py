"""What live tuning learns and changes in a process, on a fake driver and a fake NCCL."""

from __future__ import annotations

import pytest
from test_nccl_routes import TWO_GHOSTS, fake_nccl, nccl_program  # noqa: F401 (fixtures)

CONTROLS = (
    """
    import sys, types
    gpu = types.SimpleNamespace(multi_processor_count=132)
    cuda = types.SimpleNamespace(
        get_device_properties=lambda device: gpu, current_device=lambda: 0, device_count=lambda: 1,
        is_initialized=lambda: False, mem_get_info=lambda: (free[0], 141 << 30),
    )
    torch = types.SimpleNamespace(cuda=cuda, are_deterministic_algorithms_enabled=lambda: bool(deterministic))
    deterministic, free = [], [80 << 30]
    sys.modules["torch"] = torch
    import driver
    from weft import Policy
    from weft.tuning.live.controls import LaunchControls
    """
    + TWO_GHOSTS
    + """
    controls = LaunchControls(Policy(), world=2, parameters=1000)
    gemm, comm = driver.kernel("_Z4gemmPf"), driver.kernel("ncclDevKernel_AllReduce")
    def whole_step():
        step()
        driver.launch(comm, grid=12, stream=7)
        driver.launch(gemm)
        driver.finish(7)
        driver.launch(gemm)
    whole_step()
    controls.learn()
    whole_step()
    whole_step()
    facts = controls.facts(2)
    """
)


def test_what_a_job_launches_and_what_can_be_tried_is_learnt(nccl_program):  # noqa: F811
    facts = nccl_program(CONTROLS + "show(facts.to_dict())", env={"WEFT_LIVE": "1", "LOCAL_WORLD_SIZE": "2"})
    assert facts["launches"]
    assert facts["ctas"] == 12
    assert facts["cta_choices"] == [6, 16, 24, 32]
    assert facts["most_ctas"] == 33
    assert facts["why_no_ctas"] == ""
    (gemm,) = facts["kernels"]
    assert (gemm["name"], gemm["symbol"]) == ("gemm(float*)", "_Z4gemmPf")
    assert (gemm["launches"], gemm["beside"]) == (2, 1)
    assert facts["collectives"] == 1
    assert "2 ranks, 1000 parameters" in facts["workload"]
    assert "all_reduce a step" in facts["workload"]


def test_policies_are_applied_to_launches_and_collectives_and_taken_back(nccl_program):  # noqa: F811
    seen = nccl_program(
        CONTROLS
        + """
    controls.prepare(Policy(max_ctas=16), None)
    def ran(policy):
        controls.apply(policy)
        n.ctas()
        before = len(n.ctas())
        whole_step()
        return [n.ctas()[before:], driver.records()[-1]["shared"] > 0]
    shown = [ran(Policy()), ran(Policy(max_ctas=16)), ran(Policy(max_ctas=16, residency=2)), ran(Policy())]
    controls.apply(Policy(max_ctas=16, residency=2))
    controls.harmless()
    driver.launch(gemm)
    harmless = driver.records()[-1]["shared"] > 0
    controls.apply(Policy())
    controls.release()
    prepared = routes.communicators()[0].prepared
    show([shown, harmless, prepared, controls.clock()])
    """,
        env={"WEFT_LIVE": "1"},
    )
    shown, harmless, prepared, clock = seen
    assert shown == [[[12, 12], False], [[16, 16], False], [[16, 16], True], [[12, 12], False]]
    assert not harmless
    assert prepared == []
    assert len(clock) == 1
    assert next(iter(clock.values())) == 7


def test_models_are_no_longer_observed_once_tuning_has_ended_even_without_a_trace(nccl_program):  # noqa: F811
    observed = nccl_program(
        CONTROLS
        + """
    from weft.shim import tracer
    observed = []
    controls._frameworks = types.SimpleNamespace(
        learn=lambda: observed.append(1), stop_learning=observed.clear, apply=lambda policy: None
    )
    tracer.start = lambda: False
    controls.learn()
    during = list(observed)
    controls.apply(Policy())
    show([during, observed])
    """
    )
    assert observed == [[1], []]


def test_where_sums_must_keep_their_order_ctas_are_left_alone(nccl_program):  # noqa: F811
    source = (
        CONTROLS.replace(
            "n.init(2, 1, unique, config(12)))",
            "n.init(3, 1, unique, config(12))), lambda: ghosts.append(n.init(3, 2, unique, config(12)))",
        )
        .replace("n.init(2, 0", "n.init(3, 0")
        .replace("deterministic, free = []", "deterministic, free = [1]")
    )
    facts = nccl_program(source + "show(facts.to_dict())", env={"WEFT_LIVE": "1"})
    assert facts["cta_choices"] == []
    assert "deterministic" in facts["why_no_ctas"]


def test_where_memory_is_short_no_communicators_are_made(nccl_program):  # noqa: F811
    source = CONTROLS.replace("[80 << 30]", "[1 << 30]")
    facts = nccl_program(source + "show(facts.to_dict())", env={"WEFT_LIVE": "1"})
    assert facts["cta_choices"] == []
    assert "memory is free" in facts["why_no_ctas"]


def test_what_the_tracer_recorded_goes_with_what_was_launched(nccl_program):  # noqa: F811
    costs = """
    import tracer_driver
    driver.library().fake_cost(b"_Z4gemmPf", driver.ctypes.c_int64(2_000_000), 8)
    driver.library().fake_cost(b"ncclDevKernel_AllReduce", driver.ctypes.c_int64(3_000_000), 8)
    controls = LaunchControls"""
    source = CONTROLS.replace("\n    controls = LaunchControls", costs)
    for call in ("controls.learn()", "facts = controls"):
        source = source.replace(call, f"driver.library().fake_sync()\n    {call}")
    left = "left = [driver.library().fake_live_events(), driver.library().fake_live_streams()]"
    facts, left = nccl_program(source + f"{left}\n    show([facts.to_dict(), left])", env={"WEFT_LIVE": "1"})
    # A step: a collective of 3 ms on one stream, two GEMMs of 2 ms on another; the steps follow each other.
    assert facts["comm_ms"] == pytest.approx(3, rel=0.02)
    assert facts["span_ms"] == pytest.approx(4, rel=0.02)
    assert facts["exposed_ms"] == pytest.approx(0, abs=0.02)
    (gemm,) = facts["kernels"]
    assert gemm["ms"] == pytest.approx(4, rel=0.02)
    assert gemm["beside_ms"] == pytest.approx(3, rel=0.02)
    assert left == [0, 0]
    costs = facts["costs"]
    assert costs["exposed_ms"] == {"all_reduce": pytest.approx(0, abs=0.02)}
    assert costs["held_ms"] == pytest.approx(3 * 12 / 132, rel=0.02)
    assert costs["slowed_ms"] == pytest.approx(0, abs=0.02)  # one GEMM ran alone, as long as the other
    assert [kind for kind, _, _ in facts["calls"]] == ["all_reduce"]


def test_overlap_from_python_moves_collectives_and_gives_them_back(nccl_program):  # noqa: F811
    seen = nccl_program(
        CONTROLS
        + """
    import weft
    from weft.shim import apply
    def ran():
        before = len(n.ctas())
        whole_step()
        return n.ctas()[before:]
    with weft.overlap(Policy(max_ctas=16)):
        inside = ran()
        with weft.overlap(Policy(max_ctas=16, residency=2)):
            shaped = [ran(), driver.records()[-1]["shared"] > 0]
        with weft.overlap(Policy(priority="high")):
            none = ran()
        again = ran()
        controls.apply(Policy())  # as weft.tune does at its end
        apply.restore()
        tuned = ran()
    apply.restore()
    show([inside, shaped, none, again, tuned, ran()])
    """,
        env={"WEFT_LIVE": "1"},
    )
    assert seen == [[16, 16], [[16, 16], True], [12, 12], [16, 16], [16, 16], [12, 12]]


def test_overlap_says_why_ctas_stay_as_they_are(nccl_program):  # noqa: F811
    said = nccl_program(
        """
    import warnings
    import weft
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with weft.overlap(weft.Policy(max_ctas=16)):
            pass
    show([str(one.message) for one in caught])
    """
    )
    (line,) = said
    assert "max_ctas 16 is not applied (the program has made no NCCL communicator yet)" in line


def test_where_ctas_cannot_be_switched_another_start_could_have_others(nccl_program):  # noqa: F811
    source = CONTROLS.replace("[80 << 30]", "[1 << 30]")
    facts = nccl_program(source + "show(facts.to_dict())", env={"WEFT_LIVE": "1"})
    assert facts["cta_choices_at_start"] == [6, 16, 24, 32]
