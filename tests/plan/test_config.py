"""Jobs: what is derived, what is refused, and that each refusal names a choice that works."""

from __future__ import annotations

import re

import pytest

from weft.errors import UsageError
from weft.gpu.network import NETWORKS, Network, network
from weft.plan.config import TrainingJob
from weft.policy import Policy


def job(**changes):
    return TrainingJob(**{"model": "llama3-70b", "gpu": "h100", "gpus": 256, "tp": 8, "pp": 4, **changes})


def test_what_is_left_out_is_derived():
    j = job()
    assert (j.dp, j.seq_len, j.schedule, j.network.name, j.sequence_parallel) == (
        8,
        8192,
        "1f1b",
        "ndr400",
        True,
    )
    assert j.global_batch == 8 * 32
    assert j.micro_batches == 32
    assert job(gpu="a100-80gb").network.name == "hdr200"
    assert job(interleave=5).schedule == "interleaved"
    assert job(policy="none").policy is None
    assert str(j) == "llama3-70b on 256 h100 (tp8 pp4 dp8)"


def test_a_changed_job_derives_again():
    j = job().but(tp=1, pp=1)
    assert (j.dp, j.sequence_parallel, j.schedule) == (256, False, "1f1b")
    assert job().but(gpu="a100-80gb").network.name == "hdr200"
    assert job(sharding="zero3", tp=1, pp=1, shard_ranks=64).but(gpus=512, global_batch=512).shard_ranks == 64
    assert job(sharding="zero3", tp=1, pp=1).but(gpus=512, global_batch=512).shard_ranks == 512


# The mistake, what the message must name, and the alternative that it gives, which must work.
WRONG = [
    ({"tp": 7, "gpus": 28}, "tp 7 does not divide the 64 heads", {"tp": 8, "gpus": 32}),
    (
        {"pp": 96, "gpus": 768},
        "pp 96 is more than the 80 layers of llama3-70b; nearest is pp 80",
        {"pp": 80, "gpus": 640},
    ),
    ({"gpus": 250}, "gpus 250 is not a multiple of tp 8 x pp 4 x cp 1 = 32; nearest is 256", {"gpus": 256}),
    ({"dp": 4}, "= 128, not gpus 256; with these, dp is 8", {"dp": 8}),
    ({"global_batch": 100}, "nearest is 96", {"global_batch": 96}),
    ({"cp": 3, "gpus": 384}, "cp 3 does not divide seq_len 8192; nearest is 4", {"cp": 4, "gpus": 512}),
    ({"interleave": 30}, "pp 4 x interleave 30 is more than the 80 layers", {"interleave": 20}),
    (
        {"interleave": 5, "global_batch": 8 * 6},
        "nearest is global_batch 64",
        {"interleave": 5, "global_batch": 64},
    ),
    ({"interleave": 5, "pp": 1}, "interleave 5 needs pipeline stages", {"interleave": 1, "pp": 1}),
    (
        {"interleave": 5, "schedule": "gpipe"},
        "use schedule interleaved",
        {"interleave": 5, "schedule": "interleaved"},
    ),
    ({"schedule": "interleaved"}, "needs interleave 2 or more", {"schedule": "1f1b"}),
    ({"schedule": "1f1"}, "did you mean '1f1b'", {"schedule": "1f1b"}),
    ({"sharding": "zero4"}, "sharding 'zero4' is not known", {"sharding": "zero3"}),
    ({"recompute": "some"}, "recompute 'some' is not known", {"recompute": "none"}),
    (
        {"pp": 5, "gpus": 40, "schedule": "dualpipe"},
        "nearest is 6",
        {"pp": 6, "gpus": 48, "schedule": "dualpipe"},
    ),
    ({"precision": "int4"}, "precision 'int4' is not known", {"precision": "fp8"}),
    (
        {"gpu": "a100-80gb", "precision": "fp8"},
        "NVIDIA A100 80GB does not support it; nearest is bf16 (bf16, fp16)",
        {"gpu": "a100-80gb"},
    ),
    ({"ep": 8}, "llama3-70b has no experts; use ep 1", {"ep": 1}),
    ({"tp": 1, "sequence_parallel": True}, "sequence_parallel needs tensor parallelism", {"tp": 1}),
    ({"shard_ranks": 5}, "shard_ranks 5 does not divide dp x cp = 8; nearest is 4", {"shard_ranks": 4}),
    ({"model": "lama3-70b"}, "did you mean 'llama3-70b'", {"model": "llama3-70b"}),
    ({"gpu": "h10"}, "did you mean 'h100'", {"gpu": "h100"}),
    ({"network": "ndr40"}, "did you mean 'ndr400'", {"network": "ndr400"}),
    ({"policy": "best"}, "use auto, none or a Policy", {"policy": "auto"}),
    ({"micro_batch": 0}, "micro_batch 0 is not valid", {"micro_batch": 1}),
    ({"gpus": 2.5}, "gpus 2.5 is not valid", {"gpus": 32}),
]


@pytest.mark.parametrize(("wrong", "words", "right"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_a_wrong_job_is_refused_in_one_line_with_a_choice_that_works(wrong, words, right):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        job(**wrong)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    job(**right)


def test_experts_need_a_split_that_multiplies_up():
    moe = {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 16, "tp": 2}
    with pytest.raises(UsageError, match="ep 3 does not divide the 8 experts of mixtral-8x7b; nearest is"):
        TrainingJob(**moe, ep=3)
    with pytest.raises(
        UsageError, match="ep 8 x expert_tp 4 does not divide tp x cp x dp = 16; nearest is ep 4"
    ):
        TrainingJob(**moe, ep=8, expert_tp=4)
    assert TrainingJob(**moe, ep=8).expert_tp == 2
    assert TrainingJob(**moe, ep=8, expert_tp=1).expert_tp == 1


def test_an_unknown_software_names_the_nearest():
    from weft.plan.step import predict

    with pytest.raises(UsageError, match="did you mean 'megatron-2025'"):
        predict(job(software="megatron-25"))


def test_126_layers_split_like_128():
    assert TrainingJob(model="llama3-405b", gpu="h100", gpus=1024, tp=8, pp=8, interleave=8, global_batch=128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rail_bytes_per_s": 0}, "rail_bytes_per_s 0"),
        ({"rail_bytes_per_s": 1, "oversubscription": 0.5}, "oversubscription 0.5"),
        ({"rail_bytes_per_s": 1, "domain": 0}, "domain 0"),
        ({"rail_bytes_per_s": 1, "latency_us": -1}, "latency_us -1"),
    ],
)
def test_an_impossible_network_is_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        Network(**changes)


def test_networks_have_names():
    assert all(network(name).name == name for name in NETWORKS)
    assert job(policy=Policy(priority="high")).policy == Policy(priority="high")
