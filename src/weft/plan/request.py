"""Turn a user's options and files into a question about a TrainingJob; check bounds and contradictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.gpu.network import GBIT, Network, network, usual_network
from weft.gpu.specs import spec
from weft.plan.cluster import Cluster, read_cluster
from weft.plan.config import TrainingJob
from weft.plan.model_presets import model
from weft.plan.models import Model
from weft.plan.options import PlanOptions
from weft.plan.scaling import parse_range
from weft.plan.user_files import FromFile, read_config
from weft.policy import Policy

# The largest plausible values; anything larger is more likely a typing error.
_MOST = {
    "gpus": 1 << 18,
    "layers": 10_000,
    "hidden": 1 << 20,
    "heads": 1 << 14,
    "kv_heads": 1 << 14,
    "head_dim": 1 << 12,
    "ffn": 1 << 23,
    "vocab": 1 << 24,
    "experts": 1 << 14,
    "experts_per_token": 1 << 14,
    "expert_ffn": 1 << 23,
    "seq": 1 << 26,
    "micro_batch": 1 << 20,
    "global_batch": 1 << 30,
    "interleave": 10_000,
    "limit": 100_000,
    "rail_gbit": 1_000_000,
    "oversubscription": 1000,
    "price": 1_000_000,
}
_LEAST = {"rail_gbit": 0.001, "price": 0.001}
DIMENSIONS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"),
    *("experts", "experts_per_token", "expert_ffn", "gated"),
)
HIDDEN = ("tp", "tp_backward", "cp", "ep", "pp", "grads", "params")
"""Collectives that a framework can overlap with compute."""
JOB_OPTIONS = (
    *("gpu", "tp", "pp", "cp", "ep", "expert_tp", "dp", "interleave", "schedule", "micro_batch"),
    *(
        "global_batch",
        "sharding",
        "shard_ranks",
        "sequence_parallel",
        "recompute",
        "precision",
        "compression",
    ),
)
"""Options that have the same name as a field of TrainingJob."""


@dataclass(frozen=True)
class Question:
    """A user's question: the job as keyword arguments, and the options the user fixed."""

    options: PlanOptions
    job_options: dict[str, Any]
    """Arguments of TrainingJob; in a sweep they need not be valid before the job is split."""
    fixed: frozenset[str]
    """Options that the user typed; a sweep does not vary these."""

    def job(self) -> TrainingJob:
        """The requested job. Raises UsageError that names the nearest valid value."""
        return read_job(self.job_options)


def question(options: PlanOptions, given: Iterable[str]) -> Question:
    """Check the options, read the user's files, and combine both. `given`: names of the typed options."""
    typed = frozenset(given)
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    check_numbers(typed, values)
    check_together(typed, options)
    stated = read_config(options.config) if options.config else FromFile(None)
    names = {field.name for field in fields(options)}
    options = replace(options, **{k: v for k, v in stated.options.items() if k in names - typed})
    cluster = read_cluster(options.cluster, options.gpu) if options.cluster else None
    if cluster:
        changes: dict[str, Any] = {"gpu": cluster.gpu, "gpus": cluster.gpus}
        options = replace(options, **{k: v for k, v in changes.items() if v and k not in typed})
    wanted = read_model(typed, values, stated.model)
    check_experts(options, typed, wanted)
    found = {name: getattr(options, name) for name in JOB_OPTIONS}
    found |= {
        "model": wanted,
        "seq_len": options.seq,
        "policy": read_policy(options.policy),
        "network": read_network(options, cluster),
        "gpus": _gpus(options),
    }
    if options.software:
        found["software"] = options.software
    if options.hide:
        found["hide"] = read_hidden(options.hide)
    return Question(options, found, typed)


def flag(name: str) -> str:
    """An option as the user types it."""
    return "--" + name.replace("_", "-")


def check_numbers(given: Iterable[str], values: Mapping[str, Any]) -> None:
    """Reject numbers out of range; the error names the nearest valid one."""
    for name in sorted(given):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        least, most = _LEAST.get(name, 1), _MOST.get(name, 1 << 18)
        if not least <= value <= most:
            near = most if value > most else least
            raise UsageError(f"{flag(name)} {value} is not valid; use {least} to {most}, nearest is {near}")


def check_together(given: frozenset[str], options: PlanOptions) -> None:
    """Reject options that contradict each other or would have no effect."""
    if options.sweep and options.scale:
        raise UsageError("--sweep and --scale cannot be combined; run them separately")
    if "limit" in given and not options.sweep:
        raise UsageError("--limit bounds a sweep; add --sweep, or leave it out")
    if "traced" in given and "calibrate" not in given:
        raise UsageError("--traced describes the job of a trace; add --calibrate TRACE, or leave it out")
    if options.scale and "dp" in given:
        raise UsageError("--scale varies the data parallel ranks; leave out --dp")
    if options.scale and "policy" in given:
        raise UsageError("--scale compares no policy with the best ones; leave out --policy")
    if options.config and ("model" in given or given & set(DIMENSIONS)):
        name = "model" if "model" in given else sorted(given & set(DIMENSIONS))[0]
        raise UsageError(f"both --config and {flag(name)} describe the model; use one of them")
    if options.cluster and "network" in given:
        raise UsageError("both --cluster and --network describe the network; use one of them")
    if "shard_ranks" in given and "sharding" in given and options.sharding == "none":
        raise UsageError("--shard-ranks with --sharding none: nothing is sharded; leave one of them out")


