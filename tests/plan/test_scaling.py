"""Scaling curves: sizes, batches, where a curve ends, and what it must keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import UsageError
from weft.plan import TrainingJob
from weft.plan.scaling import curve, curves, parse_range, resized, sizes, strong_batch

JOB = TrainingJob(model="llama3-8b", gpu="h100", gpus=8, tp=2, micro_batch=1, global_batch=8)


@pytest.mark.parametrize("words", ["8..16384", " 8 .. 16384 ", "8-16384", "8:16384"])
def test_ranges(words):
    assert parse_range(words) == (8, 16384)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "8..16384"),
        ("8", "8..16384"),
        ("8..", "8..16384"),
        ("-8..16", "8..16384"),
        ("64..8", "8..64"),
        ("0..8", "did you mean|not a range"),
        ("8..999999999", "nearest is 8..262144"),
        ("8..9999999999999999", "8..16384"),
    ],
)
def test_wrong_ranges_get_a_right_one(words, said):
    with pytest.raises(UsageError, match=said):
        parse_range(words)


@examples(60)
@given(st.integers(1, 300), st.integers(0, 9))
def test_sizes_are_multiples_in_the_range(low, more):
    high = low * 2**more + 8
    found = sizes(JOB, low, high)
    assert found == sorted(found)
    assert all(low <= size <= high and size % 2 == 0 for size in found)


def test_a_range_below_the_split_names_one_that_works():
    with pytest.raises(UsageError, match="needs at least 64"):
        sizes(TrainingJob(model="llama3-70b", gpu="h100", gpus=64, tp=8, pp=8), 8, 32)


def test_weak_keeps_the_rank_strong_keeps_the_batch():
    weak, strong = resized(JOB, 64, "weak"), resized(JOB.but(global_batch=64), 64, "strong")
    assert (weak.dp, weak.global_batch, weak.micro_batches) == (32, 64, JOB.micro_batches)
    assert (strong.dp, strong.global_batch, strong.micro_batches) == (32, 64, 2)


def test_a_strong_curve_ends_where_the_batch_does():
    found = curve(JOB, 8, 64, "strong")
    assert [point.gpus for point in found.points] == [8, 16]
    assert "32 GPUs: global_batch 8" in found.note


def test_a_batch_that_was_not_given_is_divided_up_to_the_largest_size():
    found = {c.kind: c for c in curves(JOB, 8, 64, batch_given=False)}
    assert [point.gpus for point in found["strong"].points] == [8, 16, 32, 64]
    assert found["strong"].note == ""
    assert strong_batch(JOB, 1 << 18) * JOB.seq_len <= 1 << 24


def test_curves_of_real_predictions_hold_together():
    told = []
    weak, strong = curves(
        JOB.but(global_batch=32), 8, 64, progress=lambda at, total: told.append((at, total))
    )
    assert told[-1] == (4, 4)
    for found in (weak, strong):
        for point in found.points:
            assert point.with_weft.step_s <= point.without.step_s * 1.0001
            assert point.job.gpus == point.gpus
    steps = [point.without.step_s for point in strong.points]
    assert steps == sorted(steps, reverse=True)
    rates = [point.tokens_per_s_per_gpu(point.without) for point in weak.points]
    assert rates[-1] <= rates[0]


def test_a_job_that_never_fits_says_why():
    with pytest.raises(UsageError, match="GiB"):
        curve(TrainingJob(model="llama3-405b", gpu="h100", gpus=8, tp=8), 8, 16, "weak")
