"""Which changes would shorten the step, by how much, why, and the command to try.

Only exposed communication on the critical path counts. The gain of a weft control comes from the simulator
(`weft.trace.replay`) and its GPU profile; the range is at most three percentage points of the step wide. For
a change to the program only the upper bound of the gain is known, so its range starts at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.policy import Policy
from weft.trace.blockers import Blocker, blockers
from weft.trace.ctas import observed_cta_changes
from weft.trace.names import short_name
from weft.trace.summary import duration

if TYPE_CHECKING:
    from weft.trace.analysis import RankAnalysis

WORTH_SHARE = 0.01
"""A change is advised if it is expected to save at least this share of the step."""

HALF_WIDTH = 0.015
"""Largest half-width of a range, as a share of the step; the model claims no more precision than that."""

_HEAD_START_US = 5
"""The head start with the largest gain on the H200; 40 µs already cost more than it saved."""

RESIDENCY_COST = 0.5
"""Overlapping compute takes this share longer with half of its resident blocks (0.53: Triton GEMMs, H200)."""

UNKNOWN_GPU_SHARE = 0.2
"""Share of a wait that a control saves if the GPU or kernel is unknown: the lowest measured on the H200."""


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    control: str
    """`priority`, `residency`, `head_start`, `min_ctas` or `max_ctas`; `program` for a change that only the
    program's author can make; `none` if there is nothing to gain."""
    title: str
    detail: str
    collective: str | None
    gain_us: tuple[float, float]
    """Lowest and highest expected saving per rank over this trace, in µs."""
    command: str | None
    evidence: str = ""
    """What the trace shows to support this."""
    step_us: float = 0.0
    """Step time, mean over ranks."""
    steps: int = 1
    """Steps in the trace."""
    of: str = "step"
    """What `step_us` measures: `step`, or `span` (the whole trace) if the trace marks no steps."""

    @property
    def step_ms(self) -> tuple[float, float]:
        """Lowest and highest expected saving per step, in ms."""
        low, high = self.gain_us
        return (round(low / self.steps / 1e3, 4), round(high / self.steps / 1e3, 4))

    @property
    def step_pct(self) -> tuple[float, float]:
        """Lowest and highest expected saving, in percent of the step."""
        low, high = (100 * 1e3 * ms / self.step_us if self.step_us else 0.0 for ms in self.step_ms)
        return (round(low, 2), round(high, 2))

    def to_json(self) -> dict[str, Any]:
        """The entry of `advice` in the document."""
        return {
            "control": self.control,
            "title": self.title,
            "detail": self.detail,
            "collective": self.collective,
            "gain_us": list(self.gain_us),
            "command": self.command,
            "step_ms": list(self.step_ms),
            "step_pct": list(self.step_pct),
            "evidence": self.evidence,
            "of": self.of,
        }


@dataclass(frozen=True)
class Step:
    """Span of the trace (mean over ranks) and its number of steps; ranges are relative to these."""

    span_us: float
    steps: int

    @property
    def us(self) -> float:
        return self.span_us / self.steps

    def range(self, expected_us: float, most_us: float) -> tuple[float, float]:
        """Range around the saving expected over the whole trace, within 0 and `most_us`."""
        half = HALF_WIDTH * self.span_us
        low = max(expected_us - half, expected_us / 2, 0.0)
        high = min(expected_us + half, 1.5 * expected_us, most_us)
        return (round(min(low, high), 1), round(high, 1))


def advise(ranks: Sequence[RankAnalysis]) -> list[Advice]:
    """What to try: weft's own controls, then changes to the program, each by expected saving; never empty."""
    step = Step(
        span_us=float(np.mean([rank.figures.span_ns for rank in ranks])) / 1e3,
        steps=max(max((len(rank.steps) for rank in ranks), default=1), 1),
    )
    floor_us = WORTH_SHARE * step.span_us

    def worth(found: list[tuple[float, Advice]]) -> list[Advice]:
        kept = [item for item in found if item[0] >= floor_us]
        return [item for _, item in sorted(kept, key=lambda pair: -pair[0])]

    controls = worth([*_for_waiting(ranks, step), *_for_ctas(ranks, step)])
    program = worth(_for_program(ranks, step))
    of = "step" if any(rank.steps for rank in ranks) else "span"
    return [replace(item, of=of) for item in (*(controls or [_nothing(ranks, step)]), *program)]


def saved_us(ranks: Sequence[RankAnalysis], *reasons: str) -> float:
    """Exposed µs of some reasons on the critical path, as mean over ranks."""
    return float(np.mean([sum(rank.path.reasons()[key] for key in reasons) for rank in ranks])) / 1e3


def mean_us(ranks: Sequence[RankAnalysis], reason: str) -> float:
    """Exposed µs of a reason, as mean over ranks."""
    return float(np.mean([rank.attribution.reasons()[reason] for rank in ranks])) / 1e3


