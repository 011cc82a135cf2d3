"""Options: what may be tried in a running job, from its profile. Nothing that cannot matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.kernels import glob_regex
from weft.policy import MAX_PATTERN_BYTES, MAX_RULES, Policy, Rule
from weft.tuning.candidates import HEAD_START_US

SHAPED_KERNELS = 2  # kernels tried in the last stage; each costs several steps of the job
SHAPED_SHARE = 0.1  # of the time that overlaps with collectives: a kernel with less is not worth shaping
BESIDE_SHARE = 0.05  # of the collectives' time: with less overlapping compute, nothing shares the GPU
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
"""For kernels that wait for memory, fewer resident blocks are pure loss (docs/lab.md)."""
FRAMEWORK_LEVERS = ("buckets", "forward prefetch", "backward prefetch", "resharding", "reduce-scatter group")
_Change = dict[str, Any]
"""Fields to replace in a Policy."""
_WAITS_FOR_MEMORY = glob_regex(MEMORY_KERNELS)


@dataclass(frozen=True)
class Kernel:
    """A compute kernel of the job, per step."""

    name: str
    """As a person writes it."""
    symbol: str
    """As the driver knows it; rules are matched against this one."""
    launches: float
    beside: float
    """Launches made while a collective was in flight."""
    blocks_per_sm: int | None
    """Blocks of it that fit on an SM by themselves; None: unknown."""
    ms: float | None = None
    """All of its time; None: the tracer could not be used."""
    beside_ms: float | None = None
    """Its time that overlaps with collectives."""

    @property
    def can_be_shaped(self) -> bool:
        """Whether fewer resident blocks are possible and could help."""
        return (self.blocks_per_sm or 1) > 1 and _WAITS_FOR_MEMORY.fullmatch(self.symbol) is None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The profile of a job, taken before anything is tried."""

    launches: bool = True
    """Whether launches can be changed: the shim is in the process and a GPU is used."""
    collectives: float = 0.0
    """Collective kernels per step."""
    ctas: int | None = None
    """CTAs that a collective takes now; None: unknown."""
    cta_choices: tuple[int, ...] = ()
    """Other numbers of CTAs that the running job can be switched to."""
    most_ctas: int = 0
    """The largest number that fits."""
    why_no_ctas: str = ""
    """Why there are none."""
    framework: Mapping[str, Sequence[_Change]] = field(default_factory=dict)
    """Changes of DDP or FSDP2 models that the running job allows, by lever."""
    cta_choices_at_start: tuple[int, ...] = ()
    """Where there are none: numbers that the job could be started with."""
    kernels: tuple[Kernel, ...] = ()
    span_ms: float | None = None
    """A step, as the tracer recorded it; None: it could not be used."""
    comm_ms: float | None = None
    """Communication in a step."""
    exposed_ms: float | None = None
    """Communication during which no compute kernel runs."""
    world: int = 1
    """Ranks of the job."""
    ranks_at_work: int = 1
    """Processes that take part in tuning."""
    workload: str = ""
    """What distinguishes this job from others in the store."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Facts:
        kernels = tuple(Kernel(**kernel) for kernel in document["kernels"])
        choices = {name: tuple(document[name]) for name in ("cta_choices", "cta_choices_at_start")}
        return cls(**{**document, "kernels": kernels, **choices})

    @property
    def beside(self) -> tuple[Kernel, ...]:
        """Compute kernels that overlap with collectives: the longest, or the most frequent, first."""
        return tuple(sorted((k for k in self.kernels if self.weight(k) > 0), key=lambda k: -self.weight(k)))

    def weight(self, kernel: Kernel) -> float:
        """How much of a kernel overlaps with collectives: in ms, or in launches where times are not known."""
        return kernel.beside if self.comm_ms is None else kernel.beside_ms or 0.0

    @property
    def shares_the_gpu(self) -> bool:
        """Whether a relevant share of compute overlaps with collectives, as far as that is known."""
        if self.comm_ms is None:
            return True
        return sum(map(self.weight, self.kernels)) > BESIDE_SHARE * self.comm_ms


def merge(facts: Iterable[Facts]) -> Facts:
    """What holds for the job as a whole: a choice must be there on every rank, a kernel on any of them."""
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
        kernels=tuple(kernels.values()),
        span_ms=slowest.span_ms,
        comm_ms=slowest.comm_ms,
        exposed_ms=slowest.exposed_ms,
        ranks_at_work=len(everyone),
    )


def search_stages(facts: Facts, default: Policy) -> list[list[_Change]]:
    """What to try, stage by stage, as changes of the best policy so far; one stage for each of LEVERS."""
    return [changes for lever in LEVERS if (changes := lever(facts, default))]


def cta_changes(facts: Facts, default: Policy) -> list[_Change]:
    """Other numbers of CTAs that the running job can be switched to."""
    # Fewer CTAs leave more to overlapping compute, and help nobody where there is none.
    counts = [c for c in facts.cta_choices if facts.shares_the_gpu or c > (facts.ctas or 0)]
    return [{"max_ctas": count} for count in counts]


def launch_changes(facts: Facts, default: Policy) -> list[_Change]:
    """Head start and priority, each alone and both."""
    if not (facts.launches and facts.collectives and facts.shares_the_gpu):
        return []
    head: _Change = {"head_start_us": HEAD_START_US if default.head_start_us == 0 else 0.0}
    first: _Change = {"priority": "high" if default.priority == "default" else "default"}
    return [head, first, {**head, **first}]


def block_changes(facts: Facts, default: Policy) -> list[_Change]:
    """Residency of the kernels that overlap most, unless the job was started with residencies of its own."""
    shaped_already = default.residency is not None or default.rules
    return residency_changes(facts) if facts.launches and facts.shares_the_gpu and not shaped_already else []


def framework_lever(name: str) -> Callable[[Facts, Policy], list[_Change]]:
    """The changes of DDP or FSDP2 models under this name, unless the job was started with some."""

    def changes(facts: Facts, default: Policy) -> list[_Change]:
        return [] if default.changes_framework else [dict(change) for change in facts.framework.get(name, ())]

    return changes


LEVERS: tuple[Callable[[Facts, Policy], list[_Change]], ...] = (
    cta_changes,
    launch_changes,
    block_changes,
    *map(framework_lever, FRAMEWORK_LEVERS),
)
"""What can be changed in a running job, the most effective in our measurements first.

