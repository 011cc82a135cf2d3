"""CTAs of collectives: where a cap slows collectives down, and where fewer CTAs would cost nothing.

All CTAs together move at most the `bus_gb_s` of the simulator's GPU profile. The saving from faster
collectives is computed by moving every span (`weft.trace.faster`), less the SM time they take from compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.sim.profile import SimFigures, profile
from weft.timeline import Kind, union
from weft.trace.faster import with_faster_collectives
from weft.trace.summary import duration

if TYPE_CHECKING:
    from weft.trace.analysis import RankAnalysis

_LARGE_BYTES = 4 << 20
"""NCCL itself uses fewer CTAs for smaller messages, so those do not reveal a cap."""

NEAR_LIMIT = 0.8
"""A collective that reaches this share of the links' bandwidth gains nothing from more CTAs."""

COSTLY_PCT = 15.0
"""If a collective slows compute down by more than this, fewer CTAs are worth trying."""

CTA_SCALING = 0.78
"""Bandwidth grows with this power of the number of CTAs while compute runs too: measured on an H200 from the
times of all-reduce, all-gather and reduce-scatter kernels at 4 and 12 CTAs in eight jobs (0.68 to 0.89)."""


@dataclass(frozen=True)
class CtaChange:
    """A change of the number of CTAs. Times in µs per rank over the trace."""

    control: str
    """`min_ctas` or `max_ctas`."""
    title: str
    evidence: str
    why: str
    setting: str
    """Environment variables that make the change."""
    expected_us: float
    most_us: float


def observed_cta_changes(ranks: Sequence[RankAnalysis], profile_name: str) -> list[CtaChange]:
    """Changes of the number of CTAs that the trace has evidence for."""
    figures, sms = profile(profile_name).figures, profile(profile_name).spec.sms
    large = _large(ranks)
    if large is None:
        return []
    more = _raised(ranks, figures, sms, large)
    fewer = _lowered(ranks, figures, large.ctas)
    return [change for change in (more, fewer) if change is not None]


@dataclass(frozen=True)
class _Large:
    """The large NCCL collectives of a run."""

    ctas: int
    speed: float | None
    """Bus bandwidth in GB/s; None if sizes are unknown."""
    share: float
    """Their share of communication time."""
    at_once: float
    """How many run at the same time, on average: several groups, or several ranks on one GPU."""


def _raised(ranks: Sequence[RankAnalysis], figures: SimFigures, sms: int, large: _Large) -> CtaChange | None:
    """NCCL_MIN_CTAS, if large collectives all run on fewer CTAs than NCCL uses by default on this GPU."""
    usual, ctas, speed, share = int(figures.comm_ctas), large.ctas, large.speed, large.share
    limit = figures.bus_gb_s
    if ctas >= usual or (speed is not None and speed >= NEAR_LIMIT * limit):
        return None
    ratio = min((usual / ctas) ** CTA_SCALING, limit / speed if speed else limit / figures.cta_gb_s)
    # Only large collectives take more CTAs, so only their share of communication gets faster.
    ratio = 1 / (1 - share + share / max(ratio, 1.0))
    saved = []
    for rank in ranks:
        run = with_faster_collectives(rank.trace, rank.found, rank.matched.last_entered_ns, ratio)
        held = run.overlap_ns * usual - rank.figures.overlap_ns * ctas
        saved.append(run.saved_ns - max(held, 0) * large.at_once / sms)
    return CtaChange(
        control="min_ctas",
        title=f"Let large collectives take {usual} SMs",
        evidence=(
            f"large collectives run on {ctas} CTAs each, where NCCL takes {usual} on this GPU by itself: a "
            f"cap (NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS or a communicator's configuration)"
            + (f"; they reach {speed:.0f} of {limit:.0f} GB/s" if speed else "")
        ),
        why=(
            f"Raise the cap to {usual}; where none is set, NCCL_MIN_CTAS asks for as many. It costs compute "
            "those SMs while a collective runs."
        ),
        setting=f"NCCL_MIN_CTAS={usual} NCCL_MAX_CTAS={usual}",
        expected_us=max(float(np.mean(saved)) / 1e3, 0.0),
        most_us=float(np.mean([rank.figures.exposed_ns for rank in ranks])) / 1e3,
    )


def _lowered(ranks: Sequence[RankAnalysis], figures: SimFigures, ctas: int) -> CtaChange | None:
    """NCCL_MAX_CTAS, if collectives slow compute down and half of their CTAs have the same bandwidth."""
    fewer = ctas // 2
    lost = float(np.mean([sum(price.lost_ns for price in rank.prices) for rank in ranks])) / 1e3
    alone = float(np.mean([sum(p.beside * p.alone_ns for p in rank.prices) for rank in ranks])) / 1e3
    if fewer < 1 or not alone or 100 * lost / alone <= COSTLY_PCT:
        return None
    if fewer * figures.cta_gb_s < figures.bus_gb_s:
        return None  # fewer CTAs would slow the collective down
    on_path = np.mean([min(rank.path.compute_ns / max(rank.figures.compute_ns, 1), 1.0) for rank in ranks])
    return CtaChange(
        control="max_ctas",
        title=f"Let collectives take only {fewer} SMs",
        evidence=(
            f"kernels take {100 * lost / alone:.0f}% longer while a collective runs, "
            f"{duration(lost)} per rank"
        ),
        why=f"Its {ctas} CTAs take SMs from them, and {fewer} carry as much over the links.",
        setting=f"NCCL_MAX_CTAS={fewer}",
        expected_us=lost / 2 * float(on_path),
        most_us=lost,
    )


def _large(ranks: Sequence[RankAnalysis]) -> _Large | None:
    """None if there is no large collective, or if their CTAs differ more than a cap explains."""
    blocks: list[int] = []
    bus_bytes = time_ns = large_ns = comm_ns = covered_ns = 0.0
    for rank in ranks:
        timeline, found = rank.trace.timeline, rank.found
        nccl = np.array(["nccl" in name.lower() for name in timeline.names], dtype=bool)
        start, end = timeline.start_ns[found.span], timeline.end_ns[found.span]
        length = end - start
        large = nccl[timeline.name[found.span]] & (timeline.resources["blocks"][found.span] > 0)
        large &= (found.bytes >= _LARGE_BYTES) & np.isin(timeline.kind[found.span], (Kind.COMM,))
        blocks += timeline.resources["blocks"][found.span][large].tolist()
        sized = large & ~np.isnan(found.bus_bytes)
        bus_bytes += float(found.bus_bytes[sized].sum())
        time_ns += float(length[sized].sum())
        large_ns += float(length[large].sum())
        covered_ns += union(start[large], end[large]).total_ns
        comm_ns += float(length.sum())
    if not blocks or max(blocks) > 1.25 * float(np.median(blocks)):
        return None
    return _Large(
        ctas=int(np.median(blocks)),
        speed=bus_bytes / time_ns if time_ns else None,
        share=large_ns / comm_ns,
        at_once=large_ns / max(covered_ns, 1.0),
    )
