"""Facts: the profile of a running job, from which `weft.tuning.live.levers` derives what to try."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.kernels import glob_regex
from weft.tuning.live.costs import CommCosts

BESIDE_SHARE = 0.05  # share of the collectives' time: with less overlapping compute, nothing shares the GPU
MEMORY_KERNELS = (
    "*elementwise*",
    "*reduce_kernel*",
    "*norm_*kernel*",
    "*softmax*",
    "*copy*",
    "*cat*batch*",
    "*multi_tensor*",
    "*embedding*",
    "*index*",
    "*dropout*",
    "*fill*",
    "triton_poi_*",
    "triton_red_*",
    "triton_per_*",
)
"""Memory-bound kernels, which fewer resident blocks only slow down (docs/lab.md)."""
PolicyChange = dict[str, Any]
"""Fields to replace in a Policy."""
_WAITS_FOR_MEMORY = glob_regex(MEMORY_KERNELS)


@dataclass(frozen=True)
class Kernel:
    """A compute kernel of the job; counts and times are per step."""

    name: str
    """The demangled name."""
    symbol: str
    """The driver's name for the kernel, which rules are matched against."""
    launches: float
    beside: float
    """Launches made while a collective was in flight."""
    blocks_per_sm: int | None
    """How many of its blocks fit on an SM; None if unknown."""
    ms: float | None = None
    """Total time; None if the tracer could not be used."""
    beside_ms: float | None = None
    """Time that overlaps with collectives; None if the tracer could not be used."""

    @property
    def can_be_shaped(self) -> bool:
        """Whether fewer resident blocks are possible and could help."""
        return (self.blocks_per_sm or 1) > 1 and _WAITS_FOR_MEMORY.fullmatch(self.symbol) is None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The profile of a job, taken before any change is tried."""

    launches: bool = True
    """Whether launches can be changed: the shim is in the process and a GPU is used."""
    collectives: float = 0.0
    """Collective kernels per step."""
    ctas: int | None = None
    """CTAs that a collective takes now; None if unknown."""
    cta_choices: tuple[int, ...] = ()
    """Other CTA counts that the running job can switch to."""
    most_ctas: int = 0
    """The largest CTA count that fits."""
    why_no_ctas: str = ""
    """Why the CTA count cannot be changed; empty if it can."""
    rules: bool = False
    """Whether rules by kind and size of a collective can be applied in this run."""
    calls: tuple[tuple[str, int, float], ...] = ()
    """Collectives of a step: kind, bytes as NCCL's tuner plugin counts them, and number of calls."""
    deterministic: bool = False
    """Whether the program asks for deterministic algorithms."""
    framework: Mapping[str, Sequence[PolicyChange]] = field(default_factory=dict)
    """Policy changes to DDP or FSDP2 models that the running job allows, by lever."""
    cta_choices_at_start: tuple[int, ...] = ()
    """CTA counts that the job could be started with, if they cannot be changed while it runs."""
    start_settings: tuple[str, ...] = ()
    """Settings `NAME=VALUE` that only a later start could try."""
    kernels: tuple[Kernel, ...] = ()
    span_ms: float | None = None
    """Length of a step as the tracer recorded it; None if the tracer could not be used."""
    comm_ms: float | None = None
    """Communication in a step."""
    exposed_ms: float | None = None
    """Communication during which no compute kernel runs."""
    costs: CommCosts | None = None
    """What communication costs a step, by cause; None if unknown."""
    world: int = 1
    """Number of ranks in the job."""
    ranks_at_work: int = 1
    """Number of processes that take part in tuning."""
    one_rank_per_gpu: bool = False
    """Whether ranks without a process come from a node profile: their collectives are not on this GPU."""
    workload: str = ""
    """What distinguishes this job from others in the store."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Facts:
        kernels = tuple(Kernel(**kernel) for kernel in document["kernels"])
        more: dict[str, Any] = {
            name: tuple(document[name]) for name in ("cta_choices", "cta_choices_at_start", "start_settings")
        }
        more["calls"] = tuple((str(kind), int(size), float(count)) for kind, size, count in document["calls"])
        more["costs"] = CommCosts(**document["costs"]) if document["costs"] else None
        return cls(**{**document, "kernels": kernels, **more})

    @property
    def beside(self) -> tuple[Kernel, ...]:
        """Compute kernels that overlap with collectives, those with the largest `weight` first."""
        return tuple(sorted((k for k in self.kernels if self.weight(k) > 0), key=lambda k: -self.weight(k)))

    def weight(self, kernel: Kernel) -> float:
        """How much of a kernel overlaps with collectives: in ms, or in launches if times are unknown."""
        return kernel.beside if self.comm_ms is None else kernel.beside_ms or 0.0

    @property
    def shares_the_gpu(self) -> bool:
        """Whether a relevant share of compute overlaps with collectives; True if unknown."""
        if self.comm_ms is None:
            return True
        return sum(map(self.weight, self.kernels)) > BESIDE_SHARE * self.comm_ms


def merge(facts: Iterable[Facts]) -> Facts:
    """Merge all ranks' facts: a choice counts if every rank has it, a kernel if any rank has it."""
    everyone = list(facts)
    kernels: dict[str, Kernel] = {}
    for kernel in (kernel for one in everyone for kernel in one.kernels):
        known = kernels.get(kernel.name)
        if known is None or (kernel.beside_ms or 0, kernel.beside) > (known.beside_ms or 0, known.beside):
            kernels[kernel.name] = kernel
    timed = [one for one in everyone if one.comm_ms is not None]
    slowest = max(timed, key=lambda one: one.comm_ms or 0) if len(timed) == len(everyone) else Facts()
    common = [c for c in everyone[0].cta_choices if all(c in one.cta_choices for one in everyone)]
    refused = next((one for one in everyone if one.why_no_ctas), Facts())
    return dataclasses.replace(
        everyone[0],
        launches=all(one.launches for one in everyone),
        collectives=max(one.collectives for one in everyone),
        cta_choices=tuple(common),
        framework={
            name: [c for c in changes if all(c in one.framework.get(name, ()) for one in everyone)]
            for name, changes in everyone[0].framework.items()
        },
        most_ctas=min(one.most_ctas for one in everyone),
        why_no_ctas=refused.why_no_ctas,
        cta_choices_at_start=refused.cta_choices_at_start,
        start_settings=tuple(
            one
            for one in everyone[0].start_settings
            if all(one in other.start_settings for other in everyone)
        ),
        kernels=tuple(kernels.values()),
        span_ms=slowest.span_ms,
        comm_ms=slowest.comm_ms,
        exposed_ms=slowest.exposed_ms,
        costs=slowest.costs,
        rules=all(one.rules for one in everyone),
        deterministic=any(one.deterministic for one in everyone),
        ranks_at_work=len(everyone),
    )


def explain(facts: Facts) -> list[dict[str, Any]]:
    """One row per kernel: how much of it overlaps with collectives, and what could be done about that."""
    rows = []
    total = sum(map(facts.weight, facts.kernels))
    for kernel in facts.beside[:12]:
        if (kernel.blocks_per_sm or 1) <= 1:
            what = "one block per SM: residency cannot be shaped"
        elif not kernel.can_be_shaped:
            what = "memory-bound: fewer blocks would only slow it down"
        else:
            what = f"{kernel.blocks_per_sm} blocks per SM: residency can be shaped"
        share = round(100 * facts.weight(kernel) / total, 1)
        rows.append(
            {
                "kernel": kernel.name,
                "launches_per_step": kernel.launches,
                "ms": kernel.ms,
                "beside_ms": kernel.beside_ms,
                "beside_collectives_pct": share,
                "blocks_per_sm": kernel.blocks_per_sm,
                "what": what,
            }
        )
    return rows
