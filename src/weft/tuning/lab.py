"""Find the best policy for a workload on an executor: choose candidates, race them, reach a verdict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.comm.node import load_node
from weft.errors import WeftError
from weft.execute.base import Executor, References
from weft.execute.sim import GHOST, SimExecutor
from weft.gpu.presets import GPU_PRESETS
from weft.gpu.specs import GpuSpec
from weft.measure.race import ROUNDS, race
from weft.measure.result import RaceEntry, RaceResult
from weft.policy import Policy
from weft.sim.fabric import default_topology
from weft.sim.profile import by_title
from weft.tuning.candidates import Candidate, candidates, promising
from weft.tuning.tuned_workload import TIE, TunedWorkload
from weft.tuning.verdict import Measured, Verdict
from weft.workload import BASELINE_CTAS, DTYPE_BYTES, Workload

_log = logging.getLogger(__name__)

COMPUTE_ALONE = Candidate("compute alone", mode="compute")
COMM_ALONE = Candidate("collective alone", mode="comm")
SIMULATED_GAIN = 0.02
"""A simulated gain below this share is within the model's error and does not justify a change."""


def choose_candidates(
    executor: Executor, workload: Workload, *, before: Policy | None = None, every: bool = False
) -> tuple[list[Candidate], int]:
    """The candidates to race, and how many more a simulated GPU ruled out.

    `before`: the winner of an earlier run; on a real GPU it is always raced again. `every`: rule nothing out.
    """
    if isinstance(executor, SimExecutor):
        spec, most = executor.profile.spec, executor.most_ctas(workload)
        here = workload.ranks if executor.ghost else 1
        possible = candidates(workload, spec, executor.ctas, most, here)
        if _copies(executor, workload):
            possible.append(Candidate.of(Policy(engine="dma")))
        return [c for c in possible if _can_run(executor, c.policy)], 0
    info = executor.info()
    title, sms = str(info.get("gpu", "")), int(info.get("sm_count") or 0)
    ghost = "ghost" in str(info.get("ranks"))
    here = workload.ranks if ghost else 1
    baseline, most = BASELINE_CTAS, sms // workload.ranks
    if info.get("node"):  # on a node, CTAs can only be lowered
        baseline = most = node_ctas(str(info["node"]), workload)
    possible = candidates(workload, _preset(title), baseline, most, here)
    if info.get("node") and workload.collective == "all_gather":  # see `_copies`: only all-gathers
        copies = load_node(str(info["node"])).copies(workload.collective, workload.ranks)
        possible += [Candidate.of(Policy(engine="dma"))] if copies else []
    likely = possible if every else _likely(title, ghost, workload, possible)
    ruled_out = len(possible) - len(likely)
    if before is not None and before not in [c.policy for c in likely]:
        likely = [*likely, Candidate.of(before)]
    return likely, ruled_out


def node_ctas(name: str, workload: Workload) -> int:
    """Default CTAs of the workload's collective on the named node."""
    size = workload.elements * DTYPE_BYTES[workload.compute.dtype]
    return load_node(name).collective(workload.collective, size, ranks=workload.ranks).ctas


def _can_run(executor: SimExecutor, policy: Policy) -> bool:
    """Whether `weft run` could apply a policy to the simulated GPU.

    On a node the library chooses its CTA count, and weft can only lower it. HIP has no head start, and
    rocBLAS has no setting that limits its compute units.
    """
    more_ctas = not executor.ghost and (policy.max_ctas or 0) > executor.ctas
    cuda_only = policy.head_start_mode != "none" or policy.sm_reserve > 0
    return not more_ctas and (executor.profile.spec.vendor == "nvidia" or not cuda_only)


def _copies(executor: SimExecutor, workload: Workload) -> bool:
    """Whether copy engines could run the collective under `weft run`: only all-gathers over NVSwitch.

    Programs' all-to-alls do not use symmetric windows, and copy engines cannot reduce.
    """
    spec = executor.profile.spec
    linked = spec.link_kind == "nvlink" and default_topology(spec) == "nvswitch"
    return workload.collective == "all_gather" and linked and not executor.ghost


def _likely(title: str, ghost: bool, workload: Workload, possible: list[Candidate]) -> list[Candidate]:
    """The candidates that a simulation of this GPU does not rule out; all of them if there is no model."""
    try:
        model = by_title(title)
        simulated = SimExecutor(model.name + (GHOST if ghost else ""), model=model)
        return promising(possible, lambda c: simulated.measure(workload, c.policy, c.mode).ms)
    except WeftError as error:  # the model does not support this GPU or workload
        _log.debug("no candidate is ruled out by simulation: %s", error)
        return list(possible)


