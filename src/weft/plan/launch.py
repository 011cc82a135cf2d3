"""Launch files of a planned job: a torchtitan TOML, or a shell script with Megatron's arguments."""

from __future__ import annotations

from pathlib import Path

from weft.errors import UsageError
from weft.plan.config import TrainingJob
from weft.plan.pipeline import stage_list
from weft.plan.user_files import FLAVORS, TITAN_SCHEDULES

TITAN_NAMES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "ZBVZeroBubble",
}
TITAN_NAMES |= {"dualpipe": "DualPipeV"}
assert all(TITAN_SCHEDULES[name.lower()] == kind for kind, name in TITAN_NAMES.items())


def launch_text(job: TrainingJob, path: Path) -> str:
    """The file that starts the job; its ending selects `.toml` for torchtitan or `.sh` for Megatron."""
    if path.suffix == ".toml":
        return torchtitan_text(job)
    if path.suffix == ".sh":
        return megatron_text(job)
    raise UsageError(f"--launch {path}: end it in .toml for torchtitan or in .sh for Megatron")


def torchtitan_text(job: TrainingJob) -> str:
    """A job configuration of torchtitan with the planned split."""
    known = [
        (f, v) for f, flavors in FLAVORS.items() for v, name in flavors.items() if name == job.model.name
    ]
    if not known:
        raise UsageError(f"--launch: torchtitan has no flavor of {job.model.name}; write a .sh for Megatron")
    family, flavor = known[0]
    fp8 = job.precision in ("fp8", "mxfp8")
    if job.precision == "nvfp4":
        raise UsageError("--launch: torchtitan trains in bf16, fp8 or mxfp8; write a .sh for Megatron")
    shards = job.shard_ranks // job.cp if job.sharding == "zero3" else job.dp
    shards = max(1, shards)
    lines = [
        f"# {job}",
        "# torchrun --nnodes N --nproc_per_node 8 -m torchtitan.train --job.config_file FILE",
        "",
        "[model]",
        f'name = "{family}"',
        f'flavor = "{flavor}"',
        *([f'converters = ["{"mx" if job.precision == "mxfp8" else "float8"}"]'] if fp8 else []),
        "",
        "[training]",
        f"local_batch_size = {job.micro_batch * job.micro_batches if job.pp > 1 else job.micro_batch}",
        f"global_batch_size = {job.global_batch}",
        f"seq_len = {job.seq_len}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {job.dp // shards}",
        f"data_parallel_shard_degree = {shards}",
        f"tensor_parallel_degree = {job.tp}",
        f"pipeline_parallel_degree = {job.pp}",
        f"context_parallel_degree = {job.cp}",
        f"expert_parallel_degree = {job.ep}",
    ]
    if job.pp > 1:
        lines += [
            f'pipeline_parallel_schedule = "{TITAN_NAMES[job.schedule]}"',
            f"pipeline_parallel_microbatch_size = {job.micro_batch}",
        ]
    lines += [
        "",
        "[activation_checkpoint]",
        f'mode = "{job.recompute}"',
        "",
        "[compile]",
        "enable = true",
        "",
    ]
    return "\n".join(lines)


def megatron_text(job: TrainingJob) -> str:
    """A shell script that starts Megatron-LM's pretrain_gpt.py with the planned split."""
    if job.schedule in ("zero-bubble", "dualpipe", "gpipe"):
        raise UsageError(f"--launch: Megatron-LM has no {job.schedule} schedule; use 1f1b or interleaved")
    m = job.model
    found: list[str] = [
        f"--num-layers {m.layers}",
        f"--hidden-size {m.hidden}",
        f"--num-attention-heads {m.heads}",
        f"--ffn-hidden-size {m.ffn}",
        f"--vocab-size {m.vocab}",
        f"--seq-length {job.seq_len}",
        f"--max-position-embeddings {job.seq_len}",
        f"--micro-batch-size {job.micro_batch}",
        f"--global-batch-size {job.global_batch}",
        f"--tensor-model-parallel-size {job.tp}",
        f"--pipeline-model-parallel-size {job.pp}",
        f"--context-parallel-size {job.cp}",
    ]
    if not m.positions:
        found.append("--position-embedding-type rope")
    if m.mla:
        found += [
            "--multi-latent-attention",
            f"--q-lora-rank {m.mla.q_rank}",
            f"--kv-lora-rank {m.mla.kv_rank}",
            f"--qk-head-dim {m.mla.nope_dim}",
            f"--qk-pos-emb-head-dim {m.mla.rope_dim}",
            f"--v-head-dim {m.mla.value_dim}",
        ]
    else:
        found.append(f"--kv-channels {m.head_dim}")
        if m.kv_heads != m.heads:
            found += ["--group-query-attention", f"--num-query-groups {m.kv_heads}"]
    found += ["--swiglu"] if m.gated else []
    found += [] if m.tied else ["--untie-embeddings-and-output-weights"]
    found += _experts(job)
    found += _split(job)
    joined = " \\\n    ".join(found)
    nodes = -(-job.gpus // job.network.domain) if job.gpus > 8 else 1
    return (
        "#!/bin/sh\n"
        f"# {job}\n"
        "# Add your data, tokenizer, optimizer and checkpoint arguments at the end.\n"
        f"NNODES={max(nodes, -(-job.gpus // 8))}\n"
        'exec torchrun --nnodes "$NNODES" --nproc_per_node 8 pretrain_gpt.py \\\n'
        f'    {joined} \\\n    "$@"\n'
    )


def _experts(job: TrainingJob) -> list[str]:
    m = job.model
    if not m.experts:
        return []
    found = [
        f"--num-experts {m.experts}",
        f"--moe-router-topk {m.experts_per_token}",
        f"--moe-ffn-hidden-size {m.expert_ffn}",
        f"--expert-model-parallel-size {job.ep}",
        f"--expert-tensor-parallel-size {job.expert_tp}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    found += [f"--moe-shared-expert-intermediate-size {m.shared_ffn}"] if m.shared_ffn else []
    dense = m.dense_layers
    found += [f"--moe-layer-freq '([0]*{dense}+[1]*{m.layers - dense})'"] if dense else []
    return found


def _split(job: TrainingJob) -> list[str]:
    found = ["--sequence-parallel"] if job.sequence_parallel else []
    if job.interleave > 1:
        found.append(f"--num-virtual-stages-per-pipeline-rank {job.interleave}")
    sizes = [stage.layers for stage in stage_list(job)]
    if len(set(sizes)) > 1 and job.interleave == 1:
        found += [
            f"--decoder-first-pipeline-num-layers {sizes[0]}",
            f"--decoder-last-pipeline-num-layers {sizes[-1]}",
        ]
    if job.recompute != "none":
        found.append(f"--recompute-granularity {job.recompute}")
        if job.recompute == "full":
            found += ["--recompute-method uniform", "--recompute-num-layers 1"]
    found.append("--fp16" if job.precision == "fp16" else "--bf16")
    if job.precision in ("fp8", "mxfp8"):
        found += ["--fp8-format hybrid", f"--fp8-recipe {'mxfp8' if job.precision == 'mxfp8' else 'delayed'}"]
    if job.precision == "nvfp4":
        found.append("--fp4-format e2m1")
    if job.sharding == "zero3":
        found += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"]
    if job.sharding != "none":
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    return found
