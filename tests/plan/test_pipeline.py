"""Pipelines: the bubble against a simulation step by step, stages that hold all layers, memory in flight."""

from __future__ import annotations

import pytest

from weft.plan.config import TrainingJob
from weft.plan.pipeline import chunk_layers, in_flight, span_s, stages


def job(**changes):
    return TrainingJob(
        **{"model": "gpt-175b", "gpu": "h100", "gpus": 64, "tp": 8, "pp": 8, "global_batch": 32, **changes}
    )


def run(order, forward, backward):
    """Time of a pipeline from dependencies alone: one stage per rank, each working in the given order."""
    done, free, todo = {}, [0.0] * len(order), [list(o) for o in order]
    while any(todo):
        moved = False
        for p, mine in enumerate(todo):
            if not mine:
                continue
            kind, m = mine[0]
            needs = (kind, m, p - 1 if kind == "f" else p + 1)
            edge = p == 0 if kind == "f" else p == len(order) - 1
            if edge and kind == "b":
                needs, edge = ("f", m, p), False
            if not edge and needs not in done:
                continue
            start = max(free[p], 0.0 if edge else done[needs])
            free[p] = done[kind, m, p] = start + (forward if kind == "f" else backward)
            mine.pop(0)
            moved = True
        assert moved, "the order deadlocks"
    return max(free)


def order_1f1b(p, stages_, micro):
    warm = min(stages_ - p, micro)
    first = [("f", m) for m in range(warm)]
    rest = [pair for m in range(micro - warm) for pair in (("b", m), ("f", m + warm))]
    return first + rest + [("b", m) for m in range(micro - warm, micro)]


def order_gpipe(_, __, micro):
    return [("f", m) for m in range(micro)] + [("b", m) for m in reversed(range(micro))]


@pytest.mark.parametrize("micro", [8, 16, 64])
@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "order"), [("1f1b", order_1f1b), ("gpipe", order_gpipe)])
def test_the_bubble_is_that_of_a_simulated_pipeline(schedule, order, depth, micro):
    j = job(pp=depth, gpus=8 * depth, schedule=schedule, global_batch=micro)
    kinds = stages(j)
    forward, backward = 1.0, 2.0
    busy, bubble = span_s(dict.fromkeys(kinds, forward + backward), kinds, j)
    orders = [order(p, depth, micro) for p in range(depth)]
    assert busy + bubble == pytest.approx(run(orders, forward, backward))


def test_interleaving_divides_the_bubble():
    plain, chunked = job(), job(interleave=3)
    kinds = stages(plain)
    times = dict.fromkeys(kinds, 1.0)
    assert span_s(times, kinds, plain) == (32.0, 7.0)
    assert span_s(times, kinds, chunked) == (32.0, pytest.approx(7 / 3))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(32, [8, 8, 8, 8]), (30, [7, 8, 8, 7]), (6, [1, 2, 2, 1]), (5, [1, 2, 1, 1])],
)
def test_uneven_layers_leave_less_to_the_first_and_the_last_chunk(layers, expected):
    assert chunk_layers(layers, len(expected)) == expected


@pytest.mark.parametrize(
    ("name", "pp", "interleave"),
    [("gpt-175b", 8, 1), ("llama3-405b", 8, 8), ("llama3-405b", 9, 7), ("deepseek-v3", 1, 1)],
)
def test_stages_hold_all_layers_once(name, pp, interleave):
    j = TrainingJob(
        model=name, gpu="h100", gpus=pp * 8, tp=8, pp=pp, interleave=interleave, global_batch=2 * pp
    )
    kinds = stages(j)
    assert sum(stage.layers * count for stage, count in kinds.items()) == j.model.layers
    assert sum(stage.moe_layers * count for stage, count in kinds.items()) == j.model.moe_layers
    assert sum(count for stage, count in kinds.items() if stage.head) == 1
    assert sum(count for stage, count in kinds.items() if stage.embedding) == 1
    assert sum(kinds.values()) == pp


def test_the_slowest_stage_sets_the_pace():
    j = job()
    kinds = stages(j)
    last = next(stage for stage in kinds if stage.head)
    times = {stage: 2.0 if stage is last else 1.0 for stage in kinds}
    assert span_s(times, kinds, j) == (64.0, 7.0)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 8),
        ({"global_batch": 4}, 4),
        ({"schedule": "gpipe"}, 32),
        # Korthikanti et al., section 4.2.3: L(1 + (p-1)/(pm)) with m chunks
        ({"interleave": 3}, 8 * (1 + 7 / 24)),
        ({"pp": 1, "gpus": 8}, 1),
    ],
)
def test_micro_batches_in_flight(changes, count):
    assert in_flight(job(**changes)) == pytest.approx(count)
