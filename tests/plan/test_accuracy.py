"""The error that `weft plan` shows is the error that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.plan.accuracy import held_out_error, known_error
from weft.plan.published import load

ROWS = Path(__file__).parent.parent / "data" / "published_training.csv"


def test_the_known_error_is_the_error():
    shown, real = known_error(), held_out_error(load(ROWS))
    assert shown is not None
    assert shown["runs"] == real["runs"] > 20
    assert shown["mean_pct"] == pytest.approx(real["mean_pct"], abs=1.0)
    assert shown["p90_pct"] == pytest.approx(real["p90_pct"], abs=3.0)
