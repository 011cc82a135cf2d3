"""The step: everything adds up, costs nothing extra at scale, and the controls never hurt."""

from __future__ import annotations

import pytest

from weft.plan import TrainingJob, predict
from weft.plan import step as step_module
from weft.policy import Policy

JOBS = [
    {"model": "llama3-70b", "gpu": "h100", "gpus": 1024, "tp": 8, "pp": 4},
    {"model": "llama3-8b", "gpu": "h100", "gpus": 64, "sharding": "zero3", "recompute": "full"},
    {"model": "llama3-8b", "gpu": "h100", "gpus": 16, "cp": 2, "precision": "fp8", "global_batch": 256},
    {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 128, "tp": 2, "ep": 8, "pp": 2, "global_batch": 256},
    {"model": "deepseek-v3", "gpu": "h200", "gpus": 2048, "ep": 64, "recompute": "full", "sharding": "zero3"},
    {
        "model": "gpt-175b",
        "gpu": "a100-80gb",
        "gpus": 512,
        "tp": 8,
        "pp": 8,
        "interleave": 3,
        "precision": "fp16",
    },
    {"model": "llama3-8b", "gpu": "mi300x", "gpus": 64, "sharding": "none", "recompute": "full"},
    {
        "model": "llama3-8b",
        "gpu": "h100",
        "gpus": 16,
        "micro_batch": 1,
        "recompute": "full",
        "network": "eth100",
    },
]
NAMES = [f"{j['model']}-{j['gpus']}-{j['gpu']}" for j in JOBS]


@pytest.mark.parametrize("policy", [None, "auto", Policy(max_ctas=8)], ids=str)
@pytest.mark.parametrize("config", JOBS, ids=NAMES)
def test_every_second_is_accounted_for(config, policy):
    p = predict(TrainingJob(**config, policy=policy))
    assert sum(p.breakdown.values()) == pytest.approx(p.step_s, rel=1e-9)
    assert all(seconds >= 0 for seconds in p.breakdown.values())
    assert p.step_s >= p.compute_s
    assert p.exposed_comm_s == pytest.approx(sum(c.exposed_s for c in p.collectives))
    assert p.mfu_pct == pytest.approx(100 * p.tflops_per_gpu * 1e12 / p.job.gpu.flops("bf16"))
    assert 0 < p.mfu_pct < 100
    assert p.simulated
    for c in p.collectives:
        assert c.count > 0
        assert c.bytes > 0
        assert c.exposed_s + c.slows_compute_by_s <= c.alone_s * (1 + 1e-9)


@pytest.mark.parametrize("config", JOBS, ids=NAMES)
def test_a_step_is_at_most_the_sum_of_its_parts(config):
    p = predict(TrainingJob(**config))
    extra = p.breakdown["bubble"] + p.breakdown["overhead"] + p.breakdown["skew"]
    alone = sum(c.alone_s for c in p.collectives)
    assert p.step_s <= p.compute_s + alone + extra + p.breakdown["compression"] + 1e-9


@pytest.mark.parametrize("config", JOBS, ids=NAMES)
def test_the_controls_never_cost_anything(config):
    plain, best = predict(TrainingJob(**config)), predict(TrainingJob(**config, policy="auto"))
    assert best.step_s <= plain.step_s * (1 + 1e-12)


@pytest.mark.parametrize("config", JOBS, ids=NAMES)
def test_hiding_nothing_is_never_faster(config):
    plain, bare = predict(TrainingJob(**config)), predict(TrainingJob(**config, hide=frozenset()))
    assert bare.step_s >= plain.step_s * (1 - 1e-12)
    assert sum(collective.hidden_s for collective in bare.collectives) == 0


def test_the_cost_of_a_prediction_does_not_grow_with_the_number_of_gpus(monkeypatch):
    calls = []
    real = step_module.collective_s
    monkeypatch.setattr(step_module, "collective_s", lambda *a, **k: calls.append(a) or real(*a, **k))
    counts = []
    for gpus in (256, 2048, 16384, 131072):
        calls.clear()
        predict(TrainingJob(model="llama3-405b", gpu="h100", gpus=gpus, tp=8, pp=16, recompute="full"))
        counts.append(len(calls))
    assert counts[0] == counts[-1] == max(counts)
    assert counts[0] < 100


