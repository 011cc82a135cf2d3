"""Which controls could hide what is exposed, what they could gain, and the command to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.timeline import Kind
from weft.trace.blockers import blockers
from weft.trace.model import HEAD_START_US, predict
from weft.trace.names import short_name

if TYPE_CHECKING:
    from weft.trace.analysis import RankAnalysis

WORTH_SHARE = 0.01
"""A control is advised if it could recover at least this share of the span."""

FEW_CTAS = 16
"""A collective on fewer SMs than this may be faster on more; NCCL takes 16 to 24 on a Hopper node."""

COSTLY_PCT = 15.0
"""Compute that slows down more than this beside a collective is worth fewer CTAs."""


@dataclass(frozen=True)
class Advice:
    """One thing to try. `gain_us` is the least and most that it could save per rank of this trace, in µs."""

    control: str
    """`priority`, `residency`, `head_start` or `max_ctas`; `program` for what only its author can change;
    `none` for nothing to gain."""
    title: str
    detail: str
    collective: str | None
    gain_us: tuple[float, float]
    command: str | None

    def to_json(self) -> dict[str, Any]:
        """The entry of `advice` in the document."""
        return {
            "control": self.control,
            "title": self.title,
            "detail": self.detail,
            "collective": self.collective,
            "gain_us": list(self.gain_us),
            "command": self.command,
        }


def advise(ranks: Sequence[RankAnalysis]) -> list[Advice]:
    """What to try, weft's own controls first, each group by what it could gain; never empty."""
    span_us = float(np.mean([rank.figures.span_ns for rank in ranks])) / 1e3
    floor_us = WORTH_SHARE * span_us
    found = [*_for_waiting(ranks), *_for_ctas(ranks)]
    controls = sorted((a for a in found if a.gain_us[1] >= floor_us), key=lambda a: -a.gain_us[1])
    program = sorted(
        (a for a in _for_program(ranks) if a.gain_us[1] >= floor_us), key=lambda a: -a.gain_us[1]
    )
    return [*(controls or [_nothing(ranks, span_us)]), *program]


def mean_us(ranks: Sequence[RankAnalysis], cause: str) -> float:
    """Exposed µs of a cause, as mean over ranks."""
    return float(np.mean([rank.attribution.totals()[cause] for rank in ranks])) / 1e3


def _for_waiting(ranks: Sequence[RankAnalysis]) -> list[Advice]:
    """Controls against what waits behind compute, by the kind of kernel it waits for."""
    out = []
    for blocker in blockers(ranks):
        gain = predict(blocker)
        beside = f"{short_name(blocker.kernel)[:80]} ({blocker.says})"
        waits = f"{blocker.collective} is ready but waits {blocker.waited_us:.0f} µs per rank behind {beside}"
        if blocker.control == "head_start":
            title = "Give the collective a head start"
            detail = f"{waits}. Nothing is preempted, so the collective has to be placed first."
            flags = f"--priority high --head-start {HEAD_START_US}"
        elif blocker.control == "residency":
            title = f"Keep room: at most {blocker.residency} blocks per SM while a collective runs"
            detail = (
                f"{waits}. With fewer resident blocks an SM drains sooner and goes to the collective. "
                "Memory-bound kernels lose by it: if some do, give rules per kernel in a policy file."
            )
            flags = f"--priority high --residency {blocker.residency} --when overlap"
        elif blocker.control == "priority":
            title = "Raise the priority of the collective"
            detail = f"{waits}. As its blocks end, a collective of high priority takes their place."
            flags = "--priority high"
        else:
            continue
        out.append(Advice(blocker.control, title, detail, blocker.collective, gain, _command(flags)))
    return out


