"""Builds the parts of a page from documents, ready for the templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TypeVar

from weft.report import analysis, bench, compare, details, tune, words
from weft.report.charts import Chart, is_simulated
from weft.report.drawing import MAX_JSON_BYTES, Drawing, draw
from weft.report.heat import Heat, heat
from weft.report.occupancy import Picture
from weft.report.parts import Bar, Card, Table
from weft.report.reading import Document, record, records, text
from weft.timeline import Ns, Timeline
from weft.tuning.tuned_workload import TunedWorkload

AnyPart = TypeVar("AnyPart", bound="Part")
MAX_DRAWN = 24
"""Most ranks whose timelines are drawn; more would make the page slow and hard to navigate."""
_NO_TABLE = Table("", (), ())


@dataclass(frozen=True, kw_only=True)
class Part:
    """One result on a page."""

    template: str
    title: str
    sentence: str
    contents: tuple[tuple[str, str], ...]
    """Identifier and label of the sections, for the page's navigation."""
    id: str = "part"
    subtitle: str = ""
    simulated: bool = False
    warnings: tuple[str, ...] = ()
    drawing: Drawing | None = None
    what_is_drawn: str = ""
    stream_table: Table = _NO_TABLE
    exposed_table: Table = _NO_TABLE
    heat: Heat | None = None

    def numbered(self, position: int) -> Part:
        """A copy with a unique identifier."""
        return replace(self, id=f"part{position}")


@dataclass(frozen=True, kw_only=True)
class AnalysisPart(Part):
    """The result of `weft analyze`."""

    cards: tuple[Card, ...]
    legend: tuple[tuple[str, str, str], ...]
    rank_bars: tuple[Bar, ...]
    ranks_left_out: int
    collective_bars: tuple[Bar, ...]
    collective_table: Table
    step_table: Table
    module_table: Table
    price_table: Table
    price_sentence: str
    advice: tuple[analysis.AdviceItem, ...]


@dataclass(frozen=True, kw_only=True)
class BenchPart(Part):
    """The result of `weft bench`."""

    heatmaps: tuple[bench.Heatmap, ...]
    charts: tuple[Chart, ...]
    table: Table


@dataclass(frozen=True, kw_only=True)
class TunePart(Part):
    """The result of `weft tune`."""

    cards: tuple[Card, ...]
    chart: Chart
    table: Table
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ComparisonPart(Part):
    """The comparison of two analyses."""

    table: Table


def analysis_part(
    document: Document,
    timelines: Sequence[Timeline] = (),
    reasons: Sequence[Ns] | None = None,
    *,
    title: str = "Analysis",
    max_bytes: int = MAX_JSON_BYTES,
) -> AnalysisPart:
    """The page part of `weft analyze`."""
    names = analysis.labels(document)
    # There may be timelines that the document does not describe, or no timelines at all.
    drawn = [*names, *(f"timeline {i}" for i in range(len(names), len(timelines)))][: len(timelines)]
    steps, price = details.step_table(document, names), details.price_table(document, names)
    modules = details.module_table(document, names)
    offsets = [*analysis.clock_offsets_ns(document), *(0 for _ in timelines)][: len(timelines)]
    ranks = heat(document, timelines, drawn, offsets) if len(timelines) > 1 else None
    collectives = analysis.collective_table(document)
    bars = tuple(analysis.rank_bars(document))
    sections = [("summary", "Summary")]
    sections += [("timeline", "Timeline")] if timelines else []
    sections += [("ranks", "Ranks")] if ranks else []
    sections += [("causes", "Causes")] if bars else []
    sections += [("advice", "Advice")]
    sections += [("collectives", "Collectives")] if collectives.rows else []
    sections += [("modules", "Modules")] if modules.rows else []
    sections += [("steps", "Steps")] if steps.rows else []
    sections += [("price", "Price")] if price.rows else []
    part = AnalysisPart(
        template="analysis.html.j2",
        title=title,
        subtitle=_subtitle(analysis.device(document), _count(len(names), "rank"), _paths(document)),
        sentence=analysis.analysis_sentence(document),
        contents=tuple(sections),
        simulated=is_simulated(document) or analysis.device(document).startswith("sim:"),
        warnings=tuple(analysis.analysis_warnings(document)),
        cards=tuple(analysis.cards(document)),
        legend=_legend(),
        rank_bars=bars,
        heat=ranks,
        ranks_left_out=max(len(names) - analysis.MAX_RANKS, 0),
        collective_bars=tuple(analysis.collective_bars(document)),
        collective_table=collectives,
        step_table=steps,
        module_table=modules,
        price_table=price,
        price_sentence=details.price_sentence(document),
        advice=tuple(analysis.advice(document)),
    )
    worst = analysis.worst_position(document)
    return _with_timelines(part, timelines, drawn, offsets, max_bytes, reasons, worst)


