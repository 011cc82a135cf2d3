"""Levers: what can be changed in a running job, ordered by possible gain; negligible ones are left out.

The traced costs bound each lever's gain: exposed all-reduces bound buckets, exposed all-gathers bound
prefetching, slowed compute bounds fewer CTAs and SMs kept free, late placement bounds a head start. A lever
whose bound is negligible is not tried; the others get steps in proportion to their bounds. If the costs are
unknown, all levers are tried in the order of LEVERS: the most effective in our measurements first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from weft.kernels import glob_regex
from weft.policy import MAX_RULES, Policy
from weft.rules import MAX_PATTERN_BYTES, CommRule, Rule
from weft.tuning.candidates import HEAD_START_US
from weft.tuning.live.costs import CommCosts
from weft.tuning.live.options import MEMORY_KERNELS, Facts, PolicyChange

SHAPED_KERNELS = 2  # kernels whose residency is tried; each costs several steps of the job
SHAPED_SHARE = 0.1  # least share of the time that overlaps with collectives for a kernel worth shaping
LEAST_BOUND = 0.003  # share of a step: a lever that can win less is not tried
_SMALL_BYTES = 1 << 20  # collectives up to this size are bound by latency, not bandwidth
SETTLE = {
    "ctas": 1,
    "reduce-scatter group": 1,
    "rules": 1,
    "copy engines": 1,
    "buckets": 2,
}  # steps that do not count after the first use
AFTER_CTAS = ("SMs kept free", "rules by kind and size")
"""Levers whose effect depends on the number of CTAs; if tried first, they may hide the effect of CTAs."""
LIBRARY_GEMMS = glob_regex(("*nvjet*", "*xmma*gemm*", "*cublas*", "cutlass*gemm*", "*gemm*cutlass*"))
"""cuBLAS GEMMs, which can leave SMs free."""


@dataclass(frozen=True)
class LeverStage:
    """A lever of this job: changes to the best policy so far, tried in alternation."""

    lever: str
    changes: list[PolicyChange] = field(default_factory=list)
    bound_ms: float | None = None
    """The most that the lever can win per step; None if unknown."""


def search_stages(facts: Facts, default: Policy) -> list[LeverStage]:
    """The levers to try, in order."""
    stages = [
        LeverStage(lever.name, changes, lever.bound(facts, facts.costs) if facts.costs else None)
        for lever in LEVERS
        if (changes := lever.changes(facts, default))
    ]
    least = LEAST_BOUND * (facts.span_ms or 0.0)
    worth = [stage for stage in stages if stage.bound_ms is None or stage.bound_ms > least]
    of_ctas = next((stage.bound_ms or 0.0 for stage in worth if stage.lever == "CTAs"), math.inf)

    def bound(stage: LeverStage) -> float:
        return min(stage.bound_ms or 0.0, of_ctas if stage.lever in AFTER_CTAS else math.inf)

    return sorted(worth, key=lambda stage: -bound(stage))  # stable: equal bounds keep the order of LEVERS


def share_of(stage: LeverStage, later: Sequence[LeverStage]) -> float:
    """Share of the remaining steps that a stage may use, by the cost of trying it and its possible gain."""
    stages = (stage, *later)
    bounds = [one.bound_ms or 0.0 for one in stages]
    mean = fmean(bounds)
    known = mean > 0 and all(one.bound_ms is not None for one in stages)
    weights = [
        cost_of(one) * (0.5 + 0.5 * bound / mean if known else 1.0)
        for one, bound in zip(stages, bounds, strict=True)
    ]
    return weights[0] / sum(weights)


def cost_of(stage: LeverStage) -> int:
    """Steps that a stage's first round takes."""
    new = {one for change in stage.changes for one in preparations(Policy(**change))} - preparations(Policy())
    return 1 + len(stage.changes) + sum(SETTLE[kind] for kind, _ in new)


# --- changes ------------------------------------------------------------------------------------------------


def cta_changes(facts: Facts, default: Policy) -> list[PolicyChange]:
    """Other CTA counts that the running job can switch to."""
    # Fewer CTAs leave more SMs to overlapping compute; if no compute overlaps, they cannot help.
    counts = [c for c in facts.cta_choices if facts.shares_the_gpu or c > (facts.ctas or 0)]
    return [{"max_ctas": count} for count in counts]


