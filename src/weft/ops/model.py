"""Tensor and sequence parallelism for Llama-like models in one call, with every gather and scatter fused.

The placements are those of torch's own recipe: tokens are sharded between the blocks (`SequenceParallel`
norms), embedding and output by vocabulary, attention by heads, feed-forward by inner features. Activations
between the blocks are DTensors, so that a model's own code sees the shape of the whole sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from weft.errors import UsageError
from weft.ops.attention_heads import check_attention
from weft.ops.feed_forward import check_feed_forward
from weft.ops.gather_once import GatherOnce
from weft.ops.layers import SharedByCopies
from weft.ops.styles import SequenceColumnwise, SequenceRowwise, SequenceStyle

ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "dense"),
    (("wq", "wk", "wv"), "wo"),
)
FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
)
"""Layers with the same input, and the layer that follows them. The first entry that fits a module applies."""
FUSED_ATTENTION = re.compile(r"qkv|query_key_value|c_attn$|Wqkv")
"""Names of layers that compute queries, keys and values together."""
OUTPUTS = ("lm_head", "output")
_SEQUENCE_DIM, HEADS_DIM = 1, 2


@dataclass
class Plan:
    """The styles for `parallelize_module`, by module name, and the groups of layers that share a gather."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    blocks: int = 0


def parallelize(model: nn.Module, mesh: Any, *, gather_logits: bool = True, **options: Any) -> nn.Module:
    """Divide a Llama-like model over a mesh of one dimension, in place; returns the model.

    Inputs have the shape (batch, sequence). Every rank gets the same inputs and returns the same logits and
    loss. With gather_logits=False, each rank returns a DTensor of logits sharded by vocabulary (for
    `torch.distributed.tensor.parallel.loss_parallel`). `options`: schedule, engine, pieces or policy of the
    fused operations. For FSDP2, call `fully_shard` afterwards, on the other dimension of the mesh.

    Supports models whose blocks have q_proj, k_proj, v_proj, o_proj and gate_proj, up_proj, down_proj (Llama,
    Mistral, Qwen, Gemma of Hugging Face), the same without a gate (Nemotron, Starcoder2, Phi), or wq, wk, wv,
    wo and w1, w3, w2 (torchtitan, the original Llama).
    """
    if mesh.ndim != 1:
        raise UsageError(f"parallelize needs a mesh of one dimension, not {mesh.ndim}; give mesh['tp']")
    found = plan_model(model, mesh.size(), gather_logits=gather_logits, **options)
    tied = _tied(model)
    parallelize_module(model, mesh, found.styles)
    for names in found.groups:
        layers = [model.get_submodule(name) for name in names]
        shared = GatherOnce(layers)
        for layer in layers:
            layer.gather_once = shared
    for _, block in _blocks(model):
        block.register_forward_pre_hook(_Sharded(mesh), with_kwargs=True)
    for module, name, source in tied:
        module.register_parameter(name, model.get_parameter(source))
    return model


