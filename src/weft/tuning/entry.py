"""Key and Entry: the verdicts in the store and their keys, validated because imports are not trusted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import weft
from weft.comm.node import NODE_VARIABLE
from weft.errors import UsageError
from weft.policy import Policy

MAX_AGE_S = 30 * 86400.0
CLOCK_SKEW_S = 86400.0
MAX_TEXT = 2048
MAX_VERDICT_BYTES = 1 << 20
KEY_COLUMNS = ("gpu", "driver", "nccl", "torch", "workload", "setting")
COLUMNS = (*KEY_COLUMNS, "policy", "verdict", "made", "weft")


@dataclass(frozen=True)
class Key:
    """What a verdict is valid for."""

    gpu: str
    driver: str
    nccl: str
    torch: str
    workload: str
    setting: str = ""
    """Where the ranks are: nodes, ghost ranks and their node profile; empty if unknown or one plain node."""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            least = 0 if part.name == "setting" else 1
            if not isinstance(value, str) or not least <= len(value) <= MAX_TEXT or not value.isprintable():
                raise UsageError(
                    f"store key: {part.name} must be printable text of {least} to {MAX_TEXT} characters, "
                    f"not {str(value)[:40]!r}"
                )

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in KEY_COLUMNS)


@dataclass(frozen=True)
class Entry:
    """A stored verdict."""

    key: Key
    policy: Policy
    verdict: Mapping[str, Any]
    """The tuner's document: text, gain and so on."""
    made: float
    """When the verdict was stored, in seconds since 1970."""
    weft: str
    """The version of weft that stored it."""

    @property
    def stale(self) -> bool:
        """Whether to measure again: too old, from the future, or from another minor version of weft."""
        return self.stale_at(time.time())

    def stale_at(self, now: float) -> bool:
        """`stale` at the time `now`, in seconds since 1970."""
        return not -CLOCK_SKEW_S <= now - self.made <= MAX_AGE_S or _minor(self.weft) != _minor(
            weft.__version__
        )

    def to_dict(self) -> dict[str, Any]:
        """One entry of an export."""
        key = dict(zip(COLUMNS, self.key.parts, strict=False))
        rest = {"policy": self.policy.to_dict(), "verdict": dict(self.verdict)}
        return {**key, **rest, "made": self.made, "weft": self.weft}

    @classmethod
    def from_dict(cls, document: Any) -> Entry:
        """An entry from its JSON document, which is not trusted."""
        if not isinstance(document, dict) or set(document) | {"setting"} != set(COLUMNS):
            raise UsageError(f"an entry is an object with exactly {', '.join(COLUMNS)}")
        document = {"setting": "", **document}  # exports of weft 0.1 have no setting
        made, version, verdict = document["made"], document["weft"], document["verdict"]
        if isinstance(made, bool) or not isinstance(made, (int, float)) or not 0 <= made < 1e11:
            raise UsageError(f"made {str(made)[:40]!r} is not a time in seconds since 1970")
        if not isinstance(version, str) or not 0 < len(version) <= 64 or not version.isprintable():
            raise UsageError(f"weft {str(version)[:40]!r} is not a version")
        if not isinstance(verdict, dict):
            raise UsageError("verdict must be an object")
        verdict_text(verdict)
        key = Key(*(document[part.name] for part in fields(Key)))
        return cls(key, Policy.from_dict(document["policy"]), verdict, float(made), version)


def here(workload: str) -> Key:
    """The store key for a workload on the GPU that this process uses through torch."""
    import torch

    version, where = str(torch.__version__), setting()
    if not torch.cuda.is_available():
        return Key("cpu", "none", "none", version, workload, where)
    from weft.gpu import nvml

    with nvml.session() as library:
        driver = nvml.driver_release(library) or str(torch.version.hip or "unknown")
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError):
        nccl = "none"
    return Key(torch.cuda.get_device_name(), driver, nccl, version, workload, where)


def setting() -> str:
    """Where the ranks of this process's job are, as text: nodes, ghost ranks and node profile."""
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    ghosts = joined and dist.get_backend() == "ghost"
    ranks = dist.get_world_size() if joined else 1
    node = os.environ.get(NODE_VARIABLE, "")
    nodes = nodes_of(ranks)
    parts = [f"{ranks - 1} ghost ranks"] if ghosts else [f"{nodes} nodes"] if nodes > 1 else []
    parts += [f"node profile {node}"] if node and node.isprintable() else []
    return ", ".join(parts)


def nodes_of(ranks: int) -> int:
    """Number of nodes that the job's ranks run on; 1 if LOCAL_WORLD_SIZE is unset or not a divisor."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return ranks // int(local) if local.isdecimal() and int(local) and ranks % int(local) == 0 else 1


def verdict_text(verdict: dict[str, Any]) -> str:
    """A verdict as JSON. Raises UsageError if it cannot be encoded or is too large."""
    try:
        text = json.dumps(verdict, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the verdict cannot be written as JSON: {error}") from None
    if len(text) > MAX_VERDICT_BYTES:
        raise UsageError(f"the verdict has {len(text)} bytes; the store takes at most {MAX_VERDICT_BYTES}")
    return text


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
