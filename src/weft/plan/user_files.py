"""Reads a user's own files: a Hugging Face config.json, a torchtitan TOML, Megatron arguments.

Each becomes a `FromFile`: the model, and the options of `PlanOptions` that the file states. Options that the
user types take precedence over the file. Keys that plans do not use are ignored; a file without a model is
rejected.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import InputError, UsageError
from weft.plan.hugging_face import hugging_face_model
from weft.plan.model_presets import MODELS
from weft.plan.models import Mla, Model

MOST_BYTES = 1 << 20
"""Size limit: configuration files are small, so a larger file is something else."""
_log = logging.getLogger("weft.plan")


@dataclass(frozen=True)
class FromFile:
    """The content of a file."""

    model: Model | None
    options: dict[str, Any] = field(default_factory=dict)
    """The options that the file states, by their names in `PlanOptions`."""


def read_config(path: str | os.PathLike[str]) -> FromFile:
    """Read a file of any of the three kinds."""
    name = os.fspath(path)
    try:
        return _read(read_text(path), name)
    except UsageError as error:
        said = str(error)
        raise UsageError(said if name in said else f"--config {name}: {said}") from None


def _read(words: str, name: str) -> FromFile:
    if name.endswith(".toml"):
        return torchtitan(parse_toml(words, name), name)
    if words.lstrip().startswith("{"):
        return FromFile(hugging_face_model(_json(words, name), name))
    if "--num-layers" in words or "--hidden-size" in words:
        return megatron(words, name)
    raise UsageError(
        f"--config {name} is neither a Hugging Face config.json nor a torchtitan TOML nor Megatron arguments "
        "(--num-layers …)"
    )


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a small text file."""
    name = os.fspath(path)
    try:
        with Path(path).open(encoding="utf-8") as file:  # anything but a regular file may never end
            words = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{name} is not a text file") from None
    if len(words) > MOST_BYTES:
        raise InputError(f"{name} is over {MOST_BYTES >> 20} MiB: not a configuration file")
    return words


def parse_toml(words: str, name: str) -> dict[str, Any]:
    """Parse a TOML document; `name` is for errors."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
        except ImportError:
            raise UsageError(f"{name}: reading TOML needs Python 3.11 or the package tomli") from None
    try:
        return dict(tomllib.loads(words))
    except ValueError as error:
        raise InputError(f"{name} is not TOML: {error}") from None


def _json(words: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(words)
    except ValueError as error:
        raise InputError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{name} is not a JSON object")
    return found


FLAVORS = {
    "llama3": {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"},
    "llama2": {"7B": "llama2-7b", "13B": "llama2-13b", "70B": "llama2-70b"},
    "llama4": {"17bx128e": "llama4-maverick"},
    "deepseek_v3": {"671B": "deepseek-v3"},
    "qwen3": {"30B-A3B": "qwen3-30b-a3b", "235B-A22B": "qwen3-235b-a22b"},
    "gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
}
"""torchtitan's models and flavors that have a model preset."""
TITAN_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "zbvzerobubble": "zero-bubble",
    "dualpipev": "dualpipe",
}


def torchtitan(document: Mapping[str, Any], name: str) -> FromFile:
    """A job configuration of torchtitan."""
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    model, training = tables.get("model", {}), tables.get("training", {})
    # Older files keep the degrees under [training] and [experimental].
    degrees = {**tables.get("experimental", {}), **training, **tables.get("parallelism", {})}

    def get(*names: str, default: int = 0) -> int:
        for key in names:
            value = degrees.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value if value > 0 else default
        return default

    family, flavor = str(model.get("name", "")), str(model.get("flavor", ""))
    known = FLAVORS.get(family, {})
    if flavor not in known:
        choices = ", ".join(f"{f} {v}" for f, vs in FLAVORS.items() for v in vs)
        raise UsageError(f"--config {name}: no model {family!r} of flavor {flavor!r}; there are {choices}")
    mode = str(tables.get("activation_checkpoint", {}).get("mode", "selective"))
    converters = [str(one) for one in model.get("converters", [])]
    compiled = bool(training.get("compile") or tables.get("compile", {}).get("enable"))
    shards, replicas = get("data_parallel_shard_degree"), get("data_parallel_replicate_degree", default=1)
    cp = get("context_parallel_degree", default=1)
    found: dict[str, Any] = {
        "tp": get("tensor_parallel_degree", default=1),
        "pp": get("pipeline_parallel_degree", default=1),
        "cp": cp,
        "ep": get("expert_parallel_degree", default=1),
        "micro_batch": get("local_batch_size", "batch_size", default=1),
        "global_batch": get("global_batch_size"),
        "seq": get("seq_len"),
        "sharding": "zero3",
        "recompute": mode if mode in ("none", "full") else "selective",
        "precision": "fp8" if any("float8" in one for one in converters) else "bf16",
        "software": "torchtitan-2024" if compiled else "torchtitan-eager",
    }
    if any("mx" in one for one in converters):
        found["precision"] = "mxfp8"
    if replicas > 1 and shards > 0:
        found["shard_ranks"] = shards * cp
    if shards > 0:
        found["dp"] = shards * replicas
    if found["pp"] > 1:
        # The local batch is the sum of the micro-batches.
        micro = get("pipeline_parallel_microbatch_size", default=1)
        found["global_batch"] = found["global_batch"] or found["micro_batch"] * int(found.get("dp", 0))
        found["micro_batch"] = micro
        word = str(degrees.get("pipeline_parallel_schedule", "1F1B")).lower()
        found["schedule"] = TITAN_SCHEDULES.get(word, "1f1b")
        if found["schedule"] == "interleaved":
            found["interleave"] = 2
    return FromFile(MODELS[known[flavor]], {k: v for k, v in found.items() if v not in (0, "")})


