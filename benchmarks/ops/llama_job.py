"""A Llama of Hugging Face transformers on P ranks over gloo, batch-first; one run, its losses as JSON.

    python benchmarks/ops/llama_job.py --ranks 2 --steps 50 --by torch --out losses.json

`--by torch`: torch's styles; nothing here imports weft. `--by weft`: `weft.ops.parallelize`. `--by plain`:
one rank. `--save DIR` saves after `--at` steps, `--load DIR` continues from there; both write a digest of all
full tensors of model and optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, VOCABULARY = 4, 256


def llama(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).to(dtype)


def by_torch(model: nn.Module, mesh: Any) -> nn.Module:
    """torch's styles for tensor and sequence parallelism."""
    sharded = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **sharded),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    block: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        block[name] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        block[name] = RowwiseParallel(**sharded)
    for layer in range(LAYERS):
        plan |= {f"model.layers.{layer}.{name}": style for name, style in block.items()}
    return parallelize_module(model, mesh, plan)


def digest(*states: Any) -> str:
    """A digest of all full tensors, in order of their names."""
    made = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}/{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                add(f"{name}/{i}", each)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            made.update(name.encode())
            made.update(whole.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())

    for state in states:
        add("", state)
    return made.hexdigest()


def job(rank: int, given: argparse.Namespace, folder: str) -> None:
    address = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=given.ranks)
    model = llama(1 if given.load else 0, getattr(torch, given.dtype))
    mesh = init_device_mesh("cpu", (given.ranks,))
    if given.by == "torch":
        by_torch(model, mesh)
    elif given.by == "weft":
        import weft.ops

        weft.ops.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if given.compiled:
        for layer in model.model.layers:
            layer.compile()
    found: dict[str, Any] = {"losses": [], "norms": []}
    first = 0
    if given.load:
        weights, state = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": state}
        dcp.load(held, checkpoint_id=given.load)
        set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        found["loaded"] = digest(*get_state_dict(model, optimizer))
        first = given.at
    for step in range(first, given.steps):
        if given.save and step == given.at:
            weights, state = get_state_dict(model, optimizer)
            found["saved"] = digest(weights, state)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=given.save)
        tokens = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        Path(given.out).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--by", choices=("torch", "weft", "plain"), default="torch")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(1, given.ranks):
            child = os.fork()
            if child == 0:
                job(rank, given, folder)
                os._exit(0)
            children.append(child)
        job(0, given, folder)
        sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main()
