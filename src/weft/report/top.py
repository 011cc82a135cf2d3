"""One frame of `weft top`: the jobs of a sample as lines that fit a terminal of any size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from weft.monitor.sample import JobSample, RankSample, TopSample

NO_JOB = "no running job of this user; start one with `weft run -- CMD`"
LINES_OF_A_JOB = 4
"""Most lines of a job, not counting its ranks."""
_BOLD, _DIM, _GREEN, _YELLOW, _RED, _END = (
    "\x1b[1m",
    "\x1b[2m",
    "\x1b[32m",
    "\x1b[33m",
    "\x1b[31m",
    "\x1b[0m",
)
_STATE = {"running": _GREEN, "ended": _DIM, "killed": _RED}
_COLUMNS = (
    ("rank", 5),
    ("pid", 8),
    ("step ms", 9),
    ("p10-p90", 15),
    ("steps", 8),
    ("launch/s", 9),
    ("coll/s", 8),
    ("bytes/s", 9),
    ("CTAs", 5),
    ("policy", 0),
)


@dataclass(frozen=True)
class Screen:
    """The terminal that a frame must fit."""

    width: int = 80
    height: int = 24
    colour: bool = False
    offset: int = 0
    """First rank to show if not all ranks fit; first line to show if not all jobs fit."""


def top_frame(sample: TopSample, screen: Screen) -> list[str]:
    """The lines of a frame, within the screen's height and width."""
    when = time.strftime("%H:%M:%S", time.localtime(sample.time))
    count = f"{len(sample.jobs)} job{'s' * (len(sample.jobs) != 1)}"
    lines = [_line(screen, f"weft top  {count}  {when}", "q quit, arrows scroll", style=_BOLD)]
    if not sample.jobs:
        lines.append(_line(screen, NO_JOB))
    room = screen.height - len(lines) - sum(4 if job.tuning else 3 for job in sample.jobs)
    for job, share in zip(sample.jobs, _shares(room, sample.jobs), strict=True):
        first = max(0, min(screen.offset, len(job.ranks) - share))
        some = (
            f"ranks {first}-{first + share - 1} of {len(job.ranks)}  " if 0 < share < len(job.ranks) else ""
        )
        lines += _head(job, some, screen)
        lines += _table(job.ranks, first, share, screen)
    hidden = max(0, len(lines) - screen.height)  # more jobs than fit: scroll below the first line
    return (lines[:1] + lines[1 + min(screen.offset, hidden) :])[: screen.height]


def _shares(room: int, jobs: Sequence[JobSample]) -> list[int]:
    """Number of rank lines of each job: shared evenly, at most as many as it has ranks."""
    wanted = [len(job.ranks) for job in jobs]
    given = [0] * len(jobs)
    while room > 0 and any(g < w for g, w in zip(given, wanted, strict=True)):
        for i, (has, needs) in enumerate(zip(given, wanted, strict=True)):
            if has < needs and room > 0:
                given[i] += 1
                room -= 1
    return given


def _head(job: JobSample, some: str, screen: Screen) -> list[str]:
    lasts = "" if job.elapsed_s is None else f" {_duration(job.elapsed_s)}"
    title = f"{job.job}  {job.state}{lasts}  {some}{job.command}"
    lines = [_line(screen, title, style=_STATE[job.state])]
    step = "step unknown" if job.step_ms is None else f"step {_number(job.step_ms)} ms"
    if job.step_spread_pct is not None:
        step += f" (10-90%: {job.step_spread_pct:.1f}%)"
    parts = [
        step,
        f"{_rate(job.launches_per_s)} launches/s",
        f"{_rate(job.collectives_per_s)} collectives/s",
        f"{_bytes(job.comm_bytes_per_s)}/s",
    ]
    parts += [] if job.exposed_pct is None else [f"exposed {job.exposed_pct:.1f}%"]
    parts.append(f"policy {job.policy_label}")
    lines.append(_line(screen, "  " + "  ".join(parts)))
    if job.tuning is not None:
        doing = f"  tuning {job.tuning.phase}"
        doing += f", now {job.tuning.trying}" if job.tuning.trying else ""
        doing += f": {job.tuning.text}" if job.tuning.text else ""
        lines.append(_line(screen, doing, style=_YELLOW))
    return lines


def _table(ranks: Sequence[RankSample], first: int, room: int, screen: Screen) -> list[str]:
    if not ranks:
        return [_line(screen, "  no rank has started, or none can be seen yet", style=_DIM)]
    if room <= 0:
        return [_line(screen, f"  {len(ranks)} ranks: the terminal is too small", style=_DIM)]
    title = "".join(name.rjust(width) if width else f"  {name}" for name, width in _COLUMNS)
    lines = [_line(screen, title, style=_DIM)]
    for rank in ranks[first : first + room]:
        cells = _cells(rank)
        text = "".join(
            cell.rjust(width) if width else f"  {cell}"
            for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
        )
        lines.append(_line(screen, text, style="" if rank.alive else _DIM))
    return lines


def _cells(rank: RankSample) -> list[str]:
    known = rank.step_p10_ms is not None and rank.step_p90_ms is not None
    spread = f"{_number(rank.step_p10_ms)}-{_number(rank.step_p90_ms)}" if known else "-"
    return [
        "-" if rank.rank is None else str(rank.rank),
        str(rank.pid),
        _number(rank.step_ms),
        spread,
        "-" if rank.steps is None else str(rank.steps),
        _rate(rank.launches_per_s),
        _rate(rank.collectives_per_s),
        _bytes(rank.comm_bytes_per_s),
        "-" if rank.ctas is None else str(rank.ctas),
        rank.policy if rank.alive else f"{rank.policy} (ended)".strip(),
    ]


def _line(screen: Screen, left: str, right: str = "", style: str = "") -> str:
    """A line without control characters, truncated to the width; `right` only if it fits."""
    clean = "".join(c if c.isprintable() else "?" for c in left)
    if right and cell_len(clean) + len(right) + 2 <= screen.width:
        clean = set_cell_size(clean, screen.width - len(right)) + right
    elif cell_len(clean) > screen.width:
        clean = set_cell_size(clean, screen.width)
    return f"{style}{clean}{_END}" if style and screen.colour else clean


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.1f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}B"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
