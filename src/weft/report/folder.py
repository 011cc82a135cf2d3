"""One page with all results of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.errors import WeftError
from weft.report.build import Part, analysis_part, bench_part, comparison_parts, tune_part
from weft.report.drawing import MAX_JSON_BYTES
from weft.report.explore import explore_part, losses_part
from weft.report.find import Result
from weft.report.page import render
from weft.report.plan_page import plan_part
from weft.report.reading import Document, number, records, text
from weft.report.reproduce import reproduction_part
from weft.reproduce.figure import Reproduction
from weft.timeline import Timeline
from weft.tuning.tuned_workload import TunedWorkload

NO_TIMELINE = "No timeline: the traces are not where they were, or were analyzed with other options."


def folder_page(results: Sequence[Result]) -> str:
    """The page of `weft report`."""
    parts: list[Part] = []
    for result in results:
        parts += _parts(result, MAX_JSON_BYTES // len(results))
    return render(parts)


def _parts(result: Result, max_bytes: int) -> Sequence[Part]:
    if result.kind == "analysis":
        timelines = find_timelines(result.document, result.path.parent)
        part = analysis_part(result.document, timelines, max_bytes=max_bytes)
        return [part if timelines else replace(part, warnings=(*part.warnings, NO_TIMELINE))]
    if result.kind == "comparison":
        sides = [find_timelines(result.document[key], result.path.parent) for key in ("before", "after")]
        return comparison_parts(result.document, *sides, max_bytes=max_bytes)
    if result.kind == "plan":
        return [plan_part(result.document)]
    if result.kind == "tune":
        return [tune_part(TunedWorkload.from_dict(result.document))]
    if result.kind == "explore":
        return [explore_part(result.document)]
    if result.kind == "losses":
        return [losses_part(result.document)]
    if result.kind == "reproduction":
        return [reproduction_part(Reproduction.from_dict(result.document))]
    return [bench_part(result.document)]


def find_timelines(document: Document, folder: Path) -> list[Timeline]:
    """The timelines of an analysis, from its trace files; empty unless all exist and match its figures."""
    found: list[Timeline] = []
    for rank in records(document, "ranks"):
        timeline = _timeline(rank, folder)
        if timeline is None:
            return []
        found.append(timeline)
    return found


def _timeline(rank: Document, folder: Path) -> Timeline | None:
    from weft.trace import formats

    path = next((p for p in (Path(text(rank, "path")), folder / text(rank, "path")) if p.is_file()), None)
    if path is None:
        return None
    try:
        traces = formats.read(path)
    except (WeftError, OSError):
        return None
    return next((trace.timeline for trace in traces if _is_of(trace.timeline, rank)), None)


def _is_of(timeline: Timeline, rank: Document) -> bool:
    """Whether a timeline has exactly a rank's figures, to the nanosecond."""
    figures = timeline.figures()
    pairs = (
        (figures.span_ns, "span_us"),
        (figures.compute_ns, "compute_us"),
        (figures.comm_ns, "comm_us"),
        (figures.overlap_ns, "overlap_us"),
    )
    return all(round(1000 * (number(rank, key) or 0.0)) == ns for ns, key in pairs)
