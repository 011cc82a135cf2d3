"""The pipeline of a plan as rectangles that a template draws."""

from __future__ import annotations

from dataclasses import dataclass

from weft.report.reading import Document, amount, records, text

_WIDTH, ROW, _LEFT = 900.0, 26.0, 70.0
_MOST = 1500
"""Most rectangles of a picture; weft writes no document with more."""
CSS = {"forward": "plan-compute", "backward": "plan-extra", "weight": "plan-hidden"}


@dataclass(frozen=True)
class Rect:
    """One pass of one micro-batch."""

    css: str
    x: float
    y: float
    width: float
    height: float
    label: str
    title: str


@dataclass(frozen=True)
class PipelineView:
    """A small pipeline of the same schedule."""

    title: str
    note: str
    rects: tuple[Rect, ...]
    rows: tuple[tuple[float, str], ...]
    """Position and name of each stage."""
    legend: tuple[tuple[str, str, str], ...]
    width: float
    height: float


def pipeline_view(document: Document) -> PipelineView | None:
    """The picture of a document's pipeline; None if it has none."""
    drawn = records(document, "drawing")[:_MOST]
    end = max((amount(one, "start") + amount(one, "length") for one in drawn), default=0.0)
    if not drawn or end <= 0:
        return None
    scale = (_WIDTH - _LEFT - 8) / end
    stages = int(min(64, max(amount(one, "stage") for one in drawn))) + 1
    rects = []
    for one in drawn:
        kind, batch = text(one, "kind"), amount(one, "micro_batch")
        width = amount(one, "length") * scale
        rects.append(
            Rect(
                CSS.get(kind, "plan-other"),
                round(_LEFT + amount(one, "start") * scale, 2),
                round(ROW * min(63.0, amount(one, "stage")) + 2, 2),
                round(max(0.0, width - 1), 2),
                ROW - 4,
                f"{batch + 1:.0f}" if width > 14 else "",
                f"stage {amount(one, 'stage') + 1:.0f}: {kind} of micro-batch {batch + 1:.0f}",
            )
        )
    holds = records(document, "stages")
    sizes = sorted({int(amount(stage, "layers")) for stage in holds})
    shown = (
        f"{sizes[0]} layers each" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} layers" if sizes else ""
    )
    lost = 100 * amount(document, "bubble_share")
    return PipelineView(
        title=f"Pipeline: {text(document, 'schedule')}, {len(holds)} stages of {shown}",
        note=(
            f"The pattern with up to 8 stages and 12 micro-batches; the job has {len(holds)} stages and "
            f"{amount(document, 'micro_batches'):.0f} micro-batches. Stages wait for {lost:.1f}% of the time "
            "that they compute."
        ),
        rects=tuple(rects),
        rows=tuple((round(ROW * at + ROW / 2 + 4, 2), f"stage {at + 1}") for at in range(stages)),
        legend=(
            ("plan-compute", "forward", ""),
            ("plan-extra", "backward", ""),
            *(
                (("plan-hidden", "weight gradients", ""),)
                if any(r.css == "plan-hidden" for r in rects)
                else ()
            ),
        ),
        width=_WIDTH,
        height=ROW * stages + 4,
    )
