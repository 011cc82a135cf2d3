"""Checks bucket and prefetch settings by their effect on collectives, in a trace or a running job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from weft.doctor.check import Check
from weft.doctor.environment import check_environment
from weft.report import words

if TYPE_CHECKING:
    from weft.trace import Analysis

DEFAULT_BUCKET_BYTES = 25 << 20
"""Default of DistributedDataParallel's bucket_cap_mb."""
_SMALL_BYTES = 1 << 20
_MANY = 16
LARGE_BYTES = 100 << 20
EXPOSED_PCT = 20.0
_NEEDED = "needed_by_compute"


@dataclass(frozen=True)
class StepCalls:
    """Calls of one kind of collective in a step."""

    kind: str
    sizes: tuple[int, ...]
    """Bytes of each call."""
    exposed_pct: float | None = None
    """Exposed share of their time; None if unknown, as in a running job."""
    needed_pct: float = 0.0
    """Share of the exposed time in which the next compute kernel waits for the result."""


def traffic_checks(found: Sequence[StepCalls], where: str) -> list[Check]:
    """Findings about bucket sizes and prefetch, from the calls of a step."""
    by_kind = {one.kind: one for one in found if one.sizes}
    checks = []
    if "all_reduce" in by_kind:
        checks += _buckets(by_kind["all_reduce"], where)
    for kind, what in (("all_gather", "all-gathers"), ("reduce_scatter", "reduce-scatters")):
        if kind in by_kind:
            checks += _prefetch(by_kind[kind], what, where)
    return checks or [Check("buckets", "skip", f"{where}: no all-reduce, all-gather or reduce-scatter")]


def _buckets(one: StepCalls, where: str) -> list[Check]:
    count, typical = len(one.sizes), median(one.sizes)
    exposed = "" if one.exposed_pct is None else f", {one.exposed_pct:.0f}% of their time exposed"
    text = f"{where}: {count} all-reduces a step, {words.size(typical)} each (median){exposed}"
    if one.exposed_pct is not None and one.exposed_pct < EXPOSED_PCT:
        return [Check("buckets", "ok", text)]
    if count == 1 and one.sizes[0] >= LARGE_BYTES:
        fix = "smaller DDP buckets (bucket_cap_mb=25) start before the last gradient is ready"
        return [Check("buckets", "warn", f"{text}: one bucket cannot overlap with the backward pass", fix)]
    if count >= _MANY and typical < _SMALL_BYTES:
        fix = "larger buckets: DistributedDataParallel(bucket_cap_mb=25 or more), or a fused all-reduce"
        return [Check("buckets", "warn", f"{text}: start-up costs dominate such small calls", fix)]
    near = 0.5 * DEFAULT_BUCKET_BYTES <= typical <= 2 * DEFAULT_BUCKET_BYTES
    if count >= _MANY and near and one.exposed_pct is not None:
        fix = "compare bucket_cap_mb=25, 50, 100 and 200 (pytorch issue 118421), or `weft run --tune -- CMD`"
        return [Check("buckets", "warn", f"{text}: about DDP's default of 25 MiB", fix)]
    return [Check("buckets", "ok", text)]


def _prefetch(one: StepCalls, what: str, where: str) -> list[Check]:
    typical = words.size(median(one.sizes))
    text = f"{where}: {len(one.sizes)} {what} a step, {typical} each (median)"
    if one.exposed_pct is None:
        return [Check("prefetch", "ok", text)]
    text += f", {one.exposed_pct:.0f}% of their time exposed"
    if one.exposed_pct < EXPOSED_PCT or one.needed_pct < 50:
        return [Check("prefetch", "ok", text)]
    fix = (
        "prefetch: FSDP2 set_modules_to_forward_prefetch and set_modules_to_backward_prefetch, FSDP1 "
        "forward_prefetch=True"
        if one.kind == "all_gather"
        else "a process group of its own for reduce-scatters (FSDP2: set_separate_reduce_scatter_group)"
    )
    detail = f"{text}, {one.needed_pct:.0f}% of that because compute waits for them"
    return [Check("prefetch", "warn", detail, fix)]


def traffic_of_trace(analysis: Analysis) -> list[StepCalls]:
    """The calls of a mean step on the rank with the most exposed communication."""
    rank = max(analysis.ranks, key=lambda one: one.figures.exposed_ns)
    steps = max(1, len(rank.steps))
    found, why = rank.found, rank.attribution
    length = (rank.trace.timeline.end_ns - rank.trace.timeline.start_ns)[found.span]
    kinds = [found.kind[label] for label in found.label.tolist()]
    result = []
    for kind in dict.fromkeys(kinds):
        mine = [place for place, one in enumerate(kinds) if one == kind]
        sizes = sorted(int(found.bytes[place]) for place in mine if found.bytes[place] >= 0)
        total, exposed = float(length[mine].sum()), float(why.exposed_ns[mine].sum())
        chosen = why.exposed_ns >= 0
        chosen[:] = False
        chosen[mine] = True
        needed = float(why.reasons(chosen).get(_NEEDED, 0))
        a_step = tuple(sizes[::steps] if steps > 1 else sizes)
        result.append(
            StepCalls(
                kind,
                a_step,
                100 * exposed / total if total else 0.0,
                100 * needed / exposed if exposed else 0.0,
            )
        )
    return result


def trace_checks(paths: Sequence[Path]) -> list[Check]:
    """Findings about a job's settings, from a profiler trace."""
    from weft.trace import analyze

    return traffic_checks(traffic_of_trace(analyze(*paths)), "trace")


def job_checks(name: str) -> list[Check]:
    """Findings about a running job: its initial environment and its collectives."""
    from weft.monitor.calls import CallFile
    from weft.monitor.jobs import select_job
    from weft.monitor.processes import job_environments

    job = select_job(name)
    checks, seen = [], set()
    for env in job_environments(job):
        for check in check_environment(env):
            if check.name.startswith("env:") and check not in seen:
                seen.add(check)
                checks.append(check)
    for path in sorted(job.folder.glob("calls.*"))[:1]:
        file = CallFile(path)
        try:
            calls = file.calls_of_a_step()
        finally:
            file.close()
        kinds = dict.fromkeys(kind for kind, _ in calls)
        traffic = [StepCalls(kind, tuple(size for one, size in calls if one == kind)) for kind in kinds]
        checks += traffic_checks(traffic, f"job {job.name}")
    return checks or [
        Check("job", "ok", f"job {job.name}: no setting that disables overlap, no NCCL call yet")
    ]
