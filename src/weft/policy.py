"""Policy: how compute and communication may share the GPU. Pure data, JSON in and out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from weft.checks import check_choice, check_int, check_keys, unique_keys
from weft.errors import InputError, UsageError
from weft.files import write_whole
from weft.rules import MAX_COMM_CTAS, MAX_RESIDENCY, CommRule, Rule, parse_comm_rules, parse_rules

VERSION = 1
MAX_HEAD_START_US = 1000.0  # a longer wait is a stall, not a head start: 40 µs already costs time on an H200
MAX_PLACED_US = 100_000.0
PLACED_BOUND_US = 5000.0  # longest wait for a collective's placement if the policy sets none: a long GEMM
MAX_CTAS = 128  # channels of RCCL (MAXCHANNELS in src/include/device.h); NCCL has MAX_COMM_CTAS
MAX_RULES = 64  # slots in the shim's control block
MAX_SM_RESERVE = 1024
MAX_BUCKET_MB = 1 << 16
MAX_PREFETCH = 16
MAX_COMM_RULES = 32
_MAX_FILE_BYTES = 1 << 20

PRIORITIES = ("default", "high")
HEAD_STARTS = ("none", "timed", "placed")
MOMENTS = ("always", "overlap")
ENGINES = ("sm", "dma")
SCHEDULES = (
    "serial",
    "shard",
    "uniform-fused-1d",
    "hetero-fused-1d",
    "hetero-unfused-1d",
    "uniform-fused-2d",
)

# Where each control is in the JSON document: field of Policy → (section, key).
_PLACES = {
    "priority": ("comm", "priority"),
    "head_start": ("comm", "head_start"),
    "head_start_us": ("comm", "head_start_us"),
    "max_ctas": ("comm", "max_ctas"),
    "engine": ("comm", "engine"),
    "comm_rules": ("comm", "rules"),
    "residency": ("compute", "residency"),
    "when": ("compute", "when"),
    "rules": ("compute", "rules"),
    "sm_reserve": ("compute", "sm_reserve"),
    "schedule": (None, "schedule"),
    "bucket_mb": ("framework", "bucket_mb"),
    "first_bucket_mb": ("framework", "first_bucket_mb"),
    "forward_prefetch": ("framework", "forward_prefetch"),
    "backward_prefetch": ("framework", "backward_prefetch"),
    "reshard_after_forward": ("framework", "reshard_after_forward"),
    "reduce_scatter_group": ("framework", "reduce_scatter_group"),
}
FRAMEWORK = tuple(name for name, (section, _) in _PLACES.items() if section == "framework")
"""Fields of Policy that are applied to torch's DDP and FSDP2, not to launches."""
_SHOWN = ("priority", "residency", "head_start", "head_start_us", "max_ctas", "sm_reserve", "schedule")