def _for_waiting(ranks: Sequence[RankAnalysis], step: Step) -> list[tuple[float, Advice]]:
    """Controls for collectives that wait behind compute, chosen by the kernel that holds the SMs."""
    profile = profile_name(ranks)
    out = []
    for blocker in blockers(ranks):
        policy, flags = _control(blocker)
        if policy is None:
            continue
        expected = _expected_us(blocker, policy, profile)
        if blocker.control == "residency":
            overlap_us = float(np.mean([rank.figures.overlap_ns for rank in ranks])) / 1e3
            expected = max(expected - RESIDENCY_COST * overlap_us, 0.0)
        kernel = f"{short_name(blocker.kernel)[:80]} ({blocker.says})"
        evidence = (
            f"{blocker.collective} is ready but waits {duration(blocker.waited_us)} per rank behind "
            f"{kernel}; {duration(blocker.saved_us)} of that is exposed and on the critical path"
        )
        title, why = _TEXT[blocker.control]
        item = Advice(
            control=blocker.control,
            title=title.format(residency=blocker.residency),
            detail=f"{evidence}. {why}",
            collective=blocker.collective,
            gain_us=step.range(expected, blocker.exposed_us),
            command=_command(flags),
            evidence=evidence,
            step_us=step.us,
            steps=step.steps,
        )
        out.append((expected, item))
    return out


_TEXT = {
    "head_start": (
        "Give the collective a head start",
        "Nothing is preempted, so the collective has to be placed first.",
    ),
    "residency": (
        "Keep room: at most {residency} blocks per SM while a collective runs",
        "With fewer resident blocks, an SM drains sooner and becomes free for the collective. Memory-bound "
        "kernels slow down: if the job has any, limit only the others, by rules in a policy file.",
    ),
    "priority": (
        "Raise the priority of the collective",
        "As blocks of that kernel end, blocks of a high-priority collective take their place.",
    ),
}


def _control(blocker: Blocker) -> tuple[Policy | None, str]:
    if blocker.control == "head_start":
        policy = Policy(priority="high", head_start_us=_HEAD_START_US)
        return policy, f"--priority high --head-start {_HEAD_START_US}"
    if blocker.control == "residency":
        policy = Policy(priority="high", residency=blocker.residency, when="overlap")
        return policy, f"--priority high --residency {blocker.residency} --when overlap"
    if blocker.control == "priority":
        return Policy(priority="high"), "--priority high"
    return None, ""


def _expected_us(blocker: Blocker, policy: Policy, profile: str | None) -> float:
    """Expected saving per rank in µs: each wait is simulated, and what compute loses is subtracted."""
    if profile is None or blocker.says.startswith("its resources"):
        return UNKNOWN_GPU_SHARE * blocker.saved_us
    from weft.trace.replay import saving  # loads the simulator, which few traces need

    total = 0.0
    each_rank = blocker.calls / max(len(blocker.waits), 1)
    for wait, saved in blocker.waits:
        outcome = saving(wait, policy, profile)
        total += outcome.share * saved - max(outcome.compute_later_ns, 0.0) / 1e3 * each_rank
    return max(total, 0.0)


def profile_name(ranks: Sequence[RankAnalysis]) -> str | None:
    """Name of the simulator's profile of the GPU in the trace; None if there is none."""
    from weft.errors import WeftError
    from weft.sim.profile import by_title

    try:
        return by_title(ranks[0].trace.device_name).name if ranks else None
    except WeftError:
        return None


def _for_ctas(ranks: Sequence[RankAnalysis], step: Step) -> list[tuple[float, Advice]]:
    """More CTAs for collectives that a cap slows down; fewer if they cost compute time and gain nothing."""
    profile = profile_name(ranks)
    out = []
    for change in observed_cta_changes(ranks, profile) if profile else []:
        item = Advice(
            control=change.control,
            title=change.title,
            detail=f"{change.evidence}. {change.why}",
            collective=None,
            gain_us=step.range(change.expected_us, change.most_us),
            command=_command("", change.setting),
            evidence=change.evidence,
            step_us=step.us,
            steps=step.steps,
        )
        out.append((change.expected_us, item))
    return out