class _Sharded:
    """Hook that shards hidden states that are whole on every rank, like `inputs_embeds`; skips DTensors."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = SharedByCopies(mesh)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        if x is None or type(x) is not torch.Tensor:
            return None
        whole = DTensor.from_local(x, self._mesh.value, [Replicate()], run_check=False)
        x = whole.redistribute(placements=[Shard(_SEQUENCE_DIM)])
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def plan_model(model: nn.Module, ranks: int, *, gather_logits: bool = True, **options: Any) -> Plan:
    """The style of every module that `parallelize` changes. Raises UsageError for unsupported models."""
    made = Plan()
    for name, block in _blocks(model):
        _plan_block(made, name, block, ranks, options)
    if not made.blocks:
        raise UsageError(_unknown(model))
    _plan_ends(made, model, gather_logits, options)
    for name, style in made.styles.items():
        if isinstance(style, SequenceStyle):
            style.layer.check(name, model.get_submodule(name), ranks)
    return made


def _unknown(model: nn.Module) -> str:
    """The error message if no block was found, with the names of candidate layers."""
    names = [name for name, module in model.named_modules() if name and _is_dense(module)]
    wanted = "it looks for q_proj, k_proj, v_proj, o_proj or wq, wk, wv, wo in its blocks"
    fused = next((name for name in names if FUSED_ATTENTION.search(name.split(".")[-1])), None)
    if fused is not None:
        return (
            f"parallelize cannot divide {fused}, one layer for queries, keys and values: a rank's part would "
            f"not be its heads; {wanted}"
        )
    adapted = next((name for name in names if name.endswith(".base_layer")), None)
    if adapted is not None:
        return f"parallelize cannot divide {adapted}, which has adapters: merge them first"
    found = ", ".join(names[:4]) or "no nn.Linear"
    return (
        f"parallelize knows no layer of this model ({found}): {wanted}; use SequenceColumnwise and "
        "SequenceRowwise with parallelize_module"
    )


def _is_dense(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks: modules with an attention as a direct child."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if any(_match(child, ATTENTION) for child in children.values()):
            yield name, module


def _match(module: nn.Module, kinds: Any) -> tuple[tuple[str, ...], str] | None:
    for columns, row in kinds:
        if all(isinstance(getattr(module, each, None), nn.Linear) for each in (*columns, row)):
            return columns, row
    return None


def _plan_block(made: Plan, name: str, block: nn.Module, ranks: int, options: dict[str, Any]) -> None:
    made.blocks += 1
    pairs = 0
    for child_name, child in block.named_children():
        path = f"{name}.{child_name}"
        match = _match(child, ATTENTION) or _match(child, FEED_FORWARD)
        if match is not None:
            columns, row = match
            _plan_inside(made, path, child, (*columns, row))
            if _match(child, ATTENTION):
                check_attention(path, child, columns, ranks)
            else:
                check_feed_forward(path, child, columns, row, ranks)
            pairs += 1
            for each in columns:
                made.styles[f"{path}.{each}"] = SequenceColumnwise(sequence_dim=_SEQUENCE_DIM, **options)
            made.groups.append(tuple(f"{path}.{each}" for each in columns))
            made.styles[f"{path}.{row}"] = SequenceRowwise(
                sequence_dim=_SEQUENCE_DIM, use_local_output=False, **options
            )
        elif _is_norm(child):
            made.styles[path] = SequenceParallel(sequence_dim=_SEQUENCE_DIM)
        elif any(True for _ in child.parameters()):
            raise UsageError(
                f"parallelize does not know {path} ({type(child).__name__}); it looks for attention and a "
                "feed-forward with gate_proj, up_proj, down_proj or w1, w3, w2 (or up_proj, down_proj; c_fc, "
                "c_proj; fc1, fc2)"
            )
    if pairs != 2:
        raise UsageError(f"parallelize found {pairs} of 2 pairs of layers in {name} ({type(block).__name__})")


def _plan_inside(made: Plan, path: str, module: nn.Module, known: tuple[str, ...]) -> None:
    """Plan the norms of queries and keys, whose inputs are (batch, tokens, this rank's heads, features).

    Raises UsageError for any other module with parameters.
    """
    for name, child in module.named_children():
        if name in known or not any(True for _ in child.parameters()):
            continue
        if not _is_norm(child):
            raise UsageError(f"parallelize does not know {path}.{name} ({type(child).__name__})")
        made.styles[f"{path}.{name}"] = SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True)
    if any(True for _ in module.parameters(recurse=False)):
        raise UsageError(f"parallelize does not know the parameters of {path} ({type(module).__name__})")


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: named like one, and without children, unlike a PreNormTransformer."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _plan_ends(made: Plan, model: nn.Module, gather_logits: bool, options: dict[str, Any]) -> None:
    """Plan the modules outside the blocks: embedding, last norm and output layer."""
    inside = tuple(f"{name}." for name, _ in _blocks(model))
    embeddings = 0
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding):
            embeddings += 1
            made.styles[name] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(_SEQUENCE_DIM), use_local_output=False
            )
        elif _is_norm(module):
            made.styles[name] = SequenceParallel(sequence_dim=_SEQUENCE_DIM)
        elif isinstance(module, nn.Linear):
            if name.split(".")[-1] not in OUTPUTS:
                raise UsageError(
                    f"parallelize does not know what {name} is for; it knows {', '.join(OUTPUTS)}"
                )
            made.styles[name] = SequenceColumnwise(
                sequence_dim=_SEQUENCE_DIM,
                output_layouts=Replicate() if gather_logits else None,
                use_local_output=gather_logits,
                **options,
            )
        elif any(True for _ in module.parameters(recurse=False)):
            raise UsageError(
                f"parallelize does not know the parameters of {name or 'the model'} ({type(module).__name__})"
            )
    if embeddings != 1:
        raise UsageError(f"parallelize needs a model with one token embedding; this one has {embeddings}")


def _tied(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Tied parameters: (module, the parameter's name in it, the full name under which it appears first)."""
    first: dict[int, str] = {}
    found = []
    for path, module in model.named_modules(remove_duplicate=True):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            if id(parameter) in first:
                found.append((module, name, first[id(parameter)]))
            first.setdefault(id(parameter), full)
    return found
