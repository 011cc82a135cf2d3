"""What a user can say to `weft plan`: one field for each option, with its help. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def option(default: Any, text: str, *, metavar: str = "", flag: str = "") -> Any:
    """A field that is an option of the command line: its help, and its name where it is not the field's."""
    return field(default=default, metadata={"help": text, "metavar": metavar, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `weft plan` that describe the job and the question. 0 and empty: not given."""

    model: str = option("", "A model, such as llama3-70b; or give its dimensions.")
    config: Path | None = option(  # noqa: RUF009
        None,
        "Your own file: a Hugging Face config.json, a torchtitan TOML or Megatron arguments.",
        metavar="FILE",
    )
    gpu: str = option("h100", "A GPU: a100-80gb, h100 (default), h200, b200, gb300, mi300x, …")
    gpus: int = option(0, "GPUs of the whole job.")
    tp: int = option(1, "Tensor parallel ranks.")
    pp: int = option(1, "Pipeline stages.")
    cp: int = option(1, "Context parallel ranks.")
    ep: int = option(1, "Expert parallel ranks.")
    expert_tp: int = option(0, "Tensor parallel ranks of an expert; default: as --tp.")
    dp: int = option(0, "Data parallel ranks; default: what is left.")
    interleave: int = option(1, "Model chunks of each pipeline stage; default: 1.")
    schedule: str = option("", "1f1b, gpipe, interleaved, zero-bubble or dualpipe; default: by --interleave.")
    micro_batch: int = option(1, "Sequences of a micro-batch; default: 1.")
    global_batch: int = option(0, "Sequences of a step; default: 8 micro-batches a stage, 1 if --pp 1.")
    seq: int = option(0, "Tokens of a sequence; default: the model's.")
    sharding: str = option("zero1", "none, zero1 (default), zero2 or zero3 (FSDP).")
    shard_ranks: int = option(0, "Ranks that --sharding spreads over (HSDP); default: all replicas.")
    sequence_parallel: bool | None = option(
        None, "Default: where tp is above 1.", flag="--sequence-parallel/--no-sequence-parallel"
    )
    recompute: str = option("none", "none (default), selective or full.")
    precision: str = option("bf16", "bf16 (default), fp16, fp8, mxfp8 or nvfp4.")
    hide: str = option(
        "", "Collectives that overlap with compute, such as 'grads params ep'; default: the software's."
    )
    compression: str = option(
        "none", "none, bf16, fp8, int8, powersgd:RANK, topk:DENSITY, zero++, qwz+qgz, …"
    )
    network: str = option("", "A fabric: hdr200, ndr400, eth100, …; default: the GPU's usual.")
    cluster: Path | None = option(  # noqa: RUF009
        None, "A file about the cluster: nodes, links, or nccl-tests output.", metavar="FILE"
    )
    rail_gbit: float = option(0.0, "Gbit/s of the fabric for each GPU, instead of the network's own.")
    oversubscription: float = option(0.0, "Bandwidth lost above the leaf switches: 2 halves it.")
    policy: str = option("auto", "auto (default: the best for each collective), none, or a file.")
    software: str = option("", "Training software; default: megatron-2025.")
    layers: int = option(0, "Dimensions instead of --model: layers.")
    hidden: int = option(0, "Hidden size.")
    heads: int = option(0, "Attention heads.")
    kv_heads: int = option(0, "Heads of keys and values.")
    head_dim: int = option(0, "Width of a head; default: hidden / heads.")
    ffn: int = option(0, "MLP width; default: four times hidden.")
    vocab: int = option(0, "Vocabulary; default: 51200.")
    gated: bool = option(False, "A gated MLP (SwiGLU).")
    experts: int = option(0, "Experts of each layer.")
    experts_per_token: int = option(0, "Experts that a token visits.")
    expert_ffn: int = option(0, "Width of one expert.")
    sweep: bool = option(False, "Try the ways to split the job; options given here stay fixed.")
    limit: int = option(200, "Predictions of a sweep; default: 200.")
    scale: str = option("", "Weak and strong scaling over a range of GPUs, such as 8..16384.", metavar="A..B")
    price: float = option(0.0, "USD for a GPU-hour: gives the cost of a billion tokens.")
    calibrate: Path | None = option(  # noqa: RUF009
        None, "A profiler trace of one node: sets the compute side.", metavar="TRACE"
    )
    traced: str = option("", "How the traced job differed: 'layers=4 tp=1 gpus=2'.", metavar="K=V …")
