"""A user's own files give the same job as the equivalent options, or one line says why not."""

from __future__ import annotations

import json

import pytest

from weft.errors import WeftError
from weft.gpu.collectives import collective_s, group
from weft.gpu.network import GBIT, usual_network
from weft.gpu.specs import spec
from weft.plan import TrainingJob, predict
from weft.plan.cluster import from_nccl_tests, read_cluster
from weft.plan.figures import shipped
from weft.plan.launch import launch_text
from weft.plan.model_presets import MODELS
from weft.plan.options import PlanOptions
from weft.plan.request import question
from weft.plan.user_files import read_config

# The fields that matter of config.json of meta-llama/Llama-3.1-70B, Qwen/Qwen3-30B-A3B and DeepSeek-V3, openai/gpt-oss-120b.
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": None,
    "use_sliding_window": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "hidden_act": "silu",
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "hidden_act": "silu",
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}

# google/gemma-2-2b and the text_config of meta-llama/Llama-4-Scout and -Maverick; gemma's states no tying.
GEMMA = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}
SCOUT = {
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 1,
    "vocab_size": 202048,
    "hidden_act": "silu",
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
}
MAVERICK = {**SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2}


def file(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("document", "preset"),
    [
        (LLAMA, "llama3-70b"),
        (QWEN, "qwen3-30b-a3b"),
        (DEEPSEEK, "deepseek-v3"),
        (GPT_OSS, "gpt-oss-120b"),
        (MAVERICK, "llama4-maverick"),
    ],
)
def test_a_hugging_face_config_is_the_model(tmp_path, document, preset):
    found, known = read_config(file(tmp_path, "config.json", document)).model, MODELS[preset]
    assert found is not None
    assert found.params == known.params
    assert found.active_params == known.active_params
    assert found.attention_flops(4096) == known.attention_flops(4096)
    assert found.most_nodes == known.most_nodes


# tiiuae/falcon-7b: one key-value head, whatever `num_kv_heads` says. baidu/ERNIE-4.5-21B-A3B.
FALCON = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "vocab_size": 65024,
}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 28,
    "hidden_size": 2560,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "hidden_act": "silu",
    "vocab_size": 103424,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("document", "params"),
    [
        (GEMMA, 2_614_341_888),
        (SCOUT, 107_769_861_120),
        (FALCON, 6_921_720_704),
        (ERNIE, 21_825_000_000),
    ],
)
def test_a_config_has_the_parameters_that_transformers_counts(tmp_path, document, params):
    found = read_config(file(tmp_path, "config.json", document)).model
    assert found.params == pytest.approx(params, rel=1e-3)


def test_experts_that_a_model_does_not_use_do_not_count(tmp_path):
    without = {**LLAMA, "num_experts": 16384, "num_experts_per_tok": 64, "is_moe": False}
    assert (
        read_config(file(tmp_path, "config.json", without)).model
        == read_config(file(tmp_path, "plain.json", LLAMA)).model
    )


def test_the_text_part_of_a_multimodal_config_is_taken(tmp_path):
    path = file(tmp_path, "config.json", {"model_type": "vl", "text_config": LLAMA, "vision_config": {}})
    assert read_config(path).model.params == MODELS["llama3-70b"].params