def _preset(title: str) -> GpuSpec | None:
    """The preset of a real GPU, by its marketing name; None if there is none: residency is not tried then."""
    words = title.lower().replace("-", " ").split()
    return next((gpu for name, gpu in GPU_PRESETS.items() if name.split("-")[0] in words), None)


def tune_workload(
    executor: Executor,
    workload: Workload,
    tried: Sequence[Candidate],
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    deadline_s: float | None = None,
    on_sample: Callable[[int, float | None], None] | None = None,
    ranked_out: int = 0,
) -> TunedWorkload:
    """Race the candidates; the first two must be sequential and plain overlap.

    A simulated GPU has no noise, so one round suffices. Raises the executor's error if a baseline cannot run
    at all. `ranked_out`: how many candidates a model ruled out before; only recorded in the result.
    """
    once = executor.simulated
    result = race(
        [*tried, COMPUTE_ALONE, COMM_ALONE],
        lambda c: executor.measure(workload, c.policy, c.mode).ms,
        baselines=(0, 1),
        aside=(len(tried), len(tried) + 1),
        rounds=1 if once else rounds,
        min_rounds=1 if once else 3,
        confirm=0 if once else 5,
        seed=seed,
        deadline_s=deadline_s,
        clock=getattr(executor, "clock", time.monotonic),  # ranks must agree on when time is up
        on_sample=on_sample,
    )
    return replace(_conclude(executor, workload, result, len(tried)), ranked_out=ranked_out)


def _conclude(
    executor: Executor, workload: Workload, result: RaceResult[Candidate], count: int
) -> TunedWorkload:
    entries = result.entries
    for entry in (*entries[:2], *entries[count:]):
        if entry.error is not None:
            raise entry.error
    sequential, overlap, compute, comm = entries[0], entries[1], entries[count], entries[count + 1]
    baseline, chosen = result.best_baseline, result.chosen
    if chosen is None or baseline is None:
        raise WeftError(f"{workload}: nothing could be measured on {executor.device}; see `weft doctor`")
    once = executor.simulated
    if once:
        chosen = _simplest(entries[:count], chosen)
        if entries[chosen].ms > (1 - SIMULATED_GAIN) * entries[baseline].ms:
            chosen = baseline
    applies = chosen not in result.baselines
    best = entries[chosen if applies else baseline]
    middle, low, high = result.ratio(chosen) if applies else (1.0, 1.0, 1.0)
    verdict = Verdict(
        source="simulator" if once else "lab",
        policy=best.candidate.policy if applies else Policy(),
        chosen=best.candidate.label,
        applies=applies,
        gain_pct=100 * (1 - middle),
        gain_ci_pct=(100 * (1 - high), 100 * (1 - low)),
        best_ms=best.ms,
        baseline_ms=entries[baseline].ms,
        baseline="sequential" if baseline == 0 else "plain overlap",
        reason=""
        if applies
        else why_left_alone(result, "the model's error" if executor.simulated else "noise"),
        measurements=result.measurements,
        candidates=tuple(map(Measured.of, entries[:count])),
    )
    _log.debug("%s on %s: %s", workload, executor.device, verdict.text)
    references = References(sequential.ms, compute.ms, comm.ms, workload.iterations)
    return TunedWorkload(
        verdict=verdict,
        device=executor.device,
        workload=workload,
        overlap_ms=overlap.ms,
        sequential_ms=references.sequential_ms,
        ideal_ms=references.ideal_ms,
    )


def why_left_alone(result: RaceResult[Candidate], within: str) -> str:
    """Why a race ended with a baseline: how close the others came. `within`: what could hide a small gain."""
    if result.unconfirmed is not None:
        return f"{result.entries[result.unconfirmed].candidate.label} was ahead, but not when measured again"
    skip = {*result.baselines, *result.aside}
    others = [entry for i, entry in enumerate(result.entries) if i not in skip]
    found = result.nearest()
    if found is None:
        return f"no candidate can run here ({others[0].problem})" if others else "no control can matter here"
    first, change = found
    how = f"within {within}" if change < 0 else "no gain"
    return f"nearest: {result.entries[first].candidate.label}, {100 * change:+.1f}%, {how}"


def _simplest(entries: Sequence[RaceEntry[Candidate]], chosen: int) -> int:
    """Index of the candidate with the fewest controls among those within TIE of the chosen one."""
    near = [i for i, e in enumerate(entries) if e.ms <= entries[chosen].ms * (1 + TIE)]
    return min(near, key=lambda i: (entries[i].candidate.policy.controls, entries[i].ms))
