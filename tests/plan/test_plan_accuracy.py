"""The error that `weft plan` shows is the error that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.plan.accuracy import held_out_error, known_error, unchecked
from weft.plan.config import TrainingJob
from weft.plan.published import load

ROWS = Path(__file__).parent.parent / "data" / "published_training.csv"


def test_the_known_error_is_the_error():
    shown, real = known_error(), held_out_error(load(ROWS))
    assert shown is not None
    assert shown["runs"] == real["runs"] > 20
    assert shown["on"] == real["on"]
    assert shown["mean_pct"] == pytest.approx(real["mean_pct"], abs=1.0)
    assert shown["p90_pct"] == pytest.approx(real["p90_pct"], abs=3.0)


def test_the_error_is_claimed_only_where_runs_were_checked():
    known = known_error()
    assert unchecked(TrainingJob(model="llama3-8b", gpu="h100", gpus=16), known) == []
    for changes in ({"gpu": "a100-80gb"}, {"gpu": "mi300x"}, {"gpu": "h100", "software": "megatron-2022"}):
        j = TrainingJob(model="llama3-8b", gpus=16, **changes)
        assert f"no published run of {j.software} on {j.gpu.name} was checked" in unchecked(j, known)[0]
    assert unchecked(TrainingJob(model="llama3-8b", gpu="mi300x", gpus=16), None) == []
