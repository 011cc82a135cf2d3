"""weft.ops.parallelize on model families of Hugging Face transformers: `ops_families.py P FOLDER`.

Losses and gradients of a tiny model of each family equal those of the plain one, with tokens that ranks cannot
divide evenly; greedy generation with a cache and a padded batch too. Families it does not know are refused.
"""

from __future__ import annotations

import sys

import torch
import transformers
from forked_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from weft.errors import UsageError
from weft.ops import parallelize

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = (
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Mistral", {}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 8}),
    ("Granite", {}),
    ("Olmo2", {}),
    ("Gemma2", {"head_dim": 8}),
    ("Cohere", {}),
    ("Nemotron", {}),
    ("Starcoder2", {}),
    ("Phi", {}),
)
REFUSED = (("Phi3", {}), ("Mixtral", {}), ("StableLm", {}), ("Llama", {"num_key_value_heads": 1}))


def make(family: str, more: dict) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def check(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    known = [each for each in FAMILIES if hasattr(transformers, f"{each[0]}Config")]
    for family, more in known:
        plain, model = make(family, more), parallelize(make(family, more), mesh)
        wanted, loss = (net(input_ids=tokens, labels=tokens).loss for net in (plain, model))
        assert abs(loss.item() - wanted.item()) < 1e-5, f"{family}: {loss.item()}, not {wanted.item()}"
        wanted.backward()
        loss.backward()
        theirs = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            got, want = parameter.grad.full_tensor(), theirs[name].grad
            error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-4)).item()
            assert error < 1e-4, f"{family}: gradient of {name} is off by {error:.2g}"
    for family, more in REFUSED:
        if hasattr(transformers, f"{family}Config"):
            try:
                parallelize(make(family, more), mesh)
            except UsageError:
                continue
            raise AssertionError(f"{family} was not refused")
    plain, model = make("Llama", {}).eval(), parallelize(make("Llama", {}).eval(), mesh)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for options in ({}, {"attention_mask": mask}):
        grown = [net.generate(tokens, max_new_tokens=6, do_sample=False, **options) for net in (plain, model)]
        assert torch.equal(*grown), f"generation differs: {grown}"
    if rank == 0:
        print(f"{len(known)} families are equal on {ranks} ranks")


if __name__ == "__main__":
    sys.exit(1 if run_ranks(int(sys.argv[1]), sys.argv[2], 60.0, check) else 0)