_NUMBERS = {
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "seq-length": "seq",
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "expert_tp",
    "num-virtual-stages-per-pipeline-rank": "interleave",
    "num-distributed-optimizer-instances": "_instances",
}


def megatron(words: str, name: str) -> FromFile:
    """Arguments of Megatron-LM's pretrain_gpt.py, alone or in a shell script."""
    flags = _flags(words)

    def get(key: str, default: int = 0) -> int:
        value = flags.get(key)
        if value is None or value == "":
            return default
        if not re.fullmatch(r"[0-9_]+", value):
            raise InputError(f"{name}: --{key} is {value!r}, not a whole number")
        return int(value)

    layers, hidden, heads = get("num-layers"), get("hidden-size"), get("num-attention-heads")
    if not (layers and hidden and heads):
        raise UsageError(f"--config {name} states no --num-layers, --hidden-size and --num-attention-heads")
    experts = get("num-experts")
    mla = None
    if "multi-latent-attention" in flags:
        mla = Mla(
            q_rank=get("q-lora-rank", hidden),
            kv_rank=get("kv-lora-rank", 512),
            nope_dim=get("qk-head-dim", 128),
            rope_dim=get("qk-pos-emb-head-dim", 64),
            value_dim=get("v-head-dim", 128),
        )
    gated = "swiglu" in flags
    ffn = get("ffn-hidden-size", int(4 * hidden * 2 / 3) if gated else 4 * hidden)
    model = Model(
        name="megatron",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=get("num-query-groups") if "group-query-attention" in flags else 0,
        head_dim=get("kv-channels") or (128 if mla else 0),
        ffn=ffn,
        vocab=get("vocab-size") or get("padded-vocab-size") or 51200,
        gated=gated,
        tied="untie-embeddings-and-output-weights" not in flags,
        positions=0 if flags.get("position-embedding-type") == "rope" else get("max-position-embeddings"),
        experts=experts,
        experts_per_token=get("moe-router-topk", 2) if experts else 0,
        expert_ffn=get("moe-ffn-hidden-size", ffn) if experts else 0,
        shared_ffn=get("moe-shared-expert-intermediate-size") if experts else 0,
        mla=mla,
        seq_len=get("seq-length") or 2048,
    )
    found: dict[str, Any] = {key: get(flag) for flag, key in _NUMBERS.items() if get(flag)}
    found["sequence_parallel"] = "sequence-parallel" in flags if found.get("tp", 1) > 1 else None
    found["recompute"] = _recompute(flags)
    found["precision"] = _precision(flags)
    found["sharding"] = "zero1" if "use-distributed-optimizer" in flags else "none"
    if flags.keys() & {"use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp"}:
        found["sharding"] = "zero3"
    instances = found.pop("_instances", 1)
    if instances > 1:
        _log.debug("%s: %d optimizer instances; give --shard-ranks for them", name, instances)
    per_chunk, pp = get("num-layers-per-virtual-pipeline-stage"), found.get("pp", 1)
    if per_chunk and pp > 1:
        found["interleave"] = max(1, layers // pp // per_chunk)
    if found.get("interleave", 1) > 1:
        found["schedule"] = "interleaved"
    return FromFile(model, {k: v for k, v in found.items() if v is not None})


def _flags(words: str) -> dict[str, str]:
    """Flags and their values; `$NAME` is replaced by the value that the script assigned to NAME."""
    assigned = dict(
        re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?([\w./:-]*)[\"']?\s*(?:#.*)?$", words, re.M)
    )

    def known(match: re.Match[str]) -> str:
        return str(assigned.get(match[1] or match[2], ""))

    lines = [line for line in words.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\$\{(\w+)(?::-[^}]*)?\}|\$(\w+)", known, "\n".join(lines))
    text = re.sub(r"[\\()\"'\[\],]", " ", text)
    try:
        parts = shlex.split(text, comments=True)
    except ValueError:
        parts = text.split()
    found: dict[str, str] = {}
    for at, part in enumerate(parts):
        if not part.startswith("--") or len(part) < 3:
            continue
        flag, _, value = part[2:].partition("=")
        after = parts[at + 1] if at + 1 < len(parts) else ""
        found[flag.replace("_", "-")] = value or ("" if after.startswith("-") else after)
    return found


def _recompute(flags: Mapping[str, str]) -> str:
    if flags.get("recompute-granularity") in ("full", "selective"):
        return flags["recompute-granularity"]
    return "selective" if "recompute-activations" in flags else "none"


def _precision(flags: Mapping[str, str]) -> str:
    if "fp4-format" in flags:
        return "nvfp4"
    if "fp8-format" in flags or "fp8-hybrid" in flags or "fp8-e4m3" in flags:
        return "mxfp8" if flags.get("fp8-recipe") == "mxfp8" else "fp8"
    return "fp16" if "fp16" in flags else "bf16"
