"""The candidates of `weft tune`: which policies are worth a race, from what the kernels allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from weft.gpu.occupancy import blocks_per_sm, shared_bytes_for
from weft.gpu.specs import GpuSpec
from weft.policy import Policy, Rule
from weft.workload import DTYPE_BYTES, TRITON_KINDS, Compute, Workload

GEMM = "weft_gemm"  # the name of our Triton GEMM as the driver knows it
PROMISING = 12  # candidates that a model ranks first
NEAR_BEST = 1.02  # times the model's best: it cannot tell these apart
HEAD_START_US = 5.0  # enough for a collective's blocks to be placed first; 40 already costs on an H200


@dataclass(frozen=True)
class Candidate:
    """One way to run a workload."""

    label: str
    policy: Policy = field(default_factory=Policy)
    mode: str = "overlap"


SEQUENTIAL = Candidate("sequential", mode="sequential")
PLAIN = Candidate("overlap")


def candidates(
    workload: Workload, gpu: GpuSpec | None, baseline_ctas: int, most_ctas: int, *, engines: bool = False
) -> list[Candidate]:
    """Sequential and plain overlap first, then every combination of the controls that can matter.

    `gpu`: whose limits decide on residency (None: unknown, residency is left alone). `most_ctas`: how many
    blocks of each rank's collective are resident at once. `engines`: copy engines can move the bytes.
    """
    found = [SEQUENTIAL, PLAIN]
    ctas = (None, *cta_choices(baseline_ctas, most_ctas))
    residencies = (None, *(residency_choices(workload.compute, gpu) if gpu else ()))
    for count, residency, head, priority in product(
        ctas, residencies, (0.0, HEAD_START_US), ("default", "high")
    ):
        rules = (Rule(GEMM, residency),) if residency else ()
        policy = Policy(priority=priority, head_start_us=head, max_ctas=count, rules=rules)
        if not policy.is_neutral:
            found.append(Candidate(label(policy), policy))
    if engines and workload.collective in ("all_gather", "all_to_all"):
        found.append(Candidate("dma", Policy(engine="dma")))
    return found


def promising(
    tried: Sequence[Candidate], predict: Callable[[Candidate], float], most: int = PROMISING
) -> list[Candidate]:
    """Those worth a measurement, by a model's times: the first `most`, and a safety set.

    The safety set is what no model may rule out: the baselines (the first two), and every control alone.
    """
    rest = [c for c in tried[2:] if not _alone(c)]
    times = {c.label: predict(c) for c in rest}
    least = min(times.values(), default=0.0)
    ranked = sorted(rest, key=lambda c: times[c.label])
    first = [c for c in ranked[:most] if times[c.label] <= NEAR_BEST * least or c in ranked[: most // 2]]
    return [c for number, c in enumerate(tried) if number < 2 or _alone(c) or c in first]


def _alone(candidate: Candidate) -> bool:
    return "+" not in candidate.label


def for_kernel(policy: Policy, pattern: str) -> Policy:
    """A policy found with our GEMM, for kernels of another program, there only while a collective runs."""
    if not policy.rules:
        return policy
    rules = tuple(Rule(pattern, rule.residency) if rule.kernel == GEMM else rule for rule in policy.rules)
    return replace(policy, rules=rules, when="overlap")


def cta_choices(baseline: int, most: int) -> Iterator[int]:
    """Half, one and a half times and twice as many as the library would take."""
    for count in (baseline // 2, baseline + baseline // 2, 2 * baseline):
        if 1 <= count <= most and count != baseline:
            yield count


def residency_choices(compute: Compute, gpu: GpuSpec) -> list[int]:
    """Fewer blocks per SM than fit by themselves; only for our GEMM, whose shared memory can be raised.

    Library kernels of today have one block per SM, and for kernels bound by memory fewer is pure loss.
    """
    if compute.kind not in TRITON_KINDS:
        return []
    threads, registers, shared = launch_size(compute, gpu)
    natural = blocks_per_sm(gpu, threads, registers, shared)
    wanted = sorted({natural - 1, natural - 2, natural // 2} - {natural}, reverse=True)
    possible = [n for n in wanted if n >= 1 and shared_bytes_for(gpu, threads, registers, shared, n)]
    return possible[:3]


def launch_size(compute: Compute, gpu: GpuSpec) -> tuple[int, int, int]:
    """Threads, registers per thread (estimated) and shared bytes of a block of our GEMM."""
    tile_m, tile_n, tile_k = compute.tile or (64, 64, 64)
    threads = compute.warps * gpu.warp_size
    registers = min(255, tile_m * tile_n // threads + 40)
    return threads, registers, compute.stages * (tile_m + tile_n) * tile_k * DTYPE_BYTES[compute.dtype]


def label(policy: Policy) -> str:
    """A short name: `priority+res3+head5+ctas12`."""
    parts = ["priority"] if policy.priority == "high" else []
    parts += [f"res{rule.residency}" for rule in policy.rules if rule.residency]
    parts += [f"res{policy.residency}"] if policy.residency else []
    parts += [f"head{policy.head_start_us:g}"] if policy.head_start_us else []
    parts += [f"ctas{policy.max_ctas}"] if policy.max_ctas else []
    parts += [f"reserve{policy.sm_reserve}"] if policy.sm_reserve else []
    parts += ["dma"] if policy.engine == "dma" else []
    return "+".join(parts) or "overlap"
