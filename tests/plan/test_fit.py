"""Fitting: it finds figures that were hidden in made-up runs, stays at its priors without evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.plan.config import TrainingJob
from weft.plan.figures import shipped
from weft.plan.fit import Free, fit, log_errors, series, with_value
from weft.plan.published import Published
from weft.plan.step import predict

SKEW = "software.megatron-2025.skew"


def runs(figures):
    """Steps that these figures predict, as if somebody had measured them."""
    jobs = [
        TrainingJob(model=name, gpu="h100", gpus=gpus, tp=tp, global_batch=gpus)
        for name, tp in (("llama3-8b", 2), ("llama3-70b", 8))
        for gpus in (16, 64, 512)
    ]
    steps = [predict(job, figures, check_memory=False).step_s for job in jobs]
    return [
        Published("made up", "fit", str(job), job, step, "", "")
        for job, step in zip(jobs, steps, strict=True)
    ]


def test_figures_hidden_in_runs_are_found():
    truth = with_value(with_value(shipped(), "gemm.h100.bf16", 0.61), SKEW, 0.012)
    free = [Free(("gemm.h100.bf16",), 0.7, 0.3), Free((SKEW,), 0.004, 1.0)]
    found = fit(shipped(), free, runs(truth))
    assert found.gemm["h100"]["bf16"] == pytest.approx(0.61, rel=0.02)
    assert found.software["megatron-2025"].skew == pytest.approx(0.012, rel=0.1)
    assert max(abs(log_errors(found, runs(truth)))) < 0.01


def test_a_figure_without_evidence_stays_at_its_prior():
    free = [Free(("gemm.a100-80gb.bf16",), 0.8, 0.1)]
    assert fit(shipped(), free, runs(shipped())).gemm["a100-80gb"]["bf16"] == pytest.approx(0.8)


def test_one_run_far_off_does_not_spoil_the_rest():
    rows = runs(shipped())
    rows[0] = replace(rows[0], step_s=3 * rows[0].step_s)
    free = [Free(("gemm.h100.bf16",), 0.7, 0.3)]
    share = fit(shipped(), free, rows).gemm["h100"]["bf16"]
    assert share == pytest.approx(shipped().gemm["h100"]["bf16"], rel=0.06)


def test_series_differ_only_in_their_size():
    rows = runs(shipped())
    assert series(rows) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("power", 0.3, lambda f: f.power),
        ("links.congestion", 0.1, lambda f: f.links.congestion),
        ("gemm.h100.fp8", 0.5, lambda f: f.gemm["h100"]["fp8"]),
        ("software.megascale-2024.network", 0.4, lambda f: f.software["megascale-2024"].network),
        ("scale.h100-96gb.h100", 0.5, lambda f: f.gemm["h100-96gb"]["bf16"] / f.gemm["h100"]["bf16"]),
    ],
)
def test_a_figure_is_replaced_by_its_path(path, value, read):
    assert read(with_value(shipped(), path, value)) == pytest.approx(value)