def _for_program(ranks: Sequence[RankAnalysis], step: Step) -> list[tuple[float, Advice]]:
    """Changes to the program, for time that no weft control can recover.

    Only the upper bound of the gain is known: the range goes from 0 to all of that time on the critical path.
    """

    def item(us: float, title: str, detail: str, command: str | None = None) -> tuple[float, Advice]:
        said = f"{duration(us)} per rank on the critical path"
        gain = (0.0, round(us, 1))
        return us, Advice(
            "program", title, detail.format(said=said), None, gain, command, said, step.us, step.steps
        )

    kinds = _kinds_needed(ranks)
    return [
        item(
            saved_us(ranks, "launched_late"),
            "Launch earlier",
            "{said} is exposed because the CPU launches late: use CUDA graphs or torch.compile, larger "
            "batches, or issue the collective before other work.",
        ),
        item(
            saved_us(ranks, "queue_full"),
            "Issue the collective before the kernels that fill the queue",
            "{said} is exposed because the queue to the GPU was full when the collective was issued: issue "
            "it first, or use CUDA graphs, which take one entry.",
        ),
        item(saved_us(ranks, "slower_rank"), "Balance the ranks", _slowest(ranks)),
        item(
            saved_us(ranks, "pipeline_bubble"),
            "Shrink the pipeline bubble",
            "{said} passes in receives that wait for another stage: more micro-batches, an interleaved "
            "schedule, or stages of equal length.",
        ),
        item(
            saved_us(ranks, "same_stream"),
            "Move the collectives off the compute stream",
            "{said} is communication on the stream that computes, where nothing can overlap with it: use "
            "async_op=True with a wait where the result is needed, or fuse the collective with its GEMM "
            "(`weft explore`, weft.ops).",
        ),
        item(
            saved_us(ranks, "needed_by_compute"),
            "Issue communication earlier, or in smaller pieces",
            f"{{said}} passes while the next compute waits for the result. {_earlier(kinds)}",
        ),
        item(
            saved_us(ranks, "waits_for_input", "nothing_to_hide_behind"),
            "Give the collectives something to overlap with",
            "{said} runs after the compute that makes its input, with no other compute left: smaller "
            "buckets start earlier, and the next step's input pipeline or optimizer could run meanwhile.",
        ),
    ]


def _kinds_needed(ranks: Sequence[RankAnalysis]) -> str:
    """The kind of collective that compute waits for longest."""
    totals: dict[str, int] = {}
    for rank in ranks:
        needed = rank.attribution.of("needed_by_compute")
        for kind, ns in zip(np.array(rank.found.kind, dtype=object)[rank.found.label], needed, strict=True):
            totals[kind] = totals.get(kind, 0) + int(ns)
    return max(totals, key=lambda kind: totals[kind]) if totals else ""


def _earlier(kind: str) -> str:
    return {
        "all_gather": "Prefetch (FSDP2: set_modules_to_forward_prefetch and the one for backward), or "
        "keep parameters gathered with reshard_after_forward=False.",
        "all_reduce": "Smaller DDP buckets (bucket_cap_mb) start before the last gradient is there; tensor "
        "parallelism can fuse the collective with its GEMM (`weft explore`, weft.ops).",
        "reduce_scatter": "A communicator of its own for reduce-scatter lets it run next to the all-gathers.",
        "all_to_all": "Split the batch in two, so that one half computes while the other communicates.",
    }.get(
        kind, "Prefetching, or fusing the collective with its GEMM (`weft explore`, weft.ops), changes that."
    )


def _slowest(ranks: Sequence[RankAnalysis]) -> str:
    said = "{said} passes inside collectives, waiting for a rank that enters later"
    waits = [rank.attribution.reasons()["slower_rank"] for rank in ranks]
    last = ranks[int(np.argmin(waits))].trace
    if len(ranks) > 1 and last.rank is not None and max(waits) > 0:
        said += f"; rank {last.rank} waits least, so it is the one the others wait for most"
    return said + ". Even out the work, or the input pipeline."


def _nothing(ranks: Sequence[RankAnalysis], step: Step) -> Advice:
    exposed = float(np.mean([rank.figures.exposed_ns for rank in ranks])) / 1e3
    behind = mean_us(ranks, "behind_compute")
    on_path = saved_us(ranks, "behind_compute")
    comm = sum(rank.figures.comm_ns for rank in ranks)
    if not comm:
        why = "No communication was found. If a kernel of yours communicates, name it with --comm."
    elif exposed < WORTH_SHARE * step.span_us:
        share = 100 * exposed / step.span_us if step.span_us else 0.0
        why = f"Only {duration(exposed)} per rank is exposed, {share:.1f}% of the span."
    else:
        part = f"only {duration(behind)}" if behind >= 1 else "nothing"
        why = (
            f"Of {duration(exposed)} exposed per rank {part} waited behind compute, which is what priority, "
            "residency and a head start can change"
        )
        why += f"; {duration(on_path)} of it is on the critical path." if behind >= 1 else "."
    title = "Nothing to gain from weft's controls"
    return Advice("none", title, why, None, (0.0, 0.0), None, why, step.us, step.steps)


def _command(flags: str, setting: str = "") -> str:
    return " ".join(f"{setting} weft run {flags} --stats weft-stats.json -- CMD".split())