def bench_part(document: Document) -> BenchPart:
    """The page part of `weft bench`."""
    heatmaps, charts = bench.heatmaps(document), bench.times(document)
    sections = [("heat", "Heatmaps")] if heatmaps else []
    sections += [("times", "Times")] if charts else []
    suite = text(document, "suite")
    return BenchPart(
        template="bench.html.j2",
        title=f"Bench {suite}".strip(),
        subtitle=_subtitle(text(document, "device"), _count(len(records(document, "rows")), "measurement")),
        sentence=bench.bench_sentence(document),
        contents=(*sections, ("table", "Results")),
        simulated=is_simulated(document),
        warnings=tuple(bench.bench_warnings(document)),
        heatmaps=tuple(heatmaps),
        charts=tuple(charts),
        table=bench.row_table(document),
    )


def tune_part(
    tuned: TunedWorkload,
    before: Timeline | None = None,
    after: Timeline | None = None,
    pictures: Sequence[Picture] = (),
    *,
    max_bytes: int = MAX_JSON_BYTES,
) -> TunePart:
    """The page part of `weft tune`."""
    shown = [(line, name) for line, name in ((before, "before"), (after, "after")) if line is not None]
    part = TunePart(
        template="tune.html.j2",
        title=f"Tune {tuned.workload}",
        subtitle=_subtitle(tuned.device, _count(len(tuned.candidates), "candidate")),
        sentence=tuned.text,
        contents=(
            ("summary", "Summary"),
            ("candidates", "Candidates"),
            *([("timeline", "Timeline")] if shown else []),
            *([("occupancy", "Occupancy")] if pictures else []),
        ),
        simulated=tuned.verdict.simulated,
        pictures=tuple(pictures),
        cards=tuple(tune.tune_cards(tuned)),
        chart=tune.candidate_chart(tuned),
        table=tune.candidate_table(tuned),
    )
    timelines, names = [line for line, _ in shown], [name for _, name in shown]
    return _with_timelines(part, timelines, names, None, max_bytes)


def comparison_parts(
    document: Document,
    before: Sequence[Timeline] = (),
    after: Sequence[Timeline] = (),
    *,
    max_bytes: int = MAX_JSON_BYTES,
) -> list[Part]:
    """The comparison of two analyses, then each of them."""
    part = ComparisonPart(
        template="comparison.html.j2",
        title="Comparison",
        sentence=compare.comparison_sentence(document),
        contents=(("change", "Change"),),
        warnings=tuple(analysis.analysis_warnings(document)),
        table=compare.change_table(document),
    )
    sides = (("before", "Before", before), ("after", "After", after))
    analyses = [
        analysis_part(record(document, key), timelines, title=title, max_bytes=max_bytes // 2)
        for key, title, timelines in sides
    ]
    return [part, *analyses]


def _with_timelines(
    part: AnyPart,
    timelines: Sequence[Timeline],
    names: Sequence[str],
    offsets_ns: Sequence[int] | None,
    max_bytes: int,
    reasons: Sequence[Ns] | None = None,
    worst: int = 0,
) -> AnyPart:
    """The part with its timelines. If there are too many ranks, only the most exposed are drawn."""
    if not timelines:
        return part
    first = names[worst] if worst < len(names) else names[0]
    chosen = list(range(len(timelines)))
    if len(chosen) > MAX_DRAWN:
        exposed = [timeline.figures().exposed_ns for timeline in timelines]
        chosen = sorted(sorted(chosen, key=lambda i: -exposed[i])[:MAX_DRAWN])
    lines, labels = [timelines[i] for i in chosen], [names[i] for i in chosen]
    drawing = draw(
        lines,
        labels,
        offsets_ns=None if offsets_ns is None else [offsets_ns[i] for i in chosen],
        max_bytes=max_bytes,
        reasons=None if reasons is None else [reasons[i] for i in chosen],
        first=first,
    )
    if len(chosen) < len(timelines):
        drawn = f"The {len(chosen)} most exposed of {len(timelines)} ranks are drawn"
        note = f"{drawn}; the map below shows all ranks."
        drawing = replace(drawing, notes=(note, *drawing.notes))
    return replace(
        part,
        drawing=drawing,
        what_is_drawn=", ".join(labels),
        stream_table=details.stream_table(lines, labels),
        exposed_table=details.exposed_table(lines, labels),
    )


def _legend() -> tuple[tuple[str, str, str], ...]:
    known = tuple((f"cause-{i}", cause.name, cause.meaning) for i, cause in enumerate(words.CAUSE_TEXTS))
    return (("hidden", "hidden behind compute", "communication that overlaps with compute"), *known)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s") if number else ""


def _paths(document: Document) -> str:
    paths = [PurePath(text(rank, "path")) for rank in records(document, "ranks") if text(rank, "path")]
    shown = ["/".join(path.parts[-2:]) for path in paths[:2]]
    return ", ".join(shown) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")


def _subtitle(*pieces: str) -> str:
    return " · ".join(piece for piece in pieces if piece)
