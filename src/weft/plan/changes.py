"""The effect of one change to a job on its step: pipeline, hidden collectives, compression, hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.errors import UsageError
from weft.gpu.network import GBIT
from weft.plan.compression import NONE
from weft.plan.config import TrainingJob
from weft.plan.figures import Figures, shipped
from weft.plan.step import Prediction, predict

NAMES = {
    "tp": "tensor parallel collectives behind their GEMMs, in pieces (a finer-grain schedule, weft.ops)",
    "cp": "context parallel transfers behind attention",
    "ep": "expert all-to-all behind the other half of the batch",
    "pp": "transfers between pipeline stages behind the next micro-batch",
    "grads": "gradient sums behind the backward pass",
    "params": "parameter gathers behind the forward pass",
}
COMPRESSIONS = ("bf16", "fp8", "int8", "powersgd:4", "topk:0.01", "zero++", "qwz")
LEAST_PCT = 0.2
"""Smaller changes of the step time are omitted: the model is not that accurate."""


@dataclass(frozen=True)
class Change:
    """One change and its effect; a negative gain is a loss."""

    kind: str
    """`schedule`, `pipeline`, `compression` or `what-if` (another network, precision or recomputation)."""
    text: str
    option: str
    """The option for the command line; empty if there is none."""
    step_time_s: float
    gain_pct: float


def planned_changes(
    job: TrainingJob, found: Prediction, figures: Figures | None = None
) -> tuple[Change, ...]:
    """The changes that matter, largest gain first. Losses are included only for compression and what-if."""
    made = []
    for kind, text, option, what in _candidates(job, found, figures or shipped()):
        try:
            other = predict(job.but(**what), figures)
        except UsageError:
            continue
        gain = 100.0 * (1.0 - other.step_s / found.step_s)
        if abs(gain) >= LEAST_PCT and (gain > 0 or kind in ("compression", "what-if")):
            made.append(Change(kind, text, option, other.step_s, gain))
    return tuple(sorted(made, key=lambda change: -change.gain_pct))


def _candidates(
    job: TrainingJob, found: Prediction, figures: Figures
) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    hidden = job.hide if job.hide is not None else figures.find(job.software).hides
    for name, text in NAMES.items():
        more = {name, "tp_backward"} if name == "tp" else {name}
        if found.breakdown.get(name, 0.0) > 0 and not more <= hidden:
            yield "schedule", f"hide the {text}", "", {"hide": frozenset(hidden | more)}
    yield from _what_if(job)
    for chunks in (2, 4, 8):
        if job.pp > 1 and chunks != job.interleave:
            text = f"{chunks} chunks for each pipeline stage: a smaller bubble, more transfers"
            yield "pipeline", text, f"--interleave {chunks}", {"interleave": chunks}
    if job.pp > 1 and job.interleave > 1:
        yield "pipeline", "one chunk for each stage", "--interleave 1", {"interleave": 1}
    if job.dp * job.cp > 1 and job.compression == NONE:
        for name in COMPRESSIONS:
            what = (
                "weights and gradients" if name == "zero++" else "weights" if name == "qwz" else "gradients"
            )
            yield "compression", f"{name} {what}", f"--compression {name}", {"compression": name}


def _what_if(job: TrainingJob) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Other networks, precisions and recomputation: questions about a cluster that is not bought yet."""
    if job.gpus > job.network.domain:
        for times, text in ((2.0, "a network twice as fast"), (0.5, "a network half as fast")):
            rail = job.network.rail_bytes_per_s * times
            net = job.network.but(name=f"{rail / GBIT:g} Gbit/s", rail_bytes_per_s=rail)
            yield "what-if", text, f"--rail-gbit {rail / GBIT:g}", {"network": net}
    lower = {"bf16": "fp8", "fp16": "fp8", "fp8": "nvfp4"}.get(job.precision)
    if lower:
        yield "what-if", f"matmuls in {lower}", f"--precision {lower}", {"precision": lower}
    if job.recompute != "none":
        yield "what-if", "no recomputation", "--recompute none", {"recompute": "none"}
    if job.pp > 1 and job.schedule == "1f1b":
        yield "pipeline", "a zero-bubble schedule", "--schedule zero-bubble", {"schedule": "zero-bubble"}