def _for_ctas(ranks: Sequence[RankAnalysis]) -> list[Advice]:
    """More SMs for a collective that is slow and bare, fewer for one that slows compute down."""
    out = []
    ctas = _ctas(ranks)
    if not ctas:
        return []
    bare_us = mean_us(ranks, "nothing_to_hide_behind")
    comm_us = float(np.mean([rank.figures.comm_ns for rank in ranks])) / 1e3
    if ctas < FEW_CTAS and bare_us > 0.1 * comm_us:
        more = min(2 * ctas, FEW_CTAS)
        detail = (
            f"Collectives run on {ctas} SMs, and {bare_us:.0f} µs per rank have nothing to hide behind: more "
            "SMs may make them faster. It costs compute those SMs."
        )
        gain = (0.0, round(bare_us * (1 - ctas / more), 1))
        out.append(
            Advice("max_ctas", f"Let collectives take {more} SMs", detail, None, gain, _command("", more))
        )
    lost_us = float(np.mean([sum(max(p.lost_ns, 0) for p in rank.prices) for rank in ranks])) / 1e3
    alone_us = float(np.mean([sum(p.beside * p.alone_ns for p in rank.prices) for rank in ranks])) / 1e3
    if ctas >= 4 and alone_us and 100 * lost_us / alone_us > COSTLY_PCT and bare_us < lost_us:
        detail = (
            f"Kernels take {100 * lost_us / alone_us:.0f}% longer beside a collective, {lost_us:.0f} µs per "
            f"rank; its {ctas} CTAs take SMs and bandwidth from them. It makes the collective slower."
        )
        gain = (0.0, round(lost_us / 2, 1))
        fewer = max(ctas // 2, 1)
        title = f"Let collectives take only {fewer} SMs"
        out.append(Advice("max_ctas", title, detail, None, gain, _command("", fewer)))
    return out


def _ctas(ranks: Sequence[RankAnalysis]) -> int:
    """The blocks of most NCCL or RCCL kernels, 0 if unknown."""
    blocks = []
    for rank in ranks:
        timeline = rank.trace.timeline
        nccl = np.array(["nccl" in name.lower() for name in timeline.names], dtype=bool)
        mine = (timeline.kind == Kind.COMM) & nccl[timeline.name] & (timeline.resources["blocks"] > 0)
        blocks += timeline.resources["blocks"][mine].tolist()
    return int(np.median(blocks)) if blocks else 0


def _for_program(ranks: Sequence[RankAnalysis]) -> list[Advice]:
    """What no control of weft can change."""
    late, slow = mean_us(ranks, "launched_late"), mean_us(ranks, "slower_rank")
    bare = mean_us(ranks, "nothing_to_hide_behind")
    return [
        Advice(
            "program",
            "Launch earlier",
            f"{late:.0f} µs per rank are exposed because the CPU launches late: use CUDA graphs or "
            "torch.compile, larger batches, or issue the collective before other work.",
            None,
            (0.0, round(late, 1)),
            None,
        ),
        Advice("program", "Balance the ranks", _slowest(ranks, slow), None, (0.0, round(slow, 1)), None),
        Advice(
            "program",
            "Give the collectives something to hide behind",
            f"{bare:.0f} µs per rank run while no compute is ready: it depends on them, or none is left. "
            "Prefetching, smaller buckets, or fusing a collective with its GEMM (`weft explore`, weft.ops) "
            "change that.",
            None,
            (0.0, round(bare, 1)),
            None,
        ),
    ]


def _slowest(ranks: Sequence[RankAnalysis], slow_us: float) -> str:
    said = f"{slow_us:.0f} µs per rank pass inside collectives, waiting for a rank that enters later"
    waits = [rank.attribution.totals()["slower_rank"] for rank in ranks]
    last = ranks[int(np.argmin(waits))].trace
    if len(ranks) > 1 and last.rank is not None and max(waits) > 0:
        said += f"; rank {last.rank} waits least, so it is the one the others wait for most"
    return said + ". Even out the work, or the input pipeline."


def _nothing(ranks: Sequence[RankAnalysis], span_us: float) -> Advice:
    exposed = float(np.mean([rank.figures.exposed_ns for rank in ranks])) / 1e3
    behind = mean_us(ranks, "behind_compute")
    comm = sum(rank.figures.comm_ns for rank in ranks)
    if not comm:
        why = "No communication was found. If a kernel of yours communicates, name it with --comm."
    elif exposed < WORTH_SHARE * span_us:
        why = f"Only {exposed:.0f} µs per rank are exposed, {100 * exposed / span_us:.1f}% of the span."
    else:
        why = (
            f"Of {exposed:.0f} exposed µs per rank only {behind:.0f} µs waited behind compute, which is what "
            "priority, residency and a head start can change."
        )
    return Advice("none", "Nothing to gain from weft's controls", why, None, (0.0, 0.0), None)


def _command(flags: str, ctas: int | None = None) -> str:
    start = f"NCCL_MAX_CTAS={ctas} " if ctas else ""
    return " ".join(f"{start}weft run {flags} --stats weft-stats.json -- CMD".split())
