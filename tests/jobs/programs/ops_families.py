"""weft.ops.parallelize on model families of Hugging Face transformers: `ops_families.py P FOLDER`.

Losses and gradients of a tiny model of each family equal those of the plain model, with a token count that
the ranks do not divide; so do greedy generation with a cache and a padded batch. Other families are refused
unchanged.
Rank 0 prints a JSON line for each: `benchmarks/ops/families.py` keeps them.
"""

from __future__ import annotations

import json
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
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS_OF_8 = {"head_dim": 8}
FAMILIES = (
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Mistral", {}),
    ("Ministral3", {}),
    ("Qwen2", {}),
    ("Qwen3", HEADS_OF_8),
    ("Granite", {}),
    ("Olmo", {}),
    ("Olmo2", {}),
    ("Olmo3", {}),
    ("Gemma", HEADS_OF_8),
    ("Gemma2", HEADS_OF_8),
    ("Gemma3", HEADS_OF_8),
    ("VaultGemma", HEADS_OF_8),
    ("Cohere", {}),
    ("Cohere2", {}),
    ("Nemotron", {}),
    ("Starcoder2", {}),
    ("Phi", {}),
    ("SmolLM3", {}),
    ("Helium", {"head_dim": 4}),
    ("Ernie4_5", HEADS_OF_8),
    ("Arcee", {}),
    ("Exaone4", {}),
    ("SeedOss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    ("Cwm", {}),
    ("Jais2", {}),
    ("BitNet", {}),
)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REFUSED = (
    ("Llama", {"num_key_value_heads": 1}),
    ("StableLm", {}),
    ("Phi3", {}),
    ("Glm4", HEADS_OF_8),
    ("GPTNeoX", {}),
    ("GPT2", {}),
    ("OPT", {}),
    ("Falcon", {}),
    ("Mixtral", EXPERTS),
    ("Qwen3Moe", {**EXPERTS, **HEADS_OF_8}),
    ("GptOss", EXPERTS),
    ("Apertus", {}),
    ("Mamba", {}),
)


def known(families):
    return [each for each in families if hasattr(transformers, f"{each[0]}Config")]


def make(family: str, more: dict) -> nn.Module:
    torch.manual_seed(0)
    text = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(
        transformers, f"{family}LMHeadModel"
    )
    return kind(text(**{**SIZES, **more}))


def say(rank: int, family: str, more: dict, **found: object) -> None:
    if rank == 0:
        print(json.dumps({"family": family, "settings": more, **found}), flush=True)


def check_equal(family: str, more: dict, mesh, tokens: torch.Tensor) -> dict[str, float]:
    """How much the loss differs, and the largest error of a gradient relative to its largest value."""
    plain, model = make(family, more), parallelize(make(family, more), mesh)
    wanted, loss = (net(input_ids=tokens, labels=tokens).loss for net in (plain, model))
    apart = abs(loss.item() - wanted.item()) / wanted.item()
    assert apart < 2e-6, f"{family}: {loss.item()}, not {wanted.item()}"
    wanted.backward()
    loss.backward()
    theirs, worst = dict(plain.named_parameters()), 0.0
    for name, parameter in model.named_parameters():
        got, want = parameter.grad.full_tensor(), theirs[name].grad
        error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-4)).item()
        assert error < 1e-4, f"{family}: gradient of {name} is off by {error:.2g}"
        worst = max(worst, error)
    return {"loss_apart": apart, "gradients_apart": worst}


def check_refused(family: str, more: dict, mesh) -> str:
    model = make(family, more)
    before = {name: id(each) for name, each in model.named_parameters()}
    try:
        parallelize(model, mesh)
    except UsageError as error:
        assert before == {name: id(each) for name, each in model.named_parameters()}, f"{family}: changed"
        return str(error)
    raise AssertionError(f"{family} was not refused")


def check(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    for family, more in known(FAMILIES):
        say(rank, family, more, **check_equal(family, more, mesh, tokens))
    for family, more in known(REFUSED):
        say(rank, family, more, refused=check_refused(family, more, mesh))
    plain, model = make("Llama", {}).eval(), parallelize(make("Llama", {}).eval(), mesh)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for options in ({}, {"attention_mask": mask}):
        grown = [net.generate(tokens, max_new_tokens=6, do_sample=False, **options) for net in (plain, model)]
        assert torch.equal(*grown), f"generation differs: {grown}"
    if rank == 0:
        print(f"{len(known(FAMILIES))} families are equal on {ranks} ranks")


if __name__ == "__main__":
    sys.exit(1 if run_ranks(int(sys.argv[1]), sys.argv[2], 60.0, check) else 0)
