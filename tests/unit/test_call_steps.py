"""Steps from collective calls of one size: which of them belong together shows only in the gaps between them."""

from __future__ import annotations

import numpy as np
import pytest

from weft.monitor.calls import _CALL, CallFile, _cycle

MS = 1_000_000


def jittered(gaps: list[float], times: int, scatter: float, seed: int) -> np.ndarray:
    """Gaps in nanoseconds (given in ms), repeated with scatter, from a random place on."""
    order = np.random.default_rng(seed)
    rolled = np.roll(gaps, order.integers(len(gaps)))
    return (np.tile(rolled, times) * order.lognormal(0, scatter, times * len(gaps)) * MS).astype(np.int64)


@pytest.mark.parametrize("scatter", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(
    "gaps",
    [
        [5.0],
        [5.0] * 9 + [6.0],  # logs every 10 steps
        [5.0, 6.0],
        [5.0] * 49 + [50.0],  # evaluates every 50 steps, in a sixth of its time
        [5.0] * 19 + [40.0],
    ],
)
def test_with_one_call_to_a_step_no_pause_makes_a_longer_one(gaps, scatter):
    assert {_cycle(jittered(gaps, 500 // len(gaps), scatter, seed)) for seed in range(8)} == {1}


@pytest.mark.parametrize("scatter", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(
    "gaps", [[0.01, 0.01, 0.01, 4.0], [1.0, 3.0], [0.2, 0.9, 0.3, 5.0], [0.5] * 11 + [6.0]]
)
def test_calls_between_two_long_gaps_are_one_step(gaps, scatter):
    assert {_cycle(jittered(gaps, 500 // len(gaps), scatter, seed)) for seed in range(8)} == {len(gaps)}


def test_an_evaluation_now_and_then_does_not_make_steps_of_several_calls_longer():
    gaps = jittered([0.5, 0.8, 0.6, 4.0], 120, 0.2, 1)
    gaps[np.flatnonzero(gaps > 2 * MS)[::20]] += 300 * MS
    assert _cycle(gaps) == 4


def test_what_the_first_few_calls_seem_to_be_is_not_final(tmp_path):
    """A reader that starts early sees only three steps, of four calls each, at first."""
    path = tmp_path / "calls.7.0"
    path.touch()
    ends = np.cumsum(np.tile([MS // 10] * 3 + [4 * MS], 60))
    calls = np.zeros(len(ends), _CALL)
    calls["number"], calls["key"], calls["bytes"] = np.arange(1, len(ends) + 1), 1, 4096
    calls["host_ns"] = ends
    path.write_bytes(calls[:13].tobytes())
    file = CallFile(path)
    try:
        file.step_times_ms()
        path.write_bytes(calls.tobytes())
        assert file.step_times_ms()[-1] == pytest.approx(4.3)
        assert len(file.calls_of_a_step()) == 4
    finally:
        file.close()