def test_distinct_stages_are_worked_out_once():
    few = predict(
        TrainingJob(
            model="gpt-1t", gpu="a100-80gb", gpus=512, tp=8, pp=64, recompute="full", precision="fp16"
        )
    )
    assert few.step_s > 0
    from weft.plan.pipeline import stages

    assert len(stages(few.job)) == 3


def test_a_model_flops_rate_is_that_of_the_paper():
    """Korthikanti et al.: 530B on 2240 GPUs in 39.15 s is 54.2% of the peak."""
    j = TrainingJob(
        model="gpt-530b", gpu="a100-80gb", gpus=2240, tp=8, pp=35, interleave=3, global_batch=2240
    )
    p = predict(j, check_memory=False)
    assert p.mfu_pct * p.step_s == pytest.approx(54.2 * 39.15, rel=0.01)


def test_what_a_gpu_borrows_is_noted():
    notes = predict(TrainingJob(model="llama3-8b", gpu="b200", gpus=8)).notes
    assert any("matmuls: shares of the peak as on h100" in note for note in notes)
    assert any("profile of h100" in note for note in notes)
    assert any("software" in note for note in notes)


def test_experts_and_the_rest_share_the_compute_to_hide_behind():
    """Both use the same rails, so together they cannot hide behind more compute than there is."""
    job = TrainingJob(model="mixtral-8x7b", gpu="h100", gpus=128, ep=8, network="eth100")
    found = predict(job, check_memory=False)
    hidden = sum(c.hidden_s for c in found.collectives if c.name == "grads")
    backward = found.compute_s + found.breakdown["overhead"]
    assert len({c.group for c in found.collectives if c.name == "grads"}) == 2
    assert 0 < hidden < backward
    assert found.breakdown["grads"] > 0


KEYS_AND_VALUES = 2 * 8 * 128 * 2  # bytes of a token: 8 heads of 128, bf16
ACTIVATION = 4096 * 2  # bytes of a token, bf16
LAYER = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # bytes of its matrices, bf16
EMBEDDINGS = 2 * 2 * 128256 * 4096


@pytest.mark.parametrize(
    ("split", "name", "expected"),
    [
        ({"cp": 2}, "cp", {4096 * KEYS_AND_VALUES: 32, 2 * 4096 * KEYS_AND_VALUES: 32}),
        ({"cp": 4}, "cp", {2048 * KEYS_AND_VALUES: 96, 2 * 2048 * KEYS_AND_VALUES: 96}),
        ({"cp": 2, "tp": 2}, "cp", {4096 * KEYS_AND_VALUES // 2: 32, 4096 * KEYS_AND_VALUES: 32}),
        ({"pp": 2}, "pp", {8192 * ACTIVATION: 32}),
        ({"pp": 2, "tp": 2}, "pp", {8192 * ACTIVATION // 2: 32}),
        ({"sharding": "zero3"}, "grads", {LAYER + EMBEDDINGS // 32: 32}),
        ({"sharding": "zero3"}, "params", {LAYER + EMBEDDINGS // 32: 64}),
    ],
)
def test_collectives_of_llama_8b_move_the_bytes_that_its_dimensions_give(split, name, expected):
    """Sequences of 8192 tokens, one per micro-batch; backward, context parallelism moves twice as much."""
    found = predict(TrainingJob(model="llama3-8b", gpu="h200", gpus=16, recompute="none", **split))
    sizes = {one.bytes: one.count for one in found.collectives if one.name == name}
    assert sizes == expected


@pytest.mark.parametrize(("tp", "cp", "neighbours"), [(1, 8, 2), (8, 2, 1), (2, 8, 1)])
def test_context_parallel_neighbours_share_a_node_as_long_as_all_their_ranks_fit_on_it(tp, cp, neighbours):
    found = predict(TrainingJob(model="llama3-8b", gpu="h200", gpus=32, tp=tp, cp=cp))
    assert {one.group.per_domain for one in found.collectives if one.name == "cp"} == {neighbours}


@pytest.mark.parametrize(("software", "pieces"), [("torchtitan-2025", 1), ("deepspeed-2021", 4)])
def test_a_layer_is_gathered_in_as_many_pieces_as_the_software_makes(software, pieces):
    job = TrainingJob(
        model="llama3-8b", gpu="h200", gpus=16, sharding="zero3", software=software, seq_len=512
    )
    gathers = [one for one in predict(job).collectives if one.name == "params"]
    assert sum(one.count for one in gathers) == 2 * 32 * pieces  # forward and backward
    assert sum(one.bytes * one.count for one in gathers) == pytest.approx(2 * 2 * job.model.params)
