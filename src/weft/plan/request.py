"""From what a user types to a TrainingJob: bounds, the model by name or dimensions, the nearest valid split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.errors import UsageError
from weft.gpu.specs import spec
from weft.plan.config import TrainingJob
from weft.plan.models import Model, model
from weft.plan.network import GBIT, Network, network, usual_network

# The largest numbers that still mean something; beyond them a typing error is more likely than a plan.
MOST = {
    "gpus": 1 << 18,
    "layers": 10_000,
    "hidden": 1 << 20,
    "heads": 1 << 14,
    "kv_heads": 1 << 14,
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
}
LEAST = {"rail_gbit": 0.001}
DIMENSIONS = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("experts", "experts_per_token", "expert_ffn", "gated"),
)


def flag(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")


def check_numbers(given: Iterable[str], values: Mapping[str, Any]) -> None:
    """Refuse numbers that cannot be meant, with the nearest that can."""
    for name in sorted(given):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        least, most = LEAST.get(name, 1), MOST.get(name, 1 << 18)
        if not least <= value <= most:
            near = most if value > most else least
            raise UsageError(
                f"{flag(name)} {value} is not possible; use {least} to {most}, nearest is {near}"
            )


def read_model(given: Iterable[str], values: Mapping[str, Any]) -> Model:
    """The named model, or one by its dimensions."""
    typed = [name for name in DIMENSIONS if name in set(given)]
    if values["model"] and typed:
        raise UsageError(
            f"both --model {values['model']} and {flag(typed[0])} are given; use the name or the dimensions"
        )
    if values["model"]:
        return model(values["model"])
    missing = [name for name in ("layers", "hidden", "heads") if not values[name]]
    if missing:
        raise UsageError(
            "no model: give --model NAME, such as llama3-70b, or its dimensions "
            f"({', '.join(map(flag, missing))} {'is' if len(missing) == 1 else 'are'} missing)"
        )
    kept = {name: values[name] for name in DIMENSIONS if values[name]}
    return Model(name="custom", **{"ffn": 4 * values["hidden"], "vocab": 51200, **kept})


def read_network(gpu: str, name: str, rail_gbit: float, oversubscription: float) -> Network:
    """A network by name, or what the GPU is mostly sold with; the numbers change it."""
    found = network(name) if name else usual_network(spec(gpu).name)
    if rail_gbit:
        found = found.but(name=f"{rail_gbit:g} Gbit/s", rail_bytes_per_s=rail_gbit * GBIT)
    if oversubscription:
        found = found.but(name=f"{found.name} 1:{oversubscription:g}", oversubscription=oversubscription)
    return found


def read_job(wanted: Model, gpus: int, options: Mapping[str, Any]) -> TrainingJob:
    """The job; where something does not divide, the error names the nearest choice that does."""
    if not gpus:
        raise UsageError("no --gpus: how many GPUs does the job have? for example --gpus 1024")
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
    return TrainingJob(model=wanted, gpus=gpus, **options)


def _divisors(whole: int) -> list[int]:
    return [d for d in range(1, whole + 1) if not whole % d]


def _divides(name: str, value: int, choices: Sequence[int], what: str, ranks: int, times: int = 1) -> None:
    """Refuse a split that is none of the choices; the nearest one also divides the ranks, where any does."""
    if value in choices:
        return
    found = [d for d in choices if not ranks % d] or choices or [1]
    near = min(found, key=lambda d: max(d / value, value / d))
    shown = f"{flag(name)} {value}" + (f" x --interleave {times}" if times > 1 else "")
    raise UsageError(f"{shown} does not divide the {what}; nearest is {flag(name)} {near}")