def check_experts(options: PlanOptions, given: frozenset[str], wanted: Model) -> None:
    """Reject options about experts if the model has none."""
    if wanted.experts:
        return
    for name in ("experts_per_token", "expert_ffn", "expert_tp"):
        if name in given:
            raise UsageError(
                f"{flag(name)} {getattr(options, name)}: {wanted.name} has no experts; leave it out, "
                "or add --experts"
            )


def read_model(given: Iterable[str], values: Mapping[str, Any], stated: Model | None = None) -> Model:
    """The model of the user's file (`stated`), the named model, or one built from the dimensions."""
    typed = [name for name in DIMENSIONS if name in set(given)]
    if values["model"] and typed:
        raise UsageError(
            f"both --model {values['model']} and {flag(typed[0])} are given; use the name or the dimensions"
        )
    if stated is not None:
        return stated
    if values["model"]:
        return model(values["model"])
    missing = [name for name in ("layers", "hidden", "heads") if not values[name]]
    if missing:
        raise UsageError(
            "no model: give --model NAME, such as llama3-70b, --config FILE, or its dimensions "
            f"({', '.join(map(flag, missing))} {'is' if len(missing) == 1 else 'are'} missing)"
        )
    kept = {name: values[name] for name in DIMENSIONS if values[name]}
    if not values["experts"]:
        kept = {name: value for name, value in kept.items() if not name.startswith("expert")}
    return Model(name="custom", **{"ffn": 4 * values["hidden"], "vocab": 51200, **kept})


def read_hidden(words: str) -> frozenset[str]:
    """Names of collectives, separated by spaces or commas; `none` is the empty set."""
    names = frozenset(words.replace(",", " ").split()) - {"none"}
    wrong = sorted(names - set(HIDDEN))
    if wrong:
        raise UsageError(f"--hide {wrong[0]!r} is not known; there are {', '.join(HIDDEN)} and none")
    return names


def read_network(options: PlanOptions, cluster: Cluster | None = None) -> Network:
    """The network of the user's cluster, the named one, or the GPU's usual one, with the given changes."""
    found = network(options.network) if options.network else usual_network(spec(options.gpu).name)
    found = cluster.network if cluster else found
    if options.rail_gbit:
        rail = options.rail_gbit
        found = found.but(name=f"{rail:g} Gbit/s", rail_bytes_per_s=rail * GBIT)
    if options.oversubscription:
        over = options.oversubscription
        found = found.but(name=f"{found.name} 1:{over:g}", oversubscription=over)
    return found


def read_policy(words: str) -> Policy | str:
    """`auto`, `none`, or the policy in a file."""
    if words in ("auto", "none"):
        return words
    if words.endswith(".json") or Path(words).exists():
        return Policy.load(words)
    raise UsageError(
        f"--policy {words!r} is not a policy file; use auto, none, or a file that weft tune wrote"
    )


def _gpus(options: PlanOptions) -> int:
    """Number of GPUs: as given, or from the ranks, or the start of the --scale range; 0 if unknown."""
    unit = options.tp * options.pp * options.cp
    if not options.gpus and options.dp:
        return unit * options.dp
    if not options.gpus and options.scale:
        return -(-parse_range(options.scale)[0] // unit) * unit
    return options.gpus


def read_job(options: Mapping[str, Any]) -> TrainingJob:
    """The job. If something does not divide, the error names the nearest choice that does."""
    wanted, gpus = options["model"], options["gpus"]
    check_gpus(gpus)
    rest = gpus // max(1, options["pp"] * options["cp"])
    _divides("tp", options["tp"], _divisors(wanted.heads), f"{wanted.heads} heads of {wanted.name}", rest)
    if options["expert_tp"]:
        if not wanted.experts:
            raise UsageError(
                f"--expert-tp {options['expert_tp']}: {wanted.name} has no experts; leave it out"
            )
        rest = gpus // max(1, options["pp"] * options["ep"])
        what = f"{wanted.expert_ffn} columns of {wanted.name}'s experts"
        _divides("expert_tp", options["expert_tp"], _divisors(wanted.expert_ffn), what, rest)
    return TrainingJob(**options)


def check_gpus(gpus: int) -> None:
    """Reject a job without GPUs."""
    if not gpus:
        raise UsageError("no --gpus: how many GPUs does the job have? for example --gpus 1024")


def _divisors(whole: int) -> list[int]:
    return [d for d in range(1, whole + 1) if not whole % d]


def _divides(name: str, value: int, choices: Sequence[int], what: str, ranks: int) -> None:
    """Reject an impossible split; the error names the nearest choice, which divides the ranks if any does."""
    if value in choices:
        return
    found = [d for d in choices if not ranks % d] or choices or [1]
    near = min(found, key=lambda d: max(d / value, value / d))
    raise UsageError(f"{flag(name)} {value} does not divide the {what}; nearest is {flag(name)} {near}")
