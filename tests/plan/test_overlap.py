"""Overlap: the shipped table is what the simulator says, and hiding never costs more than waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import WeftError
from weft.gpu.collectives import Group
from weft.gpu.specs import spec
from weft.plan.compute import Work
from weft.plan.overlap import (
    CANDIDATES,
    COPY,
    contention,
    contention_table,
    hide,
    mixed,
    simulate_pair,
    simulated_gpu,
)
from weft.policy import Policy

H100 = spec("h100")
NEAR, FAR = Group(8, 8, 8), Group(64, 1, 512)


@pytest.mark.parametrize(
    "key",
    [
        ("h100", "gemm", "all_gather", 0.0, Policy()),
        ("h100", "gemm", "reduce_scatter", 50.0, CANDIDATES[2]),
        ("h100", "attention", "all_reduce", 200.0, CANDIDATES[0]),
        ("h200", "gemm", "all_to_all", 0.0, COPY),
        ("a100-40gb", "gemm", "all_reduce", 25.0, Policy()),
        ("mi300x", "gemm", "all_gather", 0.0, CANDIDATES[3]),
    ],
    ids=str,
)
def test_the_table_is_what_the_simulator_says(key):
    """If this fails, the simulator has changed: rerun benchmarks/plan/contention.py and fit.py."""
    found = simulate_pair(*key)
    assert contention_table()[key].stretch == pytest.approx(found.stretch, abs=1e-3)
    assert contention_table()[key].loss == pytest.approx(found.loss, abs=1e-3)
    assert contention_table()[key].alone == pytest.approx(found.alone, abs=1e-3)


def test_what_is_not_in_the_table_is_simulated():
    key = ("h100", "gemm", "all_gather", 0.0, Policy(max_ctas=12))
    assert key not in contention_table()
    found = contention(*key)
    assert found.stretch >= 1
    assert 0 <= found.loss < 1
    assert contention(*key) is found


def test_contention_is_real_and_copies_cost_no_sm():
    plain = contention("h100", "gemm", "all_gather", 0.0, Policy())
    copied = contention("h100", "gemm", "all_gather", 0.0, COPY)
    assert plain.loss > 0.05
    assert copied.loss < 0.01


@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]),
    alone=st.floats(1e-6, 10),
    gemm=st.floats(0, 10),
    attention=st.floats(0, 10),
    elementwise=st.floats(0, 10),
    floor=st.floats(0, 1),
    group=st.sampled_from([NEAR, FAR]),
    policy=st.sampled_from([None, "auto", COPY, *CANDIDATES]),
)
@examples(200)
def test_hiding_never_costs_more_than_waiting(
    kind, alone, gemm, attention, elementwise, floor, group, policy
):
    window = Work(gemm, attention, elementwise)
    found = hide(kind, alone, window, floor, H100, group, policy)
    assert found.cost_s <= alone * (1 + 1e-9)
    assert found.exposed_s >= floor * alone * 0.98 - 1e-12
    assert found.hidden_s == pytest.approx(max(0.0, alone - found.exposed_s))
    assert found.hidden_s <= window.total * 1.03 + 1e-12 * alone  # a difference of times, rounded
    assert found.slows_compute_by_s >= 0
    best = hide(kind, alone, window, floor, H100, group, "auto")
    plain = hide(kind, alone, window, floor, H100, group, None)
    assert best.cost_s <= plain.cost_s * (1 + 1e-9)


def test_what_the_window_does_not_hide_runs_undisturbed():
    """A long collective that overlaps with little compute is slowed only while the compute runs."""
    window, alone = Work(elementwise=0.01), 1.0
    found = hide("all_reduce", alone, window, 0.0, H100, FAR, None)
    assert found.policy == Policy()
    stretch = mixed("all_reduce", window, H100, FAR, Policy()).stretch
    assert stretch > 1
    assert found.exposed_s == pytest.approx(alone - 0.01 / stretch)


def test_copy_engines_move_what_they_can():
    window = Work(gemm=1.0)
    assert hide("all_gather", 0.1, window, 0.0, H100, NEAR, "auto").policy == COPY
    assert hide("reduce_scatter", 0.1, window, 0.0, H100, NEAR, COPY).policy.engine == "sm"
    assert hide("all_gather", 0.1, window, 0.0, H100, FAR, COPY).policy.engine == "sm"
    assert hide("all_gather", 0.1, Work(), 0.0, H100, NEAR, "auto").policy is None


@pytest.mark.parametrize(
    ("gpu", "stands_for"), [("a100-80gb", "a100-40gb"), ("b200", "h100"), ("h200", "h200")]
)
def test_a_gpu_without_a_profile_borrows_that_of_a_relative(gpu, stands_for):
    assert simulated_gpu(spec(gpu)) == stands_for


def test_launch_gaps_alone_contend_with_nothing():
    assert hide("all_gather", 0.1, Work(overhead=1.0), 0.0, H100, FAR, None).cost_s == 0


@pytest.mark.parametrize(
    ("gpu", "policy"),
    [("a100-40gb", Policy(max_ctas=128)), ("h100", Policy(sm_reserve=132))],
    ids=["ctas", "reserve"],
)
def test_a_policy_that_the_gpu_cannot_run_is_refused_in_one_line(gpu, policy):
    with pytest.raises(WeftError) as caught:
        hide("all_gather", 0.1, Work(gemm=1.0), 0.0, spec(gpu), NEAR, policy)
    assert len(str(caught.value).splitlines()) == 1
