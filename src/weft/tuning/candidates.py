"""Candidates: the policies worth trying, their labels, the CTA ladder and the standard head start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from weft.gpu.occupancy import blocks_per_sm, shared_bytes_for, tile_launch_size
from weft.gpu.specs import GpuSpec
from weft.policy import Policy
from weft.rules import Rule
from weft.workload import TRITON_KINDS, Compute, Workload

GEMM = "weft_gemm"  # the driver's name for our Triton GEMM
CUBLAS = "gemm"  # the kind of compute that runs in cuBLAS
_PROMISING = 12  # how many of the model's top-ranked candidates to keep
NEAR_BEST = 1.02  # times within this factor of the model's best: the model cannot tell them apart
HEAD_START_US = 5.0  # enough for a collective's blocks to be placed first; 40 already costs time on an H200
_HEAD_STARTS: tuple[dict[str, Any], ...] = ({}, {"head_start_us": HEAD_START_US}, {"head_start": "placed"})
CTA_LADDER = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Candidate:
    """A policy under test, with its label."""

    label: str
    policy: Policy = field(default_factory=Policy)
    mode: str = "overlap"

    @classmethod
    def of(cls, policy: Policy) -> Candidate:
        """Overlap under this policy; the label names its controls."""
        return cls(policy.label, policy)


SEQUENTIAL = Candidate("sequential", mode="sequential")
PLAIN = Candidate("overlap")


def candidates(
    workload: Workload, gpu: GpuSpec | None, baseline_ctas: int, most_ctas: int, ranks_here: int = 1
) -> list[Candidate]:
    """Sequential and plain overlap first, then every combination of the controls that can matter.

    Includes only policies that `weft run` can apply. `gpu`: its limits determine the residencies to try; None
    if the GPU is unknown, then none is tried. `most_ctas`: how many blocks of each rank's collective can be
    resident at once. `ranks_here`: how many ranks share the GPU.
    """
    found = [SEQUENTIAL, PLAIN]
    ctas = (None, *cta_choices(baseline_ctas, most_ctas))
    residencies = (None, *(residency_choices(workload.compute, gpu) if gpu else ()))
    for count, residency, head, priority in product(ctas, residencies, _HEAD_STARTS, ("default", "high")):
        rules = (Rule(GEMM, residency),) if residency else ()
        policy = Policy(priority=priority, max_ctas=count, rules=rules, **head)
        if not policy.is_neutral:
            found.append(Candidate.of(policy))
    if workload.compute.kind == CUBLAS:
        for count in ctas:
            held = ranks_here * (count or baseline_ctas)
            if held < (gpu.sms if gpu else most_ctas) / 2:
                found.append(Candidate.of(Policy(max_ctas=count, sm_reserve=held)))
    return found


def promising(
    tried: Sequence[Candidate], predict: Callable[[Candidate], float], most: int = _PROMISING
) -> list[Candidate]:
    """The candidates worth measuring: up to `most` that a model predicts to be fastest, and a safety set.

    The safety set, which no model may rule out, holds the baselines (the first two) and all policies with a
    single control.
    """
    rest = [c for c in tried[2:] if c.policy.controls > 1]
    times = {c.label: predict(c) for c in rest}
    least = min(times.values(), default=0.0)
    ranked = sorted(rest, key=lambda c: times[c.label])
    first = [c for c in ranked[:most] if times[c.label] <= NEAR_BEST * least or c in ranked[: most // 2]]
    return [c for number, c in enumerate(tried) if number < 2 or c.policy.controls <= 1 or c in first]


def for_kernel(policy: Policy, pattern: str) -> Policy:
    """Rewrite a policy found with our GEMM for another program's kernels, in force during collectives."""
    if not policy.rules:
        return policy
    rules = tuple(Rule(pattern, rule.residency) if rule.kernel == GEMM else rule for rule in policy.rules)
    return replace(policy, rules=rules, when="overlap")


def cta_choices(now: int, most: int) -> tuple[int, ...]:
    """Other CTA counts worth trying: the highest rung up to half of `now`, and the rungs up to 8/3 of it."""
    fewer = max((count for count in CTA_LADDER if count <= now // 2), default=0)
    more = [count for count in CTA_LADDER if now < count <= now * 8 / 3]
    return tuple(count for count in (fewer, *more) if 1 <= count <= most)


def residency_choices(compute: Compute, gpu: GpuSpec) -> list[int]:
    """Residencies below the natural one; only for our GEMM, whose shared memory can be raised.

    Current library kernels have one block per SM; memory-bound kernels only get slower with fewer blocks.
    """
    if compute.kind not in TRITON_KINDS:
        return []
    threads, registers, shared = tile_launch_size(gpu, compute)
    natural = blocks_per_sm(gpu, threads, registers, shared)
    wanted = sorted({natural - 1, natural - 2, natural // 2} - {natural}, reverse=True)
    possible = [n for n in wanted if n >= 1 and shared_bytes_for(gpu, threads, registers, shared, n)]
    return possible[:3]
