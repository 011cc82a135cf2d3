"""Rules of a policy: settings for some kernels (Rule) and for some collectives (CommRule). Pure data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from weft.checks import check_choice, check_int, check_keys
from weft.errors import UsageError

MAX_RESIDENCY = 32  # no GPU so far holds more blocks on an SM (CUDA programming guide, compute capabilities)
MAX_PATTERN_BYTES = 127
MAX_COMM_CTAS = 64  # channels of NCCL (MAXCHANNELS in src/include/device.h)
MAX_CLUSTER = 8
MAX_COMM_BYTES = 2**63 - 1
CHUNKS = (4096, 1 << 24)  # NCCL rounds down to its grain (at most 1920 bytes) and caps at its buffer size

NCCL_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "send_recv",
)
# In the order of NCCL's own numbers.
ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
CTA_POLICIES = ("default", "efficiency", "zero")


@dataclass(frozen=True)
class Rule:
    """Residency of the compute kernels whose name matches; the first matching rule decides."""

    kernel: str
    """Case-insensitive glob over the whole kernel name; `*`: any run of characters, `?`: one."""
    residency: int | None
    """Resident blocks per SM; None: leave these kernels unchanged."""

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, str) or not self.kernel:
            raise UsageError(
                f"compute.rules: kernel must be a name pattern such as '*gemm*', not {self.kernel!r}"
            )
        encoded = self.kernel.encode("utf-8", "replace")
        if len(encoded) > MAX_PATTERN_BYTES:
            raise UsageError(
                f"compute.rules: the pattern {self.kernel[:40]!r}… is too long; use at most "
                f"{MAX_PATTERN_BYTES} bytes, with * for the rest"
            )
        if b"\0" in encoded or encoded.decode() != self.kernel:
            raise UsageError(
                f"compute.rules: the pattern {self.kernel!r} has a character that no kernel name has; "
                "use ? for one character"
            )
        check_int("compute.rules residency", self.residency, 1, MAX_RESIDENCY)


@dataclass(frozen=True, kw_only=True)
class CommRule:
    """Settings for the collectives of one kind and size; the first matching rule decides.

    None in a field: NCCL's own choice. Bytes are counted as in NCCL's tuner plugin: elements times their
    size, and times the number of ranks for all_gather and reduce_scatter.
    """

    collective: str | None = None
    """One of NCCL_COLLECTIVES; None: any."""
    min_bytes: int = 0
    max_bytes: int | None = None
    """Inclusive; None: no upper limit."""
    ctas: int | None = None
    """CTAs of the call, if the communicator has as many channels and the call has enough data."""
    cluster: int | None = None
    """CTAs of a thread-block cluster (Hopper and newer); 0: no clusters. NCCL 2.31 and newer."""
    algorithm: str | None = None
    protocol: str | None = None
    chunk: int | None = None
    """Bytes that a channel moves at a time. NCCL 2.30 and newer."""
    cta_policy: str | None = None
    """NCCL's own preference between speed and SMs. NCCL 2.31 and newer."""

    def __post_init__(self) -> None:
        if self.collective is not None:
            check_choice("comm.rules: collective", self.collective, NCCL_COLLECTIVES)
        if self.min_bytes is None:
            object.__setattr__(self, "min_bytes", 0)
        check_int("comm.rules: min_bytes", self.min_bytes, 0, MAX_COMM_BYTES)
        check_int("comm.rules: max_bytes", self.max_bytes, 0, MAX_COMM_BYTES)
        if self.max_bytes is not None and self.max_bytes < self.min_bytes:
            raise UsageError(
                f"comm.rules: max_bytes {self.max_bytes} is below min_bytes {self.min_bytes}; swap them"
            )
        check_int("comm.rules: ctas", self.ctas, 1, MAX_COMM_CTAS, why="the channels of NCCL")
        check_int("comm.rules: cluster", self.cluster, 0, MAX_CLUSTER)
        check_int("comm.rules: chunk", self.chunk, *CHUNKS)
        for name, choices in (
            ("algorithm", ALGORITHMS),
            ("protocol", PROTOCOLS),
            ("cta_policy", CTA_POLICIES),
        ):
            if getattr(self, name) is not None:
                check_choice(f"comm.rules: {name}", getattr(self, name), choices)
        rest = [field for field in fields(self) if field.name not in ("collective", "ctas")]
        if self.collective == "send_recv" and any(getattr(self, f.name) != f.default for f in rest):
            raise UsageError(
                "comm.rules: NCCL takes nothing but a number of channels for send_recv, for every size; "
                "keep collective and ctas only"
            )

    def matches(self, collective: str, size: int) -> bool:
        """Whether the rule applies to a collective of this size in bytes."""
        most = MAX_COMM_BYTES if self.max_bytes is None else self.max_bytes
        return self.collective in (None, collective) and self.min_bytes <= size <= most

    def to_dict(self) -> dict[str, Any]:
        """The JSON object: only fields that differ from their defaults."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value != type(self).__dict__.get(name)}


def parse_rules(value: Any) -> tuple[Rule, ...]:
    if not isinstance(value, list):
        raise UsageError(f"compute.rules: must be a list, not {value!r}")
    for entry in value:
        if not isinstance(entry, dict):
            raise UsageError(f"compute.rules: every entry must be an object, not {entry!r}")
        check_keys("compute.rules", entry, ("kernel", "residency"))
        if set(entry) != {"kernel", "residency"}:
            raise UsageError(
                f"compute.rules: an entry needs kernel and residency (null: leave unchanged), not {entry!r}"
            )
    return tuple(Rule(entry["kernel"], entry["residency"]) for entry in value)


def parse_comm_rules(value: Any) -> tuple[CommRule, ...]:
    if not isinstance(value, list):
        raise UsageError(f"comm.rules: must be a list, not {value!r}")
    for entry in value:
        if not isinstance(entry, dict):
            raise UsageError(f"comm.rules: every entry must be an object, not {entry!r}")
        check_keys("comm.rules", entry, [field.name for field in fields(CommRule)])
    return tuple(CommRule(**entry) for entry in value)
