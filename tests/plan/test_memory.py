"""Memory: Korthikanti's formulas, what sharding saves, and the refusal with its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.errors import UsageError
from weft.plan.config import TrainingJob
from weft.plan.figures import shipped
from weft.plan.memory import activation_bytes, check_fits, memory_bytes
from weft.plan.published import load
from weft.plan.step import predict

FIGURES = shipped()
ROWS = load(Path(__file__).parents[1] / "data" / "published_training.csv")


def gpt(**changes):
    base = {"model": "gpt-175b", "gpu": "a100-80gb", "gpus": 64, "tp": 8, "pp": 8, "global_batch": 64}
    return TrainingJob(
        **{**base, "precision": "fp16", "sharding": "none", "software": "megatron-2022", **changes}
    )


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        # Korthikanti et al., table 2, bytes of a layer: sbh times this, with a s/h = 16 for GPT-3
        ({"recompute": "none", "sequence_parallel": True}, (34 + 5 * 16) / 8),
        ({"recompute": "selective", "sequence_parallel": True}, 34 / 8),
        ({"recompute": "none", "sequence_parallel": False}, 10 + (24 + 5 * 16) / 8),
        ({"recompute": "full", "sequence_parallel": False}, 2),
    ],
)
def test_activations_follow_korthikanti(changes, formula):
    j = gpt(**changes)
    assert activation_bytes(j, FIGURES, moe=False) == pytest.approx(2048 * 12288 * formula, rel=0.12)


@pytest.mark.parametrize(
    ("software", "kept"),
    [
        # Bytes of a token: the layer's input, the attention's output, then outputs of matmuls, in bf16.
        ("torchtitan-2025", 2 * (2 * 4096) + 2 * (2 * 4096) + 2 * 1024 + 2 * 14336),
        ("maxtext-2024", 2 * 4096 + 2 * 4096 + 2 * 2 * 1024),
    ],
)
def test_what_selective_recomputation_keeps_of_a_llama_layer(software, kept):
    j = TrainingJob(model="llama3-8b", gpu="h200", gpus=16, software=software, recompute="selective")
    assert activation_bytes(j, FIGURES, moe=False) == 8192 * kept


@pytest.mark.parametrize(
    ("sharding", "each"),
    [("none", 2 + 2 + 12), ("zero1", 2 + 2 + 12 / 64), ("zero2", 2 + 14 / 64), ("zero3", 16 / 64)],
)
def test_sharding_divides_what_it_says(sharding, each):
    j = TrainingJob(model="llama2-7b", gpu="h100", gpus=64, sharding=sharding)
    kinds = memory_bytes(j, FIGURES)
    held = kinds["parameters"] + kinds["gradients"] + kinds["optimizer"]
    assert held / j.model.params == pytest.approx(each)


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_what_is_summed_or_gathered_once_a_step_is_held_whole(sharding):
    """Pipeline stages gather nothing layer by layer, so memory must not be counted as if they did."""
    j = TrainingJob(model="llama2-7b", gpu="h100", gpus=64, pp=4, sharding=sharding)
    plain = j.but(sharding="zero1")
    assert memory_bytes(j, FIGURES) == memory_bytes(plain, FIGURES)
    assert predict(j).step_s == pytest.approx(predict(plain).step_s)
    summed = TrainingJob(model="llama2-7b", gpu="h100", gpus=64, sharding="zero2", global_batch=128)
    assert memory_bytes(summed, FIGURES)["gradients"] == 2 * summed.model.params


def test_memory_that_does_not_fit_is_refused_with_the_number():
    j = TrainingJob(model="llama3-405b", gpu="h100", gpus=8, tp=8)
    needed = sum(memory_bytes(j, FIGURES).values()) / 2**30
    with pytest.raises(UsageError, match=re.escape(f"needs {needed:.0f} GiB on its fullest GPU")) as caught:
        predict(j)
    assert "NVIDIA H100 SXM has 80 GiB" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert predict(j, check_memory=False).step_s > 0


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"micro_batch": 16, "tp": 8, "sharding": "zero3"}, "recompute more"),
        (
            {"micro_batch": 64, "tp": 8, "sharding": "zero3", "recompute": "full"},
            "raise tp or cp, or use a smaller",
        ),
        ({"tp": 1, "sharding": "zero1", "recompute": "full"}, "sharding zero3"),
        # Activations are the largest part, yet everything else alone does not fit either.
        ({"tp": 1, "sharding": "zero1", "gpus": 8}, "sharding zero3"),
        ({"pp": 2, "sharding": "zero3", "recompute": "full"}, "raise tp or pp, or use more"),
    ],
)
def test_the_refusal_says_what_would_help(changes, fix):
    j = TrainingJob(**{"model": "llama3-70b", "gpu": "h100", "gpus": 64, **changes})
    with pytest.raises(UsageError, match=fix):
        check_fits(j, memory_bytes(j, FIGURES))


def test_runs_that_took_place_fit():
    """All but a few: how those were made to fit (offloading, other recomputation) is not published."""
    over = [
        row.label
        for row in ROWS
        if sum(memory_bytes(row.job, FIGURES).values()) > 1.03 * row.job.gpu.memory_bytes
    ]
    assert len(over) <= 3, over


@pytest.mark.parametrize("software", list(FIGURES.software))
@pytest.mark.parametrize("layers", [1, 32])
def test_more_recomputation_never_needs_more(software, layers):
    base = TrainingJob(model="llama3-8b", gpu="h100", gpus=8, software=software)
    need = [
        sum(memory_bytes(base.but(model=base.model.but(layers=layers), recompute=r), FIGURES).values())
        for r in ("none", "selective", "full")
    ]
    assert need[0] >= need[1] * (1 - 1e-9)
    assert need[1] >= need[2] * (1 - 1e-9)


def test_one_rank_gathers_nothing():
    j = TrainingJob(model="llama2-7b", gpu="h200", gpus=1, sharding="zero3")
    assert memory_bytes(j, FIGURES) == memory_bytes(j.but(sharding="none"), FIGURES)
