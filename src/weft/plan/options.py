"""Options of `weft plan`: one field per option, with its help text. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def option(default: Any, text: str, *, metavar: str = "", flag: str = "") -> Any:
    """A field for a command-line option. `text`: its help; `flag`: its name, if not that of the field."""
    return field(default=default, metadata={"help": text, "metavar": metavar, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `weft plan` that describe the job and the question. 0 or empty: not given."""

    model: str = option("", "A model, such as llama3-70b; or give --layers, --hidden, …")
    config: Path | None = option(  # noqa: RUF009
        None,
        "Your own file: a Hugging Face config.json, a torchtitan TOML or Megatron arguments.",
        metavar="FILE",
    )
    gpu: str = option("h100", "A GPU: a100-80gb, h100 (default), h200, b200, gb300, mi300x, …")
    gpus: int = option(0, "Number of GPUs of the whole job.")
    tp: int = option(1, "Tensor parallel ranks.")
    pp: int = option(1, "Pipeline stages.")
    cp: int = option(1, "Context parallel ranks.")
    ep: int = option(1, "Expert parallel ranks.")
    expert_tp: int = option(0, "Tensor parallel ranks of an expert; default: --tp.")
    dp: int = option(0, "Data parallel ranks; default: the remaining GPUs.")
    interleave: int = option(1, "Model chunks per pipeline stage; default: 1.")
    schedule: str = option("", "1f1b, gpipe, interleaved, zero-bubble or dualpipe; default: by --interleave.")
    micro_batch: int = option(1, "Sequences per micro-batch; default: 1.")
    global_batch: int = option(0, "Sequences per step; default: 8 micro-batches per stage, 1 if --pp 1.")
    seq: int = option(0, "Tokens per sequence; default: the model's.")
    sharding: str = option("zero1", "none, zero1 (default), zero2 or zero3 (FSDP).")
    shard_ranks: int = option(0, "Ranks to shard over (HSDP); default: all replicas.")
    sequence_parallel: bool | None = option(
        None,
        "Split activations along the sequence too; default: if --tp > 1.",
        flag="--sequence-parallel/--no-sequence-parallel",
    )
    recompute: str = option("none", "Recomputed activations: none (default), selective or full.")
    precision: str = option("bf16", "bf16 (default), fp16, fp8, mxfp8 or nvfp4.")
    hide: str = option(
        "", "Collectives that overlap with compute, such as 'grads params ep'; default: the software's."
    )
    compression: str = option(
        "none", "none, bf16, fp8, int8, powersgd:RANK, topk:DENSITY, zero++, qwz+qgz, …"
    )
    network: str = option("", "A fabric: hdr200, ndr400, eth100, …; default: the usual one for the GPU.")
    cluster: Path | None = option(  # noqa: RUF009
        None, "A description of the cluster (TOML or JSON), or nccl-tests output.", metavar="FILE"
    )
    rail_gbit: float = option(0.0, "Gbit/s of the fabric per GPU; default: the network's.")
    oversubscription: float = option(0.0, "Oversubscription above the leaf switches: 2 halves the bandwidth.")
    policy: str = option(
        "auto", "auto (default): the best controls for each collective; none; or a policy file."
    )
    software: str = option("", "Training software; default: megatron-2025.")
    layers: int = option(0, "Instead of --model: number of layers.")
    hidden: int = option(0, "Hidden size.")
    heads: int = option(0, "Number of attention heads.")
    kv_heads: int = option(0, "Number of key and value heads (GQA).")
    head_dim: int = option(0, "Width of a head; default: hidden / heads.")
    ffn: int = option(0, "MLP width; default: four times hidden.")
    vocab: int = option(0, "Vocabulary size; default: 51200.")
    gated: bool = option(False, "A gated MLP (SwiGLU).")
    experts: int = option(0, "Experts per layer.")
    experts_per_token: int = option(0, "Experts per token (top-k).")
    expert_ffn: int = option(0, "MLP width of one expert.")
    sweep: bool = option(False, "Compare ways to split the job; options that you give stay fixed.")
    limit: int = option(200, "With --sweep: number of predictions to keep; default: 200.")
    scale: str = option("", "Weak and strong scaling over a range of GPUs, such as 8..16384.", metavar="A..B")
    price: float = option(0.0, "USD per GPU-hour, for the cost of a billion tokens.")
    calibrate: Path | None = option(  # noqa: RUF009
        None, "A profiler trace of one rank, to calibrate compute times.", metavar="TRACE"
    )
    traced: str = option(
        "", "With --calibrate: how the traced job differed, such as 'layers=4 tp=1 gpus=2'.", metavar="K=V …"
    )
