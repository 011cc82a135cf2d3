"""The fit recovers the constants behind made-up runs, and stays at its priors without evidence."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from weft.plan.config import TrainingJob
from weft.plan.figures import Constants, shipped
from weft.plan.fit import Free, fit, log_errors, series, without
from weft.plan.published import Published
from weft.plan.step import predict


def runs(figures, source="made up"):
    """Step times predicted with these figures, in the form of published measurements."""
    jobs = [
        TrainingJob(model=name, gpu="h100", gpus=gpus, tp=tp, global_batch=gpus)
        for name, tp in (("llama3-8b", 2), ("llama3-70b", 8))
        for gpus in (16, 64, 512)
    ]
    steps = [predict(job, figures, check_memory=False).step_s for job in jobs]
    return [Published(source, str(job), job, step, "", "") for job, step in zip(jobs, steps, strict=True)]


def test_constants_hidden_in_runs_are_found():
    truth = shipped().but(gemm_h100=0.61, skew=0.012)
    free = [Free("gemm_h100", 0.7, 0.3), Free("skew", 0.004, 1.0)]
    found = fit(shipped(), free, runs(truth)).figures
    assert found.constants.gemm_h100 == pytest.approx(0.61, rel=0.02)
    assert found.constants.skew == pytest.approx(0.012, rel=0.1)
    assert max(abs(log_errors(found, runs(truth)))) < 0.01


def test_a_constant_without_evidence_stays_at_its_prior():
    free = [Free("gemm_a100", 0.8, 0.1)]
    assert fit(shipped(), free, runs(shipped())).figures.constants.gemm_a100 == pytest.approx(0.8)


def test_one_run_far_off_does_not_spoil_the_rest():
    rows = runs(shipped())
    rows[0] = replace(rows[0], step_s=3 * rows[0].step_s)
    found = fit(shipped(), [Free("gemm_h100", 0.7, 0.3)], rows).figures
    assert found.constants.gemm_h100 == pytest.approx(shipped().constants.gemm_h100, rel=0.06)


def test_a_source_that_is_left_out_has_no_say():
    free = [Free("gemm_h100", 0.7, 0.3)]
    good, wrong = runs(shipped(), "good"), runs(shipped().but(gemm_h100=0.4), "wrong")
    rows = [*good, *wrong]
    whole = fit(shipped(), free, rows)
    alone = fit(shipped(), free, good).figures.constants.gemm_h100
    assert whole.figures.constants.gemm_h100 < 0.97 * alone
    assert without("wrong", whole, free, rows).constants.gemm_h100 == pytest.approx(alone, rel=0.03)


def test_series_differ_only_in_their_size():
    rows = runs(shipped())
    assert series(rows) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", [field.name for field in fields(Constants)])
def test_every_constant_changes_some_prediction(name):
    """A constant that no prediction depends on could not be fitted."""
    base = {"gpu": "h100", "gpus": 64, "global_batch": 64}
    jobs = [
        TrainingJob(model="llama3-8b", tp=2, precision="fp8", **base),
        TrainingJob(model="mixtral-8x7b", ep=8, **base),
        TrainingJob(model="llama3-8b", sharding="zero3", software="torchtitan-eager", **base),
        TrainingJob(model="llama3-8b", tp=4, sharding="none", software="torchtitan-2024", **base).but(
            hide=frozenset({"tp", "tp_backward"})
        ),
        TrainingJob(model="llama3-8b", tp=8, sequence_parallel=False, **base),
        TrainingJob(model="gpt-7.5b", gpu="a100-80gb", gpus=64, sharding="none", software="megatron-2022"),
    ]
    from weft.plan.published import gpu_of

    jobs.append(jobs[2].but(gpu=gpu_of("h100-96gb")))
    value = getattr(shipped().constants, name)
    changed = shipped().but(**{name: value * 0.9})
    assert any(
        predict(job, changed, check_memory=False).step_s != predict(job, check_memory=False).step_s
        for job in jobs
    )