def launch_changes(facts: Facts, default: Policy) -> list[PolicyChange]:
    """Head start (timed, or until collectives are placed) and priority."""
    if not (facts.launches and facts.collectives and facts.shares_the_gpu):
        return []
    modes: dict[str, PolicyChange] = {
        "none": {"head_start": None, "head_start_us": 0.0},
        "timed": {"head_start": None, "head_start_us": HEAD_START_US},
        "placed": {"head_start": "placed", "head_start_us": 0.0},
    }
    heads = [change for mode, change in modes.items() if mode != default.head_start_mode]
    first: PolicyChange = {"priority": "high" if default.priority == "default" else "default"}
    return [*heads, first, {**heads[-1], **first}]


def reserve_changes(facts: Facts, default: Policy) -> list[PolicyChange]:
    """SMs that library GEMMs leave free; not in deterministic jobs, as cuBLAS may choose other kernels."""
    gemms = any(LIBRARY_GEMMS.fullmatch(kernel.symbol) for kernel in facts.beside)
    if not (facts.launches and facts.ctas and gemms) or facts.deterministic or default.sm_reserve:
        return []
    ghosts = facts.ranks_at_work == 1 and not facts.one_rank_per_gpu
    sharing = max(1, facts.world) if ghosts else 1
    return [{"sm_reserve": facts.ctas * sharing}]


