"""Reads the model from a Hugging Face config.json of a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import InputError, UsageError
from weft.plan.models import Mla, Model

USUAL_TOKENS = 8192
"""Most tokens of a sequence to assume from a file that states only the model's maximum."""
_GATED = ("bitnet", "gemma", "vaultgemma")
"""Model types with a gated MLP whose activation's name does not say so."""
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "opt", "starcoder2")
"""Model types that share one matrix for embedding and output, which their files do not state."""
_ATTENTION_EXPERTS = ("jetmoe",)
"""Model types whose attention has a query and an output projection for each expert."""
_OTHER_LAYERS = ("mamba_", "ssm_", "lru_", "conv_", "linear_attn", "linear_num", "attn_layer_period")
"""How keys begin that describe layers other than attention and MLP."""


def _int(document: Mapping[str, Any], *names: str, name: str = "", default: int = 0) -> int:
    """The first of these keys that the document has, as an integer; `name` is for errors."""
    for key in names:
        value = document.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{name}: {key} is {value!r}, not a whole number")
        return value
    return default


def hugging_face_model(document: Mapping[str, Any], name: str) -> Model:
    """The model of a config.json; `name` is for errors."""
    found = document.get("text_config", document)
    d: Mapping[str, Any] = found if isinstance(found, dict) else document

    def get(*names: str, default: int = 0) -> int:
        return _int(d, *names, name=name, default=default)

    kind = str(d.get("model_type") or document.get("model_type") or "model")
    if kind in _ATTENTION_EXPERTS:
        raise UsageError(
            f"--config {name}: {kind} has experts in its attention (a mixture of attention heads), which "
            "weft plan does not model"
        )
    layers, hidden = get("num_hidden_layers", "n_layer"), get("hidden_size", "n_embd", "d_model")
    heads = get("num_attention_heads", "n_head")
    if not (layers and hidden and heads):
        raise UsageError(
            f"--config {name} states no num_hidden_layers, hidden_size and num_attention_heads; "
            "give a model's config.json"
        )
    stated = d.get("layer_types")
    types = stated if isinstance(stated, list) else []
    if other := _other_layer(d, types):
        raise UsageError(
            f"--config {name}: {kind} has layers other than attention and MLP ({other}), which weft plan "
            "does not model"
        )
    experts = get("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    if d.get("is_moe") is False:
        experts = 0
    each = get("moe_intermediate_size", default=get("intermediate_size"))
    # Llama 4: a dense layer's width; intermediate_size is that of an expert, of which one is shared.
    dense_ffn = get("intermediate_size_mlp") if experts else 0
    shared = get("shared_expert_intermediate_size") or each * get(
        "n_shared_experts", "moe_num_shared_experts", default=bool(dense_ffn)
    )
    sparse_layers = layers // (get("interleave_moe_layer_step", "decoder_sparse_step") or 1)
    first_dense = get("first_k_dense_replace", "moe_layer_start_index")
    one_kv_head = bool(d.get("multi_query")) and not d.get("new_decoder_architecture")
    activation = str(d.get("hidden_act", d.get("hidden_activation", d.get("activation_function", ""))))
    full = sum(one == "full_attention" for one in types)
    window = get("sliding_window") if d.get("use_sliding_window", True) is not False else 0
    most = get("max_position_embeddings", "n_positions", default=USUAL_TOKENS)
    mla = None
    if get("kv_lora_rank"):
        mla = Mla(
            q_rank=get("q_lora_rank") or hidden,
            kv_rank=get("kv_lora_rank"),
            nope_dim=get("qk_nope_head_dim", default=128),
            rope_dim=get("qk_rope_head_dim", default=64),
            value_dim=get("v_head_dim", default=128),
        )
    return Model(
        name=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=0 if mla else 1 if one_kv_head else get("num_key_value_heads", "num_kv_heads"),
        head_dim=get("head_dim") or (128 if mla else 0),
        ffn=dense_ffn or get("intermediate_size", "n_inner", default=4 * hidden) or 4 * hidden,
        vocab=get("vocab_size", default=51200),
        gated=any(word in activation for word in ("silu", "swi", "glu"))
        or kind.startswith(_GATED)
        or bool(experts),
        tied=bool(d.get("tie_word_embeddings", document.get("tie_word_embeddings", kind.startswith(_TIED)))),
        experts=experts,
        experts_per_token=get("num_experts_per_tok", "num_experts_per_token", "moe_k", default=1)
        if experts
        else 0,
        expert_ffn=each if experts else 0,
        shared_ffn=shared if experts else 0,
        dense_layers=min(layers, first_dense or layers - sparse_layers) if experts else 0,
        most_nodes=get("topk_group") if experts and get("n_group") > 1 else 0,
        window=window if window < most else 0,
        full_layers=full if window else 0,
        mla=mla,
        seq_len=min(most, USUAL_TOKENS),
    )


def _other_layer(document: Mapping[str, Any], types: Sequence[object]) -> str:
    """A key or layer type that says that not all layers are attention and MLP; empty if there is none."""
    keys = (key for key, value in document.items() if value and key.startswith(_OTHER_LAYERS))
    kinds = (str(one) for one in types if one == "linear_attention" or not str(one).endswith("attention"))
    return next(keys, "") or next(kinds, "")