def place_of(name: str) -> tuple[str | None, str]:
    """Section (None: top level) and key of a field of Policy in the JSON document."""
    return _PLACES[name]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How compute and communication share the GPU. The defaults change nothing: plain overlap."""

    priority: str = "default"
    """`high` places pending blocks of a collective before pending compute blocks."""
    head_start: str | None = None
    """What the first compute launch after a collective's launch waits for: `none`, `timed` (for
    `head_start_us`) or `placed` (until the collective's blocks are placed, for at most `head_start_us`, or
    5000 if that is 0). None: `timed` if `head_start_us` is above 0, else `none`."""
    head_start_us: float = 0.0
    """Microseconds of a timed head start; with `placed`, the longest wait."""
    max_ctas: int | None = None
    """Maximum number of thread blocks (hence SMs) of a collective; None: the library's own choice."""
    engine: str = "sm"
    """What moves the bytes: `sm` kernels or `dma` copy engines."""
    comm_rules: tuple[CommRule, ...] = ()
    """CTAs, algorithm, protocol and more by kind and size of a collective; `max_ctas` covers all others."""
    residency: int | None = None
    """Resident compute blocks per SM for kernels that no rule matches; None: unchanged."""
    when: str = "always"
    """`overlap` limits residency only while a collective is in flight."""
    rules: tuple[Rule, ...] = ()
    """Residency by kernel name; the first matching rule takes precedence over `residency`."""
    sm_reserve: int = 0
    """SMs that cuBLAS GEMMs leave free while a collective is in flight."""
    schedule: str | None = None
    """Granularity of a collective fused with a GEMM; None: chosen by shape."""
    bucket_mb: float | None = None
    """DDP: MiB of a gradient bucket; None, here and below: the program's own setting."""
    first_bucket_mb: float | None = None
    """DDP: MiB of the bucket that is reduced first."""
    forward_prefetch: int | None = None
    """FSDP2: modules whose parameters are gathered ahead of their use in the forward pass."""
    backward_prefetch: int | None = None
    """FSDP2: modules whose parameters are gathered ahead of their use in the backward pass."""
    reshard_after_forward: bool | None = None
    """FSDP2: False keeps parameters gathered from the forward to the backward pass, in all modules."""
    reduce_scatter_group: bool | None = None
    """FSDP2: True gives reduce-scatter a communicator of its own."""

    def __post_init__(self) -> None:
        check_choice("comm.priority", self.priority, PRIORITIES)
        check_choice("comm.engine", self.engine, ENGINES)
        check_choice("compute.when", self.when, MOMENTS)
        if self.schedule is not None:
            check_choice("schedule", self.schedule, SCHEDULES)
        check_int("compute.residency", self.residency, 1, MAX_RESIDENCY)
        channels = f"NCCL has at most {MAX_COMM_CTAS} channels, RCCL {MAX_CTAS}"
        check_int("comm.max_ctas", self.max_ctas, 1, MAX_CTAS, why=channels)
        check_int("compute.sm_reserve", self.sm_reserve, 0, MAX_SM_RESERVE, optional=False)
        most_us = MAX_PLACED_US if self.head_start == "placed" else MAX_HEAD_START_US
        _check_head_start_us(self.head_start_us, most_us)
        object.__setattr__(self, "head_start", _head_start(self.head_start, self.head_start_us))
        self._check_framework()
        object.__setattr__(self, "rules", tuple(self.rules))
        if len(self.rules) > MAX_RULES:
            raise UsageError(f"compute.rules: {len(self.rules)} rules; a policy holds at most {MAX_RULES}")
        if not all(isinstance(rule, Rule) for rule in self.rules):
            raise UsageError("compute.rules: every entry must be a weft.Rule")
        object.__setattr__(self, "comm_rules", tuple(self.comm_rules))
        if len(self.comm_rules) > MAX_COMM_RULES:
            raise UsageError(
                f"comm.rules: {len(self.comm_rules)} rules; a policy holds at most {MAX_COMM_RULES}"
            )
        if not all(isinstance(rule, CommRule) for rule in self.comm_rules):
            raise UsageError("comm.rules: every entry must be a weft.policy.CommRule")

    def _check_framework(self) -> None:
        for name in ("bucket_mb", "first_bucket_mb"):
            _check_megabytes(f"framework.{name}", getattr(self, name))
        for name in ("forward_prefetch", "backward_prefetch"):
            check_int(f"framework.{name}", getattr(self, name), 1, MAX_PREFETCH)
        for name in ("reshard_after_forward", "reduce_scatter_group"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise UsageError(f"framework.{name} {value!r} is not valid; use true or false")

    @property
    def framework(self) -> dict[str, Any]:
        """The controls of DDP and FSDP2, as fields to replace in a policy."""
        return {name: getattr(self, name) for name in FRAMEWORK}

    @property
    def changes_framework(self) -> bool:
        """Whether a control of DDP or FSDP2 is set."""
        return any(value is not None for value in self.framework.values())

    @property
    def models(self) -> dict[str, Any]:
        """Controls that change DDP or FSDP2 models, as fields to replace (`engine`: FSDP2's buffers)."""
        return {**self.framework, "engine": self.engine}

    @property
    def changes_models(self) -> bool:
        """Whether a control changes DDP or FSDP2 models."""
        return self.models != Policy().models

    @property
    def is_neutral(self) -> bool:
        """Whether this policy changes nothing."""
        return self == Policy(when=self.when)

    @property
    def head_start_mode(self) -> str:
        """`none`, `timed` or `placed`."""
        return self.head_start or ("timed" if self.head_start_us else "none")

    def comm_rule_for(self, collective: str, size: int) -> CommRule | None:
        """The rule for a collective of `size` bytes, as NCCL's tuner plugin counts them; None if none."""
        return next((rule for rule in self.comm_rules if rule.matches(collective, size)), None)

    def ctas_for(self, collective: str, size: int) -> int | None:
        """CTAs of a collective of this size: the rule's or `max_ctas`; None: NCCL's choice."""
        rule = self.comm_rule_for(collective, size)
        return rule.ctas if rule is not None and rule.ctas is not None else self.max_ctas

    def communicator_ctas(self, ctas: int | None) -> int | None:
        """Channels that a communicator needs if calls without a rule use `ctas`; None: NCCL's choice.

        A call cannot have more CTAs than its communicator has channels.
        """
        return ctas if ctas is None else max(ctas, *(rule.ctas or 0 for rule in self.comm_rules), 0)

    @property
    def label(self) -> str:
        """A short name of the controls in a fixed order, such as `priority+res3+head5+ctas12`.

        For display only: code reads the fields. The label of a policy that changes nothing is `overlap`.
        """
        parts = ["priority"] if self.priority == "high" else []
        limits = {rule.residency for rule in self.rules if rule.residency} | {self.residency or 0}
        parts += [f"res{count}" for count in sorted(limits) if count]
        if self.head_start_mode != "none":
            bound = f"{self.head_start_us:g}" if self.head_start_us else ""
            parts.append(("placed" if self.head_start == "placed" else "head") + bound)
        parts += [f"ctas{self.max_ctas}"] if self.max_ctas else []
        parts += [f"rules{len(self.comm_rules)}"] if self.comm_rules else []
        parts += [f"reserve{self.sm_reserve}"] if self.sm_reserve else []
        parts += ["dma"] if self.engine == "dma" else []
        parts += [self.schedule] if self.schedule else []
        parts += [f"bucket{self.bucket_mb:g}"] if self.bucket_mb else []
        parts += [f"first{self.first_bucket_mb:g}"] if self.first_bucket_mb else []
        parts += [f"forward{self.forward_prefetch}"] if self.forward_prefetch else []
        parts += [f"backward{self.backward_prefetch}"] if self.backward_prefetch else []
        reshard = {None: [], True: ["reshard"], False: ["keep"]}
        parts += reshard[self.reshard_after_forward]
        parts += ["rsgroup"] if self.reduce_scatter_group else []
        return "+".join(parts) or "overlap"

    @property
    def controls(self) -> int:
        """How many controls differ from the defaults."""
        shaped = (self.residency is not None or bool(self.rules)) + bool(self.comm_rules)
        head = self.head_start_mode
        rest = (self.priority, head, self.max_ctas, self.sm_reserve, self.engine, self.schedule)
        defaults = ("default", "none", None, 0, "sm", None)
        framework = sum(value is not None for value in self.framework.values())
        return shaped + framework + sum(a != b for a, b in zip(rest, defaults, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: the version, and only the fields that differ from the defaults."""
        document: dict[str, Any] = {"version": VERSION}
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "rules":
                value = [{"kernel": rule.kernel, "residency": rule.residency} for rule in value]
            if field.name == "comm_rules":
                value = [rule.to_dict() for rule in value]
            section, key = _PLACES[field.name]
            (document.setdefault(section, {}) if section else document)[key] = value
        return document

    @classmethod
    def from_dict(cls, document: Any) -> Policy:
        """A policy from its JSON document; unknown keys and impossible values are rejected by name."""
        if not isinstance(document, dict):
            raise UsageError(f"a policy is a JSON object, not {type(document).__name__}")
        if "version" not in document:
            raise UsageError(f'there is no version; add "version": {VERSION}')
        version = document["version"]
        if version != VERSION or isinstance(version, bool):
            raise UsageError(f"policy version {version!r} is not known; this weft reads {VERSION}; update it")
        check_keys("policy", document, ("version", "comm", "compute", "framework", "schedule"))
        values: dict[str, Any] = {}
        for name, (section, key) in _PLACES.items():
            home = document.get(section, {}) if section else document
            if not isinstance(home, dict):
                raise UsageError(f"policy {section}: must be an object, not {home!r}")
            if section:
                check_keys(section, home, [k for s, k in _PLACES.values() if s == section])
            if key in home:
                parse = _PARSERS.get(name)
                values[name] = parse(home[key]) if parse else home[key]
        return cls(**values)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy file."""
        try:
            with Path(path).open(encoding="utf-8") as file:  # anything but a regular file may never end
                text = file.read(_MAX_FILE_BYTES + 1)
            if len(text) > _MAX_FILE_BYTES:
                raise UsageError(f"over {_MAX_FILE_BYTES >> 20} MiB; give a policy file")
            return cls.from_dict(json.loads(text, object_pairs_hook=unique_keys))
        except UsageError as error:
            raise InputError(f"policy {os.fspath(path)}: {error}") from None
        except OSError as error:
            raise InputError(
                f"cannot read policy {os.fspath(path)}: {error.strerror}; `weft tune --out FILE` writes one"
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"policy {os.fspath(path)} is not JSON: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a policy file, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")

    def __str__(self) -> str:
        parts = [
            f"{name} {getattr(self, name)}"
            for name in (*_SHOWN, *FRAMEWORK)
            if getattr(self, name) != type(self).__dataclass_fields__[name].default
        ]
        parts += [f"{len(self.rules)} kernel rules"] if self.rules else []
        parts += [f"{len(self.comm_rules)} collective rules"] if self.comm_rules else []
        parts += ["only while a collective is in flight"] if self.when == "overlap" else []
        parts += ["engine dma"] if self.engine == "dma" else []
        return ", ".join(parts) or "no control"


_PARSERS = {"rules": parse_rules, "comm_rules": parse_comm_rules}


def _head_start(mode: Any, us: float) -> str | None:
    """Checks the mode and returns it as stored: None if the microseconds alone determine it."""
    if mode is None:
        return None
    check_choice("comm.head_start", mode, HEAD_STARTS)
    if mode == "timed" and not us:
        raise UsageError(
            "comm.head_start timed needs comm.head_start_us, the microseconds to wait (5 is a good start)"
        )
    if mode == "none" and us:
        raise UsageError(f"comm.head_start none contradicts comm.head_start_us {us:g}; remove one of them")
    return "placed" if mode == "placed" else None


def _check_head_start_us(value: Any, most_us: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= most_us:  # false for NaN
        raise UsageError(
            f"comm.head_start_us {value!r} is not valid; use 0 to {most_us:g} microseconds "
            "(5 is a good start)"
        )


def _check_megabytes(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value <= MAX_BUCKET_MB):
        raise UsageError(f"{name} {value!r} is not valid; use MiB above 0 and up to {MAX_BUCKET_MB}")
