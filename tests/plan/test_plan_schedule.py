"""Schedules: the drawing idles exactly for the predicted bubble, and the stages hold all layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.plan import TrainingJob, predict
from weft.plan.pipeline import bubble_share, chunk_layers, stage_list
from weft.plan.schedule import drawing

BASE = {"model": "llama3-70b", "gpu": "h100", "gpus": 64, "tp": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 4},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 4, "interleave": 2},
        {"pp": 4, "schedule": "zero-bubble"},
        {"pp": 2, "schedule": "zero-bubble"},
    ],
)
def test_the_drawing_waits_as_long_as_the_prediction_says(changes):
    job = TrainingJob(**BASE, **changes)
    drawn = drawing(job)
    batches = len({one.micro_batch for one in drawn})
    end = max(one.start + one.length for one in drawn)
    busy = 3.0 * batches
    for stage in range(job.pp):
        assert sum(one.length for one in drawn if one.stage == stage) == pytest.approx(busy)
    assert end - busy == pytest.approx(3.0 * (job.pp - 1) * bubble_share(job))


@pytest.mark.parametrize(
    "changes", [{"pp": 4}, {"pp": 4, "interleave": 2}, {"pp": 4, "schedule": "zero-bubble"}]
)
def test_no_stage_does_two_things_at_once(changes):
    drawn = drawing(TrainingJob(**BASE, **changes))
    for stage in range(4):
        mine = sorted((one.start, one.length) for one in drawn if one.stage == stage)
        for (start, length), (later, _) in pairwise(mine):
            assert start + length <= later + 1e-9


def test_one_stage_has_no_picture():
    assert drawing(TrainingJob(**BASE)) == []


@given(layers=st.integers(1, 200), chunks=st.integers(1, 64))
@examples(200)
def test_chunks_hold_all_layers_as_evenly_as_can_be(layers, chunks):
    if chunks > layers:
        return
    sizes = chunk_layers(layers, chunks)
    assert sum(sizes) == layers
    assert len(sizes) == chunks
    assert max(sizes) - min(sizes) <= 2
    assert max(sizes) <= -(-(layers + 2) // chunks)


def test_sixty_one_layers_on_sixteen_stages():
    job = TrainingJob(model="deepseek-v3", gpu="h100", gpus=1024, pp=16, ep=64, global_batch=4096)
    layers = [stage.layers for stage in stage_list(job)]
    assert sum(layers) == 61
    assert max(layers) == 4
    assert layers[-1] < 4  # the output counts as a layer
    assert any("uneven stages" in note for note in predict(job, check_memory=False).notes)


def test_better_schedules_have_smaller_bubbles():
    base = TrainingJob(**{**BASE, "gpus": 128}, pp=8, global_batch=256)
    steps = {
        name: predict(base.but(schedule=name), check_memory=False).breakdown["bubble"]
        for name in ("1f1b", "zero-bubble", "dualpipe")
    }
    assert steps["zero-bubble"] < steps["1f1b"]
    assert steps["dualpipe"] < steps["1f1b"]