A new lever is a function here. Its changes must be ones that `Controls.apply` can make at a step boundary on
every rank; numbers of CTAs are prepared on all ranks before they are tried.
"""


def preparations(policy: Policy) -> frozenset[tuple[str, Any]]:
    """What all ranks must make before a policy can be applied, and what is slow when it is first used."""
    found: set[tuple[str, Any]] = {("ctas", policy.max_ctas)}
    if policy.bucket_mb is not None or policy.first_bucket_mb is not None:
        found.add(("buckets", (policy.bucket_mb, policy.first_bucket_mb)))
    if policy.reduce_scatter_group:
        found.add(("reduce-scatter group", True))
    return frozenset(found)


def beyond(facts: Facts, best: Policy) -> list[dict[str, Any]]:
    """Where the best number of CTAs is the largest or smallest that was tried: one step further."""
    count = best.max_ctas
    if count is None or count not in facts.cta_choices:
        return []
    further = round(count * 4 / 3) if count == max(facts.cta_choices) else 0
    if count == min(facts.cta_choices) and count < (facts.ctas or 0):
        further = count // 2
    return [{"max_ctas": further}] if 1 <= further <= facts.most_ctas else []


def residency_changes(facts: Facts) -> list[dict[str, Any]]:
    """One block less and half of them, for the kernels that overlap most, one kernel at a time.

    The kernel gets it by the policy's default and the others are excepted by name, not the other way round:
    the shim then still spares launches whose whole grid is resident at once, and whose blocks may wait for
    each other.
    """
    changes = []
    shaped = [kernel for kernel in facts.beside if kernel.can_be_shaped]
    least = SHAPED_SHARE * sum(map(facts.weight, facts.kernels))
    for kernel in [kernel for kernel in shaped if facts.weight(kernel) >= least][:SHAPED_KERNELS]:
        natural = kernel.blocks_per_sm or 1
        others = [pattern(k.symbol) for k in shaped]
        globs = (g for g in (*MEMORY_KERNELS, *others) if not glob_regex([g]).fullmatch(kernel.symbol))
        spared = tuple(Rule(glob, None) for glob in globs)[:MAX_RULES]
        for count in sorted({natural - 1, natural // 2}, reverse=True):
            changes.append({"when": "overlap", "residency": count, "rules": spared})
    return changes


def pattern(name: str) -> str:
    """A rule's pattern for exactly this kernel, as far as a pattern's length allows."""
    plain = "".join("?" if c in "*?[]" else c for c in name)
    if len(plain.encode()) <= MAX_PATTERN_BYTES:
        return plain
    return plain.encode()[: MAX_PATTERN_BYTES - 1].decode(errors="ignore") + "*"


def explain(facts: Facts) -> list[dict[str, Any]]:
    """By kernel: how much of it overlaps with collectives, and what could be done about it."""
    rows = []
    total = sum(map(facts.weight, facts.kernels))
    for kernel in facts.beside[:12]:
        if (kernel.blocks_per_sm or 1) <= 1:
            what = "one block per SM: residency cannot be shaped"
        elif not kernel.can_be_shaped:
            what = "waits for memory: fewer blocks would be pure loss"
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
