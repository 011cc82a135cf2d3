"""The error and interval that `weft plan` shows come from runs that were left out of the fit."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields
from pathlib import Path

import pytest

from weft.plan.accuracy import (
    Residual,
    bounds,
    covered,
    error_interval,
    error_of,
    family,
    known_error,
    summary,
    unchecked,
)
from weft.plan.config import TrainingJob
from weft.plan.figures import Constants, shipped
from weft.plan.published import load
from weft.plan.step import predict

ROOT = Path(__file__).parents[2]
ROWS = load(ROOT / "tests" / "data" / "published_training.csv")
LEFT_OUT = [
    Residual(line["source"], line["family"], line["log_error"])
    for line in json.loads((ROOT / "benchmarks" / "results" / "plan" / "left_out.json").read_text())
]
BARS = {"dense": 5.0, "fsdp": 10.0, "moe": 12.0}


def test_there_are_few_free_constants():
    assert len(fields(Constants)) <= 25


def test_every_row_was_left_out_once():
    assert [(r.source, r.family) for r in LEFT_OUT] == sorted(
        [(row.source, family(row.job)) for row in ROWS], key=lambda pair: pair[0]
    )


@pytest.mark.parametrize(("name", "bar"), BARS.items())
def test_the_error_of_a_family_with_its_source_left_out(name, bar):
    off = [abs(math.expm1(r.log_error)) for r in LEFT_OUT if r.family == name]
    assert 100 * sum(off) / len(off) <= bar


def test_intervals_cover_what_they_say():
    """Each run is judged by the interval that the runs of other sources give."""
    found = covered(LEFT_OUT)
    assert 85 <= 100 * sum(ok for _, ok in found) / len(found) <= 95
    for name in {r.family for r in LEFT_OUT}:
        mine = [ok for row, ok in found if row.family == name]
        if len(mine) >= 40:
            assert 85 <= 100 * sum(mine) / len(mine) <= 95, name


def test_what_is_shown_is_what_was_measured():
    shown, real = known_error(), summary(LEFT_OUT)
    assert shown is not None
    assert {k: v for k, v in shown.items() if k != "on"} == real


def test_the_shipped_constants_are_the_ones_that_were_judged():
    """Left-out errors are close to those of the shipped constants, so the file belongs to this model."""
    errors = [math.log(predict(row.job, check_memory=False).step_s / row.step_s) for row in ROWS]
    ordered = sorted(zip([row.source for row in ROWS], errors, strict=True), key=lambda pair: pair[0])
    gaps = [abs(error - left.log_error) for (_, error), left in zip(ordered, LEFT_OUT, strict=True)]
    assert sorted(gaps)[len(gaps) // 2] < 0.02
    assert shipped().constants.gemm_h100 < 1


def test_bounds_hold_for_new_draws_of_the_same_kind():
    draw = random.Random(3)
    inside = tried = 0
    for _ in range(300):
        low, high = bounds([draw.gauss(0.02, 0.08) for _ in range(60)])
        for _ in range(10):
            inside += low <= -draw.gauss(0.02, 0.08) <= high
            tried += 1
    assert 0.87 <= inside / tried <= 0.94


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "dense"),
        ({"sharding": "zero3"}, "fsdp"),
        ({"model": "mixtral-8x7b"}, "moe"),
        ({"seq_len": 65536, "cp": 2}, "long-context"),
        ({"gpus": 4096}, "large"),
        ({"gpu": "mi300x"}, "untested"),
        ({"gpu": "gb200", "precision": "nvfp4"}, "untested"),
    ],
)
def test_families(changes, name):
    job = TrainingJob(**{"model": "llama3-8b", "gpu": "h100", "gpus": 64, **changes})
    assert family(job) == name
    found = error_interval(job, 10.0)
    assert found is not None
    assert found.family == name
    assert found.low_s <= 10.0 <= found.high_s
    assert found.runs == (0 if name == "untested" else error_of(job)["runs"])


def test_what_nobody_published_has_the_widest_interval():
    jobs = [TrainingJob(model="llama3-8b", gpu=gpu, gpus=64) for gpu in ("h100", "mi355x")]
    widths = [found.high_s - found.low_s for found in (error_interval(job, 1.0) for job in jobs)]
    assert widths[1] > widths[0]


def test_the_error_is_claimed_only_where_runs_were_checked():
    known = known_error()
    assert unchecked(TrainingJob(model="llama3-8b", gpu="h100", gpus=16), known) == []
    for changes in ({"gpu": "a100-80gb"}, {"gpu": "mi300x"}, {"gpu": "h100", "software": "megatron-2022"}):
        j = TrainingJob(model="llama3-8b", gpus=16, **changes)
        assert f"no published run of {j.software} on {j.gpu.name} was checked" in unchecked(j, known)[0]
    assert unchecked(TrainingJob(model="llama3-8b", gpu="mi300x", gpus=16), None) == []