TOML = """
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[training]
local_batch_size = 4
seq_len = 8192
compile = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 16
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""


def asked(**options):
    return question(PlanOptions(**options), set(options)).job()


def test_a_torchtitan_file_is_the_job(tmp_path):
    job = asked(config=file(tmp_path, "job.toml", TOML))
    same = TrainingJob(
        model="llama3-70b",
        gpu="h100",
        gpus=256,
        tp=8,
        micro_batch=4,
        sharding="zero3",
        shard_ranks=16,
        recompute="full",
        precision="fp8",
        software="torchtitan-2024",
        policy="auto",
    )
    assert job == same


def test_what_is_typed_wins_over_the_file(tmp_path):
    path = file(tmp_path, "job.toml", TOML)
    job = asked(config=path, gpus=512, tp=4, dp=128, shard_ranks=64, precision="bf16")
    assert (job.gpus, job.tp, job.shard_ranks, job.precision) == (512, 4, 64, "bf16")


SCRIPT = """
#!/bin/bash
TP=4
export PP=8
ARGS=(
    --num-layers 80   # depth
    --hidden-size 8192 --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --ffn-hidden-size 28672 --swiglu --vocab-size 128256
    --untie-embeddings-and-output-weights --position-embedding-type rope
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 512
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP
    --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel
    --use-distributed-optimizer --fp8-format hybrid --bf16
)
# --recompute-granularity full
torchrun pretrain_gpt.py ${ARGS[@]}
"""


def test_megatron_arguments_are_the_job(tmp_path):
    job = asked(config=file(tmp_path, "run.sh", SCRIPT), gpus=256)
    assert job.model.params == MODELS["llama3-70b"].params
    assert (job.tp, job.pp, job.interleave, job.global_batch) == (4, 8, 5, 512)
    assert (job.precision, job.recompute, job.sharding, job.sequence_parallel) == (
        "fp8",
        "none",
        "zero1",
        True,
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("config.json", {"num_hidden_layers": 4}),
        ("config.json", {**LLAMA, "num_hidden_layers": "many"}),
        ("config.json", {**LLAMA, "num_key_value_heads": 7}),
        ("config.json", {**LLAMA, "mamba_d_state": 16}),
        ("config.json", {**LLAMA, "model_type": "jetmoe", "num_local_experts": 8, "num_experts_per_tok": 2}),
        ("config.json", {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 40}),
        ("config.json", {**LLAMA, "layer_types": ["conv", "full_attention"] * 40}),
        ("job.toml", "[model\n"),
        ("job.toml", '[model]\nname = "llama3"\nflavor = "9B"\n'),
        ("run.sh", "--num-layers eighty --hidden-size 8 --num-attention-heads 2"),
        ("run.sh", "--num-layers 4"),
        ("notes.txt", "nothing of the kind"),
        ("notes.txt", "x" * (2 << 20)),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, name, content):
    with pytest.raises(WeftError) as caught:
        read_config(file(tmp_path, name, content))
    assert len(str(caught.value).splitlines()) == 1
    assert name in str(caught.value)


def test_a_cluster_by_its_numbers(tmp_path):
    path = file(
        tmp_path,
        "cluster.toml",
        'name = "lab"\ngpu = "a100-80gb"\nnodes = 16\ngpus_per_node = 4\nnode_gbit = 400\noversubscription = 2\n',
    )
    job = asked(model="llama3-8b", cluster=path, sharding="zero3")
    assert (job.gpu.name, job.gpus, job.network.name, job.network.domain) == ("a100-80gb", 64, "lab", 4)
    assert job.network.rail_bytes_per_s == pytest.approx(100 * GBIT)
    assert job.network.oversubscription == 2
    with pytest.raises(WeftError, match="not known"):
        read_cluster(file(tmp_path, "c.toml", "rails = 4\n"), "h100")
    with pytest.raises(WeftError, match="one of them"):
        read_cluster(file(tmp_path, "d.toml", "rail_gbit = 4\nnode_gbit = 8\n"), "h100")


def nccl_output(seconds, size, hosts=2, per_host=8):
    ranks = "\n".join(
        f"#  Rank {h * per_host + r:2} Group  0 Pid {r} on host{h} device {r} [0x00] NVIDIA H100"
        for h in range(hosts)
        for r in range(per_host)
    )
    rate = size / seconds / 1e9
    line = f"{size:12} {size // 4:12} float sum -1 {1e6 * seconds:.2f} {rate:.2f} {1.875 * rate:.2f} 0"
    return f"# nccl-tests all_reduce_perf\n{ranks}\n#  size count type redop root time algbw busbw #wrong\n{line}\n"


def test_nccl_tests_output_gives_the_network_back():
    """The network whose collective was 'measured' is found from its time alone."""
    gpu, links, base = spec("h100"), shipped().links, usual_network("h100")
    truth = base.but(rail_bytes_per_s=200 * GBIT)
    size = 1 << 30
    took = collective_s("all_reduce", size, group(16, 1, truth), gpu, truth, links)
    found = from_nccl_tests(nccl_output(took, size), gpu, base, "out.txt")
    assert found.network.rail_bytes_per_s == pytest.approx(200 * GBIT, rel=0.01)
    assert found.gpus == 16
    with pytest.raises(WeftError, match="two or more"):
        from_nccl_tests(nccl_output(took, size, hosts=1), gpu, base, "out.txt")
    with pytest.raises(WeftError, match="-e 1G"):
        from_nccl_tests(nccl_output(1e-4, 1024), gpu, base, "out.txt")


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 8, "sharding": "zero3", "recompute": "full"},
        {"tp": 4, "pp": 4, "interleave": 2, "global_batch": 128, "sharding": "zero3"},
        {"tp": 2, "cp": 2, "sharding": "zero3", "shard_ranks": 8, "precision": "fp8"},
    ],
)
def test_a_torchtitan_launch_file_reads_back_as_the_same_split(tmp_path, changes):
    job = TrainingJob(**{"model": "llama3-70b", "gpu": "h100", "gpus": 64, **changes})
    path = file(tmp_path, "job.toml", launch_text(job, tmp_path / "job.toml"))
    back = asked(config=path, gpus=64)
    for name in ("tp", "pp", "cp", "dp", "interleave", "micro_batch", "global_batch", "seq_len", "recompute"):
        assert getattr(back, name) == getattr(job, name), name
    assert back.precision == job.precision
    if job.pp == 1:
        assert back.shard_ranks == job.shard_ranks


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model": "llama3-70b",
            "tp": 4,
            "pp": 4,
            "interleave": 5,
            "global_batch": 128,
            "recompute": "selective",
        },
        {"model": "qwen3-30b-a3b", "ep": 16, "expert_tp": 1, "precision": "fp8"},
        {"model": "deepseek-v3", "pp": 4, "ep": 16, "expert_tp": 1, "global_batch": 256},
        {"model": "gpt-175b", "tp": 8, "pp": 4, "precision": "fp16", "sharding": "none", "global_batch": 64},
    ],
)
def test_megatron_arguments_read_back_as_the_same_job(tmp_path, changes):
    job = TrainingJob(**{"gpu": "h100", "gpus": 64, **changes})
    path = file(tmp_path, "run.sh", launch_text(job, tmp_path / "run.sh"))
    back = asked(config=path, gpus=64)
    split = ("tp", "pp", "cp", "ep", "dp", "interleave", "micro_batch", "global_batch", "seq_len")
    for name in (*split, "sharding", "recompute", "precision", "sequence_parallel"):
        assert getattr(back, name) == getattr(job, name), name
    if not job.model.dense_layers:  # --moe-layer-freq is written but not read back
        assert back.model.params == job.model.params
        ours, theirs = (predict(one.but(policy=None), check_memory=False).step_s for one in (job, back))
        assert theirs == pytest.approx(ours, rel=0.01)


@pytest.mark.parametrize(
    ("job", "name", "said"),
    [
        ({"model": "gpt-22b"}, "a.toml", "no flavor"),
        ({"pp": 4, "schedule": "dualpipe", "global_batch": 64}, "a.sh", "no dualpipe"),
        ({}, "a.yaml", "end it in"),
        ({"gpu": "gb200", "precision": "nvfp4"}, "a.toml", "nvfp4|bf16"),
    ],
)
def test_what_a_framework_cannot_do_is_refused(tmp_path, job, name, said):
    made = TrainingJob(**{"model": "llama3-8b", "gpu": "h100", "gpus": 64, **job})
    with pytest.raises(WeftError, match=said):
        launch_text(made, tmp_path / name)