def rule_changes(facts: Facts, default: Policy) -> list[PolicyChange]:
    """CTAs for one kind or size class of collectives, and the protocol of small ones."""
    if not facts.rules or default.comm_rules or not facts.ctas:
        return []
    small = [(kind, size) for kind, size, _ in facts.calls if size <= _SMALL_BYTES]
    large = {kind for kind, size, _ in facts.calls if size > _SMALL_BYTES}
    rules: list[CommRule] = []
    if small and large:
        top = max(size for _, size in small)
        rules.append(CommRule(max_bytes=top, ctas=2))
        rules.append(CommRule(max_bytes=top, protocol="ll"))
    elif small:
        rules.append(CommRule(max_bytes=_SMALL_BYTES, protocol="ll"))
    if {"all_gather", "reduce_scatter"} <= large and facts.ctas > 1:
        rules += [
            CommRule(collective=kind, ctas=facts.ctas // 2) for kind in ("reduce_scatter", "all_gather")
        ]
    return [{"comm_rules": (rule,)} for rule in rules]


def block_changes(facts: Facts, default: Policy) -> list[PolicyChange]:
    """Residency of the kernels that overlap most, unless the job was started with a residency policy."""
    shaped_already = default.residency is not None or default.rules
    return residency_changes(facts) if facts.launches and facts.shares_the_gpu and not shaped_already else []


def framework_changes(name: str) -> Callable[[Facts, Policy], list[PolicyChange]]:
    """Changes to DDP or FSDP2 models under this name, unless the job's default already has some."""

    def changes(facts: Facts, default: Policy) -> list[PolicyChange]:
        return [] if default.changes_framework else [dict(change) for change in facts.framework.get(name, ())]

    return changes


def engine_changes(facts: Facts, default: Policy) -> list[PolicyChange]:
    """Copy engines for FSDP2's all-gathers, if all ranks can use them."""
    return [] if default.engine == "dma" else framework_changes("copy engines")(facts, default)


# --- bounds -------------------------------------------------------------------------------------------------

Bound = Callable[[Facts, CommCosts], float]


def _exposed(costs: CommCosts, *kinds: str) -> float:
    return sum(ms for kind, ms in costs.exposed_ms.items() if not kinds or kind in kinds)


def cta_bound(facts: Facts, costs: CommCosts) -> float:
    """More CTAs shorten exposed time, at most in proportion; fewer undo the slowdown of compute."""
    now, most = facts.ctas or 1, max(facts.cta_choices, default=1)
    fewer = costs.slowed_ms if min(facts.cta_choices, default=now) < now else 0.0
    return max(_exposed(costs) * max(0.0, 1 - now / most), fewer)


def launch_bound(facts: Facts, costs: CommCosts) -> float:
    """Earlier placement hides communication that would be exposed at the end, and halves the slowdown."""
    return min(costs.late_ms, _exposed(costs)) + costs.slowed_ms / 2


def block_bound(facts: Facts, costs: CommCosts) -> float:
    return min(costs.late_ms, _exposed(costs)) + costs.slowed_ms


def bucket_bound(facts: Facts, costs: CommCosts) -> float:
    """Communication exposed after the backward pass."""
    return _exposed(costs, "all_reduce", "reduce_scatter", "other")


def gather_bound(facts: Facts, costs: CommCosts) -> float:
    """Communication exposed before the modules that wait for parameters."""
    return _exposed(costs, "all_gather")


def resharding_bound(facts: Facts, costs: CommCosts) -> float:
    """Skipping the second all-gather saves its exposed time and the SMs that it holds."""
    return _exposed(costs, "all_gather") + costs.slowed_ms


def group_bound(facts: Facts, costs: CommCosts) -> float:
    """All-gathers and reduce-scatters that wait for each other."""
    return _exposed(costs, "all_gather", "reduce_scatter")


def engine_bound(facts: Facts, costs: CommCosts) -> float:
    """Copies neither wait for SMs nor take any from compute; the links are no faster."""
    return _exposed(costs, "all_gather") + costs.slowed_ms


def rule_bound(facts: Facts, costs: CommCosts) -> float:
    return _exposed(costs) + costs.slowed_ms


@dataclass(frozen=True)
class Lever:
    """Something that can be changed in a running job."""

    name: str
    changes: Callable[[Facts, Policy], list[PolicyChange]]
    bound: Bound


LEVERS = (
    Lever("CTAs", cta_changes, cta_bound),
    Lever("head start and priority", launch_changes, launch_bound),
    Lever("SMs kept free", reserve_changes, block_bound),
    Lever("buckets", framework_changes("buckets"), bucket_bound),
    Lever("forward prefetch", framework_changes("forward prefetch"), gather_bound),
    Lever("backward prefetch", framework_changes("backward prefetch"), gather_bound),
    Lever("resharding", framework_changes("resharding"), resharding_bound),
    Lever("reduce-scatter group", framework_changes("reduce-scatter group"), group_bound),
    Lever("copy engines", engine_changes, engine_bound),
    Lever("rules by kind and size", rule_changes, rule_bound),
    Lever("residency", block_changes, block_bound),
)
"""`Controls.apply` must be able to make a lever's changes at a step boundary on every rank."""


def preparations(policy: Policy) -> frozenset[tuple[str, Any]]:
    """What all ranks must create before a policy can be applied, or what is slow at its first use."""
    found: set[tuple[str, Any]] = {("ctas", policy.max_ctas)}
    if policy.bucket_mb is not None or policy.first_bucket_mb is not None:
        found.add(("buckets", (policy.bucket_mb, policy.first_bucket_mb)))
    if policy.reduce_scatter_group:
        found.add(("reduce-scatter group", True))
    if policy.comm_rules:
        found.add(("rules", policy.comm_rules))
    if policy.engine == "dma":
        found.add(("copy engines", True))
    return frozenset(found)


def beyond(facts: Facts, best: Policy) -> list[PolicyChange]:
    """One further CTA count, if the best one so far is the largest or smallest that was tried."""
    count = best.max_ctas
    if count is None or count not in facts.cta_choices:
        return []
    further = round(count * 4 / 3) if count == max(facts.cta_choices) else 0
    if count == min(facts.cta_choices) and count < (facts.ctas or 0):
        further = count // 2
    return [{"max_ctas": further}] if 1 <= further <= facts.most_ctas else []


def residency_changes(facts: Facts) -> list[PolicyChange]:
    """One resident block fewer, and half as many, for each of the kernels that overlap most.

    The policy sets the residency as its default and exempts all other kernels by name, not the other way
    round: this way the shim still skips launches whose whole grid is resident at once, because their blocks
    may wait for each other.
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
    """A rule's pattern for exactly this kernel, shortened if it exceeds the length limit."""
    plain = "".join("?" if c in "*?[]" else c for c in name)
    if len(plain.encode()) <= MAX_PATTERN_BYTES:
        return plain
    return plain.encode()[: MAX_PATTERN_BYTES - 1].decode(errors="ignore") + "*"
