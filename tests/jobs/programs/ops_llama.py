"""A Llama of Hugging Face transformers, trained plain, with torch's styles and with weft.ops.parallelize.

`ops_llama.py P FOLDER STEPS`: batch-first, fp32, the same data on P ranks over gloo. Losses and gradient norms
must be equal within fp32's rounding, and a run resumed from a checkpoint bit-identical.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformer import torch_plan
from transformers import LlamaConfig, LlamaForCausalLM

from weft.ops import parallelize

LAYERS = 4
NAMES = {
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "attention": ("self_attn",),
    "feed_forward": ("mlp",),
    "columns": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    "rows": ("self_attn.o_proj", "mlp.down_proj"),
}


def llama(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=128,
        )
    )


def by_torch(model: nn.Module, mesh) -> nn.Module:
    plan = torch_plan("model.", LAYERS, NAMES)
    plan["model.embed_tokens"] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    )
    plan["model.norm"] = SequenceParallel()
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def train(model: nn.Module, optimizer, steps: range) -> list[tuple[float, float]]:
    found = []
    for step in steps:
        tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def optimizer_of(model: nn.Module):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def check(rank: int, ranks: int) -> None:
    folder, steps = sys.argv[2], int(sys.argv[3])
    mesh = init_device_mesh("cpu", (ranks,))
    half = steps // 2
    ours = parallelize(llama(), mesh)
    optimizer = optimizer_of(ours)
    losses = train(ours, optimizer, range(half))
    weights, state = get_state_dict(ours, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    losses += train(ours, optimizer, range(half, steps))
    again = parallelize(llama(seed=1), mesh)
    resumed = optimizer_of(again)
    weights, state = get_state_dict(again, resumed)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(again, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert train(again, resumed, range(half, steps)) == losses[half:], "a resumed run is not bit-identical"
    theirs = by_torch(llama(), mesh)
    wanted = train(theirs, optimizer_of(theirs), range(steps))
    apart = [
        abs(a - b) / abs(b)
        for ours, torchs in zip(losses, wanted, strict=True)
        for a, b in zip(ours, torchs, strict=True)
    ]
    loss, norm = max(apart[0::2]), max(apart[1::2])
    assert loss < 1e-5, f"losses differ by {loss:.2g}: {losses} and {wanted}"
    assert norm < 2e-3, f"gradient norms differ by {norm:.2g}: {losses} and {wanted}"
    first = abs(losses[0][1] - wanted[0][1]) / wanted[0][1]
    assert first < 1e-5, f"gradient norms of the first step differ by {first:.2g}"
    dist.barrier()
    if rank == 0:
        print(f"equal over {steps} steps on {ranks} ranks: losses within {loss:.1e}, norms within {norm:.1e}")


if __name__ == "__main__":
    sys.exit(1 if run_ranks(int(sys.argv[1]), sys.argv[2], 60.0, check) else 0)
